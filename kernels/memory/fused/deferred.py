"""The key side of a block that holds several chunks, forward and backward: parts of scan.scan and scan.scan_backward.

The keys of a later chunk meet weights that nobody stores, F = A W + B S - X^T (m G): W and S at the block's start, X
and G of the block's earlier tokens, m the row of P theta of the token before the chunk (kernels.memory.dual.Deferred).
The fp32 state is then read and written once a block, whatever the chunk; every chunk reads the copies of W and S in the
operands' dtype, which the queries also need. The first chunk meets the weights that the block was given.

A chunk of STEP tokens is a tile of SUB rows, STEP and at least 16: matrix products want as many.
"""

import triton
import triton.language as tl

from titans_pt.kernels.memory.fused.functions import (
    THETA,
    VECTORS,
    A,
    B,
    accumulate,
    activate,
    bend_error,
    curvature,
    hidden_places,
    inner_error,
    inner_places,
    once,
    outer_places,
    product,
    slope,
    through,
    width_places,
)  # fmt: skip


@triton.jit
def _tokens(pointer, token, H, own, mask, D: tl.constexpr):
    """Rows ``own`` of a block's tokens in (B, T, H, D), zeros outside ``mask``."""
    d = tl.arange(0, D)
    return tl.load(pointer + token * D + (own[:, None] * (H * D) + d[None, :]), mask=mask[:, None], other=0.0)


@triton.jit
def _frozen(P, vectors, at, r, STEP: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr):
    """A, B and SCALE times m, (1, BLOCK), of the weights that chunk r meets: 1, 0 and 0 of the block's first chunk."""
    c = tl.arange(0, BLOCK)
    row = r * STEP - 1
    later, own = r > 0, vectors + at * VECTORS * BLOCK
    a = tl.load(own + A * BLOCK + row, mask=later, other=1.0)
    b = tl.load(own + B * BLOCK + row, mask=later, other=0.0)
    p = tl.load(P + (at * BLOCK + row) * BLOCK + c, mask=c <= row, other=0.0)
    theta = tl.load(own + THETA * BLOCK + c)
    return a, b, (p * (theta * SCALE))[None, :]


@triton.jit
def _earlier(hidden, pulled, earlier, j, BLOCK: tl.constexpr, HIDDEN: tl.constexpr, SLICE: tl.constexpr,
             ACTIVATION: tl.constexpr):  # fmt: skip
    """Slices (BLOCK, SLICE) of X of the outer matrix and G of the inner, of the tokens ``earlier``, else 0."""
    places, mask = hidden_places(j, BLOCK, HIDDEN, SLICE), earlier[:, None]
    z = tl.load(hidden + places, mask=mask, other=0.0)
    g = tl.load(pulled + places, mask=mask, other=0.0) * slope(z.to(tl.float32), ACTIVATION)
    return once(activate(z.to(tl.float32), ACTIVATION).to(z.dtype)), once(g.to(z.dtype))


