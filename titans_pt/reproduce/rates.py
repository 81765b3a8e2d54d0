"""The rule that chooses a model's learning rate, the same for all models."""

from collections.abc import Mapping
from dataclasses import dataclass

PROBE_SHARE = 10
"""Learning rates are tried on the tokens divided by this."""


@dataclass(frozen=True)
class Progress:
    """State of a choice.

    rates: all that the rule asks for so far, in ascending order. missing: those of them that were not tried. bests: the
    best rate of each grid that was tried whole, the newest first.
    """

    rates: tuple[float, ...]
    missing: tuple[float, ...]
    bests: tuple[float, ...]


@dataclass(frozen=True)
class Grid:
    """Learning rates to try. While the best is at an end of the grid, the grid grows there by a factor of two.

    first: tried in any case. within: the lowest and the highest rate that growth may reach; None: the grid is fixed.
    """

    first: tuple[float, ...]
    within: tuple[float, float] | None = None

    def progress(self, losses: Mapping[float, float]) -> Progress:
        """State after probes with these losses, infinite for a probe that failed; of two equal the smaller rate wins.

        A function of the losses alone: processes that see the same records ask for the same rates.
        """
        rates, bests = sorted(set(self.first)), []
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
