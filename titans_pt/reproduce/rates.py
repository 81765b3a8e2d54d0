"""The rule that chooses a model's learning rate, the same for all models."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """State of a choice.

    rates: all rates whose probes the rule requires so far, in ascending order. missing: rates that were not tried yet.
    bests: the best rate of each grid that was tried completely, the newest first.
    """

    rates: tuple[float, ...]
    missing: tuple[float, ...]
    bests: tuple[float, ...]


@dataclass(frozen=True)
class Grid:
    """Learning rates to try. While the best is at an end of the grid, the grid grows there by a factor of two.

    first: rates that are always tried. within: the lowest and the highest rate that growth may reach; None: the grid is
    fixed.
    """

    first: tuple[float, ...]
    within: tuple[float, float] | None = None

    def progress(self, losses: Mapping[float, float]) -> Progress:
        """State after probes with these losses; a failed probe has an infinite loss.

        A fixed grid of one rate leaves nothing to choose, and requires no probe. Of two rates with equal losses the
        smaller one wins. The state depends on the losses alone: processes that see the same records try the same rates.
        """
        rates, bests = sorted(set(self.first)), []
        if self.within is None and len(rates) == 1:
            return Progress((), (), tuple(rates))
        while not (missing := [rate for rate in rates if rate not in losses]):
            best = min(rates, key=losses.__getitem__)
            bests.append(best)
            low, high = self.within or (best, best)
            if best == rates[-1] and 2 * best <= high:
                rates.append(2 * best)
            elif best == rates[0] and best / 2 >= low:
                rates.insert(0, best / 2)
            else:
                break
        return Progress(tuple(rates), tuple(missing), tuple(dict.fromkeys(reversed(bests))))
