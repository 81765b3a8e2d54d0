"""The exact dual form: matrix products over blocks of tokens, no weight set per token.

With the gradients of a chunk frozen at its start, (M_t, S_t) is a linear recurrence in known rank-one terms
u_i = x_i g_i^T. Unrolled over a block that starts at (W, S), with a = 1 - alpha:

    M_t = A_t W + B_t S - sum_{i<=t} P[t, i] theta_i u_i       S_t = m_t S - sum_{i<=t} E[t, i] theta_i u_i
    D[t, j] = prod_{j<l<=t} a_l     E[j, i] = prod_{i<l<=j} eta_l     P = D E
    A_t = prod_{l<=t} a_l           m_t = prod_{l<=t} eta_l           B = D m

Forgetting to M_0 instead of to zero is the same recurrence for the difference M - M_0, which M_0 is added to.

So a layer applied to queries Z needs (Z X^T * P theta) G instead of M_t. A block may be shorter than the gradient
chunk: its keys still meet ``chunk_weights``, its queries the running ones. It may be longer: the keys of its later
chunks meet the M_t of their chunk's start in the same form as queries do (dual.Deferred), and the block's writes to W
and S are deferred to its end, once for all its chunks. Products of gates are cumulative products, never quotients or
logarithms: gates of exactly 0 and 1 are ordinary.

Queries only read: those of many blocks are answered at once (scan.py; the blocks themselves are in dual.py). Backward:
a short run keeps what it computed; a long one keeps the state at every ``save_every``-th block and computes again what
lies between.
"""

import math

import torch
from torch import Tensor

from titans_pt.kernels.blocks import Blocks, cut
from titans_pt.kernels.memory import native
from titans_pt.kernels.memory.coefficients import coefficients
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.scan import MemoryScan, Plan
from titans_pt.kernels.memory.state import MemoryState, Weights, choose

MAX_BLOCK = 64
"""Tokens of a compute block at most: the (block x block) products then stay small whatever the gradient chunk."""
DEFER_BELOW = 16
"""Tokens of a chunk below which blocks hold several. The same numbers; one thread, D = 64, hidden 256, forward and
backward: chunks of 1, 4 and 8 take .49, .81 and .68 of the time, of 16 and 32 1.1 times as much."""
GROUP_BYTES = 2**24
"""What the blocks of a group may occupy: they are gone through more than once and should stay in a CPU's caches."""
KEEP_BYTES = 2**24
"""What a call may keep for its backward pass beyond inputs and outputs."""


def chunked_memory(
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
    in_c: bool = False,
) -> tuple[Tensor, MemoryState]:
    """Arguments as in :func:`titans_pt.kernels.memory.naive.naive_memory`.

    Memory beyond inputs and outputs, for the backward pass: one (W, S, chunk W) per ``save_every`` blocks, and the
    intermediates of ``save_every`` blocks. None: everything where that is no more than KEEP_BYTES, else the square root
    of the number of blocks, or as many as GROUP_BYTES hold.

    in_c: by native.NativeScan where that serves, not by PyTorch operators.
    """
    batch, length, heads = q.shape[:3]
    layers = network.depth
    in_c = in_c and native.unserved(q, network) is None
    block = MAX_BLOCK if chunk_size < DEFER_BELOW and not in_c else min(chunk_size, MAX_BLOCK)
    blocks = cut(state.offset, reset, length, chunk_size, block)

    def fold(tensors: Weights) -> Weights:
        return tuple(w.reshape(batch * heads, *w.shape[2:]) for w in tensors)

    to_start = forget_to == "start"
    begin = fold(weights) if reset is not None or to_start else ()
    affine = () if norm is None else tuple(p.reshape(batch * heads, 1, -1) for p in norm)
    running = fold(state.weights)
    if to_start and not in_c:
        running = tuple(w - w0 for w, w0 in zip(running, begin, strict=True))
    carry = (*running, *fold(state.momentum), *fold(state.chunk_weights))
    outputs = []
    for first, last, tokens in _runs(blocks):
        layout = _Layout(blocks, first, last, tokens, heads)
        new = layout.rows(blocks.new_chunk, q.device), layout.rows(blocks.new_document, q.device)
        whole = in_c and blocks.index is None  # C reads tokens where they are
        inputs = [x[:, tokens] if whole else layout.fold(x) for x in (q, k, v)]
        gates = [g[:, tokens] if whole else layout.fold(g).movedim(-1, 0) for g in (theta, eta, alpha)]
        valid = layout.valid(q.device)
        if in_c:
            group, keep = native.group(layout.count, batch * heads, network, q.element_size(), save_every)
            scan, gates = native.NativeScan, (*gates, valid)
        else:
            group, keep = _groups(layout.count, _block_bytes(inputs[0], network), save_every)
            scan, gates = MemoryScan, coefficients(*gates, valid)
        plan = Plan(*new, network, to_start, theta.shape[-1], chunk_size, group, keep)
        out, *carry = scan.apply(plan, *inputs, *gates, *affine, *begin, *carry)
        outputs.append(out if whole else layout.unfold(out))

    if to_start and not in_c:
        carry[:layers] = [w0 + w for w0, w in zip(begin, carry[:layers], strict=True)]
    parts = [tuple(w.view(batch, heads, *w.shape[1:]) for w in carry[n * layers : (n + 1) * layers]) for n in range(3)]
    ended = (blocks.offset == 0).tolist()
    fresh = parts[0] if all(ended) else parts[2]
    if any(ended) and not all(ended):
        fresh = choose(torch.tensor(ended, device=q.device), parts[0], parts[2])
    return _join(outputs, blocks, length), MemoryState(parts[0], parts[1], fresh, blocks.offset)


