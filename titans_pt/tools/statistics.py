"""Statistics over samples: intervals, standard errors, variances."""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

Z = 1.959964
"""Standard errors to each side of a 95 % interval of a normal distribution."""
_T = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448,
    2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484,
    2.0452, 2.0423,
)  # fmt: skip
"""The same number for Student's t with 1, 2, ... degrees of freedom."""


def half_width(stderr: float, n: int) -> float:
    """Half the width of the 95 % interval (Student's t) of a mean of n >= 2 values, given its standard error."""
    freedom = n - 1
    if freedom <= len(_T):
        return stderr * _T[freedom - 1]
    # The quantile's expansion in 1 / freedom (Abramowitz and Stegun, 26.7.5).
    return stderr * (Z + (Z**3 + Z) / (4 * freedom) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * freedom**2))


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Wilson's score interval of 95 % for a proportion (1927).

    Unlike mean +- Z stderr it stays within [0, 1] and has a positive width at 0 and n successes. It contains the mean
    exactly, without rounding errors, because figures draw the distances from it. Without trials it is (0, 1).
    """
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    middle = p + Z * Z / (2 * n)
    half = Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    scale = 1 + Z * Z / n
    return min(p, max(0.0, (middle - half) / scale)), max(p, min(1.0, (middle + half) / scale))


def ratio_error(sizes: Sequence[int], means: Sequence[float]) -> float | None:
    """Standard error of the mean over all items of independently drawn groups, given the groups' sizes and means.

    It is the standard error of a ratio of sums (Cochran, Sampling Techniques, 1977, 6.4). For groups of equal size it
    equals the standard error of their means. None for a single group.
    """
    count, total = len(sizes), sum(sizes)
    if len(set(sizes)) == 1:
        return standard_error(means)
    mean = math.fsum(n * m for n, m in zip(sizes, means, strict=True)) / total
    squares = math.fsum((n * (m - mean)) ** 2 for n, m in zip(sizes, means, strict=True))
    return math.sqrt(squares * count / (count - 1)) / total


def proportion(successes: int, n: int) -> dict[str, float]:
    """A record's entries for the share of right answers: mean, Wilson's 95 % interval (low, high) and n > 0."""
    low, high = wilson(successes, n)
    return {"mean": successes / n, "low": low, "high": high, "n": n}


def perplexity(nats: float) -> float:
    """exp(nats); infinite where a float cannot hold it."""
    return math.exp(nats) if nats < 700 else math.inf


def doubling(length: int) -> Iterator[slice]:
    """Buckets of 0, 1, ..., length - 1 that end at powers of two: 0, 1, 2 to 3, 4 to 7, 8 to 15 ..."""
    start, stop = 0, 1
    while start < length:
        yield slice(start, min(stop, length))
        start, stop = stop, 2 * stop


def without_keys(answers: int) -> float:
    """Accuracy of a model that remembers a sample's values but not their keys, for n = ``answers`` per sample.

    The values of a sample are all different. The model guesses among the values not yet given as answers:
    (1/n + ... + 1/1) / n. This is above chance, but is not memory of a pair.
    """
    return math.fsum(1 / left for left in range(1, answers + 1)) / answers


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean of independent values; None for a single one."""
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def variance_within(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Variance of values around the mean of their group, pooled over groups, and its degrees of freedom.

    This is the mean square within groups of an analysis of variance, which assumes equal variance in all groups. (0, 0)
    if no group has two values.
    """
    squares, freedom = [], 0
    for values in groups:
        mean = math.fsum(values) / len(values)
        squares += [(value - mean) ** 2 for value in values]
        freedom += len(values) - 1
    return (math.fsum(squares) / freedom, freedom) if freedom else (0.0, 0)


class Effects(NamedTuple):
    """Values of a two-way table as row + column + rest.

    rows: the mean of each row as it would be in a complete table. variance: of the rest, with its degrees of freedom;
    (0, 0) if rows and columns explain whatever values there are.
    """

    rows: dict[Hashable, float]
    variance: tuple[float, int]


def effects_of(values: Mapping[tuple[Hashable, Hashable], float]) -> Effects:
    """Effects of rows and columns on the values of their pairs, by least squares; any pairs may be missing.

    Rows that no column connects cannot be compared: then all rows have the means of their own values.
    """
    import numpy as np  # not at the top: figures need it, and commands that show help do not

    if not values:
        return Effects({}, (0.0, 0))
    rows, columns = (list(dict.fromkeys(pair[n] for pair in values)) for n in (0, 1))
    design = np.zeros((len(values), len(rows) + len(columns)))
    for line, (row, column) in zip(design, values, strict=True):
        line[rows.index(row)] = line[len(rows) + columns.index(column)] = 1.0
    found = np.array(list(values.values()))
    fitted, _, rank, _ = np.linalg.lstsq(design, found, rcond=None)
    means = fitted[: len(rows)] + fitted[len(rows) :].mean()
    if rank < len(rows) + len(columns) - 1:
        means = [np.mean([value for pair, value in values.items() if pair[0] == row]) for row in rows]
    freedom = len(values) - int(rank)
    variance = float(((found - design @ fitted) ** 2).sum()) / freedom if freedom else 0.0
    return Effects(dict(zip(rows, map(float, means), strict=True)), (variance, freedom))


def half_width_of_sum(parts: Sequence[tuple[float, int]]) -> float:
    """Half the width of the 95 % interval of an estimate whose variance is the sum of independently estimated parts.

    The degrees of freedom follow Satterthwaite (Biometrics Bulletin 2, 1946), rounded down. They are at least
    the smallest part's.

    Args:
        parts: (variance, degrees of freedom) of each part; parts without degrees of freedom are left out.
    """
    known = [(variance, freedom) for variance, freedom in parts if freedom]
    total = math.fsum(variance for variance, _ in known)
    if not 0 < total < math.inf:
        return total and math.inf
    freedom = total**2 / math.fsum(variance**2 / freedom for variance, freedom in known)
    return half_width(math.sqrt(total), math.floor(freedom + 1e-9) + 1)
