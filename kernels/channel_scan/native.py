"""The scan in C (channel_scan.c), for CPUs: a few channels' states stay in a core's cache for the whole sequence."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from titans_pt.kernels import native
from titans_pt.kernels.channel_scan.loop import loop_scan
from titans_pt.kernels.common import first_derivatives_only

SOURCE = Path(__file__).with_name("channel_scan.c")
TILE = 16
"""Tokens between two saved states. The backward pass recomputes the states between them in a core's cache."""
BLOCK = 128
"""Channels per block. Gradients of k and q are summed over a block's channels first, then over blocks."""


def unserved(x: Tensor) -> str | None:
    """Reason why the C source does not serve tensors of ``x``'s device and dtype; None if it does."""
    return native.unserved(SOURCE, x)


def cpu_scan(
    x: Tensor, step: Tensor, k: Tensor, q: Tensor, rate: Tensor | None, state: Tensor, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute :func:`loop_scan` in C if it can, else in PyTorch."""
    if unserved(x) is not None or state.device != x.device:
        return loop_scan(x, step, k, q, rate, state, reset)
    # Channels come last, because a vector register holds neighbouring channels.
    x, step, k, q, state = (t.contiguous() for t in (x, step, k, q, state.mT))
    rate = None if rate is None else rate.t().contiguous()
    reset = None if reset is None else reset.byte().contiguous()
    if torch.is_grad_enabled():
        out, after = _Scan.apply(x, step, k, q, rate, state, reset)
    else:
        out, after, _ = _forward(x, step, k, q, rate, state, reset, keep=False)
    return out, after.mT


class _Call(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "tokens", "channels", "states", "tile", "block")]


class _Inputs(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "step", "k", "q", "rate", "reset")]


class _Scan(torch.autograd.Function):
    """Autograd of the C scan; rate (N, D), state (B, N, D), as in the C source; all contiguous."""

    @staticmethod
    def forward(
        ctx, x: Tensor, step: Tensor, k: Tensor, q: Tensor, rate: Tensor | None, state: Tensor, reset: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, after, starts = _forward(x, step, k, q, rate, state, reset, keep=True)
        ctx.save_for_backward(x, step, k, q, rate, state, reset, starts)
        return out, after

    @staticmethod
    @first_derivatives_only
    def backward(ctx, saved, d_out: Tensor, d_after: Tensor):
        x, step, k, q, rate, _, reset, starts = saved
        tensors = x, step, k, q, rate, reset
        d_state = d_after.clone(memory_format=torch.contiguous_format)
        d_x, d_step = torch.empty_like(x), torch.empty_like(step)
        d_k, d_q = k.new_empty(2, -(-x.shape[2] // BLOCK), *k.shape)
        d_rate = None if rate is None else torch.empty_like(d_state)
        _run("backward", tensors, 4, starts, d_out.contiguous(), d_state, d_x, d_step, d_k, d_q, d_rate)
        return d_x, d_step, d_k.sum(0), d_q.sum(0), None if d_rate is None else d_rate.sum(0), d_state, None


def _forward(
    x: Tensor, step: Tensor, k: Tensor, q: Tensor, rate: Tensor | None, state: Tensor, reset: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return outputs, the state after the last token and, with ``keep``, those before each tile (B, tiles, N, D)."""
    out, after = torch.empty_like(x), torch.empty_like(state)
    starts = state.new_empty(len(x), -(-x.shape[1] // TILE), *state.shape[1:]) if keep else None
    _run("forward", (x, step, k, q, rate, reset), 1, state, out, after, starts)
    return out, after, starts


def _run(name: str, tensors, passes: int, *others: Tensor | None):
    x, k = tensors[0], tensors[2]
    call, inputs = _Call(*x.shape, k.shape[2], TILE, BLOCK), _Inputs(*map(native.pointer, tensors))
    native.run(
        getattr(native.compiled(SOURCE, x.dtype), name), len(x) * -(-x.shape[2] // BLOCK),
        20 * passes * x.numel() * k.shape[2], ctypes.byref(call), ctypes.byref(inputs),
        *(ctypes.c_void_p(native.pointer(t)) for t in others),
    )  # fmt: skip