@triton.jit
def chunks(
    k, v, base, norm, P, vectors, frozen, weights, momenta, hidden, pulled, output, error, token, length, at, head, H,
    D: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr, LAYERS: tl.constexpr,
    GATES: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, TO_START: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, SCALE: tl.constexpr, STEP: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """hidden, pulled, output and error of a block's tokens, chunk by chunk; see scan.scan. frozen, weights, momenta:
    sets of the block; those that its first chunk meets, W and S at its start."""
    OPERAND: tl.constexpr = k.dtype.element_ty
    c, d, sub, s = tl.arange(0, BLOCK), tl.arange(0, D), tl.arange(0, SUB), tl.arange(0, SLICE)
    hidden, pulled = hidden + at * BLOCK * HIDDEN, pulled + at * BLOCK * HIDDEN
    output, error = output + at * BLOCK * D, error + at * BLOCK * D
    lower, upper = at * GATES, at * GATES + GATES - 1
    for r in range(BLOCK // STEP):
        own, inside = r * STEP + sub, sub < STEP
        earlier = c < r * STEP
        there = inside & (own < length)
        key = _tokens(k, token, H, own, there, D)
        first = weights
        if r == 0:
            first = frozen
        a1, b1, m1 = _frozen(P, vectors, lower, r, STEP, BLOCK, SCALE)
        a2, b2, m2 = _frozen(P, vectors, upper, r, STEP, BLOCK, SCALE)
        keys = _tokens(k, token, H, c, earlier & (c < length), D)
        mixed1 = (tl.dot(key, tl.trans(keys), input_precision=PRECISION) * m1).to(OPERAND)
        scores = tl.zeros([SUB, BLOCK], tl.float32)
        f = tl.zeros([SUB, D], tl.float32)
        for j in range(0, HIDDEN, SLICE):
            x, x_earlier = key, keys
            if LAYERS == 2:
                x_earlier, g_earlier = _earlier(hidden, pulled, earlier, j, BLOCK, HIDDEN, SLICE, ACTIVATION)
                z = -product(mixed1, g_earlier, SCALE, PRECISION)
                places = inner_places(j, D, HIDDEN, SLICE)
                z = through(key, first, momenta, base, places, a1, b1, z, TO_START, PRECISION).to(OPERAND)
                places = own[:, None] * HIDDEN + (j + s)[None, :]
                tl.store(hidden + places, z, mask=inside[:, None])
                x = once(activate(z.to(tl.float32), ACTIVATION).to(OPERAND))
            scores = tl.dot(x, tl.trans(x_earlier), scores, input_precision=PRECISION)
            places = outer_places(j, D, HIDDEN, SLICE, LAYERS)
            f = through(x, first, momenta, base, places, a2, b2, f, TO_START, PRECISION)
        errors = tl.load(error + width_places(BLOCK, D), mask=earlier[:, None], other=0.0)
        f -= product((scores * m2).to(OPERAND), errors, SCALE, PRECISION)
        value = _tokens(v, token, H, own, there, D).to(tl.float32)
        g = inner_error(f, key.to(tl.float32), value, norm, head, H, D, NORM, RESIDUAL)
        g = tl.where(there[:, None], g, 0.0).to(OPERAND)  # see scan.scan
        own_width = own[:, None] * D + d[None, :]
        tl.store(output + own_width, f, mask=inside[:, None])
        tl.store(error + own_width, g, mask=inside[:, None])
        if LAYERS == 2:
            mixed = (tl.dot(g, tl.trans(errors), input_precision=PRECISION) * m2).to(OPERAND)
            for j in range(0, HIDDEN, SLICE):
                x_earlier, _ = _earlier(hidden, pulled, earlier, j, BLOCK, HIDDEN, SLICE, ACTIVATION)
                pull = -product(mixed, x_earlier, SCALE, PRECISION)
                places = outer_places(j, D, HIDDEN, SLICE, LAYERS)
                pull = through(g, first, momenta, base, places, a2, b2, pull, TO_START, PRECISION, True)
                places = own[:, None] * HIDDEN + (j + s)[None, :]
                tl.store(pulled + places, pull.to(OPERAND), mask=inside[:, None])
        # What one iteration stores, others of the program's threads load in the next.
        tl.debug_barrier()


@triton.jit
def _add(pointer, places, x, mask):
    tl.store(pointer + places, tl.load(pointer + places, mask=mask, other=0.0) + x, mask=mask)


@triton.jit
def chunks_backward(
    k, v, base, norm, P, vectors, frozen, weights, momenta, hidden, pulled, output, error,
    d_input, d_hidden, d_error, d_key, d_norm, d_mix, d_vectors, d_v, token, length, at, head, H,
    D: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr, LAYERS: tl.constexpr,
    GATES: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, TO_START: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, SCALE: tl.constexpr, STEP: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """The way back through :func:`chunks`. In d_error, d_input (LAYERS = 2), d_hidden and d_key is what the block's
    queries and its writes add to the gradients of G, X, G of the inner matrix, and the keys; d_mix and the rows A and B
    of d_vectors have what queries add. Here the tokens of later chunks add to those of earlier ones, last chunk first.

    Out: d_key and d_v complete; for the gradients of the weights, d_error holds the gradient of the outer matrix'
    output, and d_input that of the activation's input.
    """
    OPERAND: tl.constexpr = k.dtype.element_ty
    c, d, sub, s = tl.arange(0, BLOCK), tl.arange(0, D), tl.arange(0, SUB), tl.arange(0, SLICE)
    hidden, pulled = hidden + at * BLOCK * HIDDEN, pulled + at * BLOCK * HIDDEN
    d_input, d_hidden = d_input + at * BLOCK * HIDDEN, d_hidden + at * BLOCK * HIDDEN
    output, error = output + at * BLOCK * D, error + at * BLOCK * D
    d_error, d_key, d_v = d_error + at * BLOCK * D, d_key + at * BLOCK * D, d_v + token * D
    lower, upper = at * GATES, at * GATES + GATES - 1
    for back in range(BLOCK // STEP):
        tl.debug_barrier()
        r = BLOCK // STEP - 1 - back
        own, inside = r * STEP + sub, sub < STEP
        earlier = c < r * STEP
        there = inside & (own < length)
        key = _tokens(k, token, H, own, there, D)
        keys = _tokens(k, token, H, c, earlier & (c < length), D)
        first = weights
        if r == 0:
            first = frozen
        a1, b1, m1 = _frozen(P, vectors, lower, r, STEP, BLOCK, SCALE)
        a2, b2, m2 = _frozen(P, vectors, upper, r, STEP, BLOCK, SCALE)
        plain1, plain2 = m1 * (1 / SCALE), m2 * (1 / SCALE)  # for gradients, whose size is the loss's
        width, own_width = width_places(BLOCK, D), own[:, None] * D + d[None, :]
        g = tl.load(error + own_width, mask=inside[:, None], other=0.0)
        dg = tl.load(d_error + own_width, mask=inside[:, None], other=0.0)
        errors = tl.load(error + width, mask=earlier[:, None], other=0.0)
        da2, db2 = 0.0, 0.0
        by_pull = tl.zeros([SUB, BLOCK], tl.float32)
        if LAYERS == 2:  # through the pulled error, g F^T
            of_w = tl.zeros([SUB, D], tl.float32)
            of_s = tl.zeros([SUB, D], tl.float32)
            for j in range(0, HIDDEN, SLICE):
                x_earlier, _ = _earlier(hidden, pulled, earlier, j, BLOCK, HIDDEN, SLICE, ACTIVATION)
                here = own[:, None] * HIDDEN + (j + s)[None, :]
                z = tl.load(hidden + here, mask=inside[:, None], other=0.0).to(tl.float32)
                d_pull = tl.load(d_hidden + here, mask=inside[:, None], other=0.0) * slope(z, ACTIVATION)
                d_pull = once(d_pull.to(OPERAND))
                places = outer_places(j, D, HIDDEN, SLICE, LAYERS)
                of_w = tl.dot(d_pull, tl.load(first + places), of_w, input_precision=PRECISION)
                of_s = tl.dot(d_pull, tl.load(momenta + places), of_s, input_precision=PRECISION)
                if TO_START:
                    dg = tl.dot(d_pull, tl.load(base + places), dg, input_precision=PRECISION)
                by_pull = tl.dot(d_pull, tl.trans(x_earlier), by_pull, input_precision=PRECISION)
            da2, db2 = tl.sum(of_w * g), tl.sum(of_s * g)
            dg += a2 * of_w + b2 * of_s
            dg -= tl.dot((by_pull * plain2).to(OPERAND), errors, input_precision=PRECISION)
        f = tl.load(output + own_width, mask=inside[:, None], other=0.0)
        value = _tokens(v, token, H, own, there, D).to(tl.float32)
        df, dy, d_gain, d_shift = bend_error(
            dg, f, key.to(tl.float32), value, norm, head, H, D, NORM, RESIDUAL
        )  # fmt: skip
        if NORM:
            accumulate(d_norm, d_gain, d_shift, D)
        own_tokens = own[:, None] * (H * D) + d[None, :]
        tl.store(d_v + own_tokens, (-dy).to(d_v.dtype.element_ty), mask=there[:, None])
        tl.store(d_error + own_width, df, mask=inside[:, None])
        df = df.to(OPERAND)
        dk = tl.zeros([SUB, D], tl.float32)
        if RESIDUAL:
            dk += dy

        by_f = tl.dot(df, tl.trans(errors), input_precision=PRECISION)
        by_g = tl.dot(g, tl.trans(errors), input_precision=PRECISION)
        scores = tl.dot(key, tl.trans(keys), input_precision=PRECISION)
        scores2 = tl.zeros([SUB, BLOCK], tl.float32)
        by_z = tl.zeros([SUB, BLOCK], tl.float32)
        of_w1 = tl.zeros([SUB, D], tl.float32)
        of_s1 = tl.zeros([SUB, D], tl.float32)
        mixed_f = (by_f * plain2).to(OPERAND)
        for j in range(0, HIDDEN, SLICE):
            x, x_earlier = key, keys
            places = outer_places(j, D, HIDDEN, SLICE, LAYERS)
            to_x = tl.dot(df, tl.trans(tl.load(first + places)), input_precision=PRECISION)
            to_s = tl.dot(df, tl.trans(tl.load(momenta + places)), input_precision=PRECISION)
            if LAYERS == 2:
                x_earlier, g_earlier = _earlier(hidden, pulled, earlier, j, BLOCK, HIDDEN, SLICE, ACTIVATION)
                here = own[:, None] * HIDDEN + (j + s)[None, :]
                z = tl.load(hidden + here, mask=inside[:, None], other=0.0).to(tl.float32)
                x = once(activate(z, ACTIVATION).to(OPERAND))
            scores2 = tl.dot(x, tl.trans(x_earlier), scores2, input_precision=PRECISION)
            da2 += tl.sum(x * to_x)
            db2 += tl.sum(x * to_s)
            dx = a2 * to_x + b2 * to_s - tl.dot(mixed_f, x_earlier, input_precision=PRECISION)
            if TO_START:
                dx = tl.dot(df, tl.trans(tl.load(base + places)), dx, input_precision=PRECISION)
            to_earlier = -tl.dot(tl.trans(mixed_f), x, input_precision=PRECISION)
            if LAYERS == 2:
                bend = once(slope(z, ACTIVATION))
                dg1 = tl.load(d_hidden + here, mask=inside[:, None], other=0.0)
                dx += tl.load(d_input + here, mask=inside[:, None], other=0.0)
                pull = tl.load(pulled + here, mask=inside[:, None], other=0.0)
                dh = dx * bend + dg1 * pull * once(curvature(z, ACTIVATION))
                tl.store(d_input + here, dh, mask=inside[:, None])
                dh = once(dh.to(OPERAND))
                to_earlier -= product(
                    tl.trans((by_g * m2).to(OPERAND)), (dg1 * bend).to(OPERAND), SCALE, PRECISION
                )  # fmt: skip
                _add(d_input, hidden_places(j, BLOCK, HIDDEN, SLICE), to_earlier, earlier[:, None])
                to_earlier = -product(tl.trans((scores * m1).to(OPERAND)), dh, SCALE, PRECISION)
                _add(d_hidden, hidden_places(j, BLOCK, HIDDEN, SLICE), to_earlier, earlier[:, None])
                places = inner_places(j, D, HIDDEN, SLICE)
                of_w1 = tl.dot(dh, tl.trans(tl.load(first + places)), of_w1, input_precision=PRECISION)
                of_s1 = tl.dot(dh, tl.trans(tl.load(momenta + places)), of_s1, input_precision=PRECISION)
                if TO_START:
                    dk = tl.dot(dh, tl.trans(tl.load(base + places)), dk, input_precision=PRECISION)
                by_z = tl.dot(dh, tl.trans(g_earlier), by_z, input_precision=PRECISION)
            else:
                dk += dx
                _add(d_key, width, to_earlier, earlier[:, None])
        to_earlier = -product(tl.trans((scores2 * m2).to(OPERAND)), df, SCALE, PRECISION)
        to_earlier -= tl.dot(tl.trans((by_pull * plain2).to(OPERAND)), g, input_precision=PRECISION)
        _add(d_error, width, to_earlier, earlier[:, None])
        before = d_mix + (at * LAYERS + LAYERS - 1) * BLOCK * BLOCK + (r * STEP - 1) * BLOCK
        _add(before, c, -tl.sum(scores2 * by_f + by_g * by_pull, 0), earlier)
        before = d_vectors + (at * LAYERS + LAYERS - 1) * VECTORS * BLOCK + r * STEP - 1
        if r > 0:
            tl.store(before + A * BLOCK, tl.load(before + A * BLOCK) + da2)
            tl.store(before + B * BLOCK, tl.load(before + B * BLOCK) + db2)
        if LAYERS == 2:
            mixed = (by_z * plain1).to(OPERAND)
            dk += a1 * of_w1 + b1 * of_s1 - tl.dot(mixed, keys, input_precision=PRECISION)
            to_earlier = -tl.dot(tl.trans(mixed), key, input_precision=PRECISION)
            _add(d_key, width, to_earlier, earlier[:, None])
            before = d_mix + at * LAYERS * BLOCK * BLOCK + (r * STEP - 1) * BLOCK
            _add(before, c, -tl.sum(scores * by_z, 0), earlier)
            before = d_vectors + at * LAYERS * VECTORS * BLOCK + r * STEP - 1
            if r > 0:
                tl.store(before + A * BLOCK, tl.load(before + A * BLOCK) + tl.sum(key * of_w1))
                tl.store(before + B * BLOCK, tl.load(before + B * BLOCK) + tl.sum(key * of_s1))
        _add(d_key, own_width, dk, inside[:, None])


@triton.jit
def start_weights(vectors, at, begins, row: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """(BLOCK, 1): how much of W (row A) or S (row B) at the block's start is in the weights that each token's key
    meets; of a chunk that began before the block, nothing."""
    c = tl.arange(0, BLOCK)
    first = (c // STEP) * STEP
    found = tl.load(vectors + (at * VECTORS + row) * BLOCK + first - 1, mask=first > 0, other=0.0)
    if row == A:
        found = tl.where(first == 0, tl.where(begins, 1.0, 0.0), found)
    return found[:, None]
