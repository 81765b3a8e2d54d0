"""The recurrence over blocks by PyTorch operators and autograd: what channelwise.py and stale.py share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from titans_pt.kernels.blocks import cut
from titans_pt.kernels.memory.chunked import _join, _Layout, _runs
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.state import MemoryState, Weights, choose


@dataclass
class Scan:
    """The recurrence over blocks. Whoever inherits it says what one block does.

    norm: two (N, 1, D), or None. begin: M_0, L tensors (N, d_in, d_out). to_start: whether forgetting leads to M_0, not
    to zero; weights W are then differences to it, forgotten to zero, and queries meet M_0 + W.
    """

    network: NetworkShape
    norm: Weights | None
    begin: Weights
    to_start: bool

    def coefficients(self, theta: Tensor, eta: Tensor, alpha: Tensor, valid: Tensor | None) -> Sequence:
        """What the gates of one layer, (n, N, c, .), say of each block. valid: (n, N, c), or None where all tokens are;
        those that are not change nothing."""
        raise NotImplementedError

    def block(
        self, q: Tensor, k: Tensor, v: Tensor, coefficients: tuple[Any, ...], W: Weights, S: Weights, F: Weights
    ) -> tuple[Tensor, Weights, Weights]:
        """q, k, v (N, c, D), coefficients of each layer, F the chunk's first weights -> outputs, W and S after it."""
        raise NotImplementedError

    def blocks(
        self, q, k, v, theta, eta, alpha, valid, new_chunk: list, new_document: list, W: Weights, S: Weights, F: Weights
    ) -> tuple[Tensor, Weights, Weights, Weights]:
        """Outputs (n, N, c, D) of n blocks, and the state after them.

        q, k, v: (n, N, c, D). theta, eta, alpha: (n, N, c, .). valid: (n, N, c) or None. new_chunk, new_document: of
        each block True, False or the rows (N,) where one begins.
        """
        layers = zip(*(self.network.per_layer(gate) for gate in (theta, eta, alpha)), strict=True)
        # Of each block its layers'. Unbound, not indexed: the gradient of an index is as large as all blocks.
        coefficients = list(zip(*(self.coefficients(*gates, valid) for gates in layers), strict=True))
        outputs = []
        for n, given in enumerate(zip(q.unbind(), k.unbind(), v.unbind(), coefficients, strict=True)):
            if new_document[n] is not False:
                zero = tuple(torch.zeros_like(s) for s in S)
                W = choose(new_document[n], zero if self.to_start else self.begin, W)
                S = choose(new_document[n], zero, S)
            if new_chunk[n] is not False:
                F = choose(new_chunk[n], plus(W, self.begin) if self.to_start else W, F)
            out, W, S = self.block(*given, W, S, F)
            outputs.append(out)
        return torch.stack(outputs), W, S, F


def plus(a: Weights, b: Weights) -> Weights:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def minus(a: Weights, b: Weights) -> Weights:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def blockwise_memory(
    kind: Callable[..., Scan],
    block: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor,
    alpha: Tensor,
    weights: Weights,
    *,
    network: NetworkShape,
    norm: Weights | None,
    chunk_size: int,
    forget_to: str,
    state: MemoryState,
    reset: Tensor | None,
    save_every: int | None,
) -> tuple[Tensor, MemoryState]:
    """Arguments as in :func:`titans_pt.kernels.memory.naive.naive_memory`, for blocks of ``block`` tokens at most.

    Memory beyond inputs and outputs: the state (three weight sets) per ``save_every`` blocks, and what autograd keeps
    of that many; None is the square root of the number of blocks.
    """
    batch, length, heads = q.shape[:3]
    blocks = cut(state.offset, reset, length, chunk_size, min(chunk_size, block))

    def fold(tensors: Weights) -> Weights:
        return tuple(w.reshape(batch * heads, *w.shape[2:]) for w in tensors)

    def unfold(tensors: Weights) -> Weights:
        return tuple(w.view(batch, heads, *w.shape[1:]) for w in tensors)

    begin = fold(weights)
    affine = None if norm is None else tuple(p.reshape(batch * heads, 1, -1) for p in norm)
    scan = kind(network, affine, begin, forget_to == "start")
    W, S, F = fold(state.weights), fold(state.momentum), fold(state.chunk_weights)
    if scan.to_start:
        W = minus(W, begin)
    outputs = []
    for first, last, tokens in _runs(blocks):
        layout = _Layout(blocks, first, last, tokens, heads)
        tensors = [layout.fold(x) for x in (q, k, v, theta, eta, alpha)]
        valid = layout.valid(q.device)
        new_chunk, new_document = (layout.rows(f, q.device) for f in (blocks.new_chunk, blocks.new_document))
        every, parts = save_every or math.isqrt(layout.count), []
        for begins in range(0, layout.count, every):
            part = slice(begins, begins + every)
            out, W, S, F = checkpoint(
                scan.blocks, *(x[part] for x in tensors), None if valid is None else valid[part], new_chunk[part],
                new_document[part], W, S, F, use_reentrant=False, preserve_rng_state=False,
            )  # fmt: skip
            parts.append(out)
        outputs.append(layout.unfold(torch.cat(parts)))

    if scan.to_start:
        W = plus(W, begin)
    # A chunk that is complete ends here: the next one starts at the current weights.
    frozen = choose((blocks.offset == 0).to(q.device).repeat_interleave(heads), W, F)
    return _join(outputs, blocks, length), MemoryState(unfold(W), unfold(S), unfold(frozen), blocks.offset)
