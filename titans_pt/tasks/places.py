"""Places in a list of samples, epoch after epoch, as a function of (seed, position)."""

import numpy as np


class Places:
    """Order of reading: position, which counts over all epochs -> one of ``total`` places.

    Args:
        count: places per epoch, drawn again for each epoch; None: all.
        seed: seed of the order; None: the places' own order, evenly spaced if ``count`` is smaller than ``total``.
    """

    def __init__(self, total: int, seed: int | None, count: int | None = None):
        self.total, self.seed, self.count = total, seed, min(count or total, total)
        self._cached: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, position: int) -> int:
        epoch, i = divmod(position, self.count)
        if self.seed is None:
            return i * self.total // self.count
        cached = self._cached  # read once: the loader's thread may replace it
        if cached is None or cached[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.total)
            self._cached = cached = (epoch, order[: self.count])
        return int(cached[1][i])
