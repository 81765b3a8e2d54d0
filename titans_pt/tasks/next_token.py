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
"""Most bytes of fp32 logits at a time. Under tensor parallelism one sample's logits may be more."""


def at_once(rows: int, length: int, vocabulary: int, whole: bool = True) -> tuple[int, int]:
    """Return (samples, tokens per sample) whose logits, ``vocabulary`` per token, are computed together: whole samples
    if at least one fits, else a part of one.

    whole: whether a rank has the whole head. With a split head, samples stay whole: ranks may gather a sample's tokens
    (parallel.sequence), and would gather those of a part in another order.
    """
    fit = max(1, LOGITS_BYTES // (4 * vocabulary))
    if whole and fit < length:
        return 1, -(-length // -(-length // fit))  # parts of nearly the same length
    return min(rows, max(1, fit // length)), length


def piece(batch: tuple[Tensor, ...], part: int, parts: int) -> tuple[Tensor, ...]:
    """One of ``parts`` equal pieces along time of ids (B, T + 1), with the target of its last token, and of further
    tensors (B, T)."""
    ids, *others = batch
    length = (ids.shape[1] - 1) // parts
    begin, end = part * length, (part + 1) * length
    return ids[:, begin : end + 1], *(each[:, begin:end] for each in others)


@cache
def _liger(z_loss: float) -> Callable[..., Any] | None:
    """Return liger-kernel's fused head and cross-entropy, (weight, x, targets) -> mean loss; None if not installed.

    With z_loss the output has ``loss`` and ``z_loss``, and ``loss`` includes ``z_loss``.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(
        accum_dtype=torch.float32, lse_square_scale=z_loss, return_z_loss=z_loss > 0
    )


class NextTokenLoss(nn.Module):
    """The model and its loss as one module, so that an engine sees one forward call.

    The logits of a micro-batch, (B, T, V) in fp32, would be the largest tensor of all. The head is therefore applied to
    a few samples, or a part of one, at a time, and again in the backward pass (6 % of the work of a 170M model at
    V = 32,000). On a GPU with liger-kernel installed and a whole head, liger's fused kernel computes loss and gradients
    in one pass; it sums the head's gradient in fp32.

    ``model`` is a LanguageModel; rows of its head that stand for no token do not count. ``cross_entropy`` has the
    arguments of titans_pt.layers.loss.cross_entropy; another function is needed if each rank holds a part of the
    logits. ``z_loss`` is train.z_loss, ``write_cost`` model.memory.write_cost: both change the gradient, never the
    value.
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
            reset: (B, T) bool, True where a document starts, preferably on the CPU, or None.
            weight: (B,) fp32 weight of each sample in the mean; None: all count the same.

        Returns:
            A scalar, NaN if it is infinite. With weights {"loss": a scalar}, where an infinite loss stays infinite.
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
        """-inf for the head's rows that stand for no token, else 0, in x's dtype; None if all rows stand for tokens."""
        if self.model.tokens == len(self.model.head.weight):
            return None
        bias = x.new_zeros(len(self.model.head.weight))
        bias[self.model.tokens :] = -torch.inf
        return bias

    def _few_at_a_time(self, x: Tensor, targets: Tensor, cut: bool = False) -> Tensor:
        """Compute :meth:`_losses` in pieces of the size that at_once allows.

        cut: whether this rank has all tokens of each sample, which may then be cut even with a split head.
        """
        whole = cut or self.cross_entropy is cross_entropy
        rows, length = at_once(targets.shape[0], targets.shape[1], self.model.config.vocab_rows, whole)
        if (rows, length) == targets.shape:
            return self._losses(x, targets)
        found = []
        for pair in zip(x.split(rows), targets.split(rows), strict=True):
            parts: Iterable[tuple[Tensor, ...]] = [pair]
            if length < targets.shape[1]:  # else x may have fewer tokens: sequence-parallel ranks hold parts of them
                parts = zip(*(y.split(length, 1) for y in pair), strict=True)
            found.append(torch.cat([checkpoint(self._losses, *part, use_reentrant=False) for part in parts], 1))
        return torch.cat(found)

    def _losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """x (b, t, d_model), targets (b, t) -> loss of each token, (b, t) fp32."""
        logits = self.model.head(x).flatten(0, 1).float()
        losses = self.cross_entropy(logits, targets.flatten(), "none", self.z_loss, self.model.tokens)
        return losses.view_as(targets)
