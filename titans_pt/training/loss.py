"""Next-token cross-entropy around a model."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NextTokenLoss(nn.Module):
    """The model and its loss as one module, so that an engine sees one forward call.

    ``model`` maps (ids (B, T) int64, reset=(B, T) bool) to (logits (B, T, V), state). ``cross_entropy`` takes what
    F.cross_entropy takes: another one serves logits of which a rank holds a part.
    """

    def __init__(self, model: nn.Module, cross_entropy: Callable[..., Tensor] = F.cross_entropy):
        super().__init__()
        self.model, self.cross_entropy = model, cross_entropy

    def forward(self, ids: Tensor, reset: Tensor | None, weight: Tensor | None = None) -> Tensor:
        """Mean cross-entropy, in fp32 and nats per token.

        Args:
            ids: (B, T+1) int64; positions 0..T-1 go in, positions 1..T are predicted.
            reset: (B, T) bool, True where a document starts, or None.
            weight: (B,) fp32 weight of each sample in the mean; None counts all alike.

        Returns:
            A scalar. It is NaN where the plain mean is infinite and no weights are given: its gradients are then
            NaN on every parameter, and the one check of the gradient norm decides for all ranks.
        """
        logits, _ = self.model(ids[:, :-1], reset=reset)
        targets = ids[:, 1:]
        if weight is None:
            loss = self.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            return loss * (1.0 + 0.0 * loss.detach())
        tokens = self.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        samples = tokens.view_as(targets).mean(dim=1)
        return (samples * weight).sum() / weight.sum().clamp(min=torch.finfo(torch.float32).tiny)
