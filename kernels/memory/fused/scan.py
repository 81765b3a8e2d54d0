"""The serial part: what each block writes to the state, forward and backward. One program a row (batch, head).

Nothing of the state stays in registers: fp32 states live in global memory, small enough for the L2 cache, and go by in
slices of the hidden layer, so one program serves every width. The queries have no part in it (read.py).

A set of weights is packed: inner matrix (D, hidden) if LAYERS = 2, then outer matrix (hidden, D); LAYERS = 1 is the
outer one alone, its input being the key (hidden = slice = D). Intermediates keep the dtype of q, k, v.

Forgetting to M_0 (TO_START) is forgetting to zero of the difference to it: then all weights here, in states and in the
copies for other kernels, are such differences, and ``base`` (H, packed, dtype of q) is M_0, added where they are used.
"""

import triton
import triton.language as tl

from titans_pt.kernels.memory.fused.functions import (
    CHUNK,
    DOCUMENT,
    E_END,
    FIELDS,
    LEFT,
    LENGTH,
    P_END,
    START,
    VECTORS,
    A,
    B,
    M,
    activate,
    curvature,
    mean,
    product,
    slope,
    store_tokens,
    tokens,
    unit,
    unit_vjp,
    vector,
    where_all,
    whole,
)  # fmt: skip

TILE = tl.constexpr(1024)


@triton.jit
def _inner_places(j, D: tl.constexpr, HIDDEN: tl.constexpr, SLICE: tl.constexpr):
    """Places of columns j .. j + SLICE of the inner matrix in a packed set, (D, SLICE)."""
    return tl.arange(0, D)[:, None] * HIDDEN + (j + tl.arange(0, SLICE))[None, :]


@triton.jit
def _outer_places(j, D: tl.constexpr, HIDDEN: tl.constexpr, SLICE: tl.constexpr, LAYERS: tl.constexpr):
    """Places of rows j .. j + SLICE of the outer matrix in a packed set, (SLICE, D)."""
    return (LAYERS - 1) * D * HIDDEN + (j + tl.arange(0, SLICE))[:, None] * D + tl.arange(0, D)[None, :]


@triton.jit
def _hidden_places(j, BLOCK: tl.constexpr, HIDDEN: tl.constexpr, SLICE: tl.constexpr):
    """Places of columns j .. j + SLICE of a block's hidden tensor, (BLOCK, SLICE)."""
    return tl.arange(0, BLOCK)[:, None] * HIDDEN + (j + tl.arange(0, SLICE))[None, :]


@triton.jit
def _width_places(BLOCK: tl.constexpr, D: tl.constexpr):
    return tl.arange(0, BLOCK)[:, None] * D + tl.arange(0, D)[None, :]


@triton.jit
def _end(vectors, at, BLOCK: tl.constexpr):
    """A, B and m at the end of a block: the weights of the state before it in the state behind it."""
    last = vectors + at * VECTORS * BLOCK + BLOCK - 1
    return tl.load(last + A * BLOCK), tl.load(last + B * BLOCK), tl.load(last + M * BLOCK)


@triton.jit
def _inner_error(f, key, value, norm, head, H, D: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr):
    """Gradient of ||M(k) - v||^2 at the outer matrix' output f; fp32, (BLOCK, D)."""
    y = f
    if NORM:
        d = tl.arange(0, D)
        gain = tl.load(norm + head * D + d)[None, :]
        normalised, scale = unit(f, D)
        y = normalised * gain + tl.load(norm + (H + head) * D + d)[None, :]
    if RESIDUAL:
        y += key
    error = 2 * (y - value)
    if NORM:
        error = unit_vjp(error * gain, normalised, scale, D)
    return error


