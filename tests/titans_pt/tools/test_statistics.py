"""The Wilson interval."""

import pytest

from titans_pt.tools.statistics import wilson


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
