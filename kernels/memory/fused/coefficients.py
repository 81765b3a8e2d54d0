"""What the gates say about every block, and the way back to the gates. One program a block, row and gate.

Row recurrences over the block's tokens t, i being the token that wrote (see kernels.memory.chunked for the meaning):

    E_t = eta_t E_{t-1} + 1[i = t]      P_t = (1 - alpha_t) P_{t-1} + E_t
    m_t = eta_t m_{t-1}                 B_t = (1 - alpha_t) B_{t-1} + m_t        A_t = (1 - alpha_t) A_{t-1}

from E = P = B = 0, m = A = 1: products only, so gates of exactly 0 and 1 are ordinary. Token i enters with theta_i.
Places behind the block's last token: 0 in P, E and the vectors.
"""

import triton
import triton.language as tl

from kernels.memory.fused.functions import E_END, FIELDS, LENGTH, P_END, START, THETA, VECTORS, A, B, M


@triton.jit(do_not_specialize=["T", "H", "N", "first", "K"])
def coefficients(
    theta, eta, alpha, info, P, E, vectors, ends,
    T, H, N, first, K,
    BLOCK: tl.constexpr, GATES: tl.constexpr, KEEP_E: tl.constexpr,
):  # fmt: skip
    """theta, eta, alpha (B, T, H, GATES) -> P, E (B H, K, GATES, c, c), E with KEEP_E only; vectors (B H, K, GATES,
    VECTORS, c): A, B, m, P and E of the block's end times theta, theta; ends (B H, K, GATES, 3): the last A, B, m.
    """
    row, i, gate = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    batch, head = row // H, row % H
    info += (batch * N + first + i) * FIELDS
    start, length = tl.load(info + START), tl.load(info + LENGTH)
    gates = ((batch * T + start) * H + head) * GATES + gate
    at = (row * K + i) * GATES + gate
    c = tl.arange(0, BLOCK)
    valid = c < length

    p = tl.zeros([BLOCK], tl.float32)
    e = tl.zeros([BLOCK], tl.float32)
    a, b, m = 1.0, 0.0, 1.0
    own = vectors + at * VECTORS * BLOCK
    for t in range(BLOCK):
        inside = t < length
        keep = 1 - tl.load(alpha + gates + t * H * GATES, mask=inside, other=0.0)
        momentum = tl.load(eta + gates + t * H * GATES, mask=inside, other=1.0)
        e = tl.where(c == tl.where(inside, t, -1), 1.0, momentum * e)
        m = momentum * m
        p = tl.where(inside, keep * p + e, p)
        b = tl.where(inside, keep * b + m, b)
        a = keep * a
        tl.store(P + (at * BLOCK + t) * BLOCK + c, tl.where(inside, p, 0.0))
        if KEEP_E:
            tl.store(E + (at * BLOCK + t) * BLOCK + c, tl.where(inside, e, 0.0))
        tl.store(own + A * BLOCK + t, tl.where(inside, a, 0.0))
        tl.store(own + B * BLOCK + t, tl.where(inside, b, 0.0))
        tl.store(own + M * BLOCK + t, tl.where(inside, m, 0.0))
    step = tl.load(theta + gates + c * H * GATES, mask=valid, other=0.0)
    tl.store(own + P_END * BLOCK + c, p * step)
    tl.store(own + E_END * BLOCK + c, e * step)
    tl.store(own + THETA * BLOCK + c, step)
    tl.store(ends + at * 3, a)
    tl.store(ends + at * 3 + 1, b)
    tl.store(ends + at * 3 + 2, m)


