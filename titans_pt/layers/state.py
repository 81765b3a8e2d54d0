"""State that a mixer or a whole model carries from one call to the next: tensors in dataclasses, tuples, lists, dicts.

Everything that walks a state uses :func:`parts` and :func:`with_parts`. torch.utils._pytree would need every state
class to be registered, also for mixers outside this repository.
"""

import copy
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from titans_pt.errors import UserError
from titans_pt.kernels.common import sent
from titans_pt.layers.documents import Documents

SHARED = {"shared": True}
"""Metadata of a dataclass field whose tensor has no row dimension: all rows share it."""
ALIKE = {"alike": True}
"""Metadata of a dataclass field whose tensors are the same in every row; calls read them from row 0."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, type)
"""Types of leaves that hold no tensor."""


def parts(state: Any) -> list[tuple[str, Any]]:
    """(name, value) of each field of a dataclass, of each item of a tuple, list or dict; a leaf has none."""
    if is_dataclass(state) and not isinstance(state, type):
        return [(f.name, getattr(state, f.name)) for f in fields(state)]
    if isinstance(state, (tuple, list)):
        return [(str(n), item) for n, item in enumerate(state)]
    if isinstance(state, dict):
        return [(str(key), item) for key, item in state.items()]
    return []


def with_parts(state: Any, values: Iterable[Any]) -> Any:
    """``state`` with other values of its :func:`parts`.

    Raises:
        TypeError: ``state`` is a leaf of a type that may hold tensors, which the functions here would miss.
    """
    if not parts(state):
        if not isinstance(state, (torch.Tensor, *PLAIN, tuple, list, dict)) and not is_dataclass(state):
            raise TypeError(f"state: holds a {type(state).__qualname__}; a state is made of tensors and plain values "
                            "in dataclasses, tuples, lists and dicts")  # fmt: skip
        return state
    if is_dataclass(state) and not isinstance(state, type):
        return replace(state, **{f.name: value for f, value in zip(fields(state), values, strict=True)})
    if isinstance(state, dict):
        other = copy.copy(state)  # a defaultdict or OrderedDict stays one
        other.update(zip(state, values, strict=True))
        return other
    return state._make(values) if hasattr(state, "_make") else type(state)(values)  # a named tuple


def find(state: Any, kind: type) -> Iterator[Any]:
    """Every instance of ``kind`` in ``state``, in order."""
    if isinstance(state, kind):
        yield state
    else:
        for _, part in parts(state):
            yield from find(part, kind)


def map_tensors(state: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``state`` with ``fn`` applied to every tensor; dataclasses, tuples, lists, dicts and None keep their shape.

    For example, ``map_tensors(state, torch.Tensor.detach)`` detaches it from autograd's graph.
    """
    if isinstance(state, torch.Tensor):
        return fn(state)
    return with_parts(state, [map_tensors(part, fn) for _, part in parts(state)])


def tensors(state: Any) -> Iterator[torch.Tensor]:
    """Every tensor of ``state``, in order."""
    return find(state, torch.Tensor)


def rows(state: Any) -> int | None:
    """Number of rows of ``state``: the first dimension of its first tensor. None without a tensor."""
    first = next(tensors(state), None)
    return None if first is None else len(first)


def check_rows(given: int | None, x: torch.Tensor):
    """
    Raises:
        ValueError: a state of ``given`` rows (None: there is no state) for an x (B, ...) of another number.
    """
    if given not in (None, len(x)):
        raise ValueError(f"state: given one of {given} rows; the input has {len(x)}")


@cache
def declared_states(forward: Any) -> tuple[type, ...]:
    """Classes that a ``forward`` declares for its argument state; (object,) if it does not name them all."""
    try:
        declared = get_type_hints(forward).get("state", Any)
    except NameError:  # a name of type checkers alone
        declared = Any
    kinds = get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)
    named = all(isinstance(kind, type) and kind is not Any for kind in kinds)
    return tuple(kind for kind in kinds if kind is not NoneType) if named else (object,)


def check_kind(state: Any, kinds: tuple[type, ...]):
    """
    Raises:
        ValueError: ``state`` is neither None nor of one of these ``kinds``.
    """
    if not isinstance(state, (*kinds, NoneType)):
        own = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"state: given one of another model or layer, a {type(state).__name__}; allowed: a {own}, "
                         "what this one's last call returned")  # fmt: skip


def take_rows(state: Any, index: torch.Tensor) -> Any:
    """Copy of the rows at ``index`` (n,) int64, in that order; a row may repeat. Gradients flow through it.

    It serves beam search, and several continuations of each row. A dataclass whose rows are not the first dimension of
    its tensors, or that has more to do, has a method of this name. A tensor that all rows share is a field with
    ``SHARED`` as its metadata.
    """
    if isinstance(state, torch.Tensor):
        return state.index_select(0, index.to(state.device))
    return state.take_rows(index) if hasattr(state, "take_rows") else take_parts(state, index)


def take_parts(state: Any, index: torch.Tensor) -> Any:
    """:func:`take_rows`, part by part."""
    shared = {f.name for f in fields(state) if f.metadata.get("shared")} if is_dataclass(state) else ()
    return with_parts(state, [fork(part) if name in shared else take_rows(part, index) for name, part in parts(state)])


