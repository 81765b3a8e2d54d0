"""Decoding: few tokens without a gradient, token by token, constant memory. One program per row (batch, head).

The weights are processed in slices of the hidden layer, each written once per token. Products of a vector and
a tile are sums in fp32. Packed weights: see scan.py.
"""

import triton
import triton.language as tl

from titans_pt.kernels.memory.fused.functions import activate, slope, unit, unit_vjp


@triton.jit
def _finish(f, x, norm, head, H, D: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr):
    """M(x) from the outer matrix' output f, both (1, D)."""
    d = tl.arange(0, D)
    if NORM:
        f, _ = unit(f, D)
        f = f * tl.load(norm + head * D + d)[None, :] + tl.load(norm + (H + head) * D + d)[None, :]
    if RESIDUAL:
        f += x
    return f


@triton.jit
def _apply(x, weights, D: tl.constexpr, HIDDEN: tl.constexpr, SLICE: tl.constexpr, LAYERS: tl.constexpr,
           ACTIVATION: tl.constexpr):  # fmt: skip
    """x (D,) through a packed set of weights -> the outer matrix' output, (1, D)."""
    d, s = tl.arange(0, D), tl.arange(0, SLICE)
    f = tl.zeros([1, D], tl.float32)
    for j in range(0, HIDDEN, SLICE):
        z = x
        if LAYERS == 2:
            inner = tl.load(weights + d[:, None] * HIDDEN + (j + s)[None, :])
            z = activate(tl.sum(x[:, None] * inner, 0), ACTIVATION)
        outer = tl.load(weights + (LAYERS - 1) * D * HIDDEN + (j + s)[:, None] * D + d[None, :])
        f += tl.sum(z[:, None] * outer, 0, keep_dims=True)
    return f


@triton.jit
def _move(W, S, F, begin, new_W, new_S, new_F, places, keep, momentum, step, gradient, begins, ends,
          TO_START: tl.constexpr):  # fmt: skip
    """Write one token to a tile. The chunk's first weights are updated where a chunk begins or has ended."""
    w, s = tl.load(W + places), tl.load(S + places)
    frozen = tl.where(begins, w, tl.load(F + places))
    s = momentum * s - step * gradient
    if TO_START:
        first = tl.load(begin + places)
        w = first + keep * (w - first) + s
    else:
        w = keep * w + s
    tl.store(new_W + places, w)
    tl.store(new_S + places, s)
    tl.store(new_F + places, tl.where(ends, w, frozen))


@triton.jit(do_not_specialize=["T", "H"])
def step(
    q, k, v, theta, eta, alpha, begin, norm, offset, W, S, F, new_W, new_S, new_F, out,
    T, H,
    D: tl.constexpr, HIDDEN: tl.constexpr, SLICE: tl.constexpr, LAYERS: tl.constexpr, GATES: tl.constexpr,
    CHUNK: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, TO_START: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """T tokens from the state W, S, F (B H, packed) to new_W, new_S, new_F; offset (B,): chunk tokens already read."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // H, row % H
    base = row * LAYERS * D * HIDDEN
    W, S, F, begin = W + base, S + base, F + base, begin + head * LAYERS * D * HIDDEN
    new_W, new_S, new_F = new_W + base, new_S + base, new_F + base
    d, s = tl.arange(0, D), tl.arange(0, SLICE)
    position = tl.load(offset + batch)
    for t in range(T):
        token = (batch * T + t) * H + head
        begins, ends = position % CHUNK == 0, (position + 1) % CHUNK == 0
        key = tl.load(k + token * D + d).to(tl.float32)
        value = tl.load(v + token * D + d).to(tl.float32)[None, :]
        frozen = F
        if begins:
            frozen = W
        f = _apply(key, frozen, D, HIDDEN, SLICE, LAYERS, ACTIVATION)
        error = 2 * (_finish(f, key[None, :], norm, head, H, D, NORM, RESIDUAL) - value)
        if NORM:
            normalised, scale = unit(f, D)
            error = unit_vjp(error * tl.load(norm + head * D + d)[None, :], normalised, scale, D)
        gates = token * GATES
        for j in range(0, HIDDEN, SLICE):
            places = (LAYERS - 1) * D * HIDDEN + (j + s)[:, None] * D + d[None, :]
            x = key
            if LAYERS == 2:
                inner_places = d[:, None] * HIDDEN + (j + s)[None, :]
                z = tl.sum(key[:, None] * tl.load(frozen + inner_places), 0)
                x = activate(z, ACTIVATION)
                g = tl.sum(error * tl.load(frozen + places), 1) * slope(z, ACTIVATION)
            # F and W may be overwritten: all threads must read their tiles before one stores.
            tl.debug_barrier()
            if LAYERS == 2:
                _move(W, S, F, begin, new_W, new_S, new_F, inner_places, 1 - tl.load(alpha + gates),
                      tl.load(eta + gates), tl.load(theta + gates), key[:, None] * g[None, :], begins, ends,
                      TO_START)  # fmt: skip
            upper = gates + GATES - 1
            _move(W, S, F, begin, new_W, new_S, new_F, places, 1 - tl.load(alpha + upper), tl.load(eta + upper),
                  tl.load(theta + upper), x[:, None] * error, begins, ends, TO_START)  # fmt: skip
        # Other threads of the program load what was stored: for the query now, then for the next token.
        tl.debug_barrier()
        W, S, F = new_W, new_S, new_F
        query = tl.load(q + token * D + d).to(tl.float32)
        f = _apply(query, W, D, HIDDEN, SLICE, LAYERS, ACTIVATION)
        y = _finish(f, query[None, :], norm, head, H, D, NORM, RESIDUAL)
        tl.store(out + token * D + d[None, :], y.to(out.dtype.element_ty))
        position += 1
