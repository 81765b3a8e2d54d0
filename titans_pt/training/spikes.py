"""Steps whose loss is finite but out of all proportion to those before: train.spike_deviations."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from titans_pt.config import TrainConfig


@dataclass
class Numbers:
    """Running mean and variance of the losses of steps, and how many there were."""

    mean: float = 0.0
    variance: float = 0.0
    steps: int = 0


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
    def limit(self) -> float:
        """The largest loss that is no spike; infinite when this is off, and until ``window`` losses were noted."""
        found = self._numbers
        if self.deviations is None or found.steps < self.window:
            return math.inf
        return found.mean + self.deviations * math.sqrt(found.variance)

    def note(self, loss: float):
        """Adds a finite loss to the running mean, clipped at the limit, so that a lasting new level is accepted in
        time."""
        if self.deviations is None:
            return
        found, loss = self._numbers, min(loss, self.limit)
        found.steps += 1
        share = 1.0 / min(found.steps, self.window)
        change = loss - found.mean
        found.mean += share * change
        found.variance = (1.0 - share) * (found.variance + share * change * change)
