"""Causal attention, full or in a sliding window, with a prefix that every token sees."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

QUERY_BLOCK = 512
"""Queries of one call where a mask is needed: a window then costs T x (window + block), not T x T."""


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q (B, T, H, D), k, v (B, S, H, D), mask bool (B or 1, T, S), True where a key is seen -> (B, T, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1)).transpose(1, 2)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    prefix: tuple[Tensor, Tensor] | None = None,
    first: Tensor | None = None,
) -> Tensor:
    """Each token sees itself, the ``window - 1`` tokens before it, and the whole prefix.

    Args:
        q: (B, T, H, D), the last T of the S tokens that k, v (B, S, H, D) hold; S > T continues a stream.
        window: tokens seen, the token itself included; None for all.
        prefix: keys and values (B, P, H, D) that every query sees.
        first: (B, T) int64, lowest index into k that each query may see (a document's start); None for 0.

    Returns:
        (B, T, H, D). Scores are scaled by D ** -0.5.
    """
    length, past = q.shape[1], k.shape[1] - q.shape[1]
    if window is None and prefix is None and first is None and past == 0:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    blocks = []
    for begin in range(0, length, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, length)
        low = 0 if window is None else max(0, past + begin - window + 1)
        query = torch.arange(past + begin, past + end, device=q.device)[:, None]
        key = torch.arange(low, past + end, device=q.device)
        mask = key <= query
        if window is not None:
            mask &= key > query - window
        mask = mask[None]
        if first is not None:
            mask = mask & (key >= first[:, begin:end, None])
        keys, values = k[:, low : past + end], v[:, low : past + end]
        if prefix is not None:
            keys, values = (torch.cat([p, x], 1) for p, x in zip(prefix, (keys, values), strict=True))
            mask = torch.cat([mask.new_ones(*mask.shape[:2], prefix[0].shape[1]), mask], -1)
        blocks.append(masked_attention(q[:, begin:end], keys, values, mask))
    return torch.cat(blocks, 1)
