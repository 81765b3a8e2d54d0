"""The key side of a block that holds several chunks, forward and backward: parts of scan.scan and scan.scan_backward.
chunk_gradients is a kernel with one program per block, for gradients that no other chunk waits for.

The keys of a later chunk use weights that are never stored, F = A W + B S - X^T (m G). W and S are those at the block's
start, X and G belong to the block's earlier tokens, and m is the row of P theta of the token before the chunk. The fp32
state is then read and written once per block, however short the chunks are.
Every chunk reads the copies of W and S in the operands' dtype, which the queries also need. The first chunk uses the
weights that the block was given. These are the weights at the block's start, or, if the block is the rest of a chunk
that began before, the weights at that chunk's start.

A chunk of STEP tokens is a tile of SUB rows, STEP but at least 16, because matrix products need 16 rows. One program
has few products at a time, and a chunk's time is spent waiting for products and loads. A chunk therefore has few of
both, and a step begins with all of its loads.
"""

import triton
import triton.language as tl

from titans_pt.kernels.memory.fused.functions import (
    CHUNK,
    FIELDS,
    LENGTH,
    START,
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
    met,
    once,
    outer_places,
    product,
    slope,
    store_tokens,
    tokens,
    width_places,
)  # fmt: skip

OF_KEYS, OF_ACTIVE, OF_ERRORS, MIXES = (tl.constexpr(n) for n in range(4))
"""Indices of the matrices in mixes, by the tensor whose rows of two tokens are multiplied, and their number."""

OF_PULLED, OF_OUTPUT, TURNED = (tl.constexpr(n) for n in range(3))
"""Indices of the matrices in turned, by the later token's gradient, and their number. OF_PULLED: gradient of the pulled
error, multiplied by the earlier token's X. OF_OUTPUT: gradient of the outer matrix' output, multiplied by its G."""


@triton.jit
def _tokens(pointer, token, H, own, mask, D: tl.constexpr):
    """Rows ``own`` of a block's tokens in (B, T, H, D), zeros outside ``mask``."""
    d = tl.arange(0, D)
    return tl.load(pointer + token * D + (own[:, None] * (H * D) + d[None, :]), mask=mask[:, None], other=0.0)


@triton.jit
def _frozen(P, vectors, at, r, STEP: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr):
    """A, B and SCALE times m, (1, BLOCK), of the weights that chunk r uses: 1, 0 and 0 for the block's first chunk."""
    c = tl.arange(0, BLOCK)
    row = r * STEP - 1
    later, own = r > 0, vectors + at * VECTORS * BLOCK
    a = tl.load(own + A * BLOCK + row, mask=later, other=1.0)
    b = tl.load(own + B * BLOCK + row, mask=later, other=0.0)
    p = tl.load(P + (at * BLOCK + row) * BLOCK + c, mask=c <= row, other=0.0)
    theta = tl.load(own + THETA * BLOCK + c)
    return a, b, (p * (theta * SCALE))[None, :]


@triton.jit
def _turned(matrix, own, inside, later, BLOCK: tl.constexpr):
    """Columns ``own`` of a block's matrix (later, earlier token), transposed: (SUB, BLOCK), zeros outside ``later``."""
    places = own[:, None] + tl.arange(0, BLOCK)[None, :] * BLOCK
    return tl.load(matrix + places, mask=inside[:, None] & later[None, :], other=0.0)


