"""Figures over samples."""

import math
from collections.abc import Sequence


def wilson(successes: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a proportion (1927), 95 % for the default z.

    Unlike mean +- z stderr it stays within [0, 1] and has a width at 0 and at n successes. No trials: (0, 1).
    """
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    middle = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean of independent values; None for a single one."""
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
