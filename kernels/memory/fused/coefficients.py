"""Coefficients of every block, computed from the gates, and their backward pass. One program per block, row and gate.

With a = 1 - alpha, over the block's tokens (kernels.memory.chunked has the meaning):

    D[t, j] = prod_{j<l<=t} a_l     E[t, i] = prod_{i<l<=t} eta_l     P = D E
    A_t = prod_{l<=t} a_l           m_t = prod_{l<=t} eta_l           B = D m

All are cumulative products, never quotients or logarithms: gates may be exactly 0 or 1. The last row is the block's
end: places after the last token repeat it (a = eta = 1, and nothing is written there).
"""

import triton
import triton.language as tl

from titans_pt.kernels.memory.fused.functions import E_END, FIELDS, LENGTH, P_END, START, THETA, VECTORS, A, B, M


@triton.jit
def _decay(gate, shift, BLOCK: tl.constexpr):
    """gate (BLOCK,) -> prod_{i<l<=t} gate_l at [t, i], i <= t. With shift = 1 and gate_t at index t + 1: [t - 1, i]."""
    t = tl.arange(0, BLOCK)[:, None] - shift
    i = tl.arange(0, BLOCK)[None, :]
    return tl.where(i <= t, tl.cumprod(tl.where(i < t, gate[:, None], 1.0), 0), 0.0)


@triton.jit
def _last(rows, BLOCK: tl.constexpr):
    """Last row of a (BLOCK, BLOCK) tile."""
    return tl.sum(tl.where(tl.arange(0, BLOCK)[:, None] == BLOCK - 1, rows, 0.0), 0)


