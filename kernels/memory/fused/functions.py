"""Tiles of tokens, the activations and the LayerNorm with their derivatives: the functions that all kernels share.

A place in a tensor is a 64-bit scalar, added to the pointer first, plus a 32-bit tile: 64-bit tiles cost registers.
Tiles are (c, D) or (c, hidden slice); arithmetic is fp32. kernels.memory.mlp states the same functions in PyTorch.
"""

import os

import triton
import triton.language as tl

from titans_pt.kernels.memory.mlp import LN_EPS

EPS = tl.constexpr(LN_EPS)
SQRT_HALF = tl.constexpr(0.7071067811865476)
GAUSS = tl.constexpr(0.3989422804014327)

START, LENGTH, CHUNK, DOCUMENT, LEFT, FIELDS = (tl.constexpr(n) for n in range(6))
"""Columns of the table of blocks, and their number: see layout.table."""

A, B, M, P_END, E_END, THETA, VECTORS = (tl.constexpr(n) for n in range(7))
"""Rows of a block's coefficient vectors, and their number: see coefficients.py."""


COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


@triton.jit
def once(x):
    """x, as a barrier: Triton moves no computation, no exchange between threads and no load past it.

    Without it, Triton tends to compute an operand after the exchange that the operand's product needs. There several
    threads hold each number, and all of them would evaluate the activation. Triton also puts an operand's exchange
    directly after its load: each of several loads would be waited for before the next begins. Calls of this function
    after the last load let all loads begin.
    """
    if COMPILED:
        if x.dtype == tl.float32:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
        else:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def tokens(pointer, first, H, length, D: tl.constexpr, BLOCK: tl.constexpr):
    """(BLOCK, D) of a tensor (B, T, H, D), zeros from ``length`` on; first: index of the first (token, head)."""
    c, d = tl.arange(0, BLOCK), tl.arange(0, D)
    return tl.load(pointer + first * D + (c[:, None] * (H * D) + d[None, :]), mask=c[:, None] < length, other=0.0)


@triton.jit
def store_tokens(pointer, first, H, length, tile, D: tl.constexpr, BLOCK: tl.constexpr):
    c, d = tl.arange(0, BLOCK), tl.arange(0, D)
    places = pointer + first * D + (c[:, None] * (H * D) + d[None, :])
    tl.store(places, tile.to(pointer.dtype.element_ty), mask=c[:, None] < length)


@triton.jit
def vector(pointer, at, row, BLOCK: tl.constexpr):
    """(BLOCK, 1): coefficient vector ``row`` of the block whose vectors are number ``at``."""
    return tl.load(pointer + (at * VECTORS + row) * BLOCK + tl.arange(0, BLOCK))[:, None]


@triton.jit
def where_all(flag, places):
    """Mask in the shape of ``places`` (not negative) that is the scalar ``flag`` everywhere."""
    return places < tl.where(flag, 1 << 30, 0)


@triton.jit
def _normal(z):
    """Density and distribution function of the standard normal, both from one exponential.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: within 1e-7. erf's own code takes several times
    the registers, and the kernels' elementwise work consists only of GELU, its slope and its curvature.
    """
    density = tl.exp(-0.5 * z * z)
    t = 1 / (1 + (0.3275911 * SQRT_HALF) * tl.abs(z))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * series * density
    return density * GAUSS, tl.where(z > 0, 1 - tail, tail)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        _, below = _normal(z)
        y = z * below
    elif ACTIVATION == "silu":
        y = z * tl.sigmoid(z)
    else:
        y = tl.maximum(z, 0.0)
    return y


@triton.jit
def slope(z, ACTIVATION: tl.constexpr):
    """First derivative of the activation."""
    if ACTIVATION == "gelu":
        density, below = _normal(z)
        y = below + z * density
    elif ACTIVATION == "silu":
        y = tl.sigmoid(z)
        y = y * (1 + z * (1 - y))
    else:
        y = tl.where(z > 0, 1.0, 0.0)
    return y


@triton.jit
def curvature(z, ACTIVATION: tl.constexpr):
    """Second derivative of the activation."""
    if ACTIVATION == "gelu":
        density, _ = _normal(z)
        y = (2 - z * z) * density
    elif ACTIVATION == "silu":
        y = tl.sigmoid(z)
        y = y * (1 - y) * (2 + z * (1 - 2 * y))
    else:
        y = tl.zeros_like(z)
    return y


@triton.jit
def whole(weights, base, places, TO_START: tl.constexpr):
    """A tile of weights; with TO_START they are stored as differences to base, M_0."""
    w = tl.load(weights + places)
    if TO_START:
        w = (w.to(tl.float32) + tl.load(base + places).to(tl.float32)).to(w.dtype)
    return w


@triton.jit
def met(weights, momenta, base, places, a, b, TO_START: tl.constexpr):
    """A tile of a W + b S, with TO_START + M_0, in the operands' dtype."""
    w, s = tl.load(weights + places), tl.load(momenta + places)
    total = a * w.to(tl.float32) + b * s.to(tl.float32)
    if TO_START:
        total += tl.load(base + places).to(tl.float32)
    return total.to(w.dtype)


@triton.jit
def product(left, right, SCALE: tl.constexpr, PRECISION: tl.constexpr):
    """left @ right / SCALE. For stability a step is at most about 2 / C, and numbers times a step may fall below fp16's
    range. Operands that contain a step are therefore SCALE times as large, a power of two (1 except for fp16)."""
    found = tl.dot(left, right, input_precision=PRECISION)
    if SCALE != 1:
        found = found / SCALE
    return found


