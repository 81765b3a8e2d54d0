"""The libraries that compute one part of flash.py's flash_attention: flash-attn, PyTorch's own FlashAttention,
or, where neither runs, the same formulas in plain PyTorch.

Each provider has two functions. Shapes, as FlashAttention has them: q, d_out, out (B, T, H, D), k, v (B, S, K, D)
with K dividing H (query head h reads key head h // (H / K)), lse (B, H, T) fp32; with ``rule.documents`` (N, H, D),
(N, K, D) and (H, N), N tokens of all rows.

    forward(q, k, v, rule) -> out, lse, extra
    backward(d_out, q, k, v, out, lse, rule, extra) -> d_q, d_k, d_v
"""

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titans_pt.kernels.common import warn_once

HALF = (torch.float16, torch.bfloat16)
OLDEST = (2, 7)
"""Oldest flash-attn whose functions take the arguments that FlashAttn passes."""


def flash_attn_serves() -> bool:
    """Whether FlashAttn can call an installed flash-attn. A version that is too old gives a warning."""
    spec = find_spec("flash_attn")
    if spec is None:
        return False
    # FlashAttention 4 installs a package of the same name, which lacks version 2's functions.
    folders = spec.submodule_search_locations or ()
    if not any((Path(folder) / "flash_attn_interface.py").exists() for folder in folders):
        return False
    try:
        version = metadata.version("flash-attn")
    except metadata.PackageNotFoundError:
        return False
    if tuple(int(part) for part in version.split(".")[:2]) >= OLDEST:
        return True
    warn_once(f"flash-attn {version} is too old, PyTorch's own FlashAttention serves; pip install 'flash-attn>=2.7'")
    return False


HAS_FLASH_ATTN = flash_attn_serves()


def flash_serves(q: Tensor) -> bool:
    """Whether FlashAttention's kernels take queries like these (meta tensors: whether they would on a GPU)."""
    return (q.is_cuda or q.is_meta) and q.dtype in HALF and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def choose(q: Tensor):
    if not flash_serves(q):
        return Plain
    return FlashAttn if HAS_FLASH_ATTN else Aten


def _sides(rule) -> tuple[int, int]:
    """Keys seen left and right of a query's own position, as FlashAttention counts them; -1: no bound."""
    return (-1 if rule.window is None else rule.window - 1), (0 if rule.causal else -1)


def _longest(rule) -> int:
    """Upper bound of a document's tokens, at least 2.

    With a bound of 1, FlashAttention lays query heads that share a key head out as tokens, and miscounts if some
    documents are empty.
    """
    return max(rule.row, 2)


class Aten:
    """The FlashAttention that PyTorch carries. Deterministic under torch.use_deterministic_algorithms."""

    @staticmethod
    def _options(q, rule) -> tuple[dict[str, Any], dict[str, Any]]:
        left, right = _sides(rule)
        local = rule.window is not None
        sides = {"window_size_left": left, "window_size_right": right} if local else {}
        return {"dropout_p": 0.0, "is_causal": rule.causal and not local}, {"scale": q.shape[-1] ** -0.5, **sides}

    @staticmethod
    def _lengths(q, k, rule) -> dict:
        if rule.documents is None:
            return {"cum_seq_q": None, "cum_seq_k": None, "max_q": q.shape[1], "max_k": k.shape[1]}
        documents, longest = rule.documents, _longest(rule)
        return {"cum_seq_q": documents, "cum_seq_k": documents, "max_q": longest, "max_k": longest}

    @classmethod
    def forward(cls, q: Tensor, k: Tensor, v: Tensor, rule):
        how, scale = cls._options(q, rule)
        out, lse, *random, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, **cls._lengths(q, k, rule), **how, return_debug_mask=False, **scale
        )
        return out, lse, random

    @classmethod
    def backward(cls, d_out, q, k, v, out, lse, rule, random):
        how, scale = cls._options(q, rule)
        return torch.ops.aten._flash_attention_backward(
            d_out.contiguous(), q, k, v, out.contiguous(), lse, **cls._lengths(q, k, rule), **how,
            rng_state=random[0], unused=random[1], **scale,
        )  # fmt: skip


