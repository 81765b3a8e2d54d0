"""The exact dual form: matrix products over blocks of tokens, no weight set per token.

With the gradients of a chunk frozen at its start, (M_t, S_t) is a linear recurrence in known rank-one terms
u_i = x_i g_i^T. Unrolled over a block that starts at (W, S), with a = 1 - alpha:

    M_t = A_t W + B_t S - sum_{i<=t} P[t, i] theta_i u_i       S_t = m_t S - sum_{i<=t} E[t, i] theta_i u_i
    D[t, j] = prod_{j<l<=t} a_l     E[j, i] = prod_{i<l<=j} eta_l     P = D E
    A_t = prod_{l<=t} a_l           m_t = prod_{l<=t} eta_l           B = D m

Forgetting to M_0 instead of zero is the same recurrence for the difference M - M_0; reads add M_0.

A layer applied to queries Z then needs (Z X^T * P theta) G instead of M_t. A block may be shorter than the gradient
chunk: its keys still use ``chunk_weights``, its queries the running weights. Products of gates are cumulative products,
never quotients or logarithms: gates may be exactly 0 or 1.

The memory's rule defines u_i by its loss, and may have other coefficients. C (native/scan.c) runs the same blocks row
by row, for the losses that it implements, windows (window.py) and erasing (erasure.py) included.

Queries only read: many blocks' queries are computed at once (scan.py; the blocks themselves are in dual.py). For the
backward pass a short run keeps its intermediates; a long run keeps the state at every ``save_every``-th block and
recomputes the blocks in between.
"""

import math
from functools import partial

import torch
from torch import Tensor

from titans_pt.kernels.blocks import Layout, cut, join, runs
from titans_pt.kernels.memory import native
from titans_pt.kernels.memory.call import Backend, MemoryCall
from titans_pt.kernels.memory.coefficients import Coefficients
from titans_pt.kernels.memory.erasure import decay
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.rules import Rule
from titans_pt.kernels.memory.scan import MemoryScan, ScanPlan
from titans_pt.kernels.memory.state import MemoryState, Weights, choose, state_dtype
from titans_pt.kernels.memory.window import Wide, band

MAX_BLOCK = 64
"""Most tokens of a compute block: (block x block) products then stay small, however long the gradient chunk is."""
GROUP_BYTES = 2**24
"""Most bytes of a group's blocks: they are read more than once and should stay in a CPU's caches."""
KEEP_BYTES = 2**24
"""Most bytes that a call keeps for its backward pass, beyond inputs and outputs."""


def chunked_memory(call: MemoryCall, compiled: bool = False) -> tuple[Tensor, MemoryState]:
    """Outputs (B, T, H, D) and the state after them.

    For the backward pass a call keeps, beyond inputs and outputs, one (W, S, chunk W) per ``save_every`` blocks and the
    intermediates of ``save_every`` blocks. With save_every=None it keeps everything, if that fits in KEEP_BYTES; else
    ``save_every`` is the square root of the number of blocks, or as many as GROUP_BYTES hold if that is more.

    compiled: run native.NativeScan instead of PyTorch operators.
    """
    call = call.of_rows()
    state, network, reset, to_start, save_every = call.state, call.network, call.reset, call.to_start, call.save_every
    assert state is not None
    batch, length, heads = call.q.shape[:3]
    layers, device = network.depth, call.q.device
    blocks = cut(state.offset, reset, length, call.chunk_size, min(call.chunk_size, MAX_BLOCK))

    def fold(tensors: Weights) -> Weights:
        return tuple(w.reshape(batch * heads, *w.shape[2:]) for w in tensors)

    begin = fold(call.weights) if reset is not None or to_start else ()
    affine = () if call.norm is None else tuple(p.reshape(batch * heads, 1, -1) for p in call.norm)
    running = fold(state.weights)
    if to_start and not compiled:
        running = tuple(w - w0 for w, w0 in zip(running, begin, strict=True))
    wide = None
    if call.rule.window > 1:  # in C, where rows are cut alike: each flag is a bool
        gone = [flag is True for flag in blocks.new_document]
        wide = Wide(state.recent, [call.k, call.v, *call.own], blocks, gone)
    carry = [*running, *fold(state.momentum), *fold(state.chunk_weights)]
    outputs = []
    for first, last, tokens in runs(blocks):
        layout = Layout(blocks, first, last, tokens, heads)
        new = layout.rows(blocks.new_chunk, device), layout.rows(blocks.new_document, device)
        # C reads tokens in place, unless a window reads some of them twice.
        whole = compiled and blocks.index is None and wide is None
        inputs = [x[:, tokens] if whole else layout.fold(x) for x in (call.q, call.k, call.v)]
        theta, eta, alpha = (layout.fold(gate).movedim(-1, 0) for gate in (call.theta, call.eta, call.alpha))
        own, valid, there = [layout.fold(gate) for gate in call.own], layout.valid(device), None
        own_of_keys = own
        if wide is not None:
            (inputs[1], inputs[2], *own_of_keys), there = wide.of(layout)
        gates = _coefficients(call.rule, theta, eta, alpha, own, valid, there)
        if compiled:
            group, keep = native.group(layout.count, batch * heads, network, call.q.element_size(), save_every)
        else:
            group, keep = _groups(layout.count, _block_bytes(inputs[0], network), save_every)
        plan = ScanPlan(*new, network, call.rule, to_start, len(theta), group, keep, whole, call.reads_start)
        if compiled:
            if call.reads_start and not call.rule.erases:
                gates[:3] = (x[..., -1:, :] for x in gates[:3])
            threshold = own_of_keys[: native.thresholds(call.rule)]
            erasing = (theta, *decay(alpha, valid)) if call.rule.erases else ()
            out, *carry = native.scan(plan, *inputs, *gates, *threshold, *erasing, *affine, *begin, *carry)
        else:
            out, *carry = MemoryScan.apply(plan, *inputs, *own, *gates, *affine, *begin, *carry)
        outputs.append(out if whole else layout.unfold(out))

    if to_start and not compiled:
        carry[:layers] = [w0 + w for w0, w in zip(begin, carry[:layers], strict=True)]
    parts = [tuple(w.view(batch, heads, *w.shape[1:]) for w in carry[n * layers : (n + 1) * layers]) for n in range(3)]
    fresh = choose((blocks.offset == 0).tolist(), parts[0], parts[2])
    recent = state.recent if wide is None else wide.left()
    return join(outputs, blocks, length), MemoryState(parts[0], parts[1], fresh, blocks.offset, recent)


