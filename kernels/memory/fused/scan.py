"""The serial part: each block's write to the state, forward and backward. One program per row (batch, head).

No part of the state stays in registers. fp32 states live in global memory, small enough for the L2 cache, and are
processed in slices of the hidden layer: one program serves every width. Queries are not involved (read.py).

A set of weights is packed: inner matrix (D, hidden) if LAYERS = 2, then outer matrix (hidden, D). LAYERS = 1 has only
the outer matrix, with the key as input (hidden = slice = D). Intermediates keep the dtype of q, k, v.

With TO_START the memory forgets to M_0: the difference to M_0 is forgotten to zero. All weights here, in states and in
the copies for other kernels, are then differences. ``base`` (H, packed, dtype of q) is M_0, added where weights are
used.
"""

import triton
import triton.language as tl

from titans_pt.kernels.memory.fused.deferred import chunks, chunks_backward, start_weights
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
    store_tokens,
    tokens,
    vector,
    where_all,
    whole,
    width_places,
)  # fmt: skip

TILE = tl.constexpr(1024)


@triton.jit
def _end(vectors, at, BLOCK: tl.constexpr):
    """A, B and m at the end of a block: the weights of the state before it in the state after it."""
    last = vectors + at * VECTORS * BLOCK + BLOCK - 1
    return tl.load(last + A * BLOCK), tl.load(last + B * BLOCK), tl.load(last + M * BLOCK)


