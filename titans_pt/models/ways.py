"""Other ways through the blocks than one after the other, and other calls of a block than the plain one.

Code outside puts them on a backbone. Further ways are titans_pt.models.wavefront and titans_pt.parallel.context.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from titans_pt.layers.documents import Documents
from titans_pt.layers.state import check_kind, declared_states

WAYS = ("compiled", "wavefront", "context", "around")
"""Names of a backbone's ways, the innermost first: a way leaves calls that it does not take to the one inside it."""

Blocks = Callable[[Tensor, Any, Documents | None], tuple[Tensor, Any]]
"""All blocks of a model: (x, their states or None, where documents start in x) -> (x, their states or None)."""


class Stack(Protocol):
    """The part of a backbone that its ways use: its blocks in order, their mixers, the call of a block, and the check
    of states."""

    @property
    def mixers(self) -> Sequence[Any]: ...

    def call(self, part: Callable, block: nn.Module, *arguments: Any) -> Any: ...

    def check_state(self, state: Any, x: Tensor): ...

    def __iter__(self) -> Iterator[Any]: ...


Way = Callable[[Stack, Blocks, bool, Tensor, Any, Documents | None], tuple[Tensor, Any]]
"""(the backbone, the blocks with all inner ways, whether states are wanted, x, states, documents) -> as Blocks."""

Call = Callable[..., Any]
"""(part, block, *arguments) -> part(block, *arguments): a call of a block or of half a block, as :func:`plainly`."""


def in_turn(block: nn.Module, x: Tensor, state: Any, documents: Documents | None) -> tuple[Tensor, Any]:
    """A block's part in a loop over blocks."""
    return block(x, state, documents)


def whole_sequence(block: nn.Module, x: Tensor, documents: Documents | None) -> Tensor:
    """A block over whole sequences, which no later call continues: (B, T, d_model) -> (B, T, d_model)."""
    return block(x, None, documents)[0]


def plainly(part: Callable, block: nn.Module, *arguments: Any) -> Any:
    return part(block, *arguments)


def recomputed(part: Callable, block: nn.Module, *arguments: Any) -> Any:
    """Activation checkpointing: in training only the inputs are kept, and the backward pass computes the rest again,
    with the same random draws (adapters of peft, mixers of your own)."""
    if block.training and torch.is_grad_enabled():
        return checkpoint(part, block, *arguments, use_reentrant=False)
    return part(block, *arguments)


def around(
    backbone: Stack, blocks: Blocks, states: bool, x: Tensor, state: Any, documents: Documents | None
) -> tuple[Tensor, Any]:
    """The way of the first block's mixer (``Mixer.around``)."""
    first = backbone.mixers[0]
    check_kind(state, declared_states(type(first).around))
    return first.around(blocks, x, state, documents)


PROGRAMS = 64
"""Most programs that torch.compile may make: one for each kind of block, shape, and ``Documents.most``. PyTorch's own
limit is 8, beyond which blocks run uncompiled. Five lengths of needles in a model of two kinds of block need 10."""


class Compiled:
    """Whole sequences (no state in, none out) pass each block through torch.compile."""

    def __init__(self):
        self._whole_sequence = torch.compile(whole_sequence, dynamic=False)
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, PROGRAMS)

    def __call__(
        self, backbone: Stack, blocks: Blocks, states: bool, x: Tensor, state: Any, documents: Documents | None
    ) -> tuple[Tensor, Any]:
        if state is not None or states:
            return blocks(x, state, documents)
        for block in backbone:
            compiled = documents is None or block.mixer.compiles_documents
            x = backbone.call(self._whole_sequence if compiled else whole_sequence, block, x, documents)
        return x, None
