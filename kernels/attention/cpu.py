"""One softmax over tokens and a prefix on a CPU: PyTorch's FlashAttention for CPUs on each, merged as in flash.py.

As one call of scaled_dot_product_attention the two kinds of scores need queries and keys of twice the width, for which
PyTorch has no fused kernel: twice the time.
"""

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def serves(q: Tensor) -> bool:
    """Whether :func:`attend` takes queries like these, as things are."""
    return q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64) and not torch.compiler.is_compiling()


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, prefix_q: Tensor, prefix_k: Tensor,
    prefix_v: Tensor,
) -> Tensor:  # fmt: skip
    """q (B, T, H, D), k, v (B, S, H, D), mask bool (B or 1, T, S), True where a key is seen, or None: everywhere, or up
    to the query's own place with ``causal`` (T = S). prefix_q as q; prefix_k, prefix_v (B, P, H, D), which every query
    sees. Every query must see a key. Returns (B, T, H, D)."""
    if mask is not None:
        mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf).unsqueeze(1)
    return _Merged.apply(q, k, v, mask, causal, prefix_q, prefix_k, prefix_v)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, causal: bool, prefix_q, prefix_k, prefix_v):
        tensors = tuple(x.transpose(1, 2) for x in (q, k, v, prefix_q, prefix_k, prefix_v))
        scale = q.shape[-1] ** -0.5
        out, total = _forward(*tensors[:3], 0.0, causal, attn_mask=mask, scale=scale)
        before, sums = _forward(*tensors[3:], 0.0, False, scale=scale)
        share = torch.sigmoid(total - sums).unsqueeze(-1).to(out.dtype)
        out = torch.lerp(before, out, share)
        ctx.save_for_backward(*tensors, mask, out, torch.logaddexp(total, sums))
        ctx.causal, ctx.scale = causal, scale
        return out.transpose(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out: Tensor):
        *tensors, mask, out, total = ctx.saved_tensors
        merged = d_out.transpose(1, 2), out, total
        grads = []
        for part, causal, seen in ((tensors[:3], ctx.causal, mask), (tensors[3:], False, None)):
            d_part, merged_out, lse = merged
            grads += _backward(d_part, *part, merged_out, lse, 0.0, causal, attn_mask=seen, scale=ctx.scale)
        d_q, d_k, d_v, *d_prefix = (x.transpose(1, 2) for x in grads)
        return d_q, d_k, d_v, None, None, *d_prefix
