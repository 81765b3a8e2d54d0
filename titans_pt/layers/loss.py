"""Cross-entropy, with the z-loss that keeps the logits' normaliser near 1 (Chowdhery et al., arXiv 2204.02311)."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(
    logits: Tensor, targets: Tensor, reduction: Literal["mean", "none"] = "mean", z_loss: float = 0.0,
    tokens: int | None = None,
) -> Tensor:  # fmt: skip
    """F.cross_entropy of fp32 logits (N, V) and targets (N,) int64, with :func:`with_z_loss`.

    tokens: how many of the V logits count; the others are overwritten. None: all.
    """
    hide(logits, tokens)
    losses = F.cross_entropy(logits, targets, reduction="none")
    if z_loss:
        # log Z from existing tensors: autograd keeps nothing of the logits' size for it.
        losses = with_z_loss(losses, losses + logits.gather(1, targets[:, None]).squeeze(1), z_loss)
    return losses.mean() if reduction == "mean" else losses


@torch.no_grad()
def hide(logits: Tensor, tokens: int | None):
    """Sets logits (N, V) from column ``tokens`` on to -inf, in place: they get the probability 0 and no gradient.

    Autograd need not know: the gradient of these logits is their probability.
    """
    if tokens is not None and tokens < logits.shape[1]:
        logits[:, max(0, tokens) :] = -torch.inf


def with_z_loss(losses: Tensor, log_z: Tensor, z_loss: float) -> Tensor:
    """``losses`` with the gradient of z_loss * (log Z)^2 added; the value stays the cross-entropy.

    Args:
        log_z: log of the sum of exp(logits), of the shape of ``losses``.
    """
    term = z_loss * log_z.square()
    return losses + (term - term.detach())