@triton.jit
def mean(x, D: tl.constexpr):
    return tl.sum(x, 1, keep_dims=True) / D


@triton.jit
def unit(f, D: tl.constexpr):
    """LayerNorm without its affine part: (normalised, 1 / standard deviation)."""
    centred = f - mean(f, D)
    scale = tl.rsqrt(mean(centred * centred, D) + EPS)
    return centred * scale, scale


@triton.jit
def unit_vjp(upstream, normalised, scale, D: tl.constexpr):
    """Vector-Jacobian product of unit's first output. The Jacobian is symmetric."""
    return (upstream - mean(upstream, D) - normalised * mean(upstream * normalised, D)) * scale


@triton.jit
def inner_places(j, D: tl.constexpr, HIDDEN: tl.constexpr, SLICE: tl.constexpr):
    """Places of columns j .. j + SLICE of the inner matrix in a packed set, (D, SLICE)."""
    return tl.arange(0, D)[:, None] * HIDDEN + (j + tl.arange(0, SLICE))[None, :]


@triton.jit
def outer_places(j, D: tl.constexpr, HIDDEN: tl.constexpr, SLICE: tl.constexpr, LAYERS: tl.constexpr):
    """Places of rows j .. j + SLICE of the outer matrix in a packed set, (SLICE, D)."""
    return (LAYERS - 1) * D * HIDDEN + (j + tl.arange(0, SLICE))[:, None] * D + tl.arange(0, D)[None, :]


@triton.jit
def hidden_places(j, BLOCK: tl.constexpr, HIDDEN: tl.constexpr, SLICE: tl.constexpr):
    """Places of columns j .. j + SLICE of a block's hidden tensor, (BLOCK, SLICE)."""
    return tl.arange(0, BLOCK)[:, None] * HIDDEN + (j + tl.arange(0, SLICE))[None, :]


@triton.jit
def width_places(BLOCK: tl.constexpr, D: tl.constexpr):
    return tl.arange(0, BLOCK)[:, None] * D + tl.arange(0, D)[None, :]


@triton.jit
def inner_error(f, key, value, norm, head, H, D: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr):
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
def accumulate(sums, gain, shift, D: tl.constexpr):
    """Add gain and shift (D,) to sums (2, D) in memory, which only this program uses; in registers they would cost as
    much as a tile. Several threads hold each number. The barriers make earlier stores visible to every read, and let
    all threads read before one stores."""
    d = tl.arange(0, D)
    tl.debug_barrier()
    gain += tl.load(sums + d)
    shift += tl.load(sums + D + d)
    tl.debug_barrier()
    tl.store(sums + d, gain)
    tl.store(sums + D + d, shift)


@triton.jit
def _operand(pointer, places, BACK: tl.constexpr):
    """A tile of a matrix; BACK: transposed."""
    tile = tl.load(pointer + places)
    if BACK:
        tile = tl.trans(tile)
    return tile


@triton.jit
def through(z, weights, momenta, base, places, a, b, total, TO_START: tl.constexpr, PRECISION: tl.constexpr,
            BACK: tl.constexpr = False):  # fmt: skip
    """total + A (z W) + B (z S), with a tile of the weights at a block's start; with TO_START also + z M_0. BACK: with
    W^T, S^T and M_0^T."""
    if TO_START:
        total = tl.dot(z, _operand(base, places, BACK), total, input_precision=PRECISION)
    total = tl.dot((a * z).to(z.dtype), _operand(weights, places, BACK), total, input_precision=PRECISION)
    return tl.dot((b * z).to(z.dtype), _operand(momenta, places, BACK), total, input_precision=PRECISION)


@triton.jit
def bend_error(dg, f, key, value, norm, head, H, D: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr):
    """Backward pass of :func:`inner_error`, LayerNorm's second derivative included.

    dg, the gradient of the inner error -> the gradients of f, of M(k) (its negative is the value's), and of the norm's
    gain and shift (D,).
    """
    if NORM:
        d = tl.arange(0, D)
        gain = tl.load(norm + head * D + d)[None, :]
        normalised, scale = unit(f, D)
        y = normalised * gain + tl.load(norm + (H + head) * D + d)[None, :]
        if RESIDUAL:
            y += key
        e = 2 * (y - value)
        # To hold few tiles at a time, means over a row are computed as one number per row.
        dg_mean, dg_along, dg_e = mean(dg, D), mean(dg * normalised, D), mean(dg * (e * gain), D)
        e_mean, e_along = mean(e * gain, D), mean(e * gain * normalised, D)
        d_upstream = scale * (dg - dg_mean - normalised * dg_along)
        dy = 2 * d_upstream * gain
        d_gain, d_shift = tl.sum(d_upstream * e + dy * normalised, 0), tl.sum(dy, 0)
        df = dy * gain - scale * (dg * e_along + e * gain * dg_along)
        along = mean(df * normalised, D) + scale * (dg_e - e_mean * dg_mean - e_along * dg_along)
        df = (df - normalised * along) * scale
        df = df - mean(df, D)
    else:
        dy = 2 * dg
        df = dy
        d_gain, d_shift = tl.sum(dy, 0), tl.sum(dy, 0)
    return df, dy, d_gain, d_shift