@triton.jit
def _write(W, S, F, weights, momenta, begin, places, w, s, a, b, m, left, right_p, right_e, new, more, freeze,
           RESET: tl.constexpr, TO_START: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr):  # fmt: skip
    """Write a tile: W <- a W + b S - left right_p, S <- m S - left right_e, where w, s are the old W, S and right_p,
    right_e are SCALE times as large. Also store copies for the next block, and F if ``freeze``."""
    w = a * w + b * s - product(left, right_p, SCALE, PRECISION)
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
    k, v, info, begin, base, norm, P, vectors, W, S, F, weights, momenta, hidden, pulled, active, bent, output, error,
    mixes, T, H, N, first, K,
    D: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr, LAYERS: tl.constexpr,
    GATES: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, RESET: tl.constexpr, TO_START: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr, STEP: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Blocks first .. first + K of every row. W, S, F (B H, packed), fp32: weights, momentum, weights at the chunk's
    start; in: before these blocks, out: after them.

    Stored for the other kernels, for block i: weights (B H, K + 1, packed): set 0 is F before these blocks, set i + 1
    is W before block i. momenta (B H, K, packed). With LAYERS = 2, (B H, K, c, hidden) each: hidden and pulled, the
    activation's input Z and the error before its slope; active and bent, the activation X and the error G at its input.
    output fp32, error (B H, K, c, D): f and the error G at f. mixes: see deferred.chunks.
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

    # Rows with fewer blocks end in empty blocks, which would change nothing.
    blocks = tl.minimum(tl.load(info + LEFT), K)
    for i in range(blocks):
        # Other threads of the program load in the next iteration what this one stores.
        tl.debug_barrier()
        start, length = tl.load(info + i * FIELDS + START), tl.load(info + i * FIELDS + LENGTH)
        chunk = tl.load(info + i * FIELDS + CHUNK)
        more = i + 1 < blocks
        new = tl.load(info + (i + 1) * FIELDS + DOCUMENT, mask=more, other=0) > 0
        freeze = last_chunk == first + i + 1
        frozen = weights + (row * (K + 1) + tl.maximum(chunk - first + 1, 0)) * SIZE
        at = row * K + i
        wide, lower, upper = at * BLOCK * HIDDEN, at * GATES, at * GATES + GATES - 1
        token = (batch * T + start) * H + head
        key = tokens(k, token, H, length, D, BLOCK)

        if STEP < BLOCK:
            chunks(
                k, v, base, norm, P, vectors, frozen, momenta + at * SIZE,
                hidden, pulled, active, bent, output, error, mixes, token, length, at, head, H,
                D, HIDDEN, BLOCK, SLICE, LAYERS, GATES, NORM, RESIDUAL, TO_START, ACTIVATION, PRECISION, SCALE,
                STEP, SUB,
            )  # fmt: skip
            g = tl.load(error + at * BLOCK * D + width_places(BLOCK, D))
        else:
            f = tl.zeros([BLOCK, D], tl.float32)
            for j in range(0, HIDDEN, SLICE):
                x = key
                outer = whole(frozen, base, outer_places(j, D, HIDDEN, SLICE, LAYERS), TO_START)
                if LAYERS == 2:
                    inner = once(whole(frozen, base, inner_places(j, D, HIDDEN, SLICE), TO_START))
                    z = tl.dot(key, inner, input_precision=PRECISION).to(OPERAND)
                    x = once(activate(z.to(tl.float32), ACTIVATION).to(OPERAND))
                    here = hidden_places(j, BLOCK, HIDDEN, SLICE)
                    tl.store(hidden + wide + here, z)
                    tl.store(active + wide + here, x)
                f = tl.dot(x, outer, f, input_precision=PRECISION)
            value = tokens(v, token, H, length, D, BLOCK).to(tl.float32)
            g = inner_error(f, key.to(tl.float32), value, norm, head, H, D, NORM, RESIDUAL)
            # The LayerNorm of zeros has an error hundreds of times as large, which exceeds fp16 when pulled back.
            g = tl.where(tl.arange(0, BLOCK)[:, None] < length, g, 0.0).to(OPERAND)
            tl.store(output + at * BLOCK * D + width_places(BLOCK, D), f)
            tl.store(error + at * BLOCK * D + width_places(BLOCK, D), g)
            tl.debug_barrier()

        g_p = (g * (SCALE * vector(vectors, upper, P_END, BLOCK))).to(OPERAND)
        g_e = (g * (SCALE * vector(vectors, upper, E_END, BLOCK))).to(OPERAND)
        p1 = SCALE * vector(vectors, lower, P_END, BLOCK)
        e1 = SCALE * vector(vectors, lower, E_END, BLOCK)
        a1, b1, m1 = _end(vectors, lower, BLOCK)
        a2, b2, m2 = _end(vectors, upper, BLOCK)
        next_w, next_s = weights + (row * (K + 1) + i + 2) * SIZE, momenta + (at + 1) * SIZE
        for j in range(0, HIDDEN, SLICE):
            places = outer_places(j, D, HIDDEN, SLICE, LAYERS)
            x = key
            if LAYERS == 2:
                here, inner = hidden_places(j, BLOCK, HIDDEN, SLICE), inner_places(j, D, HIDDEN, SLICE)
                w1, s1, x = tl.load(W + inner), tl.load(S + inner), tl.load(active + wide + here)
                if STEP < BLOCK:
                    g1 = once(tl.load(bent + wide + here))
                    x = once(x)
                else:
                    z = tl.load(hidden + wide + here).to(tl.float32)
                    outer = once(whole(frozen, base, places, TO_START))
                    x = once(x)
                    pull = tl.dot(g, tl.trans(outer), input_precision=PRECISION).to(OPERAND)
                    g1 = once((pull * once(slope(z, ACTIVATION))).to(OPERAND))
                    tl.store(pulled + wide + here, pull)
                    tl.store(bent + wide + here, g1)
                w1, s1 = once(w1), once(s1)
                _write(W, S, F, next_w, next_s, begin, inner, w1, s1, a1, b1, m1, tl.trans(key), (g1 * p1).to(OPERAND),
                       (g1 * e1).to(OPERAND), new, more, freeze, RESET, TO_START, PRECISION, SCALE)  # fmt: skip
            w2, s2 = tl.load(W + places), tl.load(S + places)
            w2, s2 = once(w2), once(s2)
            _write(W, S, F, next_w, next_s, begin, places, w2, s2, a2, b2, m2, tl.trans(x), g_p, g_e, new, more, freeze,
                   RESET, TO_START, PRECISION, SCALE)  # fmt: skip


