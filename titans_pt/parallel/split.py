"""Tensor parallelism for a finished model: it implements the names in titans_pt.layers.sharding.

Layers and mixers declare how they are cut; :data:`RULES` lists the consequences. A block's heads are divided among the
ranks: rank r of n holds heads [r H / n, (r + 1) H / n) of attention and memory, with their projections, convolutions,
gates, norms and M_0. The memory therefore runs without any exchange. The model is built whole from one generator and
then cut: every number of tensor ranks starts with the same weights.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titans_pt.errors import UserError
from titans_pt.layers.lora import LowRank
from titans_pt.layers.sharding import Shard, filled
from titans_pt.models.mixers import Mixer
from titans_pt.parallel.exchange import Exchanges
from titans_pt.parallel.layers import VocabularyEmbedding, split_norm
from titans_pt.parallel.topology import RankGroup


@dataclass(frozen=True)
class ShardingRule:
    """Treatment of one module, or of one parameter (which can only be cut or summed).

    cut: dimension along which all its own parameters are cut. An adapter's matrix without this dimension stays whole,
        and its gradients are summed over ranks.
    before, after: exchange (a method of Exchanges) of its inputs and of its output.
    becomes: makes the module that takes its place, from (module, exchanges); takes modules of one class, such as
        embeddings.
    summed: its parameters are whole but used on a rank's own heads: their gradients are summed over ranks.
    between: it lies between mixers and MLPs: with parallel.sequence its gradients are also summed.
    filled: its size need not be a multiple of the number of ranks: the last parts are padded with zeros.
    """

    cut: int | None = None
    before: str | None = None
    after: str | None = None
    becomes: Callable[[Any, Exchanges], nn.Module] | None = None
    summed: bool = False
    between: bool = False
    filled: bool = False


RULES = {
    Shard.WHOLE: ShardingRule(),
    Shard.COLUMN: ShardingRule(cut=0),
    Shard.ROW: ShardingRule(cut=1, after="reduce"),
    Shard.LAST_ROW: ShardingRule(cut=1, after="reduce_close"),
    Shard.ENTER: ShardingRule(before="copy"),
    Shard.ENTER_COLUMN: ShardingRule(cut=0, before="copy"),
    Shard.SUMMED: ShardingRule(summed=True),
    Shard.NORM_OF_ALL_HEADS: ShardingRule(cut=0, becomes=split_norm),
    Shard.GATHER: ShardingRule(after="gather"),
    Shard.SPLIT: ShardingRule(after="split"),
    Shard.CLOSE: ShardingRule(after="close"),
    Shard.BETWEEN: ShardingRule(between=True),
    Shard.OPEN: ShardingRule(before="open"),
    Shard.ENTER_OPEN: ShardingRule(before="open_copy"),
    Shard.VOCABULARY: ShardingRule(cut=0, becomes=VocabularyEmbedding, filled=True),
    Shard.LOGITS: ShardingRule(cut=0, before="open_copy", filled=True),
}


PASSING = (Shard.ENTER, Shard.OPEN, Shard.ENTER_OPEN, Shard.CLOSE, Shard.GATHER)
"""Names that concern the inputs and outputs of a module around others, and none of its parameters."""


class TensorParallel:
    """Cuts a model, in place, for one rank of a tensor group; a group of one changes nothing.

    Args:
        model: whole, the same on every rank.
        group: the ranks that share it.
        sequence: parallel.sequence.

    Attributes:
        dims: name of each cut parameter -> dimension along which it is cut.
        shapes: name of each cut parameter -> its whole shape.
        exchanges: the group's exchanges, which the loss also uses.
    """

    def __init__(self, model: nn.Module, group: RankGroup, sequence: bool = False):
        self.group = group
        self.exchanges = Exchanges(group, sequence)
        self.dims: dict[str, int] = {}
        self.shapes: dict[str, torch.Size] = {}
        if group.size > 1:
            self._apply(model)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of the parameter (or moment) ``name``."""
        if name not in self.dims:
            return whole
        return self.group.part(filled(whole, self.dims[name], self.group.size), self.dims[name])

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The inverse of :meth:`part`; collective."""
        if name not in self.dims:
            return part
        dim = self.dims[name]
        return self.group.all_gather(part, dim).narrow(dim, 0, self.shapes[name][dim])

    def _apply(self, model: nn.Module):
        names = {id(p): name for name, p in model.named_parameters()}
        found, named = [], set()
        for owner in model.modules():
            for path, shard in (getattr(owner, "sharding", None) or {}).items():
                part = _part(owner, path)
                if shard not in PASSING:
                    named |= {id(p) for p in _own_parameters(part)}
                if part is not None:
                    found.append((owner, path, part, RULES[shard]))
        for name, mixer in model.named_modules():
            if isinstance(mixer, Mixer):
                _check_named(name, mixer, named)
        for owner, path, part, rule in found:
            shared = part.shared(rule.cut) if isinstance(part, LowRank) and rule.cut is not None else None
            for p in _own_parameters(part):
                if p is shared:
                    self._sum(p)
                elif rule.cut is not None:
                    assert rule.filled or p.shape[rule.cut] % self.group.size == 0, names[id(p)]
                    self._cut(names[id(p)], p, rule.cut)
                if rule.summed or (rule.between and self.exchanges.sequence):
                    self._sum(p)
            if not (rule.before or rule.after or rule.becomes):
                continue
            assert isinstance(part, nn.Module), f"{path}: a parameter can only be cut or summed"
            if rule.before:
                part.register_forward_pre_hook(_before(getattr(self.exchanges, rule.before)))
            if rule.after:
                part.register_forward_hook(_after(getattr(self.exchanges, rule.after)))
            if rule.becomes:
                owner.set_submodule(path, rule.becomes(part, self.exchanges))
        for module in model.modules():
            for count in getattr(module, "per_rank", ()):
                setattr(module, count, getattr(module, count) // self.group.size)

    def _sum(self, p: nn.Parameter):
        """Sums gradients of p over ranks; a frozen parameter has none."""
        if p.requires_grad:
            p.register_hook(self.group.all_reduce)

    def _cut(self, name: str, p: nn.Parameter, dim: int):
        """Cut p, once: tied embeddings are met twice."""
        if name not in self.dims:
            self.dims[name], self.shapes[name] = dim, p.shape
            p.data = self.part(name, p.data).clone(memory_format=torch.contiguous_format)


def _part(owner: nn.Module, path: str) -> nn.Module | nn.Parameter | None:
    """The submodule or parameter of ``owner`` that ``path`` names; None if ``owner`` was built without it."""
    return functools.reduce(getattr, path.split("."), owner) if path else owner


def _own_parameters(part: nn.Module | nn.Parameter | None) -> list[nn.Parameter]:
    if isinstance(part, nn.Module):
        return list(part.parameters(recurse=False))
    return [] if part is None else [part]


def _check_named(name: str, mixer: Mixer, named: set[int]):
    """Check that some module names every parameter of a mixer.

    A parameter without a name would silently stay whole, with one rank's gradient.

    Raises:
        UserError: the mixer does not say how it is cut.
        TypeError: it leaves out a parameter.
    """
    if mixer.sharding is None:
        raise UserError(f"parallel.tensor: the mixer {mixer.name!r} does not say how it is cut over tensor ranks; set "
                        "parallel.tensor=1")  # fmt: skip
    for parameter, p in mixer.named_parameters():
        if id(p) not in named:
            raise TypeError(f"{type(mixer).__name__}.sharding names {parameter!r} ({name}) nowhere, nor does a layer "
                            "between; name it, Shard.WHOLE if every rank holds all of it")  # fmt: skip


def _before(exchange: Callable[[Tensor], Tensor]):
    """A forward pre-hook: every positional argument that is a floating-point tensor passes ``exchange``. A state that
    is a tensor is passed as a keyword, because it belongs to the rank."""

    def hook(_module, arguments):
        return tuple(exchange(x) if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments)

    return hook


def _after(exchange: Callable[[Tensor], Tensor]):
    """A forward hook: the output, or the first of (output, state), passes ``exchange``."""

    def hook(_module, _arguments, output):
        return (exchange(output[0]), *output[1:]) if isinstance(output, tuple) else exchange(output)

    return hook
