"""Attention with explicit masks, by PyTorch's scaled_dot_product_attention: any device and dtype; tests' reference."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from titans_pt.kernels.attention import cpu, token

QUERY_BLOCK = 512
"""Queries per call if a mask is needed: a window then costs T x (window + block), not T x T."""


@dataclass
class Prefix:
    """Tokens without a position that every query sees.

    q: (B, T, H, D), the queries NOT rotated: what a token reads from the prefix must not depend on its position.
    k, v: (B, P, K, D).
    """

    q: Tensor
    k: Tensor
    v: Tensor


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    prefix: Prefix | None = None,
    causal: bool = False,
) -> Tensor:
    """Attend to the keys that a mask allows, and to a prefix; returns (B, T, H, D).

    Args:
        q: (B, T, H, D). k, v: (B, S, K, D). K divides H: neighbouring query heads share one key and value head.
        mask: bool (B or 1, T, S), True where a key is seen. None: all keys, or with ``causal`` (T = S) the keys up to
            the query's own position.
        prefix: tokens that every query sees.
    """
    if mask is None and token.serves(q):
        return token.attend([(q, k, v)] if prefix is None else [(prefix.q, prefix.k, prefix.v), (q, k, v)])
    k, v = (_for_each_query(x, q) for x in (k, v))
    prefix = prefix and Prefix(prefix.q, *(_for_each_query(x, q) for x in (prefix.k, prefix.v)))
    if prefix is not None and cpu.serves(q):
        return cpu.attend(q, k, v, mask, causal, prefix.q, prefix.k, prefix.v)
    if causal and prefix is not None:
        mask = torch.ones(1, q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril()
    scale = q.shape[-1] ** -0.5
    if prefix is not None:
        # One softmax over two kinds of scores: [q | q'] . [k | 0] and [q | q'] . [0 | p].
        q = torch.cat([q, prefix.q], -1)
        k = torch.cat([F.pad(prefix.k, (prefix.k.shape[-1], 0)), F.pad(k, (0, k.shape[-1]))], 1)
        v = torch.cat([prefix.v, v], 1)
        mask = None if mask is None else F.pad(mask, (prefix.k.shape[1], 0), value=True)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None if mask is None else mask.unsqueeze(1)
    causal = causal and mask is None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale).transpose(1, 2)


def _for_each_query(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values (B, S, K, D) repeated for each of the heads of q (B, T, H, D)."""
    group = q.shape[2] // x.shape[2]
    return x if group == 1 else x.repeat_interleave(group, 2)


def causal_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None = None,
    prefix: Prefix | None = None,
    first: Tensor | None = None,
    sinks: int = 0,
) -> Tensor:
    """Compute :func:`titans_pt.kernels.attention.causal_attention` with masks; same arguments."""
    length, past = q.shape[1], k.shape[1] - q.shape[1]
    if window is None or (first is None and k.shape[1] <= window + sinks):
        window, sinks = None if sinks else window, 0
    if (window is None or window >= length) and first is None and past == 0:
        return masked_attention(q, k, v, None, prefix, causal=True)
    if length == 1 and first is None:  # a token of a stream
        low = 0 if window is None else max(0, past + 1 - window)
        k, v = (torch.cat([x[:, :sinks], x[:, low:]], 1) if low > sinks > 0 else x[:, low:] for x in (k, v))
        return masked_attention(q, k, v, None, prefix)

    blocks = []
    for begin in range(0, length, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, length)
        low = 0 if window is None else max(0, past + begin - window + 1)
        if sinks and (first is not None or low <= sinks):
            low = 0  # a document's sinks may lie anywhere
        query = torch.arange(past + begin, past + end, device=q.device)[:, None]
        key = torch.arange(low, past + end, device=q.device)
        keys, values = k[:, low : past + end], v[:, low : past + end]
        if sinks and low:
            key = torch.cat([torch.arange(sinks, device=q.device), key])
            keys, values = (torch.cat([x[:, :sinks], y], 1) for x, y in ((k, keys), (v, values)))
        mask = key <= query
        start = None if first is None else first[:, begin:end, None]
        if window is not None:
            near = key > query - window
            mask = mask & (near | (key < sinks + (0 if start is None else start)) if sinks else near)
        if mask.dim() == 2:
            mask = mask[None]
        if start is not None:
            mask = mask & (key >= start)
        part = None if prefix is None else Prefix(prefix.q[:, begin:end], prefix.k, prefix.v)
        blocks.append(masked_attention(q[:, begin:end], keys, values, mask, part))
    return torch.cat(blocks, 1)


def segment_masked(
    q: Tensor, k: Tensor, v: Tensor, memory_k: Tensor, memory_v: Tensor, stride: int, prefix: Prefix | None = None
) -> Tensor:
    """Compute :func:`titans_pt.kernels.attention.segment_attention` with masks; same arguments."""
    place = torch.arange(q.shape[1], device=q.device)
    memory = torch.arange(memory_k.shape[1], device=q.device) * stride
    mask = torch.cat([memory, place]) <= place[:, None]
    return masked_attention(q, torch.cat([memory_k, k], 1), torch.cat([memory_v, v], 1), mask[None], prefix)
