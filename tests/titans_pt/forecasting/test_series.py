"""Reading a user's CSV file: what is found, what is filled, and one clear line for each mistake."""

from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from titans_pt.errors import UserError
from titans_pt.forecasting import datasets
from titans_pt.forecasting.datasets import season
from titans_pt.forecasting.series import Series, columns_of, read_csv


@pytest.fixture
def write(tmp_path):
    def write(text: str):
        path = tmp_path / "own.csv"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(("text", "dates", "values"), [
    ("date,a,b\n2020-01-01 00:00,1,2\n2020-01-01 01:00,3,4\n2020-01-01 02:00,5,6\n", "2020-01-01 02:00:00",
     [[1, 2], [3, 4], [5, 6]]),
    ("a;when\n1,5;31.01.2020 23:00\n2;31.01.2020 23:30\n-3;01.02.2020 00:00\n", "2020-02-01 00:00:00",
     [[1.5], [2], [-3]]),
    ("when,a\n12/31/2020,1\n01/01/2021,2\n01/02/2021,3\n", "2021-01-02 00:00:00", [[1], [2], [3]]),
    ("when,a\n31/12/2020,1\n01/01/2021,2\n02/01/2021,3\n", "2021-01-02 00:00:00", [[1], [2], [3]]),
    (",a\n0,7\n1,8\n2,9\n", None, [[7], [8], [9]]),
    ("a\n7\n8\n9\n", None, [[7], [8], [9]]),
    ('"heat, all, in kW";when\n1,5;2020-01-01\n2;2020-01-02\n3;2020-01-03\n', "2020-01-03 00:00:00", [[1.5], [2], [3]]),
    ("year,a\n1949,7\n1950,8\n1951,9\n", "1951-01-01 00:00:00", [[7], [8], [9]]),
])  # fmt: skip
def test_dates_and_separators_are_found(write, text, dates, values):
    series = read_csv(write(text))
    assert series.values.tolist() == values
    assert (str(series.dates[-1]) if series.dates else None) == dates


@pytest.mark.parametrize(("rows", "message"), [
    (["2020-01-02,1", "2020-01-01,2", "2020-01-03,3"], "line 3: 2020-01-01 .* comes after .*; sort the rows by date"),
    (["2020-01-01,1", "2020-01-02,2", "2020-01-02,3"], "line 4: 2020-01-02 .* is there twice"),
    (["2020-01-01,1", "2020-01-02,2", f"2020-01-03,{'3' * 200_000}"], "line 4: field larger than field limit"),
    (["2020-01-01,1", "2020-01-02,2,3", "2020-01-03,3"], "line 3 has 3 cells, the header 2"),
    (["2020-01-01,1", "2020-01-02,x", "2020-01-03,3"], "line 3: 'x' in the column 'a' is not a number"),
    (["2020-01-01,1", "2020-01-02,inf", "2020-01-03,3"], "line 3: the column 'a' has inf, numbers may have at most"),
    (["2020-01-01,1", "2020-01-02,1e200", "2020-01-03,3"], r"line 3: the column 'a' has 1e\+200, numbers may have"),
    (["2020-01-01,1", "20-x,2", "2020-01-03,3"], "line 3: '20-x' is not a date like the others; .*date_format"),
    (["2020-01-01,1", "2020-01-02,", "2020-01-03,nan"], "2 cells have no number .*; set forecast.missing=fill"),
    (["2020-01-01,1", "2020-01-02,1", "2020-01-03,1", "2020-01-06,2"],
     "line 5: 2 rows are absent in 1 gaps .*; set forecast.gaps=fill, or ignore"),
    (["2020-01-01,1", "2020-01-02,1", "2020-01-03,1", "2020-01-03 07:00,2"], "line 5: .*steps are irregular; resample"),
    (["2020-01-01,1"], "1 rows; a series has at least 3"),
])  # fmt: skip
def test_what_is_wrong_is_one_line(write, rows, message):
    with pytest.raises(UserError, match=message):
        read_csv(write("\n".join(["date,a", *rows])))


