"""Cross-entropy, with the z-loss that keeps the logits' normaliser near 1 (Chowdhery et al., arXiv 2204.02311)."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(
    logits: Tensor, targets: Tensor, reduction: Literal["mean", "none"] = "mean", z_loss: float = 0.0
) -> Tensor:
    """F.cross_entropy of fp32 logits (N, V) and targets (N,) int64, with :func:`with_z_loss`."""
    losses = F.cross_entropy(logits, targets, reduction="none")
    if z_loss:
        # log Z from what is there: nothing of the logits' size is kept for it.
        losses = with_z_loss(losses, losses + logits.gather(1, targets[:, None]).squeeze(1), z_loss)
    return losses.mean() if reduction == "mean" else losses


def with_z_loss(losses: Tensor, log_z: Tensor, z_loss: float) -> Tensor:
    """``losses``, to whose gradient that of z_loss * (log Z)^2 is added; the value stays the cross-entropy.

    Args:
        log_z: log of the sum of exp(logits), of the shape of ``losses``.
    """
    term = z_loss * log_z.square()
    return losses + (term - term.detach())