@triton.jit
def _turn(dW, dS, dF, d_begin, places, a, b, m, left, right, right_a, right_b, d_frozen, of_w, of_s, carry, begins,
          initial, new, RESET: tl.constexpr, TO_START: tl.constexpr, PRECISION: tl.constexpr,
          DEFERRED: tl.constexpr):  # fmt: skip
    """Gradients of a state tile after a block -> before the block.

    a, b, m: see _end. left: the queries' input of the layer. right: the gradient of the layer's output for queries;
    right_a and right_b: right times A and B. d_frozen: gradient of the weights that the block's keys use. of_w and
    of_s: the shares of W and S in d_frozen, if later chunks' weights are made from W and S (DEFERRED).
    """
    dw, ds = tl.load(dW + places), tl.load(dS + places)
    carried = tl.load(dF + places, mask=where_all(carry, places), other=0.0)
    if TO_START:
        before = tl.load(d_begin + places)
        dw, ds, carried, before = once(dw), once(ds), once(carried), once(before)
        tl.store(d_begin + places, tl.dot(left, right, before + d_frozen, input_precision=PRECISION))
    if DEFERRED:
        d_frozen = tl.where(begins, 0.0, d_frozen)
    d_frozen += carried
    ds = b * dw + m * ds + tl.dot(left, right_b, input_precision=PRECISION)
    dw = a * dw + tl.dot(left, right_a, input_precision=PRECISION) + tl.where(begins, d_frozen, 0.0)
    if DEFERRED:
        dw, ds = dw + of_w, ds + of_s
    if RESET:
        if not TO_START:
            here = where_all(new, places)
            tl.store(d_begin + places, dw + tl.load(d_begin + places, mask=here, other=0.0), mask=here)
        dw, ds = tl.where(new, 0.0, dw), tl.where(new, 0.0, ds)
    tl.store(dW + places, dw)
    tl.store(dS + places, ds)
    # Before the very first block, F is an input: it needs its zeros.
    tl.store(dF + places, tl.where(begins, 0.0, d_frozen), mask=where_all(initial | (begins == 0), places))


@triton.jit
def _inner_products(dw, ds, w, s):
    """<dW, W>, <dW, S>, <dS, S> of a tile."""
    w, s = w.to(tl.float32), s.to(tl.float32)
    return tl.sum(dw * w), tl.sum(dw * s), tl.sum(ds * s)


