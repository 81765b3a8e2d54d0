"""Streams of tokens in memory, for tests of samples cut from them."""

from types import SimpleNamespace

import numpy as np


def dataset(sizes):
    """A stream 0, 1, 2, ... cut into documents of these sizes: each token is its own index in the stream."""
    starts = np.cumsum([0, *sizes])
    return SimpleNamespace(
        prefix="stream",
        tokens=int(starts[-1]),
        document_starts=starts[:-1],
        read=lambda start, stop: np.arange(start, stop, dtype=np.uint16),
    )
