"""Early stopping when the validation loss no longer falls: train.patience."""

import math
from typing import Any

from titans_pt.runs.checkpoints import Best


class Patience:
    """Counts validations since the best one.

    It depends on the validation losses alone. All ranks decide alike, and so does a resumed run, since the checkpoint
    has the numbers.

    Args:
        limit: train.patience; None: do not track the best.
        numbers: result of :meth:`numbers` at the checkpoint; {} at the start.
    """

    def __init__(self, limit: int | None, numbers: dict[str, Any]):
        self.limit = limit
        self.best = Best(**numbers) if numbers and limit else None

    def numbers(self) -> dict[str, float]:
        return self.best.numbers() if self.best else {}

    def note(self, step: int, loss: float):
        """Counts a validation; counting the same step again changes nothing."""
        if not self.limit or (self.best and step <= self.best.validated):
            return
        if self.best is None or loss < self.best.loss or not math.isfinite(self.best.loss):
            self.best = Best(step, loss, 0, step)
        else:
            self.best = Best(self.best.step, self.best.loss, self.best.since + 1, step)

    @property
    def exhausted(self) -> bool:
        """Whether ``limit`` validations in a row were no better than the best."""
        return bool(self.limit and self.best and self.best.since >= self.limit)
