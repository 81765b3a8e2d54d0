"""Ending a training whose validation loss no longer falls: train.patience."""

import math
from typing import Any

from titans_pt.runs.checkpoints import Best


class Patience:
    """Counts validations since the best one.

    A function of the validation losses alone: all ranks decide the same, and a resumed run as an undisturbed one, since
    the numbers are in the checkpoint.

    Args:
        limit: train.patience; None: the best is not looked for.
        numbers: what :meth:`numbers` was at the checkpoint; {} at the start.
    """

    def __init__(self, limit: int | None, numbers: dict[str, Any]):
        self.limit = limit
        self.best = Best(**numbers) if numbers and limit else None

    def numbers(self) -> dict[str, float]:
        return self.best.numbers() if self.best else {}

    def note(self, step: int, loss: float):
        """Takes in a validation; one that was taken in before changes nothing."""
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
