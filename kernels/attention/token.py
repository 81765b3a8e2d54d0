"""Attention of one token of a stream, for generation on a CPU: in C, over keys where they lie, without copies."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from titans_pt.kernels import native

SOURCE = Path(__file__).with_name("token.c")
MAX_PARTS = 4


class _Part(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in "qkv"] + [
        (name, ctypes.c_int64) for name in ("keys", "q_row", "k_row", "k_key", "v_row", "v_key")
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("heads", "width", "parts")), ("scale", ctypes.c_double),
        ("part", _Part * MAX_PARTS),
    ]  # fmt: skip


def serves(q: Tensor) -> bool:
    """Whether :func:`attend` takes queries like these, (B, T, H, D), as things are."""
    if q.shape[1] != 1 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return native.unserved(SOURCE, q) is None


def attend(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """One softmax over the keys of up to MAX_PARTS parts: q (B, 1, H, D), k, v (B, n, H, D) each -> (B, 1, H, D)."""
    like = parts[0][0]
    batch, _, heads, width = like.shape
    call = _Call(heads, width, len(parts), width**-0.5)
    kept, keys = [], 0
    for place, part in zip(call.part, parts, strict=False):
        q, k, v = (_heads_together(x.to(like.dtype)) for x in part)
        kept.append((q, k, v))
        keys += k.shape[1]
        place.q, place.k, place.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        place.keys, place.q_row = k.shape[1], q.stride(0)
        place.k_row, place.k_key, place.v_row, place.v_key = *k.stride()[:2], *v.stride()[:2]
    out = torch.empty_like(kept[0][0], memory_format=torch.contiguous_format)
    function = native.library(SOURCE, like.dtype).attend
    native.run(function, batch * heads, 4 * batch * keys * heads * width, ctypes.byref(call),
               ctypes.c_void_p(out.data_ptr()))  # fmt: skip
    return out


def _heads_together(x: Tensor) -> Tensor:
    """x (B, n, H, D), copied unless the heads of a token lie one after the other."""
    return x if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] else x.contiguous()
