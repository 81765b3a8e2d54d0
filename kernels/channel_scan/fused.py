"""The scan as Triton kernels, for a GPU (or, slowly, for Triton's interpreter on a CPU).

A program follows a few channels of a row through the sequence, a tile of tokens at a time. Within a tile

    h_t = a_t h_{t-1} + u_t        (a, u), (b, w) -> (a b, b u + w)

is an associative scan over tokens; h goes from tile to tile in registers. The decays a and inputs u, (B, T, D, N), are
computed in registers from (B, T, D) and (B, T, N) and never stored.

The states before each tile are saved for the backward pass, which takes the tiles in reverse. It scans h again, shifted
by one token to give h_{t-1} without a division, and dh from the end. Gradients of k and q are sums over channels. They
are stored per program and added afterwards: without atomic additions the same call gives the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titans_pt.kernels.namespace import namespace

NAMESPACE = namespace(__name__, __file__)

TOKENS = 32
"""Tokens of a tile. The states saved for the backward pass take 4 N / TOKENS bytes per token and channel."""
CELLS = 128
"""Entries of the state (channels times N) per program. During the backward pass, the programs' shares of the gradients
of k and q take 8 N N / CELLS bytes per token and channel."""
WARPS = 8
"""Warps of a program. With these three constants a program fits the registers of Hopper's threads
(tests/kernels/channel_scan/test_compilation.py)."""
STATES = (4, 8, 16, 32, 64, 128)


def unsupported(x: Tensor, k: Tensor) -> str | None:
    """Reason why the kernels cannot serve a call whose shapes fit each other, or None."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {x.dtype} is none of float32, float16, bfloat16"
    if k.shape[-1] not in STATES:
        return f"the state has {k.shape[-1]} entries a channel, none of {STATES}"
    return None


