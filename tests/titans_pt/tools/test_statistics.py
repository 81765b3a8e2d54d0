"""Intervals."""

import math
import random

import numpy as np
import pytest

from titans_pt.tools.statistics import (
    effects_of,
    half_width,
    half_width_of_sum,
    ratio_error,
    standard_error,
    variance_within,
    wilson,
    without_keys,
)  # fmt: skip


@pytest.mark.parametrize(
    "successes, n, low, high",
    [
        # By hand for z^2 = 3.8415: at 0 of n the interval is [0, z^2 / (n + z^2)].
        (0, 10, 0.0, 3.841459 / 13.841459),
        (10, 10, 10 / 13.841459, 1.0),
        # (0.5 + z^2/2n -+ z sqrt(0.25/n + z^2/4n^2)) / (1 + z^2/n) at p = 1/2 is 1/2 -+ z / (2 sqrt(n + z^2)).
        (5, 10, 0.5 - 1.959964 / (2 * 13.841459**0.5), 0.5 + 1.959964 / (2 * 13.841459**0.5)),
        (81, 263, 0.2553, 0.3662),  # Newcombe, Statistics in Medicine 17 (1998), table I
        (15, 148, 0.0624, 0.1605),
        (1, 29, 0.0061, 0.1718),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilsons_interval_holds_the_mean():
    """To the last bit: matplotlib refuses a bar of -1e-16."""
    for n in range(1, 3000):
        for successes in (0, 1, n // 2, n - 1, n):
            low, high = wilson(successes, n)
            assert low <= successes / n <= high


@pytest.mark.parametrize("n", [2, 3, 4, 10, 31, 32, 60, 256, 100_000])
def test_students_t_leaves_a_twentieth_outside(n):
    """Integrate the density over angles: with x = sqrt(f) tan(a) it is proportional to cos(a)^(f - 1)."""
    freedom = n - 1
    angles = np.linspace(0, math.pi / 2, 2_000_001)
    density = np.cos(angles) ** (freedom - 1)
    inside = angles <= math.atan(half_width(1.0, n) / math.sqrt(freedom))
    share = np.trapezoid(density[inside], angles[inside]) / np.trapezoid(density, angles)
    assert share == pytest.approx(0.95, abs=2e-5)


def test_variance_within_groups():
    # Around 2: 1 + 1; around 5: nothing, and no degree of freedom for the group of one.
    assert variance_within([[1.0, 3.0], [5.0, 5.0, 5.0], [7.0]]) == (2.0 / 3, 3)
    assert variance_within([[1.0], [2.0]]) == (0.0, 0)


def test_effects_of_rows_and_columns():
    rng = np.random.default_rng(2)
    rows, columns, noise = rng.normal(0, 5, 40), rng.normal(0, 5, 30), rng.normal(0, 0.3, (40, 30))
    full = {(r, c): rows[r] + columns[c] + noise[r, c] for r in range(40) for c in range(30)}
    means, (variance, freedom) = effects_of(full)
    table = np.array(list(full.values())).reshape(40, 30)
    left = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    assert freedom == 39 * 29 and variance == pytest.approx((left**2).sum() / freedom)
    assert list(means.values()) == pytest.approx(table.mean(1))
    some = {pair: value for pair, value in full.items() if rng.random() < 0.3}
    means, (variance, freedom) = effects_of(some)
    assert freedom == len(some) - 69 and variance == pytest.approx(0.09, rel=0.2)
    expected = rows + columns.mean()
    assert np.abs(np.array([means[r] for r in range(40)]) - expected).max() < 0.6
    raw = [np.mean([value for pair, value in some.items() if pair[0] == r]) for r in range(40)]
    assert np.abs(raw - expected).max() > 2, "means of other columns cannot be compared"


def test_effects_of_few_values():
    # b is 4 above a in the only column that both have; no value is left for the variance.
    means, variance = effects_of({("a", 0): 1.0, ("a", 1): 2.0, ("b", 0): 5.0})
    assert means == pytest.approx({"a": 1.5, "b": 5.5}) and variance == (0.0, 0)
    means, variance = effects_of({("a", 0): 1.0, ("a", 1): 3.0, ("b", 2): 5.0, ("b", 3): 9.0})
    assert means == pytest.approx({"a": 2.0, "b": 7.0}) and variance == (0.0, 0), "no column connects them"
    assert effects_of({}) == ({}, (0.0, 0))


def test_half_width_of_a_sum():
    assert half_width_of_sum([(0.04, 9)]) == half_width(0.2, 10)
    assert half_width_of_sum([(0.04, 9), (1.0, 0)]) == half_width(0.2, 10), "without degrees of freedom it is left out"
    # Two equal parts: their degrees of freedom add up. A part of zero adds none.
    assert half_width_of_sum([(0.02, 4), (0.02, 4)]) == half_width(0.2, 9)
    assert half_width_of_sum([(0.04, 4), (0.0, 100)]) == half_width(0.2, 5)
    # (0.03 + 0.01)^2 / (0.03^2 / 2 + 0.01^2 / 50) = 3.54, rounded down
    assert half_width_of_sum([(0.03, 2), (0.01, 50)]) == half_width(0.2, 4)
    assert half_width_of_sum([(0.0, 3)]) == 0.0 and half_width_of_sum([(math.inf, 3)]) == math.inf


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_model_that_binds_no_value_to_its_key(count):
    """Simulate the mean over random orders of the answers, each guessed among the values that are left."""
    right = trials = 0
    draw = random.Random(0)
    for _ in range(4000):
        left = list(range(count))
        for answer in draw.sample(range(count), count):
            right += draw.choice(left) == answer
            trials += 1
            left.remove(answer)
    assert without_keys(count) == pytest.approx(right / trials, abs=0.01)


def test_the_error_of_a_mean_over_groups_of_other_sizes():
    draw = np.random.default_rng(0)
    equal = draw.normal(size=30)
    assert ratio_error([7] * 30, equal) == standard_error(equal) and ratio_error([7], [1.0]) is None
    plain, tail = ratio_error([100] * 4, [4.8, 4.7, 5.0, 4.3]), ratio_error([100] * 4 + [1], [4.8, 4.7, 5.0, 4.3, 7.5])
    assert tail == pytest.approx(plain, rel=0.1), "a group of one item says next to nothing"
    sizes = draw.integers(20, 100, 40)
    means, errors = [], []
    for _ in range(2000):  # the stated error is that of the mean over draws
        groups = draw.normal(size=40)
        means.append(np.average(groups, weights=sizes))
        errors.append(ratio_error(sizes.tolist(), groups.tolist()))
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.05)