@pytest.mark.parametrize(("form", "step", "last"), [
    ("%m/%d/%Y %I:%M %p", "1h", "2020-01-20 23:00:00"), ("%d-%m-%Y %H:%M", "1h", "2020-01-20 23:00:00"),
    ("%d-%b-%Y %H:%M", "1h", "2020-01-20 23:00:00"), ("%b %d, %Y", "1D", "2021-04-24 00:00:00"),
    ("%m/%d/%y", "1D", "2021-04-24 00:00:00"), ("%Y%m%d%H%M", "1h", "2020-01-20 23:00:00"),
    ("%Y%m%d", "1D", "2021-04-24 00:00:00"), ("%Y-%m-%dT%H:%M:%SZ", "1h", "2020-01-20 23:00:00"),
    ("%Y-%m-%d %H:%M:%S+02:00", "1h", "2020-01-20 23:00:00"), ("unix", "1h", "2020-01-20 23:00:00"),
])  # fmt: skip
def test_forms_of_dates(write, form, step, last):
    """480 rows in each of the usual forms; the date is never a channel."""
    delta = timedelta(hours=1) if step == "1h" else timedelta(days=1)
    dates = [datetime(2020, 1, 1) + delta * i for i in range(480)]
    cells = [
        str(int((d - datetime(1970, 1, 1)).total_seconds())) if form == "unix" else d.strftime(form) for d in dates
    ]
    series = read_csv(write("date;a\n" + "\n".join(f"{cell};1" for cell in cells)))
    assert series.columns == ["a"] and str(series.dates[-1]) == last and series.notes == []
    assert series.spacing == str(delta)


def test_months_and_summer_time(write):
    ends = ["2020-01-31", "2020-02-29", "2020-03-31", "2020-04-30"]
    series = read_csv(write("date,a\n" + "\n".join(f"{end},1" for end in ends)))
    assert series.following(3) == ["2020-05-31 00:00:00", "2020-06-30 00:00:00", "2020-07-31 00:00:00"]
    assert series.spacing == "1 month"
    local = ["2020-03-29T01:00+01:00", "2020-03-29T03:00+02:00", "2020-03-29T04:00+02:00"]
    series = read_csv(write("date,a\n" + "\n".join(f"{when},1" for when in local)))
    assert str(series.dates[-1]) == "2020-03-29 02:00:00" and "converted to UTC" in series.notes[0]
    assert series.following(1) == ["2020-03-29 03:00:00+00:00"]
    firsts = [f"0{n}/01/2020" for n in range(1, 6)]
    series = read_csv(write("date,a\n" + "\n".join(f"{first},1" for first in firsts)))
    assert "read as %m/%d/%Y, and could be %d/%m/%Y: forecast.date_format" in series.notes[0]


@pytest.mark.parametrize(("dates", "spacing", "added", "after"), [
    (("2020-01-01", "2020-02-01", "2020-04-01", "2020-05-01"), "1 month", "2020-03-01", "2020-06-01"),
    (("2020-01-31", "2020-02-29", "2020-04-30", "2020-05-31"), "1 month", "2020-03-31", "2020-06-30"),
    (("2020-01-01", "2020-04-01", "2020-10-01", "2021-01-01"), "3 months", "2020-07-01", "2021-04-01"),
    (("2016-02-29", "2018-02-28", "2019-02-28", "2020-02-29"), "12 months", "2017-02-28", "2021-02-28"),
])  # fmt: skip
def test_a_month_that_is_absent(write, dates, spacing, added, after):
    path = write("date,a\n" + "\n".join(f"{date},{n}" for n, date in enumerate(dates)))
    with pytest.raises(UserError, match=f"1 rows are absent in 1 gaps .* the usual step is {spacing}.*gaps=fill"):
        read_csv(path)
    series = read_csv(path, gaps="fill")
    at = [str(date)[:10] for date in series.dates].index(added)
    assert series.values[at] == series.values[at - 1] and len(series.values) == len(dates) + 1
    assert series.notes == ["1 absent rows in 1 gaps were filled with the row before"]
    assert series.spacing == spacing and [day[:10] for day in series.following(1)] == [after]
    ignored = read_csv(path, gaps="ignore")
    assert len(ignored.values) == len(dates) and f"steps are not {spacing}" in ignored.notes[0]


def test_months_that_are_no_multiple_of_the_usual_step(write):
    dates = ("2020-01-01", "2020-04-01", "2020-07-01", "2020-11-01")
    with pytest.raises(UserError, match="line 5: .* the usual step is 3 months: the steps are irregular"):
        read_csv(write("date,a\n" + "\n".join(f"{date},1" for date in dates)), gaps="fill")


