"""Entry point and choice of an implementation."""

import ctypes
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from titans_pt.kernels import native
from titans_pt.kernels.common import first_derivatives_only

SOURCE = Path(__file__).with_name("convolution.c")
MAX_WIDTH = 16
"""Most taps that the C source supports; it sums the taps' gradients in a core's cache."""
GROUP_BYTES = 64
"""Bytes of the neighbouring channels of one token that form a group, unless a group is a head; convolution.c has the
same. Threads share the groups."""
SMALLEST = 1e-6
"""Lower bound of the length that a head is divided by; vector.h has the same."""


def short_convolution(
    x: Tensor,
    past: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    reach: Tensor | None = None,
    silu: bool = False,
    unit: int = 0,
) -> Tensor:
    """Convolve over time with a filter per channel: y_t = sum_i weight[:, width - 1 - i] x_{t-i} (+ bias).

    Args:
        x: (B, T, channels). past: (B, width - 1, channels), the inputs before it. weight: (channels, width), the newest
            input's last. bias: (channels,) or None.
        reach: (B, T) int64, number of earlier inputs that each token sees, up to width - 1; None: all.
        silu: apply SiLU.
        unit: then normalise every head of this many channels to unit length; 0: none.

    Returns:
        (B, T, channels).
    """
    compiling = torch.compiler.is_compiling()
    fits = not compiling and weight.shape[1] <= MAX_WIDTH and x.dtype == weight.dtype
    fits = fits and x.device == past.device == weight.device  # C takes addresses as they are
    if fits and native.unserved(SOURCE, x, weight, bias) is None:
        tensors = _ready(x, past, weight, bias, reach)
        if not torch.is_grad_enabled():
            return _forward(tensors, silu, unit)
        return _Convolution.apply(silu, unit, *tensors)
    return finished(_convolved(x, past, weight, bias, reach, compiling), silu, unit)


def finished(y: Tensor, silu: bool, unit: int) -> Tensor:
    """Apply SiLU to y (B, T, channels), then normalise heads of ``unit`` channels to unit length; each if asked for."""
    y = F.silu(y) if silu else y
    return F.normalize(y.unflatten(-1, (-1, unit)), dim=-1, eps=SMALLEST).flatten(-2) if unit else y


def _convolved(
    x: Tensor, past: Tensor, weight: Tensor, bias: Tensor | None, reach: Tensor | None, compiling: bool
) -> Tensor:
    width, padded = weight.shape[1], torch.cat([past, x], 1)
    if reach is None and not compiling:
        return F.conv1d(padded.transpose(1, 2), weight.unsqueeze(1), bias, groups=x.shape[2]).transpose(1, 2)
    # Sums of products fuse with what follows (SiLU, unit length) into one kernel; a convolution does not.
    taps = (padded[:, i : i + x.shape[1]] for i in range(width))
    if reach is not None:
        taps = (torch.where((reach >= width - 1 - i)[..., None], tap, 0.0) for i, tap in enumerate(taps))
    first, *others = (tap * weight[:, i] for i, tap in enumerate(taps))
    y = sum(others, first)
    return y if bias is None else y + bias


class _Call(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "tokens", "channels", "width", "silu", "unit")]


class _Inputs(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "past", "taps", "bias", "reach")]


class _Convolution(torch.autograd.Function):
    """Autograd of the C source: apply(silu, unit, *tensors), with the tensors of :func:`_ready`."""

    @staticmethod
    def forward(
        ctx, silu: bool, unit: int, x: Tensor, past: Tensor, taps: Tensor, bias: Tensor | None, reach: Tensor | None
    ) -> Tensor:
        tensors = x, past, taps, bias, reach
        ctx.save_for_backward(*tensors)
        ctx.silu, ctx.unit = silu, unit
        return _forward(tensors, silu, unit)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, tensors, d_y: Tensor):
        x, past, taps, bias, _ = tensors
        d_x, d_past = torch.empty_like(x), torch.empty_like(past)
        d_taps, d_bias = torch.zeros_like(taps), None if bias is None else torch.zeros_like(bias)
        _run("backward", tensors, ctx.silu, ctx.unit, d_y.contiguous(), d_x, d_past, d_taps, d_bias)
        return None, None, d_x, d_past, d_taps, d_bias, None


_Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def _ready(x: Tensor, past: Tensor, weight: Tensor, bias: Tensor | None, reach: Tensor | None) -> _Tensors:
    """Arguments in the C source's layout: contiguous, the weight transposed."""
    return x.contiguous(), past.contiguous(), weight.t().contiguous(), bias, reach


def _forward(tensors: _Tensors, silu: bool, unit: int) -> Tensor:
    y = torch.empty_like(tensors[0])
    _run("forward", tensors, silu, unit, y)
    return y


def _run(name: str, tensors: _Tensors, silu: bool, unit: int, *others: Tensor | None):
    x, width = tensors[0], len(tensors[2])
    call = _Call(*x.shape, width, silu, unit)
    groups = x.shape[2] // unit if unit else -(-x.shape[2] * x.element_size() // GROUP_BYTES)
    inputs = _Inputs(*map(native.pointer, tensors))
    function = getattr(native.compiled(SOURCE, x.dtype), name)
    native.run(
        function, groups, x.numel() * (width + 8 * silu), ctypes.byref(call), ctypes.byref(inputs),
        *(ctypes.c_void_p(native.pointer(t)) for t in others),
    )  # fmt: skip