@triton.jit(do_not_specialize=["T", "H", "N", "first", "K"])
def coefficients_backward(
    theta, eta, alpha, info, P, E, vectors, d_mix, d_vectors, d_ends, d_theta, d_eta, d_alpha,
    T, H, N, first, K,
    BLOCK: tl.constexpr, GATES: tl.constexpr, LAYERS: tl.constexpr,
):  # fmt: skip
    """d_mix (B H, K, LAYERS, c, c), the gradient of P theta; d_vectors (B H, K, LAYERS, VECTORS, c), rows A, B, P_END
    and E_END; d_ends (B H, K, LAYERS, 3) -> d_theta, d_eta, d_alpha (B, T, H, GATES). One gate serves LAYERS / GATES.
    """
    row, i, gate = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    batch, head = row // H, row % H
    info += (batch * N + first + i) * FIELDS
    start, length = tl.load(info + START), tl.load(info + LENGTH)
    gates = ((batch * T + start) * H + head) * GATES + gate
    at = (row * K + i) * GATES + gate
    layer = (row * K + i) * LAYERS + gate
    c = tl.arange(0, BLOCK)
    valid = c < length
    SHARED: tl.constexpr = LAYERS // GATES

    own = vectors + at * VECTORS * BLOCK
    step = tl.load(own + THETA * BLOCK + c)
    d_step = tl.zeros([BLOCK], tl.float32)
    to_p = tl.zeros([BLOCK], tl.float32)
    to_e = tl.zeros([BLOCK], tl.float32)
    to_a, to_b, to_m = 0.0, 0.0, 0.0
    for back in range(BLOCK):
        t = BLOCK - 1 - back
        inside, last, later = t < length, t == length - 1, (t > 0) & (t < length)
        for n in tl.static_range(SHARED):
            d_own = d_vectors + (layer + n) * VECTORS * BLOCK
            d_row = tl.load(d_mix + ((layer + n) * BLOCK + t) * BLOCK + c, mask=c < tl.where(inside, length, 0), other=0.0)
            d_row += tl.load(d_own + P_END * BLOCK + c, mask=c < tl.where(last, length, 0), other=0.0)
            d_last = tl.load(d_own + E_END * BLOCK + c, mask=c < tl.where(last, length, 0), other=0.0)
            d_step += d_row * tl.load(P + (at * BLOCK + t) * BLOCK + c)
            d_step += d_last * tl.load(E + (at * BLOCK + t) * BLOCK + c)
            to_p += d_row * step
            to_e += d_last * step
            to_a += tl.load(d_own + A * BLOCK + t, mask=inside, other=0.0)
            to_b += tl.load(d_own + B * BLOCK + t, mask=inside, other=0.0)
            to_a += tl.load(d_ends + (layer + n) * 3, mask=last, other=0.0)
            to_b += tl.load(d_ends + (layer + n) * 3 + 1, mask=last, other=0.0)
            to_m += tl.load(d_ends + (layer + n) * 3 + 2, mask=last, other=0.0)
        to_e += to_p
        to_m += to_b
        p = tl.load(P + (at * BLOCK + t - 1) * BLOCK + c, mask=c < tl.where(later, length, 0), other=0.0)
        e = tl.load(E + (at * BLOCK + t - 1) * BLOCK + c, mask=c < tl.where(later, length, 0), other=0.0)
        a = tl.load(own + A * BLOCK + t - 1, mask=later, other=1.0)
        b = tl.load(own + B * BLOCK + t - 1, mask=later, other=0.0)
        m = tl.load(own + M * BLOCK + t - 1, mask=later, other=1.0)
        place = gates + t * H * GATES
        tl.store(d_alpha + place, -(tl.sum(to_p * p) + to_b * b + to_a * a), mask=inside)
        tl.store(d_eta + place, tl.sum(to_e * e) + to_m * m, mask=inside)
        keep = 1 - tl.load(alpha + place, mask=inside, other=0.0)
        momentum = tl.load(eta + place, mask=inside, other=1.0)
        to_p, to_b, to_a = to_p * keep, to_b * keep, to_a * keep
        to_e, to_m = to_e * momentum, to_m * momentum
    tl.store(d_theta + gates + c * H * GATES, d_step, mask=valid)