class FlashAttn:
    """The flash-attn package (2.7 or newer), when it is installed: pip install flash-attn."""

    @staticmethod
    def _options(q, rule, **more) -> dict:
        left, right = _sides(rule)
        lengths = {} if rule.documents is None else {
            "cu_seqlens_q": rule.documents, "cu_seqlens_k": rule.documents,
            "max_seqlen_q": _longest(rule), "max_seqlen_k": _longest(rule),
        }  # fmt: skip
        return lengths | {
            "dropout_p": 0.0, "softmax_scale": q.shape[-1] ** -0.5, "causal": rule.causal, "softcap": 0.0,
            "window_size_left": left, "window_size_right": right, "alibi_slopes": None,
        } | more  # fmt: skip

    @classmethod
    def forward(cls, q: Tensor, k: Tensor, v: Tensor, rule):
        from flash_attn import flash_attn_interface as flash

        call = flash._flash_attn_forward if rule.documents is None else flash._flash_attn_varlen_forward
        out, lse, _, random = call(q, k, v, **cls._options(q, rule, return_softmax=False))
        return out, lse, random

    @classmethod
    def backward(cls, d_out, q, k, v, out, lse, rule, random):
        from flash_attn import flash_attn_interface as flash

        call = flash._flash_attn_backward if rule.documents is None else flash._flash_attn_varlen_backward
        d_q, d_k, d_v = (torch.empty_like(x) for x in (q, k, v))
        deterministic = torch.are_deterministic_algorithms_enabled()
        call(
            d_out, q, k, v, out, lse, d_q, d_k, d_v,
            **cls._options(q, rule, deterministic=deterministic, rng_state=random),
        )  # fmt: skip
        return d_q, d_k, d_v


class Plain:
    """FlashAttention's two formulas on whole matrices, any device and dtype: the reference for the kernels."""

    @classmethod
    def forward(cls, q: Tensor, k: Tensor, v: Tensor, rule):
        q, k, v = cls._heads_first(q, k, v, rule)
        scores = cls._scores(q, k, rule)
        lse = torch.logsumexp(scores, -1)
        # A query that sees nothing of this part has lse = -inf and takes nothing from it.
        out = torch.exp(scores - lse.masked_fill(lse.isinf(), 0).unsqueeze(-1)) @ v
        return *cls._as_given(rule, out), lse[0] if rule.documents is not None else lse, None

    @classmethod
    def backward(cls, d_out, q, k, v, out, lse, rule, _):
        groups = q.shape[-2] // k.shape[-2]
        if rule.documents is not None:
            lse = lse.unsqueeze(0)
        q, k, v = cls._heads_first(q, k, v, rule)
        d_out, out, _ = cls._heads_first(d_out, out, out, rule)
        p = torch.exp(cls._scores(q, k, rule) - lse.unsqueeze(-1))
        d_v = p.mT @ d_out
        d_scores = p * (d_out @ v.mT - (d_out * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        d_q, d_k = d_scores @ k, d_scores.mT @ q
        d_k, d_v = (x.unflatten(1, (-1, groups)).sum(2) for x in (d_k, d_v))
        return cls._as_given(rule, d_q, d_k, d_v)

    @staticmethod
    def _heads_first(q, k, v, rule):
        groups = q.shape[-2] // k.shape[-2]
        if rule.documents is not None:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
        return (x.transpose(1, 2) for x in (q, k, v))

    @staticmethod
    def _as_given(rule, *tensors):
        tokens_first = (x.transpose(1, 2) for x in tensors)
        return tuple(x[0] if rule.documents is not None else x for x in tokens_first)

    @staticmethod
    def _scores(q: Tensor, k: Tensor, rule) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if not rule.causal:
            return scores
        key = torch.arange(k.shape[2], device=q.device)
        query = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
        seen = key <= query
        if rule.window is not None:
            seen &= key > query - rule.window
        if rule.documents is not None:
            document = torch.bucketize(key, rule.documents, right=True)
            seen &= document == document[:, None]
        return scores.masked_fill(~seen, -torch.inf)