def fused_scan(
    x: Tensor, step: Tensor, k: Tensor, q: Tensor, rate: Tensor | None, state: Tensor, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in :func:`titans_pt.kernels.channel_scan.loop.loop_scan`; rate and state fp32, the
    others in any precision, outputs in x's."""
    tensors = [None if t is None else t.contiguous() for t in (x, step, k, q, rate, state)]
    if reset is not None:
        reset = reset.to(x.device, torch.uint8, non_blocking=True).contiguous()
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    out, after, _ = _operator(*tensors, reset, keep)
    return out, after


@triton.jit
def _after(a, u, b, w):
    return a * b, b * u + w


@triton.jit
def _decay(step, k, rate, RATE: tl.constexpr):
    """step (t, c), k (t, n), rate (c, n) -> (t, c, n). 1 where step is 0."""
    return tl.exp(-rate[None, :, :] * step[:, :, None]) if RATE else 1 - step[:, :, None] * (k * k)[:, None, :]


@triton.jit
def _tokens(pointer, first, rows, columns, width, mask):
    """Load (rows, columns) of a tensor (B T, width) as fp32, 0 outside the mask; first: token index of row 0."""
    return tl.load(pointer + first * width + (rows * width + columns), mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T"])
def scan(
    x, step, k, q, rate, state, reset, out, after, starts,
    T, D,
    N: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, RATE: tl.constexpr, RESET: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """x, step, out (B, T, D), k, q (B, T, N), rate (D, N), state, after (B, D, N), reset (B, T), starts (B, tiles, D,
    N). Grid (B, D / CHANNELS)."""
    row = tl.program_id(0).to(tl.int64)
    t, n = tl.arange(0, TOKENS), tl.arange(0, N)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    cells, here = c[:, None] * N + n[None, :], (c < D)[:, None] & (n >= 0)[None, :]
    pace = rate
    if RATE:
        pace = tl.load(rate + cells, mask=here, other=0.0)
    h = tl.load(state + row * D * N + cells, mask=here, other=0.0)
    tiles = tl.cdiv(T, TOKENS)
    for tile in range(tiles):
        if KEEP:
            tl.store(starts + (row * tiles + tile) * D * N + cells, h, mask=here)
        first, there = row * T + tile * TOKENS, tile * TOKENS + t < T
        wide, narrow = there[:, None] & (c < D)[None, :], there[:, None] & (n >= 0)[None, :]
        s_t = _tokens(step, first, t[:, None], c[None, :], D, wide)
        x_t = _tokens(x, first, t[:, None], c[None, :], D, wide)
        k_t = _tokens(k, first, t[:, None], n[None, :], N, narrow)
        q_t = _tokens(q, first, t[:, None], n[None, :], N, narrow)
        a = _decay(s_t, k_t, pace, RATE)
        if RESET:
            begins = tl.load(reset + first + t, mask=there, other=0)
            a = tl.where((begins != 0)[:, None, None], 0.0, a)
        u = (s_t * x_t)[:, :, None] * k_t[:, None, :]
        through, added = tl.associative_scan((a, u), 0, _after)
        hs = through * h[None, :, :] + added
        y = tl.sum(hs * q_t[:, None, :], 2)
        tl.store(out + first * D + (t[:, None] * D + c[None, :]), y.to(out.dtype.element_ty), mask=wide)
        h = tl.sum(tl.where((t == TOKENS - 1)[:, None, None], hs, 0.0), 0)
    tl.store(after + row * D * N + cells, h, mask=here)


@triton.jit(do_not_specialize=["T", "B"])
def scan_backward(
    x, step, k, q, rate, reset, starts, d_out, d_after, d_x, d_step, d_k, d_q, d_rate, d_state,
    T, D, B,
    N: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, RATE: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """Backward pass of :func:`scan`; d_k, d_q (D / CHANNELS, B, T, N) and d_rate (B, D, N) are partial sums."""
    row = tl.program_id(0).to(tl.int64)
    t, n = tl.arange(0, TOKENS), tl.arange(0, N)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    cells, here = c[:, None] * N + n[None, :], (c < D)[:, None] & (n >= 0)[None, :]
    part = (tl.program_id(1) * B + row) * T
    pace = rate
    if RATE:
        pace = tl.load(rate + cells, mask=here, other=0.0)
        d_pace = tl.zeros([CHANNELS, N], tl.float32)
    later = tl.load(d_after + row * D * N + cells, mask=here, other=0.0)
    tiles = tl.cdiv(T, TOKENS)
    for back in range(tiles):
        tile = tiles - 1 - back
        first, there = row * T + tile * TOKENS, tile * TOKENS + t < T
        wide, narrow = there[:, None] & (c < D)[None, :], there[:, None] & (n >= 0)[None, :]

        # The state before each token: the tile scanned one token late. Masked loads make the first step an identity.
        before = (there & (t > 0))[:, None]
        s_b = _tokens(step, first - 1, t[:, None], c[None, :], D, before & (c < D)[None, :])
        x_b = _tokens(x, first - 1, t[:, None], c[None, :], D, before & (c < D)[None, :])
        k_b = _tokens(k, first - 1, t[:, None], n[None, :], N, before & (n >= 0)[None, :])
        a_b = _decay(s_b, k_b, pace, RATE)
        if RESET:
            begins = tl.load(reset + first - 1 + t, mask=there & (t > 0), other=0)
            a_b = tl.where((begins != 0)[:, None, None], 0.0, a_b)
        through, added = tl.associative_scan((a_b, (s_b * x_b)[:, :, None] * k_b[:, None, :]), 0, _after)
        h = tl.load(starts + (row * tiles + tile) * D * N + cells, mask=here, other=0.0)
        h_b = through * h[None, :, :] + added

        # The state's gradient after each token, from the last to the first.
        after = ((t < TOKENS - 1) & (tile * TOKENS + t + 1 < T))[:, None]
        s_a = _tokens(step, first + 1, t[:, None], c[None, :], D, after & (c < D)[None, :])
        k_a = _tokens(k, first + 1, t[:, None], n[None, :], N, after & (n >= 0)[None, :])
        a_a = _decay(s_a, k_a, pace, RATE)
        if RESET:
            begins = tl.load(reset + first + 1 + t, mask=(t < TOKENS - 1) & (tile * TOKENS + t + 1 < T), other=0)
            a_a = tl.where((begins != 0)[:, None, None], 0.0, a_a)
        q_t = _tokens(q, first, t[:, None], n[None, :], N, narrow)
        d_y = _tokens(d_out, first, t[:, None], c[None, :], D, wide)
        own = d_y[:, :, None] * q_t[:, None, :]
        own += tl.where((t == TOKENS - 1)[:, None, None], later[None, :, :], 0.0)
        _, d_h = tl.associative_scan((a_a, own), 0, _after, reverse=True)

        s_t = _tokens(step, first, t[:, None], c[None, :], D, wide)
        x_t = _tokens(x, first, t[:, None], c[None, :], D, wide)
        k_t = _tokens(k, first, t[:, None], n[None, :], N, narrow)
        a = _decay(s_t, k_t, pace, RATE)
        if RESET:
            begins = tl.load(reset + first + t, mask=there, other=0)
            a = tl.where((begins != 0)[:, None, None], 0.0, a)
            # A decay that a reset replaces has no gradient.
            h_b = tl.where((begins != 0)[:, None, None], 0.0, h_b)
        later = tl.sum(tl.where((t == 0)[:, None, None], a * d_h, 0.0), 0)
        u_t = s_t * x_t
        h_t = a * h_b + u_t[:, :, None] * k_t[:, None, :]
        to_u = tl.sum(d_h * k_t[:, None, :], 2)
        to_step, to_k = x_t * to_u, tl.sum(d_h * u_t[:, :, None], 1)
        if RATE:
            to_log = d_h * a * h_b
            to_step -= tl.sum(to_log * pace[None, :, :], 2)
            d_pace -= tl.sum(to_log * s_t[:, :, None], 0)
        else:
            to_a = d_h * h_b
            to_step -= tl.sum(to_a * (k_t * k_t)[:, None, :], 2)
            to_k -= 2 * k_t * tl.sum(to_a * s_t[:, :, None], 1)
        tokens = t[:, None] * D + c[None, :]
        tl.store(d_x + first * D + tokens, (s_t * to_u).to(d_x.dtype.element_ty), mask=wide)
        tl.store(d_step + first * D + tokens, to_step.to(d_step.dtype.element_ty), mask=wide)
        tokens = t[:, None] * N + n[None, :]
        tl.store(d_k + (part + tile * TOKENS) * N + tokens, to_k, mask=narrow)
        tl.store(d_q + (part + tile * TOKENS) * N + tokens, tl.sum(h_t * d_y[:, :, None], 1), mask=narrow)
    tl.store(d_state + row * D * N + cells, later, mask=here)
    if RATE:
        tl.store(d_rate + row * D * N + cells, d_pace, mask=here)


def _launch(x: Tensor, k: Tensor, rate: Tensor | None, reset: Tensor | None) -> tuple[tuple[int, int], int, dict]:
    """Return the grid, the number of tiles, and the constants of a launch."""
    channels = max(1, CELLS // k.shape[-1])
    constants = {
        "N": k.shape[-1], "TOKENS": TOKENS, "CHANNELS": channels, "RATE": rate is not None, "RESET": reset is not None,
        "num_warps": WARPS, "num_stages": 1,
    }  # fmt: skip
    return (x.shape[0], triton.cdiv(x.shape[2], channels)), triton.cdiv(x.shape[1], TOKENS), constants


@torch.library.custom_op(f"{NAMESPACE}::channel_scan", mutates_args=())
def _operator(
    x: Tensor,
    step: Tensor,
    k: Tensor,
    q: Tensor,
    rate: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward kernel on contiguous tensors; reset uint8; keep: save states for a backward pass.

    Returns outputs, the state after the last token, and the states before each tile (B, tiles, D, N), none without
    ``keep``.
    """
    grid, tiles, constants = _launch(x, k, rate, reset)
    out, after = torch.empty_like(x), torch.empty_like(state)
    starts = state.new_empty(len(x), tiles if keep else 0, *state.shape[1:])
    with torch.cuda.device_of(x):
        scan[grid](
            x, step, k, q, x if rate is None else rate, state, x if reset is None else reset, out, after, starts,
            x.shape[1], x.shape[2], KEEP=keep, **constants,
        )  # fmt: skip
    return out, after, starts


@_operator.register_fake
def _(x, step, k, q, rate, state, reset, keep):
    tiles = -(-x.shape[1] // TOKENS) if keep else 0
    return torch.empty_like(x), torch.empty_like(state), state.new_empty(x.shape[0], tiles, *state.shape[1:])


@torch.library.custom_op(f"{NAMESPACE}::channel_scan_backward", mutates_args=())
def _backward_operator(
    d_out: Tensor,
    d_after: Tensor,
    starts: Tensor,
    x: Tensor,
    step: Tensor,
    k: Tensor,
    q: Tensor,
    rate: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, step, k, q, rate (one entry if there is no rate) and state."""
    grid, _, constants = _launch(x, k, rate, reset)
    d_x, d_step, d_state = torch.empty_like(x), torch.empty_like(step), torch.empty_like(d_after)
    d_k, d_q = (torch.empty(grid[1], *k.shape, dtype=torch.float32, device=k.device) for _ in range(2))
    d_rate = d_after.new_zeros(1, 1) if rate is None else torch.empty_like(d_after)
    with torch.cuda.device_of(x):
        scan_backward[grid](
            x, step, k, q, x if rate is None else rate, x if reset is None else reset, starts, d_out, d_after,
            d_x, d_step, d_k, d_q, d_rate, d_state, x.shape[1], x.shape[2], len(x), **constants,
        )  # fmt: skip
    return d_x, d_step, d_k.sum(0).to(k.dtype), d_q.sum(0).to(q.dtype), d_rate.sum(0), d_state


@_backward_operator.register_fake
def _(d_out, d_after, starts, x, step, k, q, rate, reset):
    d_rate = d_after.new_empty(1) if rate is None else torch.empty_like(rate)
    return *(torch.empty_like(t) for t in (x, step, k, q)), d_rate, torch.empty_like(d_after)


def _setup(ctx, inputs, output):
    x, step, k, q, rate, state, reset, _ = inputs
    ctx.save_for_backward(x, step, k, q, rate, reset, output[2])
    ctx.state_shape = state.shape
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, d_after, _):
    x, step, k, q, rate, reset, starts = ctx.saved_tensors
    d_out = torch.zeros_like(x) if d_out is None else d_out.contiguous()
    d_after = starts.new_zeros(ctx.state_shape) if d_after is None else d_after.contiguous()
    d_x, d_step, d_k, d_q, d_rate, d_state = _backward_operator(d_out, d_after, starts, x, step, k, q, rate, reset)
    return d_x, d_step, d_k, d_q, None if rate is None else d_rate, d_state, None, None


_operator.register_autograd(_backward, setup_context=_setup)
