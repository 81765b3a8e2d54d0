"""Tensor parallelism put on a finished model: which parameter is cut along which dimension, and what moves where.

:data:`TABLE` is the whole of it. A block's heads are shared out over ranks: rank r of n holds heads [r H / n,
(r + 1) H / n) of attention and memory, with their projections, convolutions, gates, norms and M_0, so the memory runs
without any exchange. The model is built whole from one generator and then cut: every tensor size starts alike.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titans_pt.layers.attention import Attention
from titans_pt.layers.memory import MemoryGates, MemoryNetwork, NeuralMemory, Projection
from titans_pt.layers.mlp import SwiGLU
from titans_pt.models.language_model import Block, LanguageModel
from titans_pt.models.mixers.attention import AttentionMixer
from titans_pt.models.mixers.common import BranchGate
from titans_pt.models.mixers.lmm import LMM
from titans_pt.models.mixers.mac import MAC
from titans_pt.models.mixers.mag import MAG
from titans_pt.models.mixers.mal import MAL
from titans_pt.parallel.exchange import Exchanges
from titans_pt.parallel.layers import SplitRMSNorm, VocabularyEmbedding
from titans_pt.parallel.topology import TensorGroup


@dataclass(frozen=True)
class Rule:
    """What becomes of one module.

    cut: dimension along which all parameters of its own are cut.
    before, after: the exchange (a method of Exchanges) that its inputs and its output pass.
    becomes: a module class that takes its place, made from (module, exchanges).
    summed: its parameters are whole but used on a rank's own heads: their gradients are summed over ranks.
    between: it stands between mixers and MLPs: with parallel.sequence its gradients are sums, too.
    """

    cut: int | None = None
    before: str | None = None
    after: str | None = None
    becomes: Callable[[nn.Module, Exchanges], nn.Module] | None = None
    summed: bool = False
    between: bool = False


COLUMN = Rule(cut=0)
"""A linear layer (out, in) whose outputs, or a convolution whose channels, are those of the rank's heads."""
ROW = Rule(cut=1, after="reduce")
"""A linear layer (out, in) that takes a rank's heads and sums over all."""
ENTRY = Rule(before="copy")
"""A module that takes whole inputs and gives the rank's part."""
ENTRY_COLUMN = Rule(cut=0, before="copy")
LAST_ROW = Rule(cut=1, after="reduce_close")
"""The row-parallel layer that ends a mixer or MLP."""
NORM_OF_ALL_HEADS = Rule(cut=0, becomes=SplitRMSNorm)
BETWEEN = Rule(between=True)

TABLE: dict[type[nn.Module], dict[str, Rule]] = {
    LanguageModel: {
        "embedding": Rule(cut=0, becomes=VocabularyEmbedding),
        "norm": BETWEEN,
        "head": Rule(cut=0, before="open_copy"),
    },
    Block: {"mixer_norm": BETWEEN, "mixer": Rule(before="open"), "mlp_norm": BETWEEN},
    SwiGLU: {"": Rule(before="open_copy"), "gate": COLUMN, "up": COLUMN, "down": LAST_ROW},
    Attention: {"": ENTRY, "q": COLUMN, "k": COLUMN, "v": COLUMN},
    NeuralMemory: {"": ENTRY, "output_norm": Rule(summed=True)},
    Projection: {"linear": COLUMN, "conv": COLUMN},
    MemoryGates: {"linear": COLUMN},
    MemoryNetwork: {"": Rule(cut=0)},
    AttentionMixer: {"out": LAST_ROW},
    LMM: {"gate": ENTRY_COLUMN, "out": LAST_ROW},
    MAC: {
        "read": ENTRY,
        "attention.q": ENTRY, "attention.k": ENTRY, "attention.v": ENTRY,  # MAC calls them one by one
        "join": Rule(after="gather"),
        "gate.norm_a": Rule(after="split"),  # of x + attention, which is whole
        "gate.norm_b": NORM_OF_ALL_HEADS,
        "gate.linear": ENTRY_COLUMN,
        "out": LAST_ROW,
    },
    MAG: {
        "gate.norm_a": NORM_OF_ALL_HEADS,
        "gate.norm_b": NORM_OF_ALL_HEADS,
        "gate.linear": ENTRY_COLUMN,
        "out": LAST_ROW,
    },
    # What MAL adds to its output is whole in time, so it is closed as a whole.
    MAL: {"": Rule(after="close"), "gate": ENTRY_COLUMN, "memory_out": ROW, "out": ROW},
}  # fmt: skip
"""By class of module, and by path from it: modules that are not named are whole on every rank."""
HEADS = (Attention, Projection, MemoryGates, BranchGate)
"""Modules whose ``n_heads`` becomes the number of the rank's own."""


class TensorParallel:
    """A model cut for one rank of a tensor group, in place; of a group of one it stays as it is.

    Args:
        model: whole, alike on every rank.
        group: the ranks that share it.
        sequence: parallel.sequence.

    Attributes:
        dims: dimension along which each parameter that is cut was cut, by name.
        exchanges: what the loss needs, too.
    """

    def __init__(self, model: LanguageModel, group: TensorGroup, sequence: bool = False):
        self.group = group
        self.exchanges = Exchanges(group, sequence)
        self.dims: dict[str, int] = {}
        if group.size > 1:
            self._apply(model)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of the parameter (or moment) ``name``."""
        return self.group.part(whole, self.dims[name]) if name in self.dims else whole

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The inverse of :meth:`part`; collective."""
        return self.group.all_gather(part, self.dims[name]) if name in self.dims else part

    def _apply(self, model: LanguageModel):
        names = {id(p): name for name, p in model.named_parameters()}
        found = [(owner, path, rule) for owner in model.modules() for path, rule in TABLE.get(type(owner), {}).items()]
        for owner, path, rule in found:
            module = owner.get_submodule(path)
            for p in module.parameters(recurse=False):
                if rule.cut is not None:
                    self._cut(names[id(p)], p, rule.cut)
                if rule.summed or (rule.between and self.exchanges.sequence):
                    p.register_hook(self.group.all_reduce)
            if rule.before:
                module.register_forward_pre_hook(_before(getattr(self.exchanges, rule.before)))
            if rule.after:
                module.register_forward_hook(_after(getattr(self.exchanges, rule.after)))
            if rule.becomes:
                owner.set_submodule(path, rule.becomes(module, self.exchanges))
        for module in model.modules():
            if isinstance(module, HEADS):
                module.n_heads //= self.group.size

    def _cut(self, name: str, p: nn.Parameter, dim: int):
        """Once, though tied embeddings are met twice."""
        if name not in self.dims:
            self.dims[name] = dim
            p.data = self.group.part(p.data, dim).clone(memory_format=torch.contiguous_format)


def _before(exchange: Callable[[Tensor], Tensor]):
    """A forward pre-hook: every positional argument that is a tensor of numbers passes ``exchange``."""

    def hook(_module, arguments):
        return tuple(exchange(x) if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments)

    return hook


def _after(exchange: Callable[[Tensor], Tensor]):
    """A forward hook: the output, or the first of (output, state), passes ``exchange``."""

    def hook(_module, _arguments, output):
        return (exchange(output[0]), *output[1:]) if isinstance(output, tuple) else exchange(output)

    return hook