def _block_bytes(x: Tensor, network: NetworkShape) -> int:
    """Of what a block leaves for its backward pass; x (n, N, c, D)."""
    _, rows, c, width = x.shape
    states = 2 * sum(a * b for a, b in network.layers)
    tokens = c * (7 * network.hidden * (network.depth - 1) + 9 * width + network.depth * c)
    return rows * (states + tokens) * x.element_size()


def _groups(count: int, block_bytes: int, save_every: int | None) -> tuple[int, bool]:
    """Blocks of a group; whether each of them keeps what its backward pass needs (see Plan)."""
    if save_every:
        return min(save_every, count), False
    fit = max(1, GROUP_BYTES // block_bytes)
    if count * block_bytes <= KEEP_BYTES:
        return min(fit, count), True
    return min(max(fit, math.isqrt(count)), count), False


def _runs(blocks: Blocks):
    """(first block, one past the last, token range) of runs of equally long blocks."""
    first = t = 0
    while first < len(blocks.lengths):
        last = first + 1
        while last < len(blocks.lengths) and blocks.lengths[last] == blocks.lengths[first]:
            last += 1
        end = t + blocks.lengths[first] * (last - first)
        yield first, last, slice(t, end)
        first, t = last, end


def _join(outputs: list[Tensor], blocks: Blocks, length: int) -> Tensor:
    """Per run (B, n c, H, D) -> (B, T, H, D)."""
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    if blocks.index is None:
        return out
    index, valid = blocks.index.flatten(1), blocks.valid.flatten(1)
    place = torch.zeros(index.shape[0], length, dtype=torch.int64)
    row, slot = valid.nonzero(as_tuple=True)
    place[row, index[row, slot]] = slot
    return torch.take_along_dim(out, place.to(out.device)[:, :, None, None], 1)


class _Layout:
    """Between (B, T, H, F) and the blocks of a run, (n, B H, c, F)."""

    def __init__(self, blocks: Blocks, first: int, last: int, tokens: slice, heads: int):
        self.blocks, self.span, self.tokens, self.heads = blocks, slice(first, last), tokens, heads
        self.count = last - first

    def fold(self, x: Tensor) -> Tensor:
        if self.blocks.index is None:
            x = x[:, self.tokens].unflatten(1, (self.count, -1))
        else:
            index = self.blocks.index[:, self.span].to(x.device)
            x = torch.take_along_dim(x, index.flatten(1)[:, :, None, None], 1).unflatten(1, index.shape[1:])
        return x.permute(1, 0, 3, 2, 4).flatten(1, 2)

    def unfold(self, x: Tensor) -> Tensor:
        """(n, B H, c, D) -> (B, n c, H, D)."""
        return x.unflatten(1, (-1, self.heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)

    def valid(self, device) -> Tensor | None:
        """(n, B H, c) bool, or None where every place holds a token."""
        if self.blocks.valid is None:
            return None
        return self.blocks.valid[:, self.span].to(device).transpose(0, 1).repeat_interleave(self.heads, 1)

    def rows(self, flags: list, device) -> list:
        """Per block of the run, flags of batch rows -> flags of (batch, head) rows."""
        return [f if isinstance(f, bool) else f.to(device).repeat_interleave(self.heads) for f in flags[self.span]]