def test_business_days(write):
    """Weekends are no gaps; a holiday is one."""
    days = [day for day in (datetime(2024, 1, 1) + timedelta(days=i) for i in range(21)) if day.weekday() < 5]
    holiday = [day for day in days if day != datetime(2024, 1, 15)]
    text = ["date,a\n" + "\n".join(f"{day:%Y-%m-%d},{n}" for n, day in enumerate(each)) for each in (days, holiday)]
    series = read_csv(write(text[0]))
    assert series.spacing == "1 business day" and series.notes == [] and season(series) == ("last week", 5)
    assert [day[:10] for day in series.following(2)] == ["2024-01-22", "2024-01-23"]
    path = write(text[1])
    with pytest.raises(UserError, match=r"line 12: 1 rows are absent in 1 gaps .* the usual step is 1 business day\)"):
        read_csv(path)
    filled = read_csv(path, gaps="fill")
    assert filled.dates == days and filled.values[10] == filled.values[9] == 9


def test_days_of_one_week_are_days(write):
    """Five working days show no weekend."""
    assert read_csv(write("date,a\n" + "\n".join(f"2024-01-0{n},1" for n in range(1, 6)))).spacing == "1 day, 0:00:00"


@pytest.mark.parametrize(("head", "rows", "spacing", "last"), [
    ("No,Year,month,day,hour,a", [f"{n},2010,1,{1 + n // 24},{n % 24},{n}" for n in range(60)], "1:00:00",
     "2010-01-03 11:00:00"),
    ("Date;Time;a", [f"{1 + n // 24:02d}.02.2010;{n % 24:02d}:00:00;{n}" for n in range(60)], "1:00:00",
     "2010-02-03 11:00:00"),
    ("date,hour,a", [f"2010-02-0{1 + n // 24},{n % 24},{n}" for n in range(60)], "1:00:00", "2010-02-03 11:00:00"),
    ("year;month;a", [f"{2019 + n // 12};{n % 12 + 1};{n},5" for n in range(14)], "1 month", "2020-02-01 00:00:00"),
])  # fmt: skip
def test_a_date_in_several_columns(write, head, rows, spacing, last):
    path = write("\n".join([head, *rows]))
    series = read_csv(path, columns=["a"])
    assert series.columns == columns_of(path, ["a"]) == ["a"]
    assert (series.spacing, str(series.dates[-1])) == (spacing, last)
    assert "were read as one date" in series.notes[-1]
    if "month" in head:
        both = read_csv(path, columns=["a", "month"])
        assert both.columns == ["a", "month"] and both.dates == series.dates, "a part may be a channel"


def test_parts_of_a_date_beside_a_date_are_channels(write):
    rows = "\n".join(f"2020-01-0{n},2020,1,{n}" for n in range(1, 5))
    series = read_csv(write(f"date,year,month,a\n{rows}"))
    assert series.columns == ["year", "month", "a"] and series.notes == []
    rows = "\n".join(f"2020-01-0{n},{3 * n},{n}" for n in range(1, 5))
    series = read_csv(write(f"date,hour,a\n{rows}"))
    assert series.columns == ["hour", "a"] and series.spacing == "1 day, 0:00:00", "one row a day"


