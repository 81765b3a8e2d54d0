"""Attention over tokens and a prefix on a CPU: PyTorch's CPU FlashAttention on each, merged as in flash.py.

A single call of scaled_dot_product_attention would need queries and keys of twice the width to hold both kinds of
scores. PyTorch has no fused kernel for that, and the call takes twice the time.
"""

import torch
from torch import Tensor

from titans_pt.kernels.common import first_derivatives_only

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def serves(q: Tensor) -> bool:
    """Whether :func:`attend` can serve these queries now: device, dtype, no torch.compile."""
    return q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64) and not torch.compiler.is_compiling()


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, prefix_q: Tensor, prefix_k: Tensor,
    prefix_v: Tensor,
) -> Tensor:  # fmt: skip
    """Attend to tokens and a prefix with one softmax; returns (B, T, H, D). Every query must see a key.

    Args:
        q: (B, T, H, D). k, v: (B, S, H, D).
        mask: bool (B or 1, T, S), True where a key is seen. None: all keys, or with ``causal`` (T = S) the keys up to
            the query's own position.
        prefix_q: as q. prefix_k, prefix_v: (B, P, H, D), which every query sees.
    """
    if mask is not None:
        mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf).unsqueeze(1)
    heads_first = (x.transpose(1, 2) for x in (q, k, v, prefix_q, prefix_k, prefix_v))
    return _Merged.apply(mask, causal, *heads_first).transpose(1, 2)


class _Merged(torch.autograd.Function):
    """apply(mask, causal, q, k, v, prefix_q, prefix_k, prefix_v) -> outputs, all (B, H, T, D)."""

    @staticmethod
    def forward(ctx, mask: Tensor | None, causal: bool, *tensors: Tensor):
        scale = tensors[0].shape[-1] ** -0.5
        out, total = _forward(*tensors[:3], 0.0, causal, attn_mask=mask, scale=scale)
        before, sums = _forward(*tensors[3:], 0.0, False, scale=scale)
        share = torch.sigmoid(total - sums).unsqueeze(-1).to(out.dtype)
        out = torch.lerp(before, out, share)
        ctx.save_for_backward(*tensors, mask, out, torch.logaddexp(total, sums))
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx, saved, d_out: Tensor):
        *tensors, mask, out, total = saved
        merged = d_out, out, total
        grads = []
        for part, causal, seen in ((tensors[:3], ctx.causal, mask), (tensors[3:], False, None)):
            d_part, merged_out, lse = merged
            grads += _backward(d_part, *part, merged_out, lse, 0.0, causal, attn_mask=seen, scale=ctx.scale)
        return None, None, *grads