@triton.jit
def chunks(
    k, v, base, norm, P, vectors, weights, momenta, hidden, pulled, active, bent, output, error, mixes,
    token, length, at, head, H,
    D: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr, LAYERS: tl.constexpr,
    GATES: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, TO_START: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, SCALE: tl.constexpr, STEP: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Compute hidden, pulled, active, bent, output and error of a block's tokens, chunk by chunk; see scan.scan.

    weights, momenta: sets of the block. mixes (B H, K, MIXES, c, c): SCALE times m times the products of two tokens'
    keys, X and G. Rows are the later token's; columns outside earlier chunks are zero.
    """
    OPERAND: tl.constexpr = k.dtype.element_ty
    c, d, sub = tl.arange(0, BLOCK), tl.arange(0, D), tl.arange(0, SUB)
    hidden, pulled = hidden + at * BLOCK * HIDDEN, pulled + at * BLOCK * HIDDEN
    active, bent = active + at * BLOCK * HIDDEN, bent + at * BLOCK * HIDDEN
    output, error = output + at * BLOCK * D, error + at * BLOCK * D
    lower, upper = at * GATES, at * GATES + GATES - 1
    for r in range(BLOCK // STEP):
        own, inside = r * STEP + sub, sub < STEP
        earlier = (c < r * STEP)[:, None]
        there = inside & (own < length)
        rows = inside[:, None]
        square = mixes + at * MIXES * BLOCK * BLOCK + (own[:, None] * BLOCK + c[None, :])
        key = _tokens(k, token, H, own, there, D)
        value = _tokens(v, token, H, own, there, D).to(tl.float32)
        keys = _tokens(k, token, H, c, (c < r * STEP) & (c < length), D)
        errors = tl.load(error + width_places(BLOCK, D), mask=earlier, other=0.0)
        a1, b1, m1 = _frozen(P, vectors, lower, r, STEP, BLOCK, SCALE)
        a2, b2, m2 = _frozen(P, vectors, upper, r, STEP, BLOCK, SCALE)
        key, keys, errors = once(key), once(keys), once(errors)
        mixed1 = (tl.dot(key, tl.trans(keys), input_precision=PRECISION) * m1).to(OPERAND)
        scores = tl.zeros([SUB, BLOCK], tl.float32)
        f = tl.zeros([SUB, D], tl.float32)
        for j in range(0, HIDDEN, SLICE):
            x, x_earlier = key, keys
            outer = met(weights, momenta, base, outer_places(j, D, HIDDEN, SLICE, LAYERS), a2, b2, TO_START)
            if LAYERS == 2:
                here = hidden_places(j, BLOCK, HIDDEN, SLICE)
                x_earlier = tl.load(active + here, mask=earlier, other=0.0)
                g_earlier = tl.load(bent + here, mask=earlier, other=0.0)
                inner = met(weights, momenta, base, inner_places(j, D, HIDDEN, SLICE), a1, b1, TO_START)
                x_earlier, g_earlier, inner, outer = once(x_earlier), once(g_earlier), once(inner), once(outer)
                z = tl.dot(key, inner, -product(mixed1, g_earlier, SCALE, PRECISION), input_precision=PRECISION)
                z = z.to(OPERAND)
                x = once(activate(z.to(tl.float32), ACTIVATION).to(OPERAND))
                here = hidden_places(j, SUB, HIDDEN, SLICE) + r * STEP * HIDDEN
                tl.store(hidden + here, z, mask=rows)
                tl.store(active + here, x, mask=rows)
            scores = tl.dot(x, tl.trans(x_earlier), scores, input_precision=PRECISION)
            f = tl.dot(x, outer, f, input_precision=PRECISION)
        mixed2 = (scores * m2).to(OPERAND)
        f -= product(mixed2, errors, SCALE, PRECISION)
        g = inner_error(f, key.to(tl.float32), value, norm, head, H, D, NORM, RESIDUAL)
        g = tl.where(there[:, None], g, 0.0).to(OPERAND)  # see scan.scan
        own_width = own[:, None] * D + d[None, :]
        tl.store(output + own_width, f, mask=rows)
        tl.store(error + own_width, g, mask=rows)
        tl.store(square + OF_ACTIVE * BLOCK * BLOCK, mixed2, mask=rows)
        # Other threads of the program load in the next loop what this one stores.
        tl.debug_barrier()
        if LAYERS == 2:
            mixed = (tl.dot(g, tl.trans(errors), input_precision=PRECISION) * m2).to(OPERAND)
            tl.store(square + OF_KEYS * BLOCK * BLOCK, mixed1, mask=rows)
            tl.store(square + OF_ERRORS * BLOCK * BLOCK, mixed, mask=rows)
            for j in range(0, HIDDEN, SLICE):
                x_earlier = tl.load(active + hidden_places(j, BLOCK, HIDDEN, SLICE), mask=earlier, other=0.0)
                here = hidden_places(j, SUB, HIDDEN, SLICE) + r * STEP * HIDDEN
                z = tl.load(hidden + here, mask=rows, other=0.0)
                outer = met(weights, momenta, base, outer_places(j, D, HIDDEN, SLICE, LAYERS), a2, b2, TO_START)
                x_earlier, outer, z = once(x_earlier), once(outer), once(z).to(tl.float32)
                pull = -product(mixed, x_earlier, SCALE, PRECISION)
                pull = tl.dot(g, tl.trans(outer), pull, input_precision=PRECISION).to(OPERAND)
                tl.store(pulled + here, pull, mask=rows)
                tl.store(bent + here, (pull * once(slope(z, ACTIVATION))).to(OPERAND), mask=rows)
            tl.debug_barrier()


@triton.jit
def chunks_backward(
    k, v, base, norm, P, vectors, weights, momenta, hidden, pulled, active, output, error, mixes, turned,
    d_input, d_hidden, d_error, d_key, d_norm, d_v, token, length, at, head, H,
    D: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr, LAYERS: tl.constexpr,
    GATES: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, TO_START: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, SCALE: tl.constexpr, STEP: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Backward pass of :func:`chunks`, last chunk first: each collects later chunks' gradients of its G, X and inner G.

    On entry d_error, d_input and d_hidden (LAYERS = 2) hold the gradients of G, X and inner G from the block's queries
    and writes. Out: d_v. Overwritten: d_error, by the gradient of the outer matrix' output; hidden and pulled
    (LAYERS = 2), by the gradients of the activation's input and of the pulled error. With RESIDUAL d_key gets its part.
    turned (B H, K, TURNED, c, c) is only used between chunks of the block. :func:`chunk_gradients` computes the
    remaining gradients.
    """
    OPERAND: tl.constexpr = k.dtype.element_ty
    c, d, sub = tl.arange(0, BLOCK), tl.arange(0, D), tl.arange(0, SUB)
    hidden, pulled, active = hidden + at * BLOCK * HIDDEN, pulled + at * BLOCK * HIDDEN, active + at * BLOCK * HIDDEN
    d_input, d_hidden = d_input + at * BLOCK * HIDDEN, d_hidden + at * BLOCK * HIDDEN
    output, error = output + at * BLOCK * D, error + at * BLOCK * D
    d_error, d_key, d_v = d_error + at * BLOCK * D, d_key + at * BLOCK * D, d_v + token * D
    mixes, turned = mixes + at * MIXES * BLOCK * BLOCK, turned + at * TURNED * BLOCK * BLOCK
    upper = at * GATES + GATES - 1
    for back in range(BLOCK // STEP):
        tl.debug_barrier()
        r = BLOCK // STEP - 1 - back
        own, inside = r * STEP + sub, sub < STEP
        later = c >= (r + 1) * STEP
        there = inside & (own < length)
        rows = inside[:, None]
        width, own_width = width_places(BLOCK, D), own[:, None] * D + d[None, :]
        square = turned + (own[:, None] * BLOCK + c[None, :])
        a2, b2, m2 = _frozen(P, vectors, upper, r, STEP, BLOCK, SCALE)
        m2 *= 1 / SCALE  # for gradients, which have the loss's scale
        errors = tl.load(error + width)
        df_later = tl.load(d_error + width, mask=later[:, None], other=0.0).to(OPERAND)
        dg = tl.load(d_error + own_width, mask=rows, other=0.0)
        f = tl.load(output + own_width, mask=rows, other=0.0)
        key = _tokens(k, token, H, own, there, D).to(tl.float32)
        value = _tokens(v, token, H, own, there, D).to(tl.float32)
        by_active = _turned(mixes + OF_ACTIVE * BLOCK * BLOCK, own, inside, later, BLOCK)
        if LAYERS == 2:  # through the pulled error, g F^T
            by_keys = _turned(mixes + OF_KEYS * BLOCK * BLOCK, own, inside, later, BLOCK)
            by_errors = _turned(mixes + OF_ERRORS * BLOCK * BLOCK, own, inside, later, BLOCK)
            by_pulled = _turned(turned + OF_PULLED * BLOCK * BLOCK, own, inside, later, BLOCK)
            by_output = _turned(turned + OF_OUTPUT * BLOCK * BLOCK, own, inside, later, BLOCK)
            by_keys, by_errors, by_pulled, by_output = once(by_keys), once(by_errors), once(by_pulled), once(by_output)
            by_pull = tl.zeros([SUB, BLOCK], tl.float32)
            for j in range(0, HIDDEN, SLICE):
                wide = hidden_places(j, BLOCK, HIDDEN, SLICE)
                here = hidden_places(j, SUB, HIDDEN, SLICE) + r * STEP * HIDDEN
                x = tl.load(active + wide)
                dh_later = tl.load(hidden + wide, mask=later[:, None], other=0.0)
                z = tl.load(hidden + here, mask=rows, other=0.0)
                pull = tl.load(pulled + here, mask=rows, other=0.0)
                dg1 = tl.load(d_hidden + here, mask=rows, other=0.0)
                outer = met(weights, momenta, base, outer_places(j, D, HIDDEN, SLICE, LAYERS), a2, b2, TO_START)
                x, dh_later, outer = once(x), once(dh_later), once(outer)
                z, pull, dg1 = once(z).to(tl.float32), once(pull), once(dg1)
                dg1 -= product(by_keys, dh_later, SCALE, PRECISION)
                d_pull = once((dg1 * once(slope(z, ACTIVATION))).to(OPERAND))
                tl.debug_barrier()  # several threads may hold a number: all have read it before one stores
                tl.store(pulled + here, d_pull, mask=rows)
                tl.store(d_hidden + here, dg1 * pull * once(curvature(z, ACTIVATION)), mask=rows)
                dg = tl.dot(d_pull, outer, dg, input_precision=PRECISION)
                by_pull = tl.dot(d_pull, tl.trans(x), by_pull, input_precision=PRECISION)
            mixed = (by_pull * m2).to(OPERAND)
            tl.store(square + OF_PULLED * BLOCK * BLOCK, mixed, mask=rows)
            # mixed is zero except for earlier tokens, by_pulled except for later ones: their sum needs one product.
            dg -= tl.dot(mixed + by_pulled, errors, input_precision=PRECISION)
        dg -= product(by_active, df_later, SCALE, PRECISION)
        df, dy, d_gain, d_shift = bend_error(dg, f, key, value, norm, head, H, D, NORM, RESIDUAL)
        if NORM:
            accumulate(d_norm, d_gain, d_shift, D)
        own_tokens = own[:, None] * (H * D) + d[None, :]
        tl.store(d_v + own_tokens, (-dy).to(d_v.dtype.element_ty), mask=there[:, None])
        if RESIDUAL:
            dy += tl.load(d_key + own_width, mask=rows, other=0.0)
            tl.debug_barrier()
            tl.store(d_key + own_width, dy, mask=rows)
        tl.debug_barrier()
        tl.store(d_error + own_width, df, mask=rows)
        if LAYERS == 2:
            df = df.to(OPERAND)
            mixed = (tl.dot(df, tl.trans(errors), input_precision=PRECISION) * m2).to(OPERAND)
            tl.store(square + OF_OUTPUT * BLOCK * BLOCK, mixed, mask=rows)
            mixed += by_output
            for j in range(0, HIDDEN, SLICE):
                wide = hidden_places(j, BLOCK, HIDDEN, SLICE)
                here = hidden_places(j, SUB, HIDDEN, SLICE) + r * STEP * HIDDEN
                x = tl.load(active + wide)
                pull_later = tl.load(pulled + wide, mask=later[:, None], other=0.0)
                z = tl.load(hidden + here, mask=rows, other=0.0)
                dx = tl.load(d_input + here, mask=rows, other=0.0)
                bent = tl.load(d_hidden + here, mask=rows, other=0.0)
                outer = met(weights, momenta, base, outer_places(j, D, HIDDEN, SLICE, LAYERS), a2, b2, TO_START)
                x, pull_later, outer = once(x), once(pull_later), once(outer)
                z, dx, bent = once(z).to(tl.float32), once(dx), once(bent)
                dx = tl.dot(df, tl.trans(outer), dx, input_precision=PRECISION)
                dx -= tl.dot(mixed, x, input_precision=PRECISION)
                dx -= product(by_errors, pull_later, SCALE, PRECISION)
                dh = (dx * once(slope(z, ACTIVATION)) + bent).to(OPERAND)
                tl.debug_barrier()
                tl.store(hidden + here, dh, mask=rows)


@triton.jit
def _per_chunk(x, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Sums (chunks, ...) of x (BLOCK,) or (BLOCK, BLOCK) over each chunk's tokens."""
    if len(x.shape) == 2:
        found = tl.sum(tl.reshape(x, (BLOCK // STEP, STEP, BLOCK)), 1)
    else:
        found = tl.sum(tl.reshape(x, (BLOCK // STEP, STEP)), 1)
    return found


@triton.jit
def _add(pointer, places, x, mask):
    before = tl.load(pointer + places, mask=mask, other=0.0)
    tl.debug_barrier()  # several threads may hold a number: all have read it before one stores
    tl.store(pointer + places, before + x, mask=mask)


@triton.jit(do_not_specialize=["T", "H", "N", "first", "K"])
def chunk_gradients(
    k, info, base, P, vectors, weights, momenta, d_z, d_pulled, active, bent, error, d_error, d_key,
    d_mix, d_vectors, d_k,
    T, H, N, first, K,
    D: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr, LAYERS: tl.constexpr,
    GATES: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, TO_START: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, SCALE: tl.constexpr, STEP: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Gradients that follow from the results of :func:`chunks_backward`. One program per block and row.

    d_k (B, T, H, D): gradient of the keys, complete. Gradients of the coefficients of the chunks' weights are added to
    d_mix and to rows A and B of d_vectors, at the token before each chunk. d_z, d_pulled: hidden and pulled of
    chunks_backward.
    """
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = row // H, row % H
    info += (batch * N + first + i) * FIELDS
    start, length = tl.load(info + START), tl.load(info + LENGTH)
    if length == 0:
        return
    SIZE: tl.constexpr = LAYERS * D * HIDDEN
    OPERAND: tl.constexpr = k.dtype.element_ty
    at = row * K + i
    lower = at * GATES
    wide, narrow, width = at * BLOCK * HIDDEN, at * BLOCK * D, width_places(BLOCK, D)
    weights += (row * (K + 1) + tl.maximum(tl.load(info + CHUNK) - first + 1, 0)) * SIZE
    momenta, base = momenta + at * SIZE, base + head * SIZE
    token = (batch * T + start) * H + head
    c = tl.arange(0, BLOCK)
    before = (c // STEP) * STEP - 1
    earlier = c[None, :] <= before[:, None]
    ends = before[:, None] * BLOCK + c[None, :]
    key = tokens(k, token, H, length, D, BLOCK)
    g, df = tl.load(error + narrow + width), tl.load(d_error + narrow + width).to(OPERAND)
    ones = tl.where(before < 0, 1.0, 0.0)
    own = vectors + lower * VECTORS * BLOCK + before
    a1 = (tl.load(own + A * BLOCK, mask=before >= 0, other=0.0) + ones)[:, None]
    b1 = tl.load(own + B * BLOCK, mask=before >= 0, other=0.0)[:, None]

    scores2 = tl.zeros([BLOCK, BLOCK], tl.float32)
    by_pull = tl.zeros([BLOCK, BLOCK], tl.float32)
    by_z = tl.zeros([BLOCK, BLOCK], tl.float32)
    dk = tl.zeros([BLOCK, D], tl.float32)
    through_s = tl.zeros([BLOCK, D], tl.float32)
    da2 = tl.zeros([BLOCK], tl.float32)
    db2 = tl.zeros([BLOCK], tl.float32)
    for j in range(0, HIDDEN, SLICE):
        x = key
        places = outer_places(j, D, HIDDEN, SLICE, LAYERS)
        w, s = tl.load(weights + places), tl.load(momenta + places)
        if LAYERS == 2:
            here, inner = wide + hidden_places(j, BLOCK, HIDDEN, SLICE), inner_places(j, D, HIDDEN, SLICE)
            x, g1 = tl.load(active + here), tl.load(bent + here)
            dh, d_pull = tl.load(d_z + here), tl.load(d_pulled + here)
            w1, s1 = tl.load(weights + inner), tl.load(momenta + inner)
            x, g1, dh, d_pull = once(x), once(g1), once(dh), once(d_pull)
            w, s, w1, s1 = once(w), once(s), once(w1), once(s1)
        to_w = tl.dot(df, tl.trans(w), input_precision=PRECISION)
        to_s = tl.dot(df, tl.trans(s), input_precision=PRECISION)
        da2 += tl.sum(x * to_w, 1)
        db2 += tl.sum(x * to_s, 1)
        scores2 = tl.dot(x, tl.trans(x), scores2, input_precision=PRECISION)
        if LAYERS == 2:
            da2 += tl.sum(d_pull * tl.dot(g, tl.trans(w), input_precision=PRECISION), 1)
            db2 += tl.sum(d_pull * tl.dot(g, tl.trans(s), input_precision=PRECISION), 1)
            by_pull = tl.dot(d_pull, tl.trans(x), by_pull, input_precision=PRECISION)
            by_z = tl.dot(dh, tl.trans(g1), by_z, input_precision=PRECISION)
            dk = tl.dot(dh, tl.trans(w1), dk, input_precision=PRECISION)
            through_s = tl.dot(dh, tl.trans(s1), through_s, input_precision=PRECISION)
        else:
            dk, through_s = to_w, to_s
    da1, db1 = tl.sum(key * dk, 1), tl.sum(key * through_s, 1)
    dk = a1 * dk + b1 * through_s
    if TO_START:
        for j in range(0, HIDDEN, SLICE):
            back, places = df, outer_places(j, D, HIDDEN, SLICE, LAYERS)
            if LAYERS == 2:
                back = tl.load(d_z + wide + hidden_places(j, BLOCK, HIDDEN, SLICE))
                places = inner_places(j, D, HIDDEN, SLICE)
            dk = tl.dot(back, tl.trans(tl.load(base + places)), dk, input_precision=PRECISION)

    by_f = tl.dot(df, tl.trans(g), input_precision=PRECISION)
    by_g = tl.dot(g, tl.trans(g), input_precision=PRECISION)
    theta = tl.load(vectors + (lower * VECTORS + THETA) * BLOCK + c)
    mixed = tl.load(P + lower * BLOCK * BLOCK + ends, mask=earlier, other=0.0) * theta[None, :]
    mixed *= by_z if LAYERS == 2 else by_f
    mixed = mixed.to(OPERAND)
    dk -= tl.dot(mixed, key, input_precision=PRECISION)
    dk -= tl.dot(tl.trans(mixed), key, input_precision=PRECISION)
    store_tokens(d_k, token, H, length, tl.load(d_key + narrow + width) + dk, D, BLOCK)

    chunk = tl.arange(0, BLOCK // STEP)
    last = chunk * STEP - 1
    places = last[:, None] * BLOCK + c[None, :]
    mask = c[None, :] <= last[:, None]
    found = _per_chunk(scores2 * by_f + by_g * by_pull, BLOCK, STEP)
    _add(d_mix + (at * LAYERS + LAYERS - 1) * BLOCK * BLOCK, places, -found, mask)
    own = d_vectors + (at * LAYERS + LAYERS - 1) * VECTORS * BLOCK
    _add(own + A * BLOCK, last, _per_chunk(da2, BLOCK, STEP), chunk > 0)
    _add(own + B * BLOCK, last, _per_chunk(db2, BLOCK, STEP), chunk > 0)
    if LAYERS == 2:
        scores = tl.dot(key, tl.trans(key), input_precision=PRECISION)
        found = _per_chunk(scores * by_z, BLOCK, STEP)
        _add(d_mix + at * LAYERS * BLOCK * BLOCK, places, -found, mask)
        own = d_vectors + at * LAYERS * VECTORS * BLOCK
        _add(own + A * BLOCK, last, _per_chunk(da1, BLOCK, STEP), chunk > 0)
        _add(own + B * BLOCK, last, _per_chunk(db1, BLOCK, STEP), chunk > 0)


@triton.jit
def start_weights(vectors, at, begins, row: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Share of W (row A) or S (row B) at the block's start in the weights that each token's key uses, (BLOCK, 1); zero
    in a chunk that began before the block."""
    c = tl.arange(0, BLOCK)
    first = (c // STEP) * STEP
    found = tl.load(vectors + (at * VECTORS + row) * BLOCK + first - 1, mask=first > 0, other=0.0)
    if row == A:
        found = tl.where(first == 0, tl.where(begins, 1.0, 0.0), found)
    return found[:, None]