@triton.jit(do_not_specialize=["T", "H", "N", "first", "K"])
def coefficients(
    theta, eta, alpha, info, P, vectors,
    T, H, N, first, K,
    BLOCK: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """theta, eta, alpha (B, T, H, GATES) -> P (B H, K, GATES, c, c), and vectors (B H, K, GATES, VECTORS, c): A, B, m,
    the last rows of P and E times theta, theta.
    """
    row, i, gate = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    batch, head = row // H, row % H
    info += (batch * N + first + i) * FIELDS
    start, length = tl.load(info + START), tl.load(info + LENGTH)
    at = (row * K + i) * GATES + gate
    c = tl.arange(0, BLOCK)
    valid = c < length
    places = ((batch * T + start) * H + head) * GATES + gate + c * H * GATES
    step = tl.load(theta + places, mask=valid, other=0.0)
    momentum = tl.load(eta + places, mask=valid, other=1.0)
    keep = 1 - tl.load(alpha + places, mask=valid, other=0.0)

    decay_m = tl.where(valid[None, :], _decay(keep, 0, BLOCK), 0.0)
    decay_s = _decay(momentum, 0, BLOCK)
    p = tl.dot(decay_m, decay_s, input_precision="tf32x3")
    m = tl.cumprod(momentum, 0)
    tl.store(P + at * BLOCK * BLOCK + c[:, None] * BLOCK + c[None, :], p)
    own = vectors + at * VECTORS * BLOCK + c
    tl.store(own + A * BLOCK, tl.cumprod(keep, 0))
    tl.store(own + B * BLOCK, tl.sum(decay_m * m[None, :], 1))
    tl.store(own + M * BLOCK, m)
    tl.store(own + P_END * BLOCK, _last(p, BLOCK) * step)
    tl.store(own + E_END * BLOCK, _last(decay_s, BLOCK) * step)
    tl.store(own + THETA * BLOCK, step)


@triton.jit(do_not_specialize=["T", "H", "N", "first", "K"])
def coefficients_backward(
    eta, alpha, info, P, vectors, d_mix, d_vectors, d_ends, d_theta, d_eta, d_alpha,
    T, H, N, first, K,
    BLOCK: tl.constexpr, GATES: tl.constexpr, LAYERS: tl.constexpr,
):  # fmt: skip
    """d_mix (B H, K, LAYERS, c, c), the gradient of P theta; d_vectors (B H, K, LAYERS, VECTORS, c), rows A, B, P_END
    and E_END; d_ends (B H, K, LAYERS, 3), of the last A, B and m -> d_theta, d_eta, d_alpha (B, T, H, GATES).

    For a recurrence x_t = a_t x_{t-1} + u_t the gradient of u is D^T dx; row t of it times x_{t-1} gives the gradient
    of a_t.
    """
    row, i, gate = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    batch, head = row // H, row % H
    info += (batch * N + first + i) * FIELDS
    start, length = tl.load(info + START), tl.load(info + LENGTH)
    at = (row * K + i) * GATES + gate
    layer = (row * K + i) * LAYERS + gate
    c = tl.arange(0, BLOCK)
    valid, end = c < length, c == BLOCK - 1
    places = ((batch * T + start) * H + head) * GATES + gate + c * H * GATES
    square = c[:, None] * BLOCK + c[None, :]
    P += at * BLOCK * BLOCK
    own = vectors + at * VECTORS * BLOCK + c
    step = tl.load(own + THETA * BLOCK)
    momentum = tl.load(eta + places, mask=valid, other=1.0)
    keep = 1 - tl.load(alpha + places, mask=valid, other=0.0)
    earlier = tl.load(eta + places - H * GATES, mask=(c > 0) & (c <= length), other=1.0)
    decay_m, decay_s = _decay(keep, 0, BLOCK), _decay(momentum, 0, BLOCK)

    # One gate may serve both layers: their gradients add up.
    d_p = tl.zeros([BLOCK, BLOCK], tl.float32)
    d_p_end = tl.zeros([BLOCK], tl.float32)
    d_e_end = tl.zeros([BLOCK], tl.float32)
    d_a = tl.zeros([BLOCK], tl.float32)
    d_b = tl.zeros([BLOCK], tl.float32)
    d_m = tl.zeros([BLOCK], tl.float32)
    for n in tl.static_range(LAYERS // GATES):
        d_own = d_vectors + (layer + n) * VECTORS * BLOCK + c
        d_end = d_ends + (layer + n) * 3
        d_p += tl.load(d_mix + (layer + n) * BLOCK * BLOCK + square)
        d_p_end += tl.load(d_own + P_END * BLOCK)
        d_e_end += tl.load(d_own + E_END * BLOCK)
        d_a += tl.load(d_own + A * BLOCK) + tl.where(end, tl.load(d_end), 0.0)
        d_b += tl.load(d_own + B * BLOCK) + tl.where(end, tl.load(d_end + 1), 0.0)
        d_m += tl.where(end, tl.load(d_end + 2), 0.0)
    d_p += tl.where(end[:, None], d_p_end[None, :], 0.0)
    d_step = tl.sum(d_p * tl.load(P + square), 0) + d_e_end * _last(decay_s, BLOCK)
    d_p *= step[None, :]

    to_p = tl.dot(tl.trans(decay_m), d_p, input_precision="tf32x3")
    to_a = tl.sum(decay_m * d_a[:, None], 0)
    to_b = tl.sum(decay_m * d_b[:, None], 0)
    d_e = tl.where(valid[:, None], to_p, 0.0) + tl.where(end[:, None], (d_e_end * step)[None, :], 0.0)
    to_e = tl.dot(tl.trans(decay_s), d_e, input_precision="tf32x3")
    to_m = tl.sum(decay_s * (tl.where(valid, to_b, 0.0) + d_m)[:, None], 0)
    # The previous rows: before the block's first token P, E, B are 0, and A, m are 1.
    p = tl.load(P + square - BLOCK, mask=square >= BLOCK, other=0.0)
    a = tl.load(own + A * BLOCK - 1, mask=c > 0, other=1.0)
    b = tl.load(own + B * BLOCK - 1, mask=c > 0, other=0.0)
    m = tl.load(own + M * BLOCK - 1, mask=c > 0, other=1.0)
    d_keep = tl.sum(to_p * p, 1) + to_a * a + to_b * b
    d_momentum = tl.sum(to_e * _decay(earlier, 1, BLOCK), 1) + to_m * m
    tl.store(d_theta + places, d_step, mask=valid)
    tl.store(d_eta + places, d_momentum, mask=valid)
    tl.store(d_alpha + places, -d_keep, mask=valid)