def join_rows(states: Sequence[Any], place: str = "the whole") -> Any:
    """Copy of the rows of all ``states`` in one state, in order: the inverse of :func:`take_rows`. Gradients flow
    through it.

    Plain values must be equal in all states. A dataclass whose states may differ in more than their rows has a static
    method of this name: it makes them alike and calls :func:`join_parts`.

    Args:
        place: name of the states' place in larger ones, for messages.

    Raises:
        UserError: no state, or states that differ in more than their rows.
    """
    if not states:
        raise UserError("states: given none; pass at least one")
    own, *others = {getattr(type(state), "join_rows", None) for state in states}
    if own is not None and not others:
        return own(states, place)
    if hasattr(states[0], "take_rows"):
        raise TypeError(f"{type(states[0]).__qualname__}: has a method take_rows, but no static method join_rows")
    return join_parts(states, place)


def join_parts(states: Sequence[Any], place: str) -> Any:
    """:func:`join_rows` of states that have the same parts, part by part."""
    integers = all(isinstance(state, torch.Tensor) and not state.is_floating_point() for state in states)
    if integers and len({state.device for state in states}) > 1:  # kernels of a GPU leave theirs there, see moved
        states = [state.cpu() for state in states]
    first = states[0]
    for state in states[1:]:
        if _form(state) != _form(first):
            raise UserError(
                f"states: {place} is {_form(first)} in one and {_form(state)} in another; join states of one layer, "
                "device and dtype"
            )
    if isinstance(first, torch.Tensor):
        return torch.cat(tuple(states))
    joined: list[Any] = []
    metadata: dict[str, Mapping] = {f.name: f.metadata for f in fields(first)} if is_dataclass(first) else {}
    for name, *of_each in zip([name for name, _ in parts(first)], *map(_values, states), strict=True):
        inner = name if place == "the whole" else f"{place}.{name}"
        kind = metadata.get(name, {})
        shared, alike = kind.get("shared", False), kind.get("alike", False)
        part = fork(of_each[0]) if shared else join_rows(of_each, inner)
        if (shared or alike) and not all(_same(of_each[0], other, alike) for other in of_each):
            raise UserError(f"states: {inner} differs; join states that one layer made with the same weights")
        joined.append(part)
    return with_parts(first, joined)


def counted_together(states: Sequence[Any]) -> list[Any]:
    """The states with one count of tokens. Each has ``position``, the tokens that its longest row has read, and
    ``behind``, (B,) int64, how many fewer each row has read; None: all rows have read equally many.

    ``position`` and ``behind`` become as small as they can be: a batch's longest rows may have left it.
    """
    position = max(state.position for state in states)
    behind = [torch.zeros(rows(state) or 0, dtype=torch.int64) if state.behind is None else state.behind.cpu()
              for state in states]  # fmt: skip
    behind = [row + (position - state.position) for row, state in zip(behind, states, strict=True)]
    least = min((int(row.min()) for row in behind if len(row)), default=0)
    differ = any(bool((row != least).any()) for row in behind)
    return [replace(state, position=position - least, behind=row - least if differ else None)
            for row, state in zip(behind, states, strict=True)]  # fmt: skip


def _form(state: Any) -> str:
    """Description of all that joined states have in common."""
    if isinstance(state, torch.Tensor):
        return f"{state.dtype} {tuple(state.shape[1:])} on {state.device} for each row"
    return f"{type(state).__name__} of {len(parts(state))}" if parts(state) else repr(state)


def _values(state: Any) -> list[Any]:
    return [value for _, value in parts(state)]


def _same(one: Any, other: Any, of_row_0: bool) -> bool:
    """Whether the tensors of two states, or those of their row 0, are equal."""
    rows = slice(1) if of_row_0 else slice(None)
    return all(torch.equal(a[rows], b[rows]) for a, b in zip(tensors(one), tensors(other), strict=True))


def fork(state: Any) -> Any:
    """A copy that shares no tensor with ``state``: two continuations of one past. Gradients flow through it."""
    return map_tensors(state, torch.clone)


def usable(state: Any, documents: Documents | None) -> Any:
    """``state`` as calls can take it.

    Tensors that were made in torch.inference_mode() are copied if autograd records, which refuses them. In rows that
    begin a document with the call's first token, infinities and NaN become 0: mixers hide a row's past with factors of
    0, which leave NaN.
    """
    recorded = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if recorded and any(tensor.is_inference() for tensor in tensors(state)):
        state = map_tensors(state, lambda tensor: tensor.clone() if tensor.is_inference() else tensor)
    if documents is None or not bool((begins := documents.host[:, 0]).any()):
        return state

    def finite(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or len(tensor) != len(begins):
            return tensor
        rows = sent(begins, tensor.device).view(-1, *[1] * (tensor.dim() - 1))
        return tensor.masked_fill(rows & ~tensor.isfinite(), 0)

    return map_tensors(state, finite)


def moved(tensor: torch.Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A state's tensor, moved to ``device`` and ``dtype`` (None: its own) if it is of floating point. Integer tensors
    (offsets, places) are moved to the host, where mixers compute masks and cuts from them; kernels of a GPU leave them
    there."""
    return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.cpu()


def compact(state: Any) -> Any:
    """``state`` with copies of tensors that would keep much unused memory alive.

    A tensor is copied if all tensors of ``state`` together use less than half of its storage. The last tokens of a
    long call are such a view: it keeps the tensor of the whole call alive.
    """
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors(state))):
        return state  # torch.func's tensors have no storage
    used: dict[int, int] = {}
    for tensor in tensors(state):
        place = tensor.untyped_storage()._cdata
        used[place] = used.get(place, 0) + tensor.numel() * tensor.element_size()

    def own(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        return tensor.clone() if 2 * used[storage._cdata] < storage.nbytes() else tensor

    return map_tensors(state, own)


def state_bytes(state: Any) -> int:
    """Bytes that the tensors of ``state`` hold."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(state))
