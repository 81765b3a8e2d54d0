"""The usual protocol of long-term forecasting: splits, scaling by the training rows, windows at every row, errors.

Informer, Autoformer and iTransformer use it. Channels are scaled by mean and standard deviation of the training rows;
validation and test borrow the ``lookback`` rows before them; MSE and MAE are means over all windows, steps and channels
on that scale. Older loaders drop the last, incomplete batch of the test; here no batch is dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from titans_pt.errors import UserError

SPLITS = {"ETTh1": (8640, 2880, 2880), "ETTh2": (8640, 2880, 2880),
          "ETTm1": (34560, 11520, 11520), "ETTm2": (34560, 11520, 11520)}  # fmt: skip
"""Rows of training, validation and test: 12, 4 and 4 months of 30 days. The rest is unused. Other series are split by
share: int(0.7 n) rows for training, int(0.2 n) for the test, the rows between for validation."""


FAR = 1e12
"""Most standard deviations from the mean of the training rows: fp32 holds the square."""


def split_rows(name: str, rows: int) -> tuple[int, int, int]:
    """Numbers of rows for training, validation and test."""
    if name in SPLITS:
        if rows < sum(SPLITS[name]):
            raise UserError(f"forecast.series: {name} has {rows} rows, and its splits need {sum(SPLITS[name])}; "
                            "take the whole file, or rename one that is another series")  # fmt: skip
        return SPLITS[name]
    train, test = int(0.7 * rows), int(0.2 * rows)
    return train, rows - train - test, test


@dataclass(frozen=True)
class Scale:
    """Scaling of the channels. mean, std: (channels,) of the training rows; a std of 0 counts as 1."""

    mean: np.ndarray
    std: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray) -> "Scale":
        # The mean of a constant channel is rounded, so its standard deviation can be tiny instead of 0.
        return cls(rows.mean(0), np.where(rows.max(0) > rows.min(0), rows.std(0), 1.0))

    def __call__(self, values: np.ndarray) -> np.ndarray:
        return (values - self.mean) / self.std

    def fp32(self, values: np.ndarray, name: str, columns: Sequence[str] = ()) -> np.ndarray:
        """Scaled values in fp32.

        Args:
            name: the series, for the message; columns: names of its channels.

        Raises:
            UserError: a number is so far from the training rows that fp32 cannot square it.
        """
        scaled = self(values)
        far = np.abs(scaled).max(0) > FAR
        if far.any():
            at = int(far.argmax())
            column = columns[at] if columns else at + 1
            raise UserError(f"{name}: the column {column!r} has numbers more than {FAR:g} standard deviations from the "
                            f"mean of the training rows ({self.mean[at]:.4g}, deviation {self.std[at]:.4g}); give them "
                            "in the unit of those rows")  # fmt: skip
        return scaled.astype(np.float32)

    def back(self, values: np.ndarray) -> np.ndarray:
        return values * self.std + self.mean


@dataclass(frozen=True)
class Windows:
    """Windows of one split, one at every row. rows: (n, channels) scaled, borrowed rows included.

    start: number of the first row in the series.
    """

    rows: np.ndarray
    lookback: int
    horizon: int
    start: int = 0

    def __len__(self) -> int:
        return max(0, len(self.rows) - self.lookback - self.horizon + 1)

    def window(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Lookback (channels, lookback) and the rows after it (channels, horizon)."""
        middle = i + self.lookback
        return self.rows[i:middle].T, self.rows[middle : middle + self.horizon].T

    def block(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Windows first .. last - 1: (windows, channels, lookback) and (windows, channels, horizon)."""
        whole = np.lib.stride_tricks.sliding_window_view(
            self.rows[first : last - 1 + self.lookback + self.horizon], self.lookback + self.horizon, axis=0
        )
        return whole[..., : self.lookback], whole[..., self.lookback :]


@dataclass(frozen=True)
class Protocol:
    """The three splits of a series."""

    scale: Scale
    train: Windows
    validation: Windows
    test: Windows


def protocol(name: str, values: np.ndarray, lookback: int, horizon: int, columns: Sequence[str] = ()) -> Protocol:
    """Split and scale a series.

    Raises:
        UserError: a split has no window, or a number is far from the training rows.
    """
    train, validation, test = split_rows(name, len(values))
    scale = Scale.of(values[:train])
    scaled = scale.fp32(values, name, columns)
    ends = {"training": (0, train), "validation": (train - lookback, train + validation),
            "test": (train + validation - lookback, train + validation + test)}  # fmt: skip
    found = []
    for split, (first, last) in ends.items():
        windows = Windows(scaled[max(0, first) : last], lookback, horizon, max(0, first))
        if first < 0 or not len(windows):
            raise UserError(f"forecast.horizon: given {horizon} with a lookback of {lookback} rows; the {split} part "
                            f"of {name} has {last - max(0, first)} rows with those before it, too few for one window; "
                            "lower forecast.horizon or data.seq_len")  # fmt: skip
        found.append(windows)
    return Protocol(scale, *found)


Forecast = Callable[[np.ndarray], np.ndarray]
"""(windows, channels, lookback) -> (windows, channels, horizon)"""


def errors(forecast: Forecast, windows: Windows, at_once: int = 1 << 24) -> tuple[np.ndarray, np.ndarray]:
    """MSE and MAE of each step ahead, (horizon,) float64: means over all windows and channels.

    at_once: approximate number of forecast values in memory at a time.
    """
    size = max(1, at_once // (windows.rows.shape[1] * windows.horizon))
    squares, absolutes = np.zeros((2, windows.horizon))
    for first in range(0, len(windows), size):
        x, y = windows.block(first, min(first + size, len(windows)))
        off = (forecast(x) - y).astype(np.float64)
        squares += (off**2).sum((0, 1))
        absolutes += np.abs(off).sum((0, 1))
    count = len(windows) * windows.rows.shape[1]
    return squares / count, absolutes / count


def last_value(horizon: int) -> Forecast:
    """Repeat the last row of the lookback at every step."""
    return lambda x: np.repeat(x[..., -1:], horizon, -1)


def seasonal(horizon: int, period: int) -> Forecast:
    """Repeat the last ``period`` rows of the lookback."""
    return lambda x: x[..., x.shape[-1] - period + np.arange(horizon) % period]


def ridge(train: Windows, penalty: float = 1e-3) -> Forecast:
    """Fit ridge regression from the lookback to the target, both less the lookback's mean, in closed form.

    One linear map serves all channels; it is fitted to all training windows.

    penalty: factor of the mean square of an input and the number of windows; the product is added to the diagonal.
    """
    lookback = train.lookback
    gram, cross = np.zeros((lookback, lookback)), np.zeros((lookback, train.horizon))
    size = max(1, (1 << 24) // (train.rows.shape[1] * (lookback + train.horizon)))
    for first in range(0, len(train), size):
        x, y = (part.reshape(-1, part.shape[-1]) for part in train.block(first, min(first + size, len(train))))
        mean = x.mean(-1, keepdims=True)
        x, y = x - mean, y - mean
        gram += x.T @ x
        cross += x.T @ y
    gram[np.diag_indices(lookback)] += penalty * np.trace(gram) / lookback + 1e-12
    weights = np.linalg.solve(gram, cross).astype(np.float32)

    def forecast(x: np.ndarray) -> np.ndarray:
        mean = x.mean(-1, keepdims=True)
        return (x - mean) @ weights + mean

    return forecast
