"""FlashAttention over several sets of keys as ONE softmax, for example a window and an always-visible prefix.

Each :class:`KeySet` is one call of a kernel that returns its output o_p and the log-sum-exp l_p of its scores. The
softmax over all sets together is

    l = log sum_p exp(l_p),    o = sum_p exp(l_p - l) o_p

Its gradient is exact when every part's backward kernel is given the MERGED o and l. A backward kernel computes the
probabilities as exp(score - l) and needs rowsum(do * o); with the merged values both belong to the whole softmax. Ring
attention does the same (arXiv 2310.01889).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from titans_pt.kernels.attention import providers
from titans_pt.kernels.common import first_derivatives_only


@dataclass
class KeySet:
    """One set of S keys that T queries see by one rule.

    q: (B, T, H, D). k, v: (B, S, K, D), K dividing H. A part may have its own queries (rotated in one, not in another).
    causal: query i sees the keys up to i + S - T (the last query sees all); else it sees all keys.
    window: with causal, only this many of the newest keys; None for all.
    shared: consecutive queries that see the same keys: query i counts as number i // shared of
        T / shared queries.
    documents: (n + 1,) int32, ascending from 0 to B * T, repeats allowed, for T = S: document boundaries in the
        concatenated rows, row starts included. A token sees only tokens of its own document.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = True
    window: int | None = None
    shared: int = 1
    documents: Tensor | None = None


@dataclass
class MaskRule:
    """A kernel's arguments besides the tensors; see :class:`KeySet`. row: T, the longest that a document can be."""

    causal: bool
    window: int | None
    shared: int
    documents: Tensor | None
    row: int


def flash_attention(parts: list[KeySet]) -> Tensor:
    """Attend to the keys of all parts with one softmax; returns (B, T, H, D) in the queries' dtype.

    Scores are scaled by D ** -0.5. CUDA tensors in fp16 or bf16 use FlashAttention (head width a multiple of 8, at most
    256), others its plain equivalent. Every query must see a key.
    """
    rules = [MaskRule(p.causal, p.window, p.shared, p.documents, p.q.shape[1]) for p in parts]
    # Views: parts may share their queries, and torch.compile takes no tensor twice.
    return _Merged.apply(rules, *(t for p in parts for t in (p.q.view_as(p.q), p.k, p.v)))


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rules: list[MaskRule], *tensors: Tensor) -> Tensor:
        provider = providers.choose(tensors[0])
        outputs, sums, extras = [], [], []
        for n, rule in enumerate(rules):
            q, k, v = (_folded(x, rule, i == 0) for i, x in enumerate(tensors[3 * n : 3 * n + 3]))
            out, lse, extra = provider.forward(q, k, v, rule)
            outputs.append(_unfolded(out, tensors[0].shape, rule))
            sums.append(_rows_unfolded(lse, tensors[0].shape, rule))
            extras.append(extra)
        if len(rules) == 1:
            out, total = outputs[0], sums[0]
        else:
            total = torch.logsumexp(torch.stack(sums), 0)
            weights = (torch.exp(s - total).transpose(1, 2).unsqueeze(-1) for s in sums)
            first, *others = (o * w for o, w in zip(outputs, weights, strict=True))
            out = sum(others, first).to(tensors[0].dtype)
        ctx.rules, ctx.provider, ctx.extras = rules, provider, extras
        ctx.save_for_backward(out, total, *tensors)
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx, saved, d_out: Tensor):
        out, total, *tensors = saved
        grads = []
        for n, rule in enumerate(ctx.rules):
            shape = tensors[0].shape
            q, k, v = (_folded(x, rule, i == 0) for i, x in enumerate(tensors[3 * n : 3 * n + 3]))
            d_q, d_k, d_v = ctx.provider.backward(
                _folded(d_out, rule, True), q, k, v, _folded(out, rule, True), _rows_folded(total, rule), rule,
                ctx.extras[n],
            )  # fmt: skip
            keys = tensors[3 * n + 1].shape
            grads += [_unfolded(d_q, shape, rule), d_k.reshape(keys), d_v.reshape(keys)]
        return None, *grads


# ---- layout of a part for its kernel: queries that see the same keys become heads, documents one long row


def _folded(x: Tensor, rule: MaskRule, query: bool) -> Tensor:
    """(B, T, H, D) -> (B, T / shared, H * shared, D) for queries; (B * T, H, D) with documents."""
    if rule.documents is not None:
        return x.flatten(0, 1)
    if query and rule.shared > 1:
        return x.unflatten(1, (-1, rule.shared)).transpose(2, 3).flatten(2, 3)
    return x


def _unfolded(x: Tensor, shape: torch.Size, rule: MaskRule) -> Tensor:
    if rule.shared > 1:
        x = x.unflatten(2, (-1, rule.shared)).transpose(2, 3)
    return x.reshape(shape)


def _rows_folded(lse: Tensor, rule: MaskRule) -> Tensor:
    """(B, H, T) -> (B, H * shared, T / shared); (H, B * T) with documents."""
    if rule.documents is not None:
        return lse.transpose(0, 1).flatten(1).contiguous()
    if rule.shared > 1:
        return lse.unflatten(2, (-1, rule.shared)).transpose(2, 3).flatten(1, 2).contiguous()
    return lse


def _rows_unfolded(lse: Tensor, shape: torch.Size, rule: MaskRule) -> Tensor:
    batch, length, heads, _ = shape
    if rule.documents is not None:
        return lse.view(heads, batch, length).transpose(0, 1)
    if rule.shared > 1:
        return lse.view(batch, heads, rule.shared, -1).transpose(2, 3).flatten(2)
    return lse
