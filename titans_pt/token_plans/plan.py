"""Plans for generation on a CPU: one token's path through a part of a model, prepared once as C calls on fixed tensors.

On the ordinary path a token takes hundreds of Python and PyTorch calls per block, most of which take longer than their
computation. A plan reads the model's own weights in place, and is dropped when a weight's storage moves. Models and
layers do not know of plans: titans_pt.token_plans.block puts them on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from titans_pt.kernels.native import PLAIN
from titans_pt.kernels.one_token import Map, Maps, unserved

Module = TypeVar("Module", bound=nn.Module)
Owner = TypeVar("Owner", bound=nn.Module)
MOST_ROWS = 8
"""Most rows of a plan: with more, one matrix-matrix product is faster than a matrix-vector product for each row."""
MOST_FOR_ONE_THREAD = 2_000_000
"""Most weights, times rows, of half a block that a plan reads with its one thread. If PyTorch has several threads, they
read more than this faster, even with all of PyTorch's calls."""


class Unplanned(Exception):
    """Signal that a part has no plan, and takes the ordinary path."""


@dataclass
class TokenPlan:
    """A token's path through a part of a model.

    out: (B, d_model), filled by ``advance``.
    accepts: whether ``advance`` takes this state.
    advance: the part's state -> its state after the token, stored where the plan's maker chose.
    """

    out: Tensor
    accepts: Callable[[Any], bool]
    advance: Callable[[Any], Any]

    def then(self, last: Maps) -> "TokenPlan":
        """This plan and one more step, whose last map is the output."""

        def advance(state: Any) -> Any:
            state = self.advance(state)
            last()
            return state

        return TokenPlan(last.out[-1], self.accepts, advance)


class _Plans:
    """The idle plans of one half of a block, valid until a weight's storage moves."""

    def __init__(self, parts: tuple[nn.Module, ...]):
        self.free: list[tuple[Tensor, TokenPlan] | None] = []
        self._parts = parts
        modules = [module for part in parts for module in part.modules()]
        self._children = [(m._modules, name, child) for m in modules for name, child in m._modules.items()]
        self._parameters = [(m._parameters, name, p, p.data_ptr())
                            for m in modules for name, p in m._parameters.items() if p is not None]  # fmt: skip
        self._called = [(vars(m), m._forward_hooks, m._forward_pre_hooks) for m in modules]

    def hold(self, parts: tuple[nn.Module, ...]) -> bool:
        """Whether modules and weights are still the same, with the same storage."""
        if any(a is not b for a, b in zip(self._parts, parts, strict=True)):
            return False
        if any(owner.get(name) is not child for owner, name, child in self._children):
            return False
        return all(owner.get(name) is p and p.data_ptr() == place for owner, name, p, place in self._parameters)

    def waited_for(self) -> bool:
        """Whether one of the modules, or all modules, have a hook, or one has its own ``forward``: a plan would not
        call it. Observers use them, and so do ZeRO-3 (to gather weights) and tensor parallelism (to sum over ranks)."""
        return _has_any_global_hook() or any(before or after or "forward" in own for own, after, before in self._called)

    def like(self, x: Tensor) -> bool:
        """Whether a plan can read the weights in place, in x's dtype, and is the fastest path.

        Tensors of other classes, such as torchao's quantised weights, have no memory of their own.
        """
        weights = [p for _, _, p, _ in self._parameters]
        few = torch.get_num_threads() == 1 or len(x) * sum(p.numel() for p in weights) <= MOST_FOR_ONE_THREAD
        return few and all(type(p) in PLAIN and p.dtype == x.dtype and p.is_contiguous() for p in weights)


_plans: WeakKeyDictionary[nn.Module, dict[tuple, _Plans]] = WeakKeyDictionary()


def through_plan(
    owner: Owner, parts: tuple[nn.Module, ...], make: Callable[[Owner, Tensor], TokenPlan], x: Tensor, state: Any
) -> tuple[Tensor, Any] | None:
    """x (B, 1, d_model) through ``owner``'s ``parts`` by a plan, and the state after it; None if none serves.

    make: (owner, the plan's input, (B, d_model)) -> the plan. It may raise Unplanned.
    """
    if x.shape[1] != 1 or x.shape[0] > MOST_ROWS or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if unserved(x) is not None or torch.is_autocast_enabled("cpu"):
        return None
    of_owner = _plans.get(owner)
    if of_owner is None:
        of_owner = _plans[owner] = {}
    key = make.__name__, x.shape[0], x.dtype, torch.get_num_threads()
    plans = of_owner.get(key)
    if plans is None or not plans.hold(parts):
        plans = of_owner[key] = _Plans(parts)
    if plans.waited_for():
        return None
    # A plan is taken out while it is used: threads that share a model then do not share a plan.
    found = plans.free.pop() if plans.free else _made(owner, make, x) if plans.like(x) else None
    try:
        if found is None or not found[1].accepts(state):
            return None
        place, plan = found
        place.copy_(x[:, 0])
        state = plan.advance(state)
        return plan.out[:, None].clone(), state
    finally:
        plans.free.append(found)


def _made(owner: Owner, make: Callable[[Owner, Tensor], TokenPlan], x: Tensor) -> tuple[Tensor, TokenPlan] | None:
    with torch.inference_mode(False), torch.no_grad():  # these tensors are written to in and out of inference mode
        place = torch.empty(x.shape[0], x.shape[2], dtype=x.dtype)
        try:
            return place, make(owner, place)
        except Unplanned:
            return None


def plain(module: nn.Module, kind: type[Module]) -> Module:
    """``module`` itself.

    Raises:
        Unplanned: it is no plain ``kind`` but, for example, a quantised layer or an adapter.
    """
    if type(module) is not kind:
        raise Unplanned
    return module


def weight_of(linear: nn.Linear) -> Tensor:
    """The weight of a :func:`plain` linear layer without a bias.

    Raises:
        Unplanned: it is no plain linear layer, or it has a bias, which it never has in this project.
    """
    if plain(linear, nn.Linear).bias is not None:
        raise Unplanned
    return linear.weight


def affine_map(x: Tensor | int, linear: nn.Linear, **options: Any) -> Map:
    """Output of a :func:`plain` linear layer for x, with its bias if it has one; options: other fields of the map."""
    return Map(x, plain(linear, nn.Linear).weight, linear.bias, **options)


def own(module: nn.Module, kind: type[Module]) -> Module:
    """``module`` itself, for a plan that replaces ``kind.forward``.

    Raises:
        Unplanned: it is no ``kind``, or has another ``forward``.
    """
    if not isinstance(module, kind) or type(module).forward is not kind.forward:
        raise Unplanned
    return module
