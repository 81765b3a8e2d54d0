"""Long-term forecasting (paper, Table 3): predict the next rows of a series from earlier rows (docs/forecasting.md)."""

import contextlib
import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from titans_pt.config import Config, PathName, Positive, Section
from titans_pt.errors import UserError
from titans_pt.forecasting.datasets import channels_of, load
from titans_pt.forecasting.protocol import Protocol, Scale, Windows, errors, last_value, protocol
from titans_pt.forecasting.series import Series, read_csv
from titans_pt.models.forecaster import Forecaster, patches_of
from titans_pt.models.mixers.base import Need
from titans_pt.parallel import RankGroup
from titans_pt.runs.folder import RunFolder
from titans_pt.tasks.base import TASKS, Task, TaskData, nan_unless_finite, refuse, with_weights
from titans_pt.tasks.places import Places
from titans_pt.tools.files import write_text
from titans_pt.tools.records import digest

ABOUT = "series.json"
"""File of a run's folder that holds the channels and their scales."""


class WindowSamples:
    """Windows in an order that is a function of (seed, position).

    Args:
        windows: windows whose lookback is all of data.seq_len.
        lookback: rows between two forecasts of a window.
        limit: windows per epoch, drawn again for each epoch; None: all.
        seed: seed of the order; None: the windows' own order.
    """

    def __init__(self, windows: Windows, lookback: int, limit: int | None, seed: int | None):
        self.windows, self.lookback, self.seq_len = windows, lookback, windows.lookback
        self.places = Places(len(windows), seed, limit)

    def __len__(self) -> int:
        return len(self.places)

    def sample(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """A window (channels, seq_len), and the rows after each of its lookbacks (channels, lookbacks, horizon);
        fp32."""
        x, y = self.windows.window(self.places[position])
        rows, ends = np.concatenate([x, y], 1), range(self.lookback, self.seq_len + 1, self.lookback)
        targets = np.stack([rows[:, end : end + self.windows.horizon] for end in ends], 1)
        return np.ascontiguousarray(x), targets

    def describe(self, position: int) -> dict:
        return {"position": position, "first row": self.windows.start + self.places[position]}


@TASKS.register
class Forecast(Task):
    """Forecast the rows after (B, channels, data.seq_len), trained with the mean squared error of scaled values."""

    name = "forecast"
    unit = "mean squared error"
    baseline_name = "last value"
    figures = ("loss", "mae")
    suites = {"forecast": "titans_pt.evaluation.forecast:Forecasts"}
    usual = ("forecast",)

    class Settings(Section):
        series: PathName = "elecdemand"
        """Series to learn: elecdemand, simbench-generation or simbench-loads, from a package that is downloaded at the
        first use; ETTh1, ETTh2, ETTm1, ETTm2, ECL, Traffic or Weather, whose file is in data.dir; or a CSV file."""
        horizon: Positive = 96
        """Horizon H: rows that are forecast."""
        lookback: Positive | None = None
        """Lookback L: rows that a forecast is made from. Null: data.seq_len. With a smaller divisor of data.seq_len, a
        sample is several lookbacks in a row: a forecast follows each, and the state is carried along."""
        patch: Positive = 16
        """Rows of a token."""
        stride: Positive = 8
        """Rows between two tokens."""
        windows: Positive | None = None
        """Training windows per epoch, drawn again for each epoch. Null: all."""
        columns: list[str] | None = None
        """Columns that are read. Null: all but the date."""
        missing: Literal["refuse", "fill"] = "refuse"
        """Treatment of cells without a number. refuse: an error. fill: the number above, if there is one."""
        gaps: Literal["refuse", "fill", "ignore"] = "refuse"
        """Treatment of dates that are not at equal steps. refuse: an error. fill: absent rows are added, with the
        numbers above.
        ignore: rows are read as if they were at equal steps, which is always done with benchmarks."""
        date_column: str | None = None
        """Name of the column with the date. Null: found by its name or its content, if there is one."""
        date_format: str | None = None
        """Format of the dates, in the notation of Python's strptime. Null: found."""

    settings: Settings

    def __init__(self, config: Config):
        super().__init__(config)
        self.columns: list[str] | None = None
        """Set by :meth:`open` or :meth:`restore`, like the scale."""
        self.scale: Scale | None = None
        self.series_name = self.settings.series
        self.spacing: str | None = None
        self.trained_on: str | None = None
        """Hash of the series that a restored run was trained on (:func:`fingerprint`)."""

    @property
    def lookback(self) -> int:
        return self.settings.lookback or self.config.data.seq_len

    @classmethod
    def check(cls, config: Config, need: Need):
        settings, length = cls.Settings.model_validate(config.section(cls.name)), config.data.seq_len
        lookback, patch, stride = settings.lookback or length, settings.patch, settings.stride
        path = "forecast.lookback" if settings.lookback else "data.seq_len"
        need(length % lookback == 0, "forecast.lookback", lookback, f"must divide data.seq_len={length}")
        least = patch + max(0, lookback - patch) // stride * stride
        need(
            lookback == least,
            path,
            lookback,
            f"must be forecast.patch={patch} and a multiple of forecast.stride={stride}, such as {least}",
        )
        need(stride <= patch, "forecast.stride", stride, f"at most forecast.patch={patch}")
        refuse(config, need, cls.name, "model.memory.write_cost", "train.z_loss", "parallel.sequence")

    # ---- the model

    def build_model(self) -> Forecaster:
        settings = self.settings
        return Forecaster(
            self.config.model, self.lookback, settings.horizon, settings.patch, settings.stride, self.channels
        )

    @property
    def channels(self) -> int:
        """Channels of the series. Before it is read, they come from its name or its file; 1 if neither tells."""
        return len(self.columns) if self.columns else self._expected_channels

    @cached_property
    def _expected_channels(self) -> int:
        settings = self.settings
        with contextlib.suppress(UserError):  # a plan needs no data
            return channels_of(settings.series, settings.columns, settings.date_column, settings.date_format) or 1
        return 1

    def sequences(self, rows: int, length: int) -> tuple[int, int]:
        """Count each channel as a row of patches."""
        settings = self.settings
        return rows * self.channels, length // self.lookback * patches_of(
            self.lookback, settings.patch, settings.stride
        )

    def output_bytes(self, rows: int, length: int, width: int) -> dict[str, int]:
        """Bytes of windows, scaled windows and patches in fp32, of the last patches' outputs, and of the forecasts with
        their errors."""
        settings, lookbacks = self.settings, length // self.lookback
        each, patches = self.sequences(rows, length)
        windows = 4 * each * (3 * length + lookbacks * (settings.stride + 4 * settings.horizon))
        ends = each * (width * patches * settings.patch + 2 * width * lookbacks * self.config.model.d_model)
        return {"windows": windows + ends}

    def objective(self, model: nn.Module, tensor: RankGroup) -> nn.Module:
        return SquaredError(model)

    # ---- data

    def read(self) -> Series:
        """Read the series that the settings name.

        Raises:
            UserError: the series is missing or malformed.
        """
        settings = self.settings
        return load(settings.series, Path(self.config.data.dir), settings.missing, settings.gaps, settings.columns,
                    settings.date_column, settings.date_format)  # fmt: skip

    def read_own(self, path: Path, run: str) -> Series:
        """Read another file with the columns that ``run`` was trained on."""
        settings = self.settings
        return read_csv(path, settings.missing, settings.gaps, self.columns, settings.date_column, settings.date_format,
                        run)  # fmt: skip

    def split(self, series: Series, lookback: int) -> Protocol:
        return protocol(series.name, series.values, lookback, self.settings.horizon, series.columns)

    def open(self) -> TaskData:
        series = self.read()
        parts = self.split(series, self.config.data.seq_len)
        self.columns, self.scale, self.series_name = series.columns, parts.scale, series.name
        self.spacing = series.spacing
        for note in series.notes:
            print(f"series {series.name}: {note}", flush=True)
        settings = self.settings
        windows = digest(settings.horizon, self.lookback, settings.patch, settings.stride, settings.windows)
        baseline = float(errors(last_value(self.settings.horizon), parts.validation)[0].mean())
        return TaskData(
            WindowSamples(parts.train, self.lookback, self.settings.windows, self.config.run.seed),
            WindowSamples(parts.validation, self.lookback, self.config.train.eval_samples, None),
            {"data": fingerprint(series), "windows": windows}, baseline,
        )  # fmt: skip

    def differs(self, key: str, path: Path, was: str, now: str) -> str:
        return f"forecast.series: {self.settings.series} holds other numbers than {path} was trained on"

    # ---- the run's folder

    def keep(self, folder: RunFolder):
        """Write the names and scales of the channels."""
        assert self.columns and self.scale
        about = {"name": self.series_name, "columns": self.columns, "mean": self.scale.mean.tolist(),
                 "std": self.scale.std.tolist(), "spacing": self.spacing}  # fmt: skip
        write_text(folder.path / ABOUT, json.dumps(about, indent=1) + "\n")

    def restore(self, folder: RunFolder, identity: dict[str, str]):
        self.trained_on = identity.get("data")
        path = folder.path / ABOUT
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
            self.columns, self.series_name, self.spacing = about["columns"], about["name"], about.get("spacing")
            self.scale = Scale(np.array(about["mean"]), np.array(about["std"]))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"{path}: missing or damaged ({error!r}); the same titans train command writes it "
                            "again") from None  # fmt: skip


class SquaredError(nn.Module):
    """A :class:`Forecaster` and its loss, the mean squared error."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """x (B, C, N * lookback), target (B, C, N, horizon) -> the mean loss; with weights (B,) also "mae"."""
        y, _ = self.model(x, output_final_state=not self.training)
        off = (y - target).flatten(1)
        squares = off.square().mean(1)
        if weight is None:
            return nan_unless_finite(squares.mean())
        return {"loss": with_weights(squares, weight), "mae": with_weights(off.abs().mean(1), weight)}


def fingerprint(series: Series) -> str:
    """SHA-256 (hex) of a series' numbers."""
    return hashlib.sha256(series.values.tobytes()).hexdigest()


@torch.no_grad()
def forecast_with(model: nn.Module, x: np.ndarray) -> np.ndarray:
    """(windows, channels, lookback) -> (windows, channels, horizon), each from an empty state."""
    at = next(model.parameters()).device
    y, _ = model(torch.from_numpy(np.array(x, np.float32)).to(at), output_final_state=False)
    return y[:, :, -1].cpu().numpy()
