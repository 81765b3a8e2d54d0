"""Layers whose computation changes under tensor parallelism, and the loss over a split vocabulary."""

from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.layers.loss import hide, with_z_loss
from titans_pt.parallel.exchange import Exchanges
from titans_pt.parallel.topology import RankGroup


class VocabularyEmbedding(nn.Module):
    """An embedding of which each rank holds V / size neighbouring rows, rounded up: (B, T) int64 -> (B, T, d_model)."""

    def __init__(self, embedding: nn.Embedding, exchanges: Exchanges):
        super().__init__()
        self.weight = embedding.weight
        self.exchanges = exchanges

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        ids = ids - self.exchanges.group.rank * rows
        foreign = (ids < 0) | (ids >= rows)
        x = F.embedding(ids.masked_fill(foreign, 0), self.weight)
        return self.exchanges.reduce_close(x.masked_fill(foreign[..., None], 0.0))


class SplitRMSNorm(nn.Module):
    """nn.RMSNorm over a width of which each rank holds a part: (..., d / size) -> the same shape and dtype.

    The mean of squares is taken over the whole width, in fp32 (fp64 for fp64); the weight, if there is one, is split
    with the width.
    """

    def __init__(self, norm: nn.RMSNorm, exchanges: Exchanges):
        super().__init__()
        self.weight = norm.weight
        self.width, self.eps = norm.normalized_shape[0], norm.eps
        self.exchanges = exchanges

    def forward(self, x: Tensor) -> Tensor:
        precise = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        squares = precise.square().sum(-1, keepdim=True)
        # Every rank uses the sum for its own part: the backward pass sums the sum's gradients over ranks.
        squares = self.exchanges.copy(self.exchanges.reduce(squares))
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps  # as nn.RMSNorm
        y = (precise * torch.rsqrt(squares / self.width + eps)).to(x.dtype)
        return y if self.weight is None else y * self.weight


class SplitLayerNorm(nn.Module):
    """nn.LayerNorm over a width of which each rank holds a part, as :class:`SplitRMSNorm`."""

    def __init__(self, norm: nn.LayerNorm, exchanges: Exchanges):
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.width, self.eps = norm.normalized_shape[0], norm.eps
        self.exchanges = exchanges

    def forward(self, x: Tensor) -> Tensor:
        precise = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        precise = precise - self._mean(precise)
        y = (precise * torch.rsqrt(self._mean(precise.square()) + self.eps)).to(x.dtype)
        y = y if self.weight is None else y * self.weight
        return y if self.bias is None else y + self.bias

    def _mean(self, x: Tensor) -> Tensor:
        return self.exchanges.copy(self.exchanges.reduce(x.sum(-1, keepdim=True))) / self.width


def split_norm(norm: nn.LayerNorm | nn.RMSNorm, exchanges: Exchanges) -> nn.Module:
    """A norm over the heads of all ranks, in place of ``norm``, which would see only a rank's own heads."""
    return SplitLayerNorm(norm, exchanges) if isinstance(norm, nn.LayerNorm) else SplitRMSNorm(norm, exchanges)


class _VocabularyCrossEntropy(torch.autograd.Function):
    """(N, V / size) fp32 logits, (N,) targets -> (N,) losses and (N,) log Z, the log of the sum of exp(logits); only
    the softmax is kept for the backward pass."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, group: RankGroup):
        width = logits.shape[1]
        highest = group.all_reduce(logits.max(1, keepdim=True).values, dist.ReduceOp.MAX)
        logits = logits - highest
        targets = targets - group.rank * width
        mine = (targets >= 0) & (targets < width)
        targets = targets.masked_fill(~mine, 0)
        chosen = logits.gather(1, targets[:, None]).squeeze(1).masked_fill(~mine, 0.0)
        exponentials = logits.exp_()
        chosen, total = group.all_reduce(torch.stack([chosen, exponentials.sum(1)])).unbind()
        ctx.save_for_backward(exponentials.div_(total[:, None]), targets, mine)
        return total.log() - chosen, total.log() + highest.squeeze(1)

    @staticmethod
    def backward(ctx, gradient: Tensor, of_log_z: Tensor):
        softmax, targets, mine = ctx.saved_tensors
        d_logits = softmax * (gradient + of_log_z)[:, None]
        d_logits.scatter_add_(1, targets[:, None], -(gradient * mine)[:, None])
        return d_logits, None, None


def vocabulary_cross_entropy(
    logits: Tensor, targets: Tensor, reduction: Literal["mean", "none"] = "mean", z_loss: float = 0.0,
    tokens: int | None = None, *, group: RankGroup,
) -> Tensor:  # fmt: skip
    """titans_pt.layers.loss.cross_entropy if each rank holds only its part of the vocabulary's logits.

    Args:
        logits: (N, V / size) fp32, this rank's part; rank r's first column is entry r V / size.
        targets: (N,) int64, over the whole vocabulary.
        tokens: how many entries of the whole vocabulary count; the logits of the others are overwritten. None: all.

    Returns:
        The mean, or (N,), fp32, nats, the same on every rank. The ranks exchange three numbers per token, never logits.
    """
    hide(logits, None if tokens is None else tokens - group.rank * logits.shape[1])
    losses, log_z = _VocabularyCrossEntropy.apply(logits, targets, group)
    if z_loss:
        losses = with_z_loss(losses, log_z, z_loss)
    return losses.mean() if reduction == "mean" else losses


def vocabulary_best(logits: Tensor, *, group: RankGroup) -> Tensor:
    """The token with the highest logit, if each rank holds only its part of the vocabulary's logits.

    Args:
        logits: (N, V / size), this rank's part; rank r's first column is entry r V / size.

    Returns:
        (N,) int64, over the whole vocabulary, the same on every rank; of equal logits the first token.
    """
    highest, token = logits.max(1)
    if group.size == 1:
        return token
    width = logits.shape[1]
    best = group.all_reduce(highest, dist.ReduceOp.MAX)
    token = torch.where(highest == best, token + group.rank * width, group.size * width)
    return group.all_reduce(token, dist.ReduceOp.MIN)
