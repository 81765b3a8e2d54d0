"""The parallel part: reads of each block's queries, forward and backward. One program per block and row.

A block depends on other blocks only through the state at its start, which scan.py stores.
"""

import triton
import triton.language as tl

from titans_pt.kernels.memory.fused.functions import (
    FIELDS,
    LENGTH,
    START,
    THETA,
    VECTORS,
    A,
    B,
    activate,
    hidden_places,
    inner_places,
    once,
    outer_places,
    product,
    slope,
    store_tokens,
    through,
    tokens,
    unit,
    unit_vjp,
    vector,
    width_places,
)  # fmt: skip


@triton.jit
def _mix(P, vectors, at, BLOCK: tl.constexpr, SCALE: tl.constexpr):
    """P[t, i] theta_i of a block times SCALE, (BLOCK, BLOCK)."""
    c = tl.arange(0, BLOCK)
    theta = tl.load(vectors + (at * VECTORS + THETA) * BLOCK + c)
    return tl.load(P + at * BLOCK * BLOCK + c[:, None] * BLOCK + c[None, :]) * (theta * SCALE)[None, :]


@triton.jit
def _read(
    query, key, mixed1, P, vectors, upper, a1, b1, a2, b2, weights, momenta, base, active, bent, error, query_active,
    wide, narrow,
    D: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr, LAYERS: tl.constexpr,
    TO_START: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Output of the outer matrix for the block's queries, and its layer's scores; with KEEP stores the queries' Z."""
    OPERAND: tl.constexpr = query.dtype
    scores = tl.zeros([BLOCK, BLOCK], tl.float32)
    out = tl.zeros([BLOCK, D], tl.float32)
    for j in range(0, HIDDEN, SLICE):
        x, zx = key, query
        if LAYERS == 2:
            here = hidden_places(j, BLOCK, HIDDEN, SLICE)
            x, g1 = tl.load(active + wide + here), tl.load(bent + wide + here)
            z = -product(mixed1, g1, SCALE, PRECISION)
            places = inner_places(j, D, HIDDEN, SLICE)
            z = through(query, weights, momenta, base, places, a1, b1, z, TO_START, PRECISION).to(OPERAND)
            if KEEP:
                tl.store(query_active + wide + here, z)
            zx = once(activate(z.to(tl.float32), ACTIVATION).to(OPERAND))
        scores = tl.dot(zx, tl.trans(x), scores, input_precision=PRECISION)
        places = outer_places(j, D, HIDDEN, SLICE, LAYERS)
        out = through(zx, weights, momenta, base, places, a2, b2, out, TO_START, PRECISION)
    mixed = (scores * _mix(P, vectors, upper, BLOCK, SCALE)).to(OPERAND)
    out -= product(mixed, tl.load(error + narrow + width_places(BLOCK, D)), SCALE, PRECISION)
    return out, scores


@triton.jit(do_not_specialize=["T", "H", "N", "first", "K"])
def read(
    q, k, info, base, norm, P, vectors, weights, momenta, active, bent, error, out,
    T, H, N, first, K,
    D: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr, LAYERS: tl.constexpr,
    GATES: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, TO_START: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """y_t = M_t(q_t), out (B, T, H, D). The intermediates are those of scan.scan and coefficients.coefficients."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = row // H, row % H
    info += (batch * N + first + i) * FIELDS
    start, length = tl.load(info + START), tl.load(info + LENGTH)
    if length == 0:
        return
    SIZE: tl.constexpr = LAYERS * D * HIDDEN
    at = row * K + i
    lower, upper = at * GATES, at * GATES + GATES - 1
    token = (batch * T + start) * H + head
    query, key = tokens(q, token, H, length, D, BLOCK), tokens(k, token, H, length, D, BLOCK)
    a1, b1 = vector(vectors, lower, A, BLOCK), vector(vectors, lower, B, BLOCK)
    a2, b2 = vector(vectors, upper, A, BLOCK), vector(vectors, upper, B, BLOCK)
    mixed1 = key
    if LAYERS == 2:
        scores1 = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        mixed1 = (scores1 * _mix(P, vectors, lower, BLOCK, SCALE)).to(key.dtype)
    y, _ = _read(
        query, key, mixed1, P, vectors, upper, a1, b1, a2, b2,
        weights + (at + row + 1) * SIZE, momenta + at * SIZE, base + head * SIZE, active, bent, error, active,
        at * BLOCK * HIDDEN, at * BLOCK * D,
        D, HIDDEN, BLOCK, SLICE, LAYERS, TO_START, ACTIVATION, PRECISION, SCALE, False,
    )  # fmt: skip
    if NORM:
        d = tl.arange(0, D)
        y, _ = unit(y, D)
        y = y * tl.load(norm + head * D + d)[None, :] + tl.load(norm + (H + head) * D + d)[None, :]
    if RESIDUAL:
        y += query.to(tl.float32)
    store_tokens(out, token, H, length, y, D, BLOCK)


@triton.jit(do_not_specialize=["T", "H", "N", "first", "K"])
def read_backward(
    q, k, d_y, info, base, norm, P, vectors, weights, momenta, active, bent, error,
    query_active, d_query_hidden, d_out, d_input, d_hidden, d_error, d_key, d_norm_read, d_mix, d_vectors, d_q,
    T, H, N, first, K,
    D: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr, LAYERS: tl.constexpr,
    GATES: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, TO_START: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Backward pass of :func:`read`: d_y (B, T, H, D) -> complete d_q, d_mix, and rows A and B of d_vectors.

    For scan.scan_backward it also stores the gradients of the block's keys and of the state at its start (see there).
    query_active first holds Z of the queries, in the end their activations X.
    """
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = row // H, row % H
    info += (batch * N + first + i) * FIELDS
    start, length = tl.load(info + START), tl.load(info + LENGTH)
    if length == 0:
        return
    SIZE: tl.constexpr = LAYERS * D * HIDDEN
    at = row * K + i
    lower, upper = at * GATES, at * GATES + GATES - 1
    wide, narrow = at * BLOCK * HIDDEN, at * BLOCK * D
    width = width_places(BLOCK, D)
    weights, momenta, base = weights + (at + row + 1) * SIZE, momenta + at * SIZE, base + head * SIZE
    token = (batch * T + start) * H + head
    c, d = tl.arange(0, BLOCK), tl.arange(0, D)
    OPERAND: tl.constexpr = q.dtype.element_ty
    query, key = tokens(q, token, H, length, D, BLOCK), tokens(k, token, H, length, D, BLOCK)
    a1, b1 = vector(vectors, lower, A, BLOCK), vector(vectors, lower, B, BLOCK)
    a2, b2 = vector(vectors, upper, A, BLOCK), vector(vectors, upper, B, BLOCK)
    mixed1 = key
    if LAYERS == 2:
        scores1 = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        mixed1 = (scores1 * _mix(P, vectors, lower, BLOCK, SCALE)).to(OPERAND)
    y, scores2 = _read(
        query, key, mixed1, P, vectors, upper, a1, b1, a2, b2, weights, momenta, base, active, bent, error,
        query_active, wide, narrow,
        D, HIDDEN, BLOCK, SLICE, LAYERS, TO_START, ACTIVATION, PRECISION, SCALE, True,
    )  # fmt: skip

    dy = tokens(d_y, token, H, length, D, BLOCK).to(tl.float32)
    dz = dy
    if NORM:
        normalised, scale = unit(y, D)
        tl.store(d_norm_read + at * 2 * D + d, tl.sum(dy * normalised, 0))
        tl.store(d_norm_read + at * 2 * D + D + d, tl.sum(dy, 0))
        dz = unit_vjp(dy * tl.load(norm + head * D + d)[None, :], normalised, scale, D)
    dz = dz.to(OPERAND)
    tl.store(d_out + narrow + width, dz)
    mix2 = _mix(P, vectors, upper, BLOCK, SCALE)  # again: else it would be held throughout _read
    mixed2 = (scores2 * mix2).to(OPERAND)
    tl.store(d_error + narrow + width, -product(tl.trans(mixed2), dz, SCALE, PRECISION))
    d_mixed2 = -tl.dot(dz, tl.trans(tl.load(error + narrow + width)), input_precision=PRECISION)
    square = c[:, None] * BLOCK + c[None, :]
    tl.store(d_mix + (at * LAYERS + LAYERS - 1) * BLOCK * BLOCK + square, d_mixed2 * scores2)
    d_scores2 = (d_mixed2 * (mix2 * (1 / SCALE))).to(OPERAND)  # gradients have the loss's scale: no SCALE
    tl.debug_barrier()

    da2 = tl.zeros([BLOCK], tl.float32)
    db2 = tl.zeros([BLOCK], tl.float32)
    dq = tl.zeros([BLOCK, D], tl.float32)
    d_mixed1 = tl.zeros([BLOCK, BLOCK], tl.float32)
    through_s = tl.zeros([BLOCK, D], tl.float32)
    for j in range(0, HIDDEN, SLICE):
        places = outer_places(j, D, HIDDEN, SLICE, LAYERS)
        here = hidden_places(j, BLOCK, HIDDEN, SLICE)
        x, zx = key, query
        if LAYERS == 2:
            z = tl.load(query_active + wide + here).to(tl.float32)
            zx = once(activate(z, ACTIVATION).to(OPERAND))
            x, g1 = tl.load(active + wide + here), tl.load(bent + wide + here)
        back = tl.dot(dz, tl.trans(tl.load(weights + places)), input_precision=PRECISION)
        da2 += tl.sum(zx * back, 1)
        dzx = tl.dot(d_scores2, x, input_precision=PRECISION) + a2 * back
        back = tl.dot(dz, tl.trans(tl.load(momenta + places)), input_precision=PRECISION)
        db2 += tl.sum(zx * back, 1)
        dzx += b2 * back
        if TO_START:
            dzx = tl.dot(dz, tl.trans(tl.load(base + places)), dzx, input_precision=PRECISION)
        dx = tl.dot(tl.trans(d_scores2), zx, input_precision=PRECISION)
        if LAYERS == 2:
            tl.store(d_input + wide + here, dx)
            dz1 = once((dzx * once(slope(z, ACTIVATION))).to(OPERAND))
            tl.store(d_query_hidden + wide + here, dz1)
            tl.debug_barrier()  # all threads have read Z
            tl.store(query_active + wide + here, zx)
            d_mixed1 -= tl.dot(dz1, tl.trans(g1), input_precision=PRECISION)
            tl.store(d_hidden + wide + here, -product(tl.trans(mixed1), dz1, SCALE, PRECISION))
            places = inner_places(j, D, HIDDEN, SLICE)
            dq = tl.dot(dz1, tl.trans(tl.load(weights + places)), dq, input_precision=PRECISION)
            through_s = tl.dot(dz1, tl.trans(tl.load(momenta + places)), through_s, input_precision=PRECISION)
        else:
            dq = dzx
            tl.store(d_key + narrow + width, dx)
    own = d_vectors + (at * LAYERS + LAYERS - 1) * VECTORS * BLOCK
    tl.store(own + A * BLOCK + c, da2)
    tl.store(own + B * BLOCK + c, db2)
    if LAYERS == 2:
        own = d_vectors + at * LAYERS * VECTORS * BLOCK
        tl.store(own + A * BLOCK + c, tl.sum(query * dq, 1))
        tl.store(own + B * BLOCK + c, tl.sum(query * through_s, 1))
        scores1 = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        tl.store(d_mix + at * LAYERS * BLOCK * BLOCK + square, d_mixed1 * scores1)
        d_scores1 = (d_mixed1 * _mix(P, vectors, lower, BLOCK, 1)).to(OPERAND)
        dq = a1 * dq + b1 * through_s
        if TO_START:  # in a separate loop: a third sum would not fit into the registers
            tl.debug_barrier()
            for j in range(0, HIDDEN, SLICE):
                dz1 = tl.load(d_query_hidden + wide + hidden_places(j, BLOCK, HIDDEN, SLICE))
                inner = tl.load(base + inner_places(j, D, HIDDEN, SLICE))
                dq = tl.dot(dz1, tl.trans(inner), dq, input_precision=PRECISION)
        dq = tl.dot(d_scores1, key, dq, input_precision=PRECISION)
        tl.store(d_key + narrow + width, tl.dot(tl.trans(d_scores1), query, input_precision=PRECISION))
    if RESIDUAL:
        dq += tokens(d_y, token, H, length, D, BLOCK).to(tl.float32)
    store_tokens(d_q, token, H, length, dq, D, BLOCK)