@triton.jit
def _write(W, S, F, weights, momenta, begin, places, vectors, at, left, right_p, right_e, new, more, freeze,
           BLOCK: tl.constexpr, RESET: tl.constexpr, TO_START: tl.constexpr, PRECISION: tl.constexpr,
           SCALE: tl.constexpr):  # fmt: skip
    """W <- a W + b S - left right_p, S <- m S - left right_e on a tile, right ones SCALE times as large;
    copies for the next block, F where frozen."""
    a, b, m = _end(vectors, at, BLOCK)
    s = tl.load(S + places)
    w = a * tl.load(W + places) + b * s - product(left, right_p, SCALE, PRECISION)
    s = m * s - product(left, right_e, SCALE, PRECISION)
    if RESET:
        first = 0.0
        if not TO_START:
            first = tl.load(begin + places, mask=where_all(new, places), other=0.0)
        w = tl.where(new, first, w)
        s = tl.where(new, 0.0, s)
    tl.store(W + places, w)
    tl.store(S + places, s)
    tl.store(F + places, w, mask=where_all(freeze, places))
    tl.store(weights + places, w.to(weights.dtype.element_ty), mask=where_all(more, places))
    tl.store(momenta + places, s.to(momenta.dtype.element_ty), mask=where_all(more, places))


