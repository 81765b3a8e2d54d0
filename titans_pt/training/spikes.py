"""Steps whose loss is finite but out of all proportion to those before: train.spike_deviations."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from titans_pt.config import TrainConfig


@dataclass
class Numbers:
    """Running mean and variance of the losses of steps, how many there were, and how many of them were spikes."""

    mean: float = 0.0
    variance: float = 0.0
    steps: int = 0
    skipped: int = 0


class SpikeGuard:
    """Whether the loss of a step lies far above those before.

    A function of the losses alone: all ranks decide the same, and a resumed run as an undisturbed one, since the
    numbers are in the checkpoint.

    Args:
        settings: spike_deviations and spike_window are read.
        numbers: what :meth:`numbers` was at the checkpoint; {} at the start.
    """

    def __init__(self, settings: TrainConfig, numbers: dict[str, Any]):
        self.deviations, self.window = settings.spike_deviations, settings.spike_window
        self._numbers = Numbers(**numbers)

    def numbers(self) -> dict[str, float]:
        return asdict(self._numbers)

    @property
    def skipped(self) -> int:
        """Steps that were spikes so far."""
        return self._numbers.skipped

    @property
    def limit(self) -> float:
        """The largest loss that is no spike; infinite when this is off, until ``window`` losses were noted, and
        while all of them are equal."""
        found = self._numbers
        if self.deviations is None or found.steps < self.window or not found.variance:
            return math.inf
        return found.mean + self.deviations * math.sqrt(found.variance)

    def note(self, loss: float):
        """Adds a finite loss to the running mean, clipped at the limit: a lasting new level is accepted in time."""
        if self.deviations is None:
            return
        found, limit = self._numbers, self.limit
        found.skipped += loss > limit
        found.steps += 1
        loss = min(loss, limit)
        share = 1.0 / min(found.steps, self.window)
        change = loss - found.mean
        found.mean += share * change
        found.variance = (1.0 - share) * (found.variance + share * change * change)
