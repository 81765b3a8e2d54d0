"""Attention of one token, for generation on a CPU: in C, on the keys in place, without copies."""

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
        *((name, ctypes.c_int64) for name in ("heads", "width", "parts", "group")), ("scale", ctypes.c_double),
        ("part", _Part * MAX_PARTS),
    ]  # fmt: skip


def serves(q: Tensor) -> bool:
    """Whether :func:`attend` can serve queries (B, T, H, D) now: one token, no autograd, no torch.compile."""
    if q.shape[1] != 1 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return native.unserved(SOURCE, q) is None


class AttentionToken:
    """One softmax over the keys of up to MAX_PARTS parts, prepared for queries at fixed addresses.

    heads: query heads. kv_heads: key and value heads, each shared by heads / kv_heads query heads.
    queries: one per part, (B, H D) or (B, 1, H, D), contiguous. out: same shape, filled by each call.
    """

    def __init__(self, heads: int, kv_heads: int, *queries: Tensor):
        like = queries[0]
        batch, width = len(like), like.numel() // (len(like) * heads)
        self.out, self._queries, self._size = torch.empty_like(like), queries, 4 * batch * heads * width
        self._call = _Call(heads, width, len(queries), heads // kv_heads, width**-0.5)
        for place, q in zip(self._call.part, queries, strict=False):
            place.q, place.q_row = q.data_ptr(), heads * width
        self._function, self._rows = native.compiled(SOURCE, like.dtype).attend, batch * heads
        self._arguments = ctypes.byref(self._call), ctypes.c_void_p(self.out.data_ptr())

    def __call__(self, *parts: tuple[Tensor, Tensor]) -> Tensor:
        """Fill and return ``out``. parts: keys and values (B, n, K, D) for each query, in any memory layout."""
        kept, keys, dtype = [], 0, self.out.dtype
        for place, (k, v) in zip(self._call.part, parts, strict=False):
            k, v = _heads_together(k.to(dtype)), _heads_together(v.to(dtype))
            kept.append((k, v))
            place.k, place.v, place.keys = k.data_ptr(), v.data_ptr(), k.shape[1]
            place.k_row, place.k_key, *_ = k.stride()
            place.v_row, place.v_key, *_ = v.stride()
            keys += k.shape[1]
        native.run(self._function, self._rows, self._size * keys, *self._arguments)
        return self.out


def attend(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """One softmax over the keys of up to MAX_PARTS parts: q (B, 1, H, D), k, v (B, n, K, D) each -> (B, 1, H, D)."""
    like, keys = parts[0][:2]
    token = AttentionToken(like.shape[2], keys.shape[2], *(q.to(like.dtype).contiguous() for q, _, _ in parts))
    return token(*((k, v) for _, k, v in parts))


def _heads_together(x: Tensor) -> Tensor:
    """Return x (B, n, K, D), copied unless each token's heads are contiguous."""
    return x if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] else x.contiguous()
