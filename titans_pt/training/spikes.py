"""Detection of loss spikes, finite losses far above recent ones: train.spike_deviations."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from titans_pt.config import TrainConfig


@dataclass
class Numbers:
    """Running mean and variance of the steps' losses, number of steps, and number of spikes among them."""

    mean: float = 0.0
    variance: float = 0.0
    steps: int = 0
    skipped: int = 0


class SpikeGuard:
    """Decides whether a step's loss is far above earlier losses.

    The decision depends on the losses alone. All ranks decide alike, and a resumed run decides like an uninterrupted
    one, since the checkpoint has the numbers.

    Args:
        settings: only spike_deviations and spike_window are used.
        numbers: result of :meth:`numbers` at the checkpoint; {} at the start.
    """

    def __init__(self, settings: TrainConfig, numbers: dict[str, Any]):
        self.deviations, self.window = settings.spike_deviations, settings.spike_window
        self._numbers = Numbers(**numbers)

    def numbers(self) -> dict[str, float]:
        return asdict(self._numbers)

    @property
    def skipped(self) -> int:
        """Number of spikes so far."""
        return self._numbers.skipped

    @property
    def limit(self) -> float:
        """The largest loss that is not a spike.

        Infinite when detection is off, before ``window`` losses were noted, and while all losses are equal.
        """
        found = self._numbers
        if self.deviations is None or found.steps < self.window or not found.variance:
            return math.inf
        return found.mean + self.deviations * math.sqrt(found.variance)

    def note(self, loss: float):
        """Adds a finite loss, clipped at the limit, to the running mean; a lasting new level is accepted eventually."""
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
