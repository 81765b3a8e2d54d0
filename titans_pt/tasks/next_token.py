"""Next-token cross-entropy around a model."""

import importlib.util
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from titans_pt.layers.loss import cross_entropy
from titans_pt.models import LanguageModel
from titans_pt.tasks.base import nan_unless_finite, with_weights
from titans_pt.tasks.writing import with_write_cost, write_gates

LOGITS_BYTES = 256 << 20
"""Logits in fp32 that exist at a time at most; under tensor parallelism, unless those of one sample are more."""


def at_once(rows: int, length: int, vocabulary: int, whole: bool = True) -> tuple[int, int]:
    """(samples, tokens of each) whose logits, ``vocabulary`` each, are computed together: whole samples where at least
    one fits, else a part of one.

    whole: whether a rank has the whole head. A split one may gather its samples' tokens from ranks (parallel.sequence),
    which parts of a sample would come from in another order: they stay whole.
    """
    fit = max(1, LOGITS_BYTES // (4 * vocabulary))
    if whole and fit < length:
        return 1, -(-length // -(-length // fit))  # parts of nearly the same length
    return min(rows, max(1, fit // length)), length


@cache
def _liger(z_loss: float) -> Callable[..., Any] | None:
    """liger-kernel's head and cross-entropy in one, (weight, x, targets) -> mean; with z_loss its output's ``loss`` and
    ``z_loss``, of which the first holds the second. None where it is not installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(
        accum_dtype=torch.float32, lse_square_scale=z_loss, return_z_loss=z_loss > 0
    )


class NextTokenLoss(nn.Module):
    """The model and its loss as one module, so that an engine sees one forward call.

    The logits of a micro-batch, (B, T, V) in fp32, would be the largest tensor of all: the head is applied to a few
    samples, or tokens of one, at a time, and again in the backward pass (6 % of the work of a 170M model at
    V = 32,000). On a GPU with liger-kernel installed, its fused kernel takes their place, which has the gradients at
    once: for a whole head, its gradient summed in fp32. ``model`` is a LanguageModel; rows of its head that stand for
    no token count nowhere. ``cross_entropy`` takes what titans_pt.layers.loss's takes; another one is needed where each
    rank holds a part of the logits. ``z_loss`` is train.z_loss, ``write_cost`` model.memory.write_cost: they move the
    gradient alone, never the value.
    """

    def __init__(
        self, model: nn.Module, cross_entropy: Callable[..., Tensor] = cross_entropy, z_loss: float = 0.0,
        write_cost: float = 0.0,
    ):  # fmt: skip
        super().__init__()
        self.model = cast(LanguageModel, model)
        self.cross_entropy, self.z_loss, self.write_cost = cross_entropy, z_loss, write_cost

    def forward(self, ids: Tensor, reset: Tensor | None, weight: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """Mean cross-entropy, in fp32 and nats per token.

        Args:
            ids: (B, T+1) int64; positions 0..T-1 go in, positions 1..T are predicted.
            reset: (B, T) bool, True where a document starts, best on the CPU, or None.
            weight: (B,) fp32 weight of each sample in the mean; None: all count the same.

        Returns:
            A scalar, NaN where it is infinite; with weights {"loss": a scalar} as it is.
        """
        with write_gates(self.model, collect=self.write_cost > 0 and weight is None) as gates:
            x, _ = self.model(ids[:, :-1], reset=reset, head=False, output_final_state=not self.training)
        targets = ids[:, 1:]
        if weight is None and self._fused(x):
            fused = _liger(self.z_loss)
            assert fused
            loss = fused(self.model.head.weight, x.flatten(0, 1), targets.flatten(), self._bias(x))
            loss = loss.loss - loss.z_loss.detach() if self.z_loss else loss
        else:
            samples = self._few_at_a_time(x, targets).mean(1)
            if weight is not None:
                return {"loss": with_weights(samples, weight)}
            loss = samples.mean()
        return nan_unless_finite(with_write_cost(loss, gates, self.write_cost))

    def _fused(self, x: Tensor) -> bool:
        whole = self.cross_entropy is cross_entropy and self.model.head.weight.numel() > 0
        return x.is_cuda and whole and _liger(self.z_loss) is not None

    def _bias(self, x: Tensor) -> Tensor | None:
        """-inf for the head's rows that stand for no token, else 0, in x's dtype; None where all rows do."""
        if self.model.tokens == len(self.model.head.weight):
            return None
        bias = x.new_zeros(len(self.model.head.weight))
        bias[self.model.tokens :] = -torch.inf
        return bias

    def _few_at_a_time(self, x: Tensor, targets: Tensor) -> Tensor:
        """Computes :meth:`_losses` in pieces whose logits at_once allows."""
        whole = self.cross_entropy is cross_entropy
        rows, length = at_once(targets.shape[0], targets.shape[1], self.model.config.vocab_rows, whole)
        if (rows, length) == targets.shape:
            return self._losses(x, targets)
        found = []
        for pair in zip(x.split(rows), targets.split(rows), strict=True):
            parts: Iterable[tuple[Tensor, ...]] = [pair]
            if length < targets.shape[1]:  # x has fewer tokens here where sequence-parallel ranks hold parts of them
                parts = zip(*(y.split(length, 1) for y in pair), strict=True)
            found.append(torch.cat([checkpoint(self._losses, *part, use_reentrant=False) for part in parts], 1))
        return torch.cat(found)

    def _losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """x (b, t, d_model), targets (b, t) -> loss of each token, (b, t) fp32."""
        logits = self.model.head(x).flatten(0, 1).float()
        losses = self.cross_entropy(logits, targets.flatten(), "none", self.z_loss, self.model.tokens)
        return losses.view_as(targets)