@pytest.mark.parametrize(("form", "step"), [("%d/%m/%Y", "1 month"), ("%d/%m/%Y %H:%M", "1:00:00")])
def test_dates_that_could_be_american_are_read_at_equal_steps(write, form, step):
    """01/02/2020 and so on ascend as days of January, in leaps at each year's end, and as months."""
    dates = [datetime(2020 + n // 12, n % 12 + 1, 1) if step == "1 month" else datetime(2020, 1, 1) + timedelta(hours=n)
             for n in range(60)]  # fmt: skip
    series = read_csv(write("date,a\n" + "\n".join(f"{date.strftime(form)},1" for date in dates)))
    assert series.dates == dates and series.spacing == step
    assert series.notes[0].startswith(f"dates were read as {form}, and could be %m/")


@pytest.mark.parametrize("form", ["{}Q{}", "{}-Q{}", "{} q{}"])
def test_quarters(write, form):
    rows = [form.format(2019 + n // 4, n % 4 + 1) for n in range(6)]
    series = read_csv(write("date,a\n" + "\n".join(f"{row},1" for row in rows)))
    assert series.spacing == "3 months" and series.following(1) == ["2020-07-01 00:00:00"] and season(series)[1] == 4


@pytest.mark.parametrize(("zones", "after"), [
    (("+02:00",) * 3, "2020-03-29 06:00:00+02:00"), (("Z",) * 3, "2020-03-29 06:00:00+00:00"),
    (("+00:00", "+00:00", "+00:00"), "2020-03-29 06:00:00+00:00"), (("", "", ""), "2020-03-29 06:00:00"),
])  # fmt: skip
def test_a_forecast_has_the_zone_of_the_dates(write, zones, after):
    rows = "\n".join(f"2020-03-29T0{n + 3}:00{zone},1" for n, zone in enumerate(zones))
    assert read_csv(write(f"date,a\n{rows}")).following(1) == [after]


@pytest.mark.parametrize("by_date", [False, True])
def test_a_long_table_is_no_series(write, by_date):
    rows = [f"2020-01-{day + 1:02d},{name}" for name, days in (("1", 10), ("2", 20)) for day in range(days)]
    with pytest.raises(UserError, match="30 rows have 20 different dates; .* give each series a column of its own"):
        read_csv(write("ds,y\n" + "\n".join(sorted(rows) if by_date else rows)))


def test_columns_that_are_none(write):
    """A separator at the end of each line is no column; a named column without numbers is refused with a remedy."""
    assert read_csv(write("date,a,\n2020-01-01,1,\n2020-01-02,2,\n2020-01-03,3,\n")).columns == ["a"]
    assert read_csv(write("date|a\n2020-01-01|1\n2020-01-02|2\n2020-01-03|3\n")).columns == ["a"]
    path = write("date,a,b\n2020-01-01,1,\n2020-01-02,2,\n2020-01-03,3,\n")
    with pytest.raises(UserError, match=r"the column 'b' has no number at all; set forecast.columns=\[a\]"):
        read_csv(path)
    assert columns_of(path) == ["a", "b"] and columns_of(path, ["a"]) == ["a"]
    with pytest.raises(UserError, match="no column 'c'; RUN was trained on a, c, the file has a, b; give its columns"):
        read_csv(path, columns=["a", "c"], trained_by="RUN")


def test_what_cannot_be_read_at_all(write):
    with pytest.raises(UserError, match="own.csv: no column of numbers besides the date; add one, or name it in forec"):
        read_csv(write("date\n2020-01-01\n2020-01-02\n2020-01-03\n"))
    path = write("")
    path.write_bytes(b"date,a\n2020-01-01,\xff\n")
    with pytest.raises(UserError, match=r"own.csv: not UTF-8 \(byte 18\); save it as UTF-8"):
        read_csv(path)


def test_the_date_is_in_a_column_of_any_name(write):
    series = read_csv(write("a,when\n1,2020-01-01\n2,2020-01-02\n3,2020-01-03\n"), date_column="when")
    assert series.columns == ["a"] and str(series.dates[0])[:10] == "2020-01-01"


def test_columns_of_a_series_that_is_asked_for_by_name(monkeypatch):
    values = np.arange(6.0).reshape(3, 2)
    monkeypatch.setattr(datasets, "_packaged", lambda name: Series(name, ["Demand", "Temperature"], values))
    assert datasets.load("elecdemand", Path()).columns == ["Demand", "Temperature"]
    found = datasets.load("elecdemand", Path(), columns=["Temperature", "Demand"])
    assert found.columns == ["Temperature", "Demand"] and found.values.tolist() == values[:, ::-1].tolist()
    with pytest.raises(UserError, match="forecast.columns: given 'x'; elecdemand has Demand, Temperature"):
        datasets.load("elecdemand", Path(), columns=["x"])
    with pytest.raises(UserError, match="forecast.columns: given 'Demand' twice; name each column once"):
        datasets.load("elecdemand", Path(), columns=["Demand", "Demand"])


def test_numbers_as_dates(write):
    for begin, unit in ((1577836800 * 10**9, 10**9), (1577836800 * 10**6, 10**6)):
        hours = "\n".join(f"{begin + 3600 * hour * unit},1" for hour in range(4))
        series = read_csv(write(f"timestamp,a\n{hours}"))
        assert series.columns == ["a"] and str(series.dates[-1]) == "2020-01-01 03:00:00"
    months = "\n".join(f"{month},{n}" for n, month in enumerate(("202001", "202002", "202003", "202004")))
    path = write(f"date,a\n{months}")
    with pytest.raises(UserError, match="the numbers in the column 'date' are no dates .* set forecast.date_format"):
        read_csv(path)
    series = read_csv(path, date_format="%Y%m")
    assert series.columns == ["a"] == columns_of(path, date_format="%Y%m") and str(series.dates[-1])[:7] == "2020-04"
    path = write("when,a\n" + "\n".join(f"2020.01.0{day},1" for day in range(1, 5)))
    assert read_csv(path, date_format="%Y.%m.%d").columns == ["a"], "by content, under any name"
    with pytest.raises(UserError, match="forecast.date_format: given '%d/%m/%Y'; no column of .* has such dates"):
        read_csv(path, date_format="%d/%m/%Y")


def test_heads_that_are_wrong(write):
    for text, message in (
        ("1,2\n3,4\n5,6\n", "line 1 has no names"),
        ("2020-01-01,2\n2020-01-02,4\n2020-01-03,6\n", "line 1 has no names"),
        ("a,a\n1,2\n3,4\n5,6\n", "two columns"),
    ):
        with pytest.raises(UserError, match=message):
            read_csv(write(text))
    path = write("date,a\n2020-01-01,1\n2020-01-02,2\n2020-01-03,3\n")
    with pytest.raises(UserError, match="forecast.columns: given 'b'; .* has a"):
        read_csv(path, columns=["b"])
    with pytest.raises(UserError, match="forecast.date_column: given 'b'"):
        read_csv(path, date_column="b")


def test_gaps_and_holes_are_counted_and_filled(write):
    path = write("date,a,b\n2020-01-01,,1\n2020-01-02,5,\n2020-01-03,6,3\n2020-01-06,7,4\n")
    series = read_csv(path, missing="fill", gaps="fill")
    assert series.values.tolist() == [[5, 1], [5, 1], [6, 3], [6, 3], [6, 3], [7, 4]]
    assert len(series.dates) == 6 and "2 absent rows in 1 gaps" in series.notes[0] and "2 cells" in series.notes[1]
    series = read_csv(path, missing="fill", gaps="ignore")
    assert len(series.values) == 4 and "1 of 3 steps are not 1 day" in series.notes[0]


def test_a_row_without_numbers_is_no_gap(write):
    """forecast.gaps=fill adds rows; it fills no cells of the file's own rows."""
    path = write("date,a\n2020-01-01,1\n2020-01-02,\n2020-01-03,3\n2020-01-05,5\n")
    with pytest.raises(UserError, match=r"1 cells have no number \(25 %; .*'a'\); set forecast.missing=fill"):
        read_csv(path, gaps="fill")
    series = read_csv(path, missing="fill", gaps="fill")
    assert series.values[:, 0].tolist() == [1, 1, 3, 3, 5]
    assert "1 absent rows in 1 gaps" in series.notes[0] and "1 cells without a number (25 %)" in series.notes[1]


def test_a_clock_that_is_set_back(write):
    hours = ["00:00", "01:00", "02:00", "02:00", "03:00"]
    path = write("\n".join(["date,a", *(f"2020-10-25 {hour},1" for hour in hours)]))
    with pytest.raises(UserError, match="line 5: .* twice; .* clock set back: forecast.gaps=ignore"):
        read_csv(path)
    series = read_csv(path, gaps="ignore")
    assert len(series.values) == 5 and series.following(1) == ["2020-10-25 04:00:00"]


def test_dates_go_on():
    hours = [datetime(2020, 2, 28, 22) + timedelta(hours=i) for i in range(3)]
    assert Series("a", ["a"], np.zeros((3, 1)), hours).following(2) == ["2020-02-29 01:00:00", "2020-02-29 02:00:00"]
    months = [datetime(2020, month, 1) for month in (10, 11, 12)]
    assert Series("a", ["a"], np.zeros((3, 1)), months).following(2) == ["2021-01-01 00:00:00", "2021-02-01 00:00:00"]
    monthly = [datetime(2020, month, 30) for month in (10, 11, 12)]
    assert Series("a", ["a"], np.zeros((3, 1)), monthly).following(3) == [
        "2021-01-30 00:00:00", "2021-02-28 00:00:00", "2021-03-30 00:00:00",
    ]  # fmt: skip
    assert Series("a", ["a"], np.zeros((3, 1))).following(2) == ["3", "4"]


def test_a_column_is_named_once(write):
    path = write("a,b\n1,2\n3,4\n5,6\n")
    assert read_csv(path, columns=["b", "a"]).values.tolist() == [[2, 1], [4, 3], [6, 5]]
    with pytest.raises(UserError, match="forecast.columns: given 'a' twice; name each column once"):
        read_csv(path, columns=["a", "b", "a"])
