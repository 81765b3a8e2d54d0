"""Entry point and choice of an implementation."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from titans_pt.kernels import native
from titans_pt.kernels.common import first_derivatives_only

SOURCE = Path(__file__).with_name("norm.c")
BLOCK = 128
"""Rows per block. The weight's gradient is summed over a block's rows first, then over blocks."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return weight x / sqrt(mean(x^2) + eps) over the last dimension, in x's dtype.

    Source: Zhang and Sennrich, arXiv 1910.07467.

    x: (..., D), any float dtype. weight: (D,).
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and x.dtype == weight.dtype and x.device == weight.device and unserved(x, weight) is None:
        if not torch.is_grad_enabled():
            return _forward(x.contiguous(), weight.contiguous(), eps)
        return _Norm.apply(x.contiguous(), weight.contiguous(), eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def unserved(x: Tensor, weight: Tensor | None = None) -> str | None:
    """Reason why :func:`prepared` does not serve ``x``'s device and dtype, or the weight's class; None if it does."""
    return native.unserved(SOURCE, x, weight)


def prepared(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Callable[[], object]]:
    """Return the output tensor of :func:`rms_norm` for fixed contiguous tensors, and the C step that fills it."""
    y = torch.empty_like(x)
    rows = x.numel() // x.shape[-1]
    function = native.compiled(SOURCE, x.dtype).forward
    call = _Call(rows, x.shape[-1], BLOCK, eps)
    given = [*(ctypes.c_void_p(t.data_ptr()) for t in (x, weight, y)), *map(ctypes.c_int64, (0, -(-rows // BLOCK)))]
    return y, lambda _kept=(x, weight): function(ctypes.byref(call), *given)


class _Call(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("rows", "width", "block")] + [("eps", ctypes.c_double)]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _forward(x, weight, eps)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, saved, d_y: Tensor):
        x, weight = saved
        d_x = torch.empty_like(x)
        parts, work = x.new_empty(2, -(-x.numel() // len(weight) // BLOCK), len(weight))
        _run("backward", x, ctx.eps, x, weight, d_y.contiguous(), d_x, parts, work)
        return d_x, parts.sum(0), None


def _forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = torch.empty_like(x)
    _run("forward", x, eps, x, weight, y)
    return y


def _run(name: str, x: Tensor, eps: float, *tensors: Tensor):
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    function = getattr(native.compiled(SOURCE, x.dtype), name)
    call, pointers = _Call(rows, width, BLOCK, eps), (ctypes.c_void_p(t.data_ptr()) for t in tensors)
    native.run(function, -(-rows // BLOCK), 8 * x.numel(), ctypes.byref(call), *pointers)
