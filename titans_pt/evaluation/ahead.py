"""Forecasts of the next rows of a user's own series: a CSV file and a picture."""

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from titans_pt.errors import UserError
from titans_pt.forecasting.protocol import Scale, Windows, errors, last_value
from titans_pt.forecasting.series import Series
from titans_pt.runs.loaded import load_run
from titans_pt.streaming import best_device
from titans_pt.tasks.forecast import Forecast, forecast_with
from titans_pt.tools.files import check_room, write_text
from titans_pt.tools.plots import new_figure, own_style, save_figure

SHOWN = 4
"""Columns in the picture, the first ones."""
RECENT = 500
"""Most windows whose errors are drawn, from the end of the file."""
READING = ("missing", "gaps", "date_column", "date_format")
"""Settings under ``forecast`` that say how a file is read; all others are the run's."""


def forecast_file(
    run: str | Path, path: Path | None, steps: int | None, out: Path | None, step: int | None = None,
    words: Sequence[str] = (),
) -> Path:  # fmt: skip
    """Forecast the ``steps`` rows after the CSV file ``path`` (None: after the run's series); return the file written.

    A run forecasts forecast.horizon rows at a time. Further rows are forecast from forecasts; the output says which.
    The picture has the last rows, the forecast, a forecast of the last known rows, and the error of each row ahead over
    the windows at the end of the file.

    Args:
        words: settings of READING, KEY=VALUE.

    Raises:
        UserError: the run is of another task; or the file lacks a column, has fewer rows than a lookback or numbers far
            from those of the training, or is the file to be written.
    """
    allowed = [f"forecast.{key}" for key in READING]
    for word in words:
        if word.partition("=")[0] not in allowed:
            raise UserError(f"{word}: not for titans forecast; allowed: {', '.join(allowed)}")
    loaded = load_run(run, step=step, device=best_device(), overrides=words)
    task = loaded.task
    if not isinstance(task, Forecast):
        raise UserError(f"{loaded.folder.path}: trained for the task {task.name!r}; name the folder of a run with "
                        "task=forecast")  # fmt: skip
    series = task.read() if path is None else task.read_own(path, str(loaded.folder.path))
    name = path or series.name
    assert task.scale is not None  # load_run restored it
    lookback, horizon = task.lookback, task.settings.horizon
    if len(series.values) < lookback:
        raise UserError(f"{name}: {len(series.values)} rows; the run forecasts from the last {lookback}")
    out = out or loaded.folder.path / "forecast" / f"{series.name}.csv"
    if out.suffix.lower() == ".png":
        raise UserError(
            f"--out: given {out}, which is the picture's name; name a CSV file, the picture stands beside it"
        )
    read = path or Path(task.settings.series)
    if read.is_file() and read.resolve() == out.resolve():
        raise UserError(f"--out: {out} is the input of the forecast; name another file")
    check_room(out, "--out")
    steps = steps or horizon
    scaled = task.scale.fp32(series.values, str(name), series.columns)
    ahead = _ahead(loaded.model, scaled[-lookback:].T, horizon, steps)
    rows = task.scale.back(ahead.T.astype(np.float64))
    write_text(out, _csv(series, rows, task.scale))
    picture = _draw(loaded.model, series.columns, task.scale, scaled, ahead, lookback, horizon, out, series.name)
    for note in series.notes:
        print(f"{name}: {note}")
    if task.spacing and series.spacing and task.spacing != series.spacing:
        print(f"{name}: rows are {series.spacing} apart, those of the training {task.spacing}")
    if steps > horizon:
        print(f"--steps {steps}: rows after the first {horizon} (forecast.horizon) are forecast from forecasts")
    print(f"{steps} rows behind the {len(series.values):,} of {name}: {out}; picture {picture}", flush=True)
    return out


def _csv(series: Series, rows: np.ndarray, scale: Scale) -> str:
    """Text of a CSV file with the ``rows`` that follow a series; numbers have six digits of a channel's deviation."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["date" if series.dates else "row", *series.columns])
    places = [max(0, 6 - math.floor(math.log10(std))) for std in scale.std]
    for when, row in zip(series.following(len(rows)), rows, strict=True):
        writer.writerow([when, *(f"{x:.{digits}f}" for x, digits in zip(row, places, strict=True))])
    return text.getvalue()


def _ahead(model, x: np.ndarray, horizon: int, steps: int) -> np.ndarray:
    """(channels, lookback) -> (channels, steps)."""
    lookback, found = x.shape[1], []
    for _ in range(0, steps, horizon):
        found.append(forecast_with(model, x[None])[0])
        x = np.concatenate([x, found[-1]], 1)[:, -lookback:]
    return np.concatenate(found, 1)[:, :steps]


@own_style()
def _draw(model, columns, scale, scaled, ahead, lookback: int, horizon: int, out: Path, name: str) -> Path:
    shown, n = min(SHOWN, len(columns)), len(scaled)
    tested = n >= lookback + horizon
    figure = new_figure(11.0, 2.2 + 1.6 * shown)
    grid = figure.add_gridspec(shown, 2, width_ratios=(2, 1))
    first = max(0, n - 2 * lookback)
    whole = scale.back(scaled.astype(np.float64))
    future = scale.back(ahead.T.astype(np.float64))
    if tested:
        before = forecast_with(model, scaled[None, n - horizon - lookback : n - horizon].transpose(0, 2, 1))[0]
        known = scale.back(before.T.astype(np.float64))
    for i in range(shown):
        axes = figure.add_subplot(grid[i, 0])
        axes.plot(range(first, n), whole[first:, i], color="black", label="truth")
        if tested:
            axes.plot(range(n - horizon, n), known[:, i], color="C1", label="forecast of known rows")
        axes.plot(range(n, n + len(future)), future[:, i], color="C0", label="forecast")
        axes.set_ylabel(columns[i], fontsize=8)
        if i == 0:
            axes.legend(fontsize=7)
    axes.set_xlabel("row")
    if tested:
        windows = Windows(scaled[-(lookback + horizon + RECENT - 1) :], lookback, horizon)
        axes = figure.add_subplot(grid[:, 1])
        size = 1 << 20
        axes.plot(range(1, horizon + 1), errors(lambda x: forecast_with(model, x), windows, size)[0], label="model")
        axes.plot(range(1, horizon + 1), errors(last_value(horizon), windows)[0], color="0.6", label="last value")
        axes.set_xlabel(f"rows ahead; the last {len(windows)} windows of the file")
        axes.set_ylabel("mean squared error (scaled)")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7)
    figure.suptitle(name, fontsize=9)
    return save_figure(figure, out.with_suffix(".png"))