@triton.jit(do_not_specialize=["T", "H", "N", "first", "K"])
def scan(
    k, v, info, begin, base, norm, vectors, W, S, F, weights, momenta, hidden, pulled, output, error,
    T, H, N, first, K,
    D: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr, LAYERS: tl.constexpr,
    GATES: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, RESET: tl.constexpr, TO_START: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Blocks first .. first + K of every row. W, S, F (B H, packed), fp32: weights, momentum, weights at the chunk's
    start; in: before these blocks, out: after them.

    For the other kernels, of block i: weights (B H, K + 1, packed): set 0 is the F before these blocks, set i + 1 the
    W before block i; momenta (B H, K, packed); hidden, pulled (B H, K, c, hidden): the activation's input Z and the
    error before its slope (LAYERS = 2); output fp32, error (B H, K, c, D): f, and the error G at it.
    """
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // H, row % H
    SIZE: tl.constexpr = LAYERS * D * HIDDEN
    W, S, F, begin, base = W + row * SIZE, S + row * SIZE, F + row * SIZE, begin + head * SIZE, base + head * SIZE
    info += (batch * N + first) * FIELDS
    last_chunk = tl.load(info + (K - 1) * FIELDS + CHUNK)
    OPERAND: tl.constexpr = k.dtype.element_ty

    new = tl.load(info + DOCUMENT) > 0
    for o in range(0, SIZE, TILE):
        place = o + tl.arange(0, TILE)
        w, s, f = tl.load(W + place), tl.load(S + place), tl.load(F + place)
        if RESET:
            w = tl.where(new, 0.0 if TO_START else tl.load(begin + place), w)
            s = tl.where(new, 0.0, s)
            tl.store(W + place, w)
            tl.store(S + place, s)
        tl.store(weights + row * (K + 1) * SIZE + place, f.to(OPERAND))
        tl.store(weights + (row * (K + 1) + 1) * SIZE + place, w.to(OPERAND))
        tl.store(momenta + row * K * SIZE + place, s.to(OPERAND))
        tl.store(F + place, tl.where(last_chunk == first, w, f))

    # Rows of fewer blocks end in empty ones, which would change nothing.
    blocks = tl.minimum(tl.load(info + LEFT), K)
    for i in range(blocks):
        # What one iteration stores, others of the program's threads load in the next.
        tl.debug_barrier()
        start, length = tl.load(info + i * FIELDS + START), tl.load(info + i * FIELDS + LENGTH)
        chunk = tl.load(info + i * FIELDS + CHUNK)
        more = i + 1 < blocks
        new = tl.load(info + (i + 1) * FIELDS + DOCUMENT, mask=more, other=0) > 0
        freeze = last_chunk == first + i + 1
        frozen = weights + (row * (K + 1) + tl.maximum(chunk - first + 1, 0)) * SIZE
        at = row * K + i
        block_hidden, block_pulled = hidden + at * BLOCK * HIDDEN, pulled + at * BLOCK * HIDDEN
        token = (batch * T + start) * H + head
        key = tokens(k, token, H, length, D, BLOCK)

        f = tl.zeros([BLOCK, D], tl.float32)
        for j in range(0, HIDDEN, SLICE):
            x = key
            if LAYERS == 2:
                inner = whole(frozen, base, _inner_places(j, D, HIDDEN, SLICE), TO_START)
                z = tl.dot(key, inner, input_precision=PRECISION).to(OPERAND)
                tl.store(block_hidden + _hidden_places(j, BLOCK, HIDDEN, SLICE), z)
                x = activate(z.to(tl.float32), ACTIVATION).to(OPERAND)
            outer = whole(frozen, base, _outer_places(j, D, HIDDEN, SLICE, LAYERS), TO_START)
            f = tl.dot(x, outer, f, input_precision=PRECISION)
        value = tokens(v, token, H, length, D, BLOCK).to(tl.float32)
        g = _inner_error(f, key.to(tl.float32), value, norm, head, H, D, NORM, RESIDUAL).to(OPERAND)
        tl.store(output + at * BLOCK * D + _width_places(BLOCK, D), f)
        tl.store(error + at * BLOCK * D + _width_places(BLOCK, D), g)
        tl.debug_barrier()

        upper = at * GATES + GATES - 1
        g_p = (g * (SCALE * vector(vectors, upper, P_END, BLOCK))).to(OPERAND)
        g_e = (g * (SCALE * vector(vectors, upper, E_END, BLOCK))).to(OPERAND)
        next_w, next_s = weights + (row * (K + 1) + i + 2) * SIZE, momenta + (at + 1) * SIZE
        for j in range(0, HIDDEN, SLICE):
            places = _outer_places(j, D, HIDDEN, SLICE, LAYERS)
            x = key
            if LAYERS == 2:
                here = _hidden_places(j, BLOCK, HIDDEN, SLICE)
                outer = whole(frozen, base, places, TO_START)
                pull = tl.dot(g, tl.trans(outer), input_precision=PRECISION).to(OPERAND)
                tl.store(block_pulled + here, pull)
                z = tl.load(block_hidden + here).to(tl.float32)
                x = activate(z, ACTIVATION).to(OPERAND)
                g1 = pull * slope(z, ACTIVATION)
                g1_p = (g1 * (SCALE * vector(vectors, at * GATES, P_END, BLOCK))).to(OPERAND)
                g1_e = (g1 * (SCALE * vector(vectors, at * GATES, E_END, BLOCK))).to(OPERAND)
                _write(W, S, F, next_w, next_s, begin, _inner_places(j, D, HIDDEN, SLICE), vectors, at * GATES,
                       tl.trans(key), g1_p, g1_e, new, more, freeze, BLOCK, RESET, TO_START, PRECISION,
                       SCALE)  # fmt: skip
            _write(W, S, F, next_w, next_s, begin, places, vectors, upper,
                   tl.trans(x), g_p, g_e, new, more, freeze, BLOCK, RESET, TO_START, PRECISION,
                       SCALE)  # fmt: skip


@triton.jit
def _turn(dW, dS, dF, d_begin, places, vectors, at, left, right, right_a, right_b, d_frozen, carry, begins, initial,
          new, BLOCK: tl.constexpr, RESET: tl.constexpr, TO_START: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Gradients of a tile of the state behind a block -> before it; d_frozen: what the block adds to dF. left: the
    queries' input of the layer; right: the gradient of its output, right_a and right_b times A and B."""
    if TO_START:
        total = tl.dot(left, right, tl.load(d_begin + places) + d_frozen, input_precision=PRECISION)
        tl.store(d_begin + places, total)
    a, b, m = _end(vectors, at, BLOCK)
    dw, ds = tl.load(dW + places), tl.load(dS + places)
    d_frozen += tl.load(dF + places, mask=where_all(carry, places), other=0.0)
    ds = b * dw + m * ds + tl.dot(left, right_b, input_precision=PRECISION)
    dw = a * dw + tl.dot(left, right_a, input_precision=PRECISION) + tl.where(begins, d_frozen, 0.0)
    if RESET:
        if not TO_START:
            once = where_all(new, places)
            tl.store(d_begin + places, dw + tl.load(d_begin + places, mask=once, other=0.0), mask=once)
        dw, ds = tl.where(new, 0.0, dw), tl.where(new, 0.0, ds)
    tl.store(dW + places, dw)
    tl.store(dS + places, ds)
    # Before the very first block, F is an input: it needs its zeros.
    tl.store(dF + places, tl.where(begins, 0.0, d_frozen), mask=where_all(initial | (begins == 0), places))


@triton.jit
def _inner_products(dw, ds, weights, momenta, places):
    """<dW, W>, <dW, S>, <dS, S> of a tile."""
    w, s = tl.load(weights + places).to(tl.float32), tl.load(momenta + places).to(tl.float32)
    return tl.sum(dw * w), tl.sum(dw * s), tl.sum(ds * s)


@triton.jit(do_not_specialize=["T", "H", "N", "first", "K"])
def scan_backward(
    q, k, v, info, base, norm, vectors, weights, momenta, hidden, pulled, output, error,
    query_hidden, d_query_hidden, d_out, d_input, d_hidden, d_error, d_key, d_norm_read,
    dW, dS, dF, d_begin, d_norm, d_vectors, d_ends, d_k, d_v,
    T, H, N, first, K,
    D: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr, LAYERS: tl.constexpr,
    GATES: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, RESET: tl.constexpr, TO_START: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The way back through :func:`scan`. dW, dS, dF, d_begin (B H, packed), d_norm (B H, 2, D), fp32: in, of the state
    behind these blocks; out, before them. d_input and d_hidden hold what the reads add and are used up.

    From read.read_backward, of block i: query_hidden, d_query_hidden (input of the queries' activation and its
    gradient), d_input (gradient of the keys' activations X), d_hidden (of their inner error G), (c, hidden);
    d_out (of the outer matrix' output on the query side), d_error, d_key (c, D); d_norm_read (2, D).
    To coefficients_backward: d_vectors rows P_END and E_END, d_ends. d_k, d_v (B, T, H, D): complete.
    """
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // H, row % H
    SIZE: tl.constexpr = LAYERS * D * HIDDEN
    dW, dS, dF, d_begin = dW + row * SIZE, dS + row * SIZE, dF + row * SIZE, d_begin + row * SIZE
    info, base = info + batch * N * FIELDS, base + head * SIZE
    d = tl.arange(0, D)
    c = tl.arange(0, BLOCK)
    OPERAND: tl.constexpr = k.dtype.element_ty
    d_norm += row * 2 * D + d

    blocks = tl.minimum(tl.load(info + first * FIELDS + LEFT), K)
    for back in range(blocks):
        tl.debug_barrier()
        i = blocks - 1 - back
        n = first + i
        start, length = tl.load(info + n * FIELDS + START), tl.load(info + n * FIELDS + LENGTH)
        chunk = tl.load(info + n * FIELDS + CHUNK)
        new = tl.load(info + n * FIELDS + DOCUMENT) > 0
        begins = chunk == n
        # dF holds something for this block unless the next one belongs to another chunk.
        carry = tl.load(info + (n + 1) * FIELDS + CHUNK, mask=n + 1 < N, other=-1) != n + 1
        frozen = weights + (row * (K + 1) + tl.maximum(chunk - first + 1, 0)) * SIZE
        at = row * K + i
        block_w, block_s = weights + (row * (K + 1) + i + 1) * SIZE, momenta + at * SIZE
        wide, narrow = at * BLOCK * HIDDEN, at * BLOCK * D
        width = _width_places(BLOCK, D)
        lower, upper = at * GATES, at * GATES + GATES - 1
        token = (batch * T + start) * H + head
        key = tokens(k, token, H, length, D, BLOCK)
        g = tl.load(error + narrow + width)
        p2, e2 = vector(vectors, upper, P_END, BLOCK), vector(vectors, upper, E_END, BLOCK)
        p1, e1 = vector(vectors, lower, P_END, BLOCK), vector(vectors, lower, E_END, BLOCK)

        # Through the state that the block wrote: to keys, activations, inner errors and coefficients.
        dg = tl.load(d_error + narrow + width)
        dk = tl.zeros([BLOCK, D], tl.float32)
        dp2 = tl.zeros([BLOCK], tl.float32)
        de2 = tl.zeros([BLOCK], tl.float32)
        dp1 = tl.zeros([BLOCK], tl.float32)
        de1 = tl.zeros([BLOCK], tl.float32)
        da2, db2, dm2 = 0.0, 0.0, 0.0
        da1, db1, dm1 = 0.0, 0.0, 0.0
        for j in range(0, HIDDEN, SLICE):
            places = _outer_places(j, D, HIDDEN, SLICE, LAYERS)
            here = _hidden_places(j, BLOCK, HIDDEN, SLICE)
            x = key
            if LAYERS == 2:
                z = tl.load(hidden + wide + here).to(tl.float32)
                x = activate(z, ACTIVATION).to(OPERAND)
            dw, ds = tl.load(dW + places), tl.load(dS + places)
            da, db, dm = _inner_products(dw, ds, block_w, block_s, places)
            da2, db2, dm2 = da2 + da, db2 + db, dm2 + dm
            dw, ds = dw.to(OPERAND), ds.to(OPERAND)
            to_x = tl.dot(g, tl.trans(dw), input_precision=PRECISION)
            dp2 -= tl.sum(x * to_x, 1)
            dx = -p2 * to_x
            to_x = tl.dot(g, tl.trans(ds), input_precision=PRECISION)
            de2 -= tl.sum(x * to_x, 1)
            dx -= e2 * to_x
            dg += product((-SCALE * p2 * x).to(OPERAND), dw, SCALE, PRECISION)
            dg += product((-SCALE * e2 * x).to(OPERAND), ds, SCALE, PRECISION)
            if LAYERS == 2:
                tl.store(d_input + wide + here, tl.load(d_input + wide + here) + dx)
                places = _inner_places(j, D, HIDDEN, SLICE)
                dw, ds = tl.load(dW + places), tl.load(dS + places)
                da, db, dm = _inner_products(dw, ds, block_w, block_s, places)
                da1, db1, dm1 = da1 + da, db1 + db, dm1 + dm
                dw, ds = dw.to(OPERAND), ds.to(OPERAND)
                bend = slope(z, ACTIVATION)
                g1 = tl.load(pulled + wide + here) * bend
                to_g = tl.dot(key, dw, input_precision=PRECISION)
                dp1 -= tl.sum(g1 * to_g, 1)
                dg1 = tl.load(d_hidden + wide + here) - p1 * to_g
                to_g = tl.dot(key, ds, input_precision=PRECISION)
                de1 -= tl.sum(g1 * to_g, 1)
                dg1 -= e1 * to_g
                tl.store(d_hidden + wide + here, dg1)
                dk += product((-SCALE * p1 * g1).to(OPERAND), tl.trans(dw), SCALE, PRECISION)
                dk += product((-SCALE * e1 * g1).to(OPERAND), tl.trans(ds), SCALE, PRECISION)
                outer = whole(frozen, base, _outer_places(j, D, HIDDEN, SLICE, LAYERS), TO_START)
                dg = tl.dot((dg1 * bend).to(OPERAND), outer, dg, input_precision=PRECISION)
            else:
                dk = dx
        own = d_vectors + (at * LAYERS + LAYERS - 1) * VECTORS * BLOCK
        tl.store(own + P_END * BLOCK + c, dp2)
        tl.store(own + E_END * BLOCK + c, de2)
        own = d_ends + (at * LAYERS + LAYERS - 1) * 3
        tl.store(own, da2)
        tl.store(own + 1, db2)
        tl.store(own + 2, dm2)
        if LAYERS == 2:
            own = d_vectors + at * LAYERS * VECTORS * BLOCK
            tl.store(own + P_END * BLOCK + c, dp1)
            tl.store(own + E_END * BLOCK + c, de1)
            own = d_ends + at * LAYERS * 3
            tl.store(own, da1)
            tl.store(own + 1, db1)
            tl.store(own + 2, dm1)

        # The gradient of the inner gradient: LayerNorm's second derivative included.
        if NORM:
            gain = tl.load(norm + head * D + d)[None, :]
            normalised, scale = unit(tl.load(output + narrow + width), D)
            y = normalised * gain + tl.load(norm + (H + head) * D + d)[None, :]
            if RESIDUAL:
                y += key.to(tl.float32)
            e = 2 * (y - tokens(v, token, H, length, D, BLOCK).to(tl.float32))
            # Few tiles at a time: what the formulas have in means over a row is worked out as numbers of that row.
            dg_mean, dg_along, dg_e = mean(dg, D), mean(dg * normalised, D), mean(dg * (e * gain), D)
            e_mean, e_along = mean(e * gain, D), mean(e * gain * normalised, D)
            d_upstream = scale * (dg - dg_mean - normalised * dg_along)
            dy = 2 * d_upstream * gain
            # Sums over the row's blocks, in memory: in registers they would cost a tile's worth.
            total = tl.sum(d_upstream * e + dy * normalised, 0) + tl.load(d_norm_read + at * 2 * D + d)
            tl.store(d_norm, tl.load(d_norm) + total)
            total = tl.sum(dy, 0) + tl.load(d_norm_read + at * 2 * D + D + d)
            tl.store(d_norm + D, tl.load(d_norm + D) + total)
            df = dy * gain - scale * (dg * e_along + e * gain * dg_along)
            along = mean(df * normalised, D) + scale * (dg_e - e_mean * dg_mean - e_along * dg_along)
            df = (df - normalised * along) * scale
            df = df - mean(df, D)
        else:
            dy = 2 * dg
            df = dy
        store_tokens(d_v, token, H, length, -dy, D, BLOCK)
        if RESIDUAL:
            dk += dy
        df = df.to(OPERAND)
        query = tokens(q, token, H, length, D, BLOCK)
        dz = tl.load(d_out + narrow + width)
        dz_a = (dz * vector(vectors, upper, A, BLOCK)).to(OPERAND)
        dz_b = (dz * vector(vectors, upper, B, BLOCK)).to(OPERAND)
        tl.debug_barrier()

        # Through the frozen weights, and the state's own gradient.
        for j in range(0, HIDDEN, SLICE):
            places = _outer_places(j, D, HIDDEN, SLICE, LAYERS)
            here = _hidden_places(j, BLOCK, HIDDEN, SLICE)
            outer = whole(frozen, base, places, TO_START)
            x, z_x = key, query
            if LAYERS == 2:
                z = tl.load(hidden + wide + here).to(tl.float32)
                x = activate(z, ACTIVATION).to(OPERAND)
                z_x = activate(tl.load(query_hidden + wide + here).to(tl.float32), ACTIVATION).to(OPERAND)
                bend = slope(z, ACTIVATION)
                dg1 = tl.load(d_hidden + wide + here)
                d_outer = tl.dot(tl.trans((dg1 * bend).to(OPERAND)), g, input_precision=PRECISION)
                d_outer = tl.dot(tl.trans(x), df, d_outer, input_precision=PRECISION)
                dx = tl.dot(df, tl.trans(outer), input_precision=PRECISION) + tl.load(d_input + wide + here)
                dh = dx * bend + dg1 * tl.load(pulled + wide + here) * curvature(z, ACTIVATION)
                dh = dh.to(OPERAND)
                inner_places = _inner_places(j, D, HIDDEN, SLICE)
                inner = whole(frozen, base, inner_places, TO_START)
                dk = tl.dot(dh, tl.trans(inner), dk, input_precision=PRECISION)
                dz1 = tl.load(d_query_hidden + wide + here)
                dz1_a = (dz1 * vector(vectors, lower, A, BLOCK)).to(OPERAND)
                dz1_b = (dz1 * vector(vectors, lower, B, BLOCK)).to(OPERAND)
                d_inner = tl.dot(tl.trans(key), dh, input_precision=PRECISION)
                _turn(dW, dS, dF, d_begin, inner_places, vectors, lower, tl.trans(query), dz1, dz1_a, dz1_b, d_inner,
                      carry, begins, n == 0, new, BLOCK, RESET, TO_START, PRECISION)  # fmt: skip
            else:
                d_outer = tl.dot(tl.trans(x), df, input_precision=PRECISION)
                dk = tl.dot(df, tl.trans(outer), dk, input_precision=PRECISION)
            _turn(dW, dS, dF, d_begin, places, vectors, upper, tl.trans(z_x), dz, dz_a, dz_b, d_outer,
                  carry, begins, n == 0, new, BLOCK, RESET, TO_START, PRECISION)  # fmt: skip
        store_tokens(d_k, token, H, length, dk + tl.load(d_key + narrow + width), D, BLOCK)