def _coefficients(
    rule: Rule, theta: Tensor, eta: Tensor, alpha: Tensor, own: list[Tensor], valid: Tensor | None, there: Tensor | None
) -> list[Tensor]:
    """The fields of Coefficients of a run's blocks, (gate_layers, n, N, ...); for theta = 1 if the rule erases.

    theta, eta, alpha: (gate_layers, n, N, c). own: (n, N, c, 1) each. there: for a window, see :meth:`Wide.of`.
    """
    alone = torch.ones_like(theta) if there is not None or rule.erases else theta
    found = rule.coefficients(alone, eta, alpha, tuple(own), valid)
    if there is None:
        return list(found)
    reach = band(theta.unsqueeze(-1) * rule.shares(tuple(own)), there)
    return list(vars(Coefficients(*found).through(reach)).values())


def in_c(call: MemoryCall) -> str | None:
    """Reason why C, in whole scans or block by block, does not serve a call; None if it does."""
    rule = call.rule
    unknown = rule.compiled_loss is None or (rule.erases and not rule.compiled_steps)
    if unknown or call.network.inputs is not None:
        return f"the memory rule is {rule.name} with these settings (model.memory.rule), which C does not know"
    if call.channelwise:
        return "alpha has one value per channel (model.memory.alpha=channel)"
    if call.soup is not None:
        return "weights of several memories are read at once (model.memory.caching.soup)"
    if call.reads_start and call.chunk_size > MAX_BLOCK and not rule.erases:
        return f"tokens read the memory of their chunk's start, in chunks longer than {MAX_BLOCK}"
    return native.unserved(call.q.new_empty(0, dtype=state_dtype(call.q)), call.network)


def _in_c(call: MemoryCall) -> str | None:
    if reason := in_c(call):
        return reason
    if call.rule.nonlinear or call.author is not None:
        return "chunks are read before they are written; see blockwise.py"
    if call.rule.window > 1 and not _alike(call):
        return "the rule has a window, and documents begin at different tokens of the rows"
    return None


def _alike(call: MemoryCall) -> bool:
    """Whether blocks are cut alike in every row."""
    state, reset = call.state, call.reset
    offsets = state is None or bool((state.offset == state.offset[0]).all())
    return offsets and (reset is None or bool((reset == reset[:1]).all()))


def _unserved(call: MemoryCall) -> str | None:
    if call.channelwise or call.reads_start or not call.rule.plain or call.soup:
        return "blockwise.py serves an alpha per channel, reads of the chunk's start, windows, features, erasing, soups"
    return None


def _block_bytes(x: Tensor, network: NetworkShape) -> int:
    """Bytes that a block keeps for its backward pass; x (n, N, c, D)."""
    _, rows, c, width = x.shape
    states = 2 * sum(a * b for a, b in network.layers)
    tokens = c * (7 * network.hidden * (network.depth - 1) + 9 * width + network.depth * c)
    return rows * (states + tokens) * x.element_size()


def _groups(count: int, block_bytes: int, save_every: int | None) -> tuple[int, bool]:
    """Number of blocks in a group, and whether blocks keep the intermediates of their backward pass (see ScanPlan)."""
    if save_every:
        return min(save_every, count), False
    fit = max(1, GROUP_BYTES // block_bytes)
    if count * block_bytes <= KEEP_BYTES:
        return min(fit, count), True
    return min(max(fit, math.isqrt(count)), count), False


CHUNKED = Backend(_unserved, chunked_memory)
NATIVE = Backend(_in_c, partial(chunked_memory, compiled=True))
