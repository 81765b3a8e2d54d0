"""The test of a forecaster: errors over all windows, beside baselines that need no training, and streaming."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from titans_pt.config import Config
from titans_pt.errors import UserError
from titans_pt.forecasting.datasets import season
from titans_pt.forecasting.protocol import errors, last_value, ridge, seasonal
from titans_pt.forecasting.published import MODELS, TABLE3
from titans_pt.runs.loaded import LoadedRun
from titans_pt.streaming import device_of
from titans_pt.tasks.forecast import Forecast, fingerprint, forecast_with
from titans_pt.tools.plots import new_figure, own_style, save_figure
from titans_pt.tools.records import digest

ROWS_AT_ONCE = 2048
"""Windows times channels that the model reads at once."""
PHASES = 8
"""Streams through the series; their starts divide the first lookback evenly."""


class Forecasts:
    """A job is a row of the table: the model, a baseline, or the model with its state carried along."""

    name = "forecast"

    def __init__(self, run: LoadedRun, config: Config):
        assert isinstance(run.task, Forecast)  # the task that names this suite
        self.loaded, self.task = run, run.task
        self.series = run.task.read()
        if self.series.columns != run.task.columns:
            raise UserError(f"forecast.series: {run.task.settings.series} has other columns than {run.folder.path} was "
                            "trained on; put the file back")  # fmt: skip
        if run.task.trained_on not in (None, fingerprint(self.series)):
            raise UserError(f"forecast.series: {run.task.settings.series} holds other numbers than {run.folder.path} "
                            "was trained on; put the file back, or forecast from the new one: titans forecast RUN "
                            "--csv FILE")  # fmt: skip
        self.lookback, self.horizon = run.task.lookback, run.task.settings.horizon
        self.parts = run.task.split(self.series, self.lookback)
        self.baselines: dict[str, Callable] = {
            "ridge on the lookback": partial(ridge, self.parts.train),
            "last value": partial(last_value, self.horizon),
        }
        """Name of a baseline -> function that returns its forecast."""
        seasons = season(self.series)
        if seasons and seasons[1] <= self.lookback:
            name, period = seasons
            self.baselines[name] = partial(seasonal, self.horizon, period)
        self.jobs = ["model", *self.baselines]
        self.phases = [n * self.lookback // PHASES for n in range(PHASES)] if self.lookback >= PHASES else [0]
        starts = self._lookbacks()
        if starts and starts[-1] >= self.parts.test.start:  # a whole lookback, and its horizon, in the test's rows
            self.jobs.append("streamed")
        self.keys = [digest(self.name, job, self.series.name, run.identity) for job in self.jobs]

    def measure(self, index: int) -> dict:
        """MSE and MAE of each step ahead."""
        job, test = self.jobs[index], self.parts.test
        if job == "streamed":
            return {"by": job} | self._streamed()
        if job == "model":
            channels = test.rows.shape[1]
            size = max(1, ROWS_AT_ONCE // channels) * channels * self.horizon
            mse, mae = errors(lambda x: forecast_with(self.loaded.model, x), test, size)
        else:
            mse, mae = errors(self.baselines[job](), test)
        return {"by": job, "mse": mse.tolist(), "mae": mae.tolist(), "n": len(test)}

    def _lookbacks(self) -> range:
        """First rows of consecutive lookbacks through the whole series."""
        last = self.parts.test.start + len(self.parts.test.rows)
        return range(0, last - self.horizon - self.lookback - self.phases[-1] + 1, self.lookback)

    @torch.no_grad()
    def _streamed(self) -> dict:
        """Read the whole series once, lookback after lookback, with the state carried along from the first row on.
        Return the errors on the test's rows, and the errors of the same windows from an empty state."""
        settings, length = self.task.settings, self.lookback
        rows = self.parts.scale.fp32(self.series.values, self.series.name, self.series.columns)
        first = self.parts.test.start + length  # the first lookback of test rows alone ends here
        phases = self.phases
        model, state = self.loaded.model, None
        device = device_of(model)
        found: dict[str, list[np.ndarray]] = {"carried": [], "fresh": []}
        for start in self._lookbacks():
            x = np.stack([rows[start + p : start + p + length].T for p in phases])
            carried, state = model(torch.from_numpy(x).to(device), state)
            end = start + length
            if end < first:
                continue
            y = np.stack([rows[end + p : end + p + settings.horizon].T for p in phases])
            found["carried"].append(carried[:, :, -1].cpu().numpy() - y)
            found["fresh"].append(forecast_with(model, x) - y)
        off = {kind: np.concatenate(parts).astype(np.float64) for kind, parts in found.items()}
        result: dict = {"n": len(off["carried"]), "before": first}
        for kind, values in off.items():
            result[kind] = {"mse": float((values**2).mean()), "mae": float(np.abs(values).mean())}
        return result

    def summary(self, records: list[dict]) -> dict:
        """Errors as means over steps and by step, and the errors of the streamed windows."""
        rows, steps, streamed = {}, {}, {}
        for record in records:
            if record["by"] == "streamed":
                streamed = {key: value for key, value in record.items() if key in ("n", "before", "carried", "fresh")}
                continue
            rows[record["by"]] = {
                "mse": float(np.mean(record["mse"])), "mae": float(np.mean(record["mae"])), "n": record["n"],
            }  # fmt: skip
            steps[record["by"]] = [[mse, mae] for mse, mae in zip(record["mse"], record["mae"], strict=True)]
        published = dict(zip(MODELS, map(list, TABLE3.get(self.series.name, ())), strict=False))
        return {
            "series": self.series.name, "lookback": self.lookback, "horizon": self.horizon,
            "channels": len(self.series.columns), "rows": rows, "steps": steps, "streamed": streamed,
            "published": published,
        }  # fmt: skip

    def table(self, summary: dict) -> str:
        n, channels = summary["rows"]["model"]["n"], summary["channels"]
        lines = [
            f"forecast: {summary['series']}, lookback {summary['lookback']}, horizon {summary['horizon']}; all {n:,} "
            f"windows of the test, {channels} channels, scaled by the training rows",
            f"  {'':<32}{'MSE':>8}{'MAE':>8}",
        ]
        named = {"model": f"{'+'.join(self.loaded.config.model.kinds)} (this run)"}
        for name, row in summary["rows"].items():
            lines.append(f"  {named.get(name, name):<32}{row['mse']:8.3f}{row['mae']:8.3f}")
        for name, (mse, mae) in summary["published"].items():
            lines.append(f"  {name + ', published, mean of 4 H':<32}{mse:8.3f}{mae:8.3f}")
        if streamed := summary["streamed"]:
            lines.append(f"  the series streamed once, {streamed['before']:,} rows before the test; {streamed['n']:,} "
                         "windows:")  # fmt: skip
            for kind, text in (("carried", "state carried along"), ("fresh", "the same windows, empty state")):
                lines.append(f"  {text:<32}{streamed[kind]['mse']:8.3f}{streamed[kind]['mae']:8.3f}")
        return "\n".join(lines)

    @own_style()
    def plots(self, summary: dict, folder: Path, title: str) -> list[Path]:
        """Plot the forecast of the first channel for a window in the middle of the test, and the error of each step."""
        test = self.parts.test
        x, y = test.window(len(test) // 2)
        forecast = forecast_with(self.loaded.model, x[None])[0]
        figure = new_figure(10.0, 4.2)
        left, right = figure.subplots(1, 2)
        ahead = np.arange(1, self.horizon + 1)
        left.plot(np.arange(1 - self.lookback, 1), x[0], color="0.6", label="lookback")
        left.plot(ahead, y[0], color="black", label="truth")
        left.plot(ahead, forecast[0], color="C0", label="forecast")
        left.set_xlabel("rows from the forecast on")
        left.set_ylabel(f"{self.series.columns[0]} (scaled)")
        left.legend(fontsize=8)
        for n, (name, steps) in enumerate(sorted(summary["steps"].items(), key=lambda item: item[0] != "model")):
            right.plot(ahead, [mse for mse, _ in steps], label=name, color=f"C{n}")
        right.set_xlabel("rows ahead")
        right.set_ylabel("mean squared error (scaled)")
        right.set_ylim(bottom=0)
        right.legend(fontsize=8)
        figure.suptitle(f"{summary['series']}\n{title}", fontsize=9)
        return [save_figure(figure, folder / "forecast.png")]
