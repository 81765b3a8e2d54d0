"""The one entry: the choice of an implementation."""

import ctypes
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from titans_pt.kernels import native

SOURCE = Path(__file__).with_name("convolution.c")
MAX_WIDTH = 16
"""Taps that the C source serves."""


def short_convolution(x: Tensor, past: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y_t = sum_i weight[:, width - 1 - i] x_{t-i} (+ bias), a filter for each channel.

    Args:
        x: (B, T, channels). past: (B, width - 1, channels), the inputs before it. weight: (channels, width), the newest
            input's last. bias: (channels,) or None.

    Returns:
        (B, T, channels).
    """
    width = weight.shape[1]
    if torch.compiler.is_compiling():
        # Sums of products fuse with what follows (SiLU, unit length) into one kernel; a convolution does not.
        padded = torch.cat([past, x], 1)
        y = sum(padded[:, i : i + x.shape[1]] * weight[:, i] for i in range(width))
        return y if bias is None else y + bias
    if width <= MAX_WIDTH and x.dtype == weight.dtype and native.unserved(SOURCE, x) is None:
        return _Convolution.apply(x, past, weight, bias)
    padded = torch.cat([past, x], 1).transpose(1, 2)
    return F.conv1d(padded, weight.unsqueeze(1), bias, groups=x.shape[2]).transpose(1, 2)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, past: Tensor, weight: Tensor, bias: Tensor | None):
        tensors = x.contiguous(), past.contiguous(), weight.t().contiguous(), bias
        y = torch.empty_like(tensors[0])
        ctx.save_for_backward(*tensors)
        _run("forward", tensors[0], weight.shape[1], *tensors, y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_y: Tensor):
        x, past, taps, bias = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in (x, past, taps)] + [None if bias is None else torch.empty_like(bias)]
        _run("backward", x, len(taps), x, past, taps, d_y.contiguous(), *grads)
        return grads[0], grads[1], grads[2].t(), grads[3]


def _run(name: str, x: Tensor, width: int, *tensors: Tensor | None):
    batch, length, channels = x.shape
    call = (ctypes.c_int64 * 4)(batch, length, channels, width)
    vectors = -(-channels * x.element_size() // 16)  # as many as the narrowest machine has
    pointers = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors]
    native.run(getattr(native.library(SOURCE, x.dtype), name), vectors, x.numel() * width, call, *pointers)
