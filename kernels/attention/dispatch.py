"""Attention of the models: each call uses the fastest implementation that supports it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from titans_pt.kernels.attention.flash import KeySet, flash_attention
from titans_pt.kernels.attention.masked import Prefix, causal_masked, segment_masked
from titans_pt.kernels.attention.providers import flash_serves
from titans_pt.kernels.common import warn_once

BACKENDS = ("auto", "flash", "masked")


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    sinks: int = 0,
    prefix: Prefix | None = None,
    first: Tensor | None = None,
    bounds: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute causal attention, optionally with a window, sinks and a prefix.

    Each token sees itself, the ``window - 1`` tokens before it, the first ``sinks`` tokens, and the whole prefix.

    Args:
        q: (B, T, H, D), the last T of the S tokens that k, v (B, S, K, D) hold; S > T continues a stream. K divides H:
            neighbouring query heads share one key and value head.
        window: tokens seen, the token itself included; None for all.
        sinks: number of first keys (see ``first``) that a query sees regardless of the window.
        prefix: tokens that every query sees.
        first: (B, T) int64, lowest index into k that each query may see (a document's start); None for 0.
        bounds: (n + 1,) int32, ascending, repeats allowed, for S = T: starts of documents in the concatenated rows,
            row starts included, then B * T. None: "flash" computes them from ``first``, and the host waits.
        backend: "flash" (FlashAttention's formulas), "masked" (explicit masks), "auto": flash where its kernels run.

    Returns:
        (B, T, H, D). Scores are scaled by D ** -0.5.
    """
    past = k.shape[1] - q.shape[1]
    flash = _flash(q, backend)
    if flash and first is not None and (past or sinks):
        beside = "sinks" if sinks else "a state (parallel.context, train.wavefront)"
        warn_once(f"attention: documents beside {beside} take explicit masks, which are slower than FlashAttention")
        flash = False
    if not flash:
        return causal_masked(q, k, v, window, prefix, first, sinks)
    if first is None:
        bounds = None
    elif bounds is None:
        bounds = _bounds(first)
    whole = min(window + sinks - past, q.shape[1]) if window and sinks else 0
    if whole <= 0:
        return _windowed(q, k, v, window, sinks, prefix, bounds)
    # For the first ``whole`` queries no key lies between sinks and window: plain causal attention.
    begin, end = (slice(None, whole), slice(None, past + whole)), (slice(whole, None), slice(None))
    outputs = []
    for queries, keys in (begin, end) if whole < q.shape[1] else (begin,):
        own = prefix and Prefix(prefix.q[:, queries], prefix.k, prefix.v)
        outputs.append(
            _windowed(q[:, queries], k[:, keys], v[:, keys], None if keys == begin[1] else window, sinks, own)
        )
    return torch.cat(outputs, 1)


def _windowed(q, k, v, window: int | None, sinks: int, prefix: Prefix | None, bounds: Tensor | None = None) -> Tensor:
    """FlashAttention over a window, and over sinks that lie before the window of every query."""
    parts = [KeySet(q, k, v, window=window, documents=bounds)]
    if window and sinks:
        seen = slice(k.shape[1] - q.shape[1] - window + 1, None)
        parts = [KeySet(q, k[:, seen], v[:, seen], window=window), KeySet(q, k[:, :sinks], v[:, :sinks], causal=False)]
    if prefix is not None:
        parts.append(KeySet(prefix.q, prefix.k, prefix.v, causal=False))
    return flash_attention(parts)


def segment_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory_k: Tensor,
    memory_v: Tensor,
    stride: int,
    *,
    prefix: Prefix | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute MAC's attention in one segment: causal over its tokens and over memory tokens.

    Args:
        q: (B, T, H, D), k, v: (B, T, K, D), the first T tokens of the segment; K divides H.
        memory_k, memory_v: (B, M, K, D), one memory token for every ``stride`` tokens, M = ceil(T / stride): token i
            sees memory tokens 0 to i // stride.
        prefix: tokens that every query sees.
        backend: see :func:`causal_attention`.

    Returns:
        (B, T, H, D). Scores are scaled by D ** -0.5.
    """
    if not _flash(q, backend):
        return segment_masked(q, k, v, memory_k, memory_v, stride, prefix)
    length = q.shape[1]
    missing = -length % stride
    if missing:
        # Queries appended at the end fill up an unfinished group; their outputs are dropped.
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (q, k, v))
        prefix = prefix and Prefix(F.pad(prefix.q, (0, 0, 0, 0, 0, missing)), prefix.k, prefix.v)
    parts = [KeySet(q, k, v), KeySet(q, memory_k, memory_v, shared=stride)]
    if prefix is not None:
        parts.append(KeySet(prefix.q, prefix.k, prefix.v, causal=False))
    return flash_attention(parts)[:, :length]


def _flash(q: Tensor, backend: str) -> bool:
    if backend not in BACKENDS:
        raise ValueError(f"attention: backend {backend!r} is none of {', '.join(BACKENDS)}")
    return backend == "flash" or (backend == "auto" and flash_serves(q))


def _bounds(first: Tensor) -> Tensor:
    """first (B, T) of whole rows -> starts of documents in the concatenated rows, then B * T; int32."""
    batch, length = first.shape
    starts = (first == torch.arange(length, device=first.device)).flatten().nonzero().flatten()
    return F.pad(starts, (0, 1), value=batch * length).to(torch.int32)