@triton.jit(do_not_specialize=["T", "H", "N", "first", "K"])
def scan_backward(
    q, k, v, info, base, norm, P, vectors, weights, momenta, hidden, pulled, active, bent, output, error, mixes,
    query_active, d_query_hidden, d_out, d_input, d_hidden, d_error, d_key, d_norm_read, turned,
    dW, dS, dF, d_begin, d_norm, d_vectors, d_ends, d_k, d_v,
    T, H, N, first, K,
    D: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr, LAYERS: tl.constexpr,
    GATES: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, RESET: tl.constexpr, TO_START: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr, STEP: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Backward pass of :func:`scan`. dW, dS, dF, d_begin (B H, packed), d_norm (B H, 2, D), fp32: in, gradients of the
    state after these blocks; out, before them. d_input and d_hidden hold the reads' gradients and are overwritten.

    From read.read_backward, for block i: query_active, d_query_hidden (the queries' activation and the gradient of its
    input), d_input (gradient of the keys' activations X), d_hidden (of their inner error G), (c, hidden);
    d_out (of the outer matrix' output on the query side), d_error, d_key (c, D); d_norm_read (2, D).
    For coefficients_backward: rows P_END and E_END of d_vectors, and d_ends. d_v (B, T, H, D) is complete. d_k is
    complete unless a block holds several chunks: then d_key, hidden and pulled go to deferred.chunk_gradients.
    """
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // H, row % H
    SIZE: tl.constexpr = LAYERS * D * HIDDEN
    dW, dS, dF, d_begin = dW + row * SIZE, dS + row * SIZE, dF + row * SIZE, d_begin + row * SIZE
    info, base = info + batch * N * FIELDS, base + head * SIZE
    c = tl.arange(0, BLOCK)
    OPERAND: tl.constexpr = k.dtype.element_ty
    d_norm += row * 2 * D

    blocks = tl.minimum(tl.load(info + first * FIELDS + LEFT), K)
    for back in range(blocks):
        tl.debug_barrier()
        i = blocks - 1 - back
        n = first + i
        start, length = tl.load(info + n * FIELDS + START), tl.load(info + n * FIELDS + LENGTH)
        chunk = tl.load(info + n * FIELDS + CHUNK)
        new = tl.load(info + n * FIELDS + DOCUMENT) > 0
        begins = chunk == n
        # dF holds a gradient for this block unless the next block belongs to another chunk.
        carry = tl.load(info + (n + 1) * FIELDS + CHUNK, mask=n + 1 < N, other=-1) != n + 1
        frozen = weights + (row * (K + 1) + tl.maximum(chunk - first + 1, 0)) * SIZE
        at = row * K + i
        block_w, block_s = weights + (row * (K + 1) + i + 1) * SIZE, momenta + at * SIZE
        wide, narrow = at * BLOCK * HIDDEN, at * BLOCK * D
        width = width_places(BLOCK, D)
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
            places = outer_places(j, D, HIDDEN, SLICE, LAYERS)
            here = hidden_places(j, BLOCK, HIDDEN, SLICE)
            x, dx = key, 0.0
            if LAYERS == 2:
                x, dx = tl.load(active + wide + here), tl.load(d_input + wide + here)
            dw, ds = tl.load(dW + places), tl.load(dS + places)
            w, s = tl.load(block_w + places), tl.load(block_s + places)
            x, dw, ds, w, s = once(x), once(dw), once(ds), once(w), once(s)
            da, db, dm = _inner_products(dw, ds, w, s)
            da2, db2, dm2 = da2 + da, db2 + db, dm2 + dm
            dw, ds = dw.to(OPERAND), ds.to(OPERAND)
            to_x = tl.dot(g, tl.trans(dw), input_precision=PRECISION)
            dp2 -= tl.sum(x * to_x, 1)
            dx -= p2 * to_x
            to_x = tl.dot(g, tl.trans(ds), input_precision=PRECISION)
            de2 -= tl.sum(x * to_x, 1)
            dx -= e2 * to_x
            dg += product(once((-SCALE * p2 * x).to(OPERAND)), dw, SCALE, PRECISION)
            dg += product(once((-SCALE * e2 * x).to(OPERAND)), ds, SCALE, PRECISION)
            if LAYERS == 2:
                places = inner_places(j, D, HIDDEN, SLICE)
                dw, ds = tl.load(dW + places), tl.load(dS + places)
                w, s = tl.load(block_w + places), tl.load(block_s + places)
                g1, dg1 = tl.load(bent + wide + here), tl.load(d_hidden + wide + here)
                if STEP == BLOCK:
                    z = tl.load(hidden + wide + here).to(tl.float32)
                    outer = once(whole(frozen, base, outer_places(j, D, HIDDEN, SLICE, LAYERS), TO_START))
                tl.store(d_input + wide + here, dx)
                dw, ds, w, s, g1, dg1 = once(dw), once(ds), once(w), once(s), once(g1), once(dg1)
                da, db, dm = _inner_products(dw, ds, w, s)
                da1, db1, dm1 = da1 + da, db1 + db, dm1 + dm
                dw, ds = dw.to(OPERAND), ds.to(OPERAND)
                to_g = tl.dot(key, dw, input_precision=PRECISION)
                dp1 -= tl.sum(g1 * to_g, 1)
                dg1 -= p1 * to_g
                to_g = tl.dot(key, ds, input_precision=PRECISION)
                de1 -= tl.sum(g1 * to_g, 1)
                dg1 -= e1 * to_g
                tl.store(d_hidden + wide + here, dg1)
                dk += product(once((-SCALE * p1 * g1).to(OPERAND)), tl.trans(dw), SCALE, PRECISION)
                dk += product(once((-SCALE * e1 * g1).to(OPERAND)), tl.trans(ds), SCALE, PRECISION)
                if STEP == BLOCK:
                    d_pull = once((dg1 * once(slope(z, ACTIVATION))).to(OPERAND))
                    dg = tl.dot(d_pull, outer, dg, input_precision=PRECISION)
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

        if NORM:
            read = d_norm_read + at * 2 * D + tl.arange(0, D)
            accumulate(d_norm, tl.load(read), tl.load(read + D), D)
        if STEP < BLOCK:
            tl.store(d_error + narrow + width, dg)
            tl.store(d_key + narrow + width, tl.load(d_key + narrow + width) + dk)
            tl.debug_barrier()
            chunks_backward(
                k, v, base, norm, P, vectors, frozen, block_s, hidden, pulled, active, output, error, mixes, turned,
                d_input, d_hidden, d_error, d_key, d_norm, d_v, token, length, at, head, H,
                D, HIDDEN, BLOCK, SLICE, LAYERS, GATES, NORM, RESIDUAL, TO_START, ACTIVATION, PRECISION, SCALE,
                STEP, SUB,
            )  # fmt: skip
            tl.debug_barrier()
            df = tl.load(d_error + narrow + width)
            of_w1 = start_weights(vectors, lower, begins, A, BLOCK, STEP)
            of_s1 = start_weights(vectors, lower, begins, B, BLOCK, STEP)
            of_w2 = start_weights(vectors, upper, begins, A, BLOCK, STEP)
            of_s2 = start_weights(vectors, upper, begins, B, BLOCK, STEP)
        else:
            df, dy, d_gain, d_shift = bend_error(
                dg, tl.load(output + narrow + width), key.to(tl.float32),
                tokens(v, token, H, length, D, BLOCK).to(tl.float32), norm, head, H, D, NORM, RESIDUAL,
            )  # fmt: skip
            if NORM:
                accumulate(d_norm, d_gain, d_shift, D)
            store_tokens(d_v, token, H, length, -dy, D, BLOCK)
            if RESIDUAL:
                dk += dy
        df = df.to(OPERAND)
        query = tokens(q, token, H, length, D, BLOCK)
        dz = tl.load(d_out + narrow + width)
        dz_a = (dz * vector(vectors, upper, A, BLOCK)).to(OPERAND)
        dz_b = (dz * vector(vectors, upper, B, BLOCK)).to(OPERAND)
        a_query, b_query = vector(vectors, lower, A, BLOCK), vector(vectors, lower, B, BLOCK)
        a1, b1, m1 = _end(vectors, lower, BLOCK)
        a2, b2, m2 = _end(vectors, upper, BLOCK)
        tl.debug_barrier()

        # Through the frozen weights, and the state's own gradient.
        for j in range(0, HIDDEN, SLICE):
            places = outer_places(j, D, HIDDEN, SLICE, LAYERS)
            here = hidden_places(j, BLOCK, HIDDEN, SLICE)
            x, z_x = key, query
            if LAYERS == 2:
                x, z_x = tl.load(active + wide + here), tl.load(query_active + wide + here)
                dz1 = tl.load(d_query_hidden + wide + here)
                inner_tile = inner_places(j, D, HIDDEN, SLICE)
                if STEP < BLOCK:
                    d_pull, dh = tl.load(pulled + wide + here), tl.load(hidden + wide + here)
                    x, z_x, dz1, d_pull, dh = once(x), once(z_x), once(dz1), once(d_pull), once(dh)
                    of_w = tl.dot(tl.trans(d_pull), (of_w2 * g).to(OPERAND), input_precision=PRECISION)
                    of_w = tl.dot(tl.trans(x), (of_w2 * df).to(OPERAND), of_w, input_precision=PRECISION)
                    of_s = tl.dot(tl.trans(d_pull), (of_s2 * g).to(OPERAND), input_precision=PRECISION)
                    of_s = tl.dot(tl.trans(x), (of_s2 * df).to(OPERAND), of_s, input_precision=PRECISION)
                    inner_w = tl.dot(tl.trans(key), (of_w1 * dh).to(OPERAND), input_precision=PRECISION)
                    inner_s = tl.dot(tl.trans(key), (of_s1 * dh).to(OPERAND), input_precision=PRECISION)
                    d_outer = tl.dot(tl.trans(d_pull), g, input_precision=PRECISION)
                    d_outer = tl.dot(tl.trans(x), df, d_outer, input_precision=PRECISION)
                    d_inner = tl.dot(tl.trans(key), dh, input_precision=PRECISION)
                else:
                    z = tl.load(hidden + wide + here).to(tl.float32)
                    dg1, pull = tl.load(d_hidden + wide + here), tl.load(pulled + wide + here)
                    dx = tl.load(d_input + wide + here)
                    outer, inner = whole(frozen, base, places, TO_START), whole(frozen, base, inner_tile, TO_START)
                    x, z_x, dz1, dx, outer, inner = once(x), once(z_x), once(dz1), once(dx), once(outer), once(inner)
                    bend = once(slope(z, ACTIVATION))
                    d_pull = once((dg1 * bend).to(OPERAND))
                    dx += tl.dot(df, tl.trans(outer), input_precision=PRECISION)
                    dh = dx * bend + dg1 * pull * once(curvature(z, ACTIVATION))
                    dh = once(dh.to(OPERAND))
                    dk = tl.dot(dh, tl.trans(inner), dk, input_precision=PRECISION)
                    d_outer = tl.dot(tl.trans(d_pull), g, input_precision=PRECISION)
                    d_outer = tl.dot(tl.trans(x), df, d_outer, input_precision=PRECISION)
                    d_inner = tl.dot(tl.trans(key), dh, input_precision=PRECISION)
                    of_w, of_s, inner_w, inner_s = d_outer, d_outer, d_inner, d_inner
                dz1_a, dz1_b = (dz1 * a_query).to(OPERAND), (dz1 * b_query).to(OPERAND)
                _turn(dW, dS, dF, d_begin, inner_tile, a1, b1, m1, tl.trans(query), dz1, dz1_a, dz1_b, d_inner,
                      inner_w, inner_s, carry, begins, n == 0, new, RESET, TO_START, PRECISION,
                      STEP < BLOCK)  # fmt: skip
            else:
                d_outer = tl.dot(tl.trans(x), df, input_precision=PRECISION)
                of_w, of_s = d_outer, d_outer
                if STEP < BLOCK:
                    of_w = tl.dot(tl.trans(x), (of_w2 * df).to(OPERAND), input_precision=PRECISION)
                    of_s = tl.dot(tl.trans(x), (of_s2 * df).to(OPERAND), input_precision=PRECISION)
                else:
                    outer = whole(frozen, base, places, TO_START)
                    dk = tl.dot(df, tl.trans(outer), dk, input_precision=PRECISION)
            _turn(dW, dS, dF, d_begin, places, a2, b2, m2, tl.trans(z_x), dz, dz_a, dz_b, d_outer, of_w, of_s,
                  carry, begins, n == 0, new, RESET, TO_START, PRECISION, STEP < BLOCK)  # fmt: skip
        if STEP == BLOCK:
            store_tokens(d_k, token, H, length, tl.load(d_key + narrow + width) + dk, D, BLOCK)
