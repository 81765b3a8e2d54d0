"""Layers in parallel: layer l works on piece p of a sequence while layer l + 1 works on piece p - 1.

A mixer that is serial in time runs one thread block per row and head on a GPU: with one row, on 12 of 132
multiprocessors. Its state makes cuts of the sequence invisible. The layers on a diagonal of (piece, layer) are then
independent and may run at the same time, on a GPU each in its own stream. The results are the same as for pieces one
after the other. Autograd runs each part of the backward pass in the stream of its forward pass.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titans_pt.layers.documents import Documents
from titans_pt.layers.state import compact, tensors
from titans_pt.models.ways import Blocks, Stack, in_turn


class Wavefront:
    """Way (titans_pt.models.ways) for calls that are longer than ``tokens``: layers in parallel."""

    def __init__(self, tokens: int):
        self.tokens = tokens

    def __call__(
        self, backbone: Stack, blocks: Blocks, states: bool, x: Tensor, state: Any, documents: Documents | None
    ) -> tuple[Tensor, Any]:
        if x.shape[1] <= self.tokens:
            return blocks(x, state, documents)
        backbone.check_state(state, x)
        x, after = wavefront(partial(backbone.call, in_turn), list(backbone), x, state, documents, self.tokens)
        return x, [compact(block_state) for block_state in after]


def wavefront(
    run: Callable[..., tuple[Tensor, Any]],
    blocks: Sequence[nn.Module],
    x: Tensor,
    state: list[Any] | None,
    documents: Documents | None,
    tokens: int,
) -> tuple[Tensor, list[Any]]:
    """Run x (B, T, d_model) through the blocks, in pieces of ``tokens`` tokens.

    Args:
        run: (block, x, the state of its mixer or None, documents) -> (x, state).
        state: states of the blocks' mixers; None at the start.

    Returns:
        (B, T, d_model) and the states after the last token.
    """
    pieces, states = list(x.split(tokens, 1)), list(state or [None] * len(blocks))
    cuts: list[Documents | None] = [None] * len(pieces)
    if documents is not None:
        cuts = [documents.cut(begin, min(begin + tokens, x.shape[1])) for begin in range(0, x.shape[1], tokens)]
    lanes = _Streams(x, len(blocks), states) if x.is_cuda else _NoStreams()
    for diagonal in range(len(pieces) + len(blocks) - 1):
        # The last layer first: it waits for all work given to the layer before, which then ends with this very piece.
        for layer in reversed(range(max(0, diagonal - len(pieces) + 1), min(len(blocks), diagonal + 1))):
            piece = diagonal - layer
            with lanes.lane(layer, pieces[piece]):
                pieces[piece], states[layer] = run(blocks[layer], pieces[piece], states[layer], cuts[piece])
    lanes.join(pieces, states)
    return torch.cat(pieces, 1), states


class _NoStreams:
    """Streams of a CPU: one part runs after the other."""

    def lane(self, layer: int, x: Tensor):
        return nullcontext()

    def join(self, pieces: list[Tensor], states: list[Any]):
        pass


class _Streams:
    """A stream for each layer, in which its pieces follow each other; a piece waits for the layer before.

    The streams begin after all earlier work of the current stream, which waits for them in :meth:`join`; a CUDA graph
    can therefore capture them. Memory of one stream that another reads is marked, or the allocator might reuse it
    early.
    """

    def __init__(self, x: Tensor, layers: int, states: list[Any]):
        self.main = torch.cuda.current_stream(x.device)
        self.streams = [torch.cuda.Stream(x.device) for _ in range(layers)]
        for stream, state in zip(self.streams, states, strict=True):
            stream.wait_stream(self.main)
            _mark([state], stream)

    def lane(self, layer: int, x: Tensor):
        """Context in which ``layer`` works on x, the newest output of the layer before."""
        stream = self.streams[layer]
        if layer:
            stream.wait_stream(self.streams[layer - 1])
        _mark([x], stream)
        return torch.cuda.stream(stream)

    def join(self, pieces: list[Tensor], states: list[Any]):
        for stream in self.streams:
            self.main.wait_stream(stream)
        _mark([pieces, states], self.main)


def _mark(state: Any, stream: torch.cuda.Stream):
    for tensor in tensors(state):
        if tensor.is_cuda:
            tensor.record_stream(stream)
