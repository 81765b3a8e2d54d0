"""A time series, and reading one from a CSV file."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import accumulate, islice, pairwise
from pathlib import Path

import numpy as np

from titans_pt.errors import UserError
from titans_pt.forecasting.steps import usual_step

DATE_NAMES = ("date", "datetime", "time", "timestamp", "ds", "day", "month", "year")
_DAYS = ("%d.%m.%Y", "%Y/%m/%d", "%m/%d/%Y", "%d/%m/%Y", "%d-%m-%Y", "%m-%d-%Y", "%d-%b-%Y", "%d %b %Y", "%b %d, %Y",
         "%d.%m.%y", "%m/%d/%y", "%d/%m/%y")  # fmt: skip
_TIMES = ("", " %H:%M:%S", " %H:%M", " %I:%M:%S %p", " %I:%M %p")
_COMPACT = {"%Y%m%d%H": 10, "%Y%m%d%H%M": 12, "%Y%m%d%H%M%S": 14}
"""Formats without separators, and their numbers of digits."""
_QUARTERS = "quarters"
"""1950Q1, 1950-Q1 or 1950 Q1: the quarter's first day."""
_UNIX = {"seconds": 1.0, "milliseconds": 1e3, "microseconds": 1e6, "nanoseconds": 1e9}
"""Units of time since 1970."""
FORMATS = (
    *(day + time for day in _DAYS for time in _TIMES), *(f"%Y-%m-%d{time}" for time in _TIMES[3:]), "%Y-%m", "%Y",
    *_COMPACT, _QUARTERS, *_UNIX,
)  # fmt: skip
"""Date formats that are tried after ISO 8601, each on the whole column."""
COUNTED = ("date", "datetime", "time", "timestamp", "ds")
"""Names of columns whose numbers may be dates: 202001312300, or seconds since 1970."""
_CERTAIN = ("date", "datetime", "timestamp", "ds")
"""Names of columns that are no channels, whatever they hold."""
_PARTS = {"year": "1970", "month": "01", "day": "01", "hour": "00", "minute": "00", "second": "00"}
"""Columns that are one date together, each with its first value."""
_CLOCK = ("hour", "minute", "second")
"""Columns that are one time of day together, beside a date."""
LARGEST = 1e100
"""Largest absolute value of a number in a cell: squares and sums stay finite."""
MISSING = ("", "nan", "na", "n/a", "null", "none")


@dataclass(frozen=True)
class Series:
    """A time series. values: (rows, channels) float64, complete. dates: one per row; None if the file has none.

    notes: remarks on the reading for the user, one line each.
    zone: distance of the dates to UTC; None if the file has none.
    """

    name: str
    columns: list[str]
    values: np.ndarray
    dates: list[datetime] | None = None
    notes: list[str] = field(default_factory=list)
    zone: tzinfo | None = None

    @property
    def spacing(self) -> str | None:
        """Spacing of the rows, for a reader; None without dates."""
        return str(usual_step(self.dates)) if self.dates else None

    def following(self, count: int) -> list[str]:
        """Names of the next ``count`` rows after the last: their dates, or row numbers without dates."""
        rows = len(self.values)
        if not self.dates:
            return [str(rows + i) for i in range(count)]
        step = usual_step(self.dates)
        return [str(step.later(self.dates[-1], i + 1).replace(tzinfo=self.zone)) for i in range(count)]


def read_csv(
    path: Path, missing: str = "refuse", gaps: str = "refuse", columns: Sequence[str] | None = None,
    date_column: str | None = None, date_format: str | None = None, trained_by: str = "",
) -> Series:  # fmt: skip
    """Read the series of a CSV file: a header, columns of numbers, and perhaps a column of dates.

    Args:
        missing: "refuse", or "fill": cells without a number get the number above (the first cells, the next below).
        gaps: treatment of uneven dates. "refuse"; "fill": absent rows are added and filled; "ignore": rows are read as
            if they were at equal steps.
        columns: columns to read; None: all but the date.
        date_column: name of the date column; None: found by its name, or by its content.
        date_format: in strptime's notation; None: found.
        trained_by: the run that was trained on ``columns``, for the message if the file has others.

    Raises:
        UserError: the file is malformed; the message names the file, the line in it, and the remedy.
    """
    header, lines, rows = _table(path, _text(path))
    parts = _date_parts(header, rows, date_column or date_format)
    header, rows = _joined(header, rows, parts, columns or ())
    place, chosen, notes = _columns(path, header, rows, columns, date_column, date_format, trained_by)
    if parts:
        notes.append(f"the columns {', '.join(parts)} were read as one date")
    dates, zone = None, None
    if place is not None:
        dates, zone = _dates(path, [row[place] for row in rows], lines, date_format, notes)
    values = _numbers(path, [header.index(name) for name in chosen], header, lines, rows, fixed=bool(trained_by))
    holes = np.isnan(values)
    if dates:
        _check_order(path, dates, lines, gaps == "ignore")
        values, dates = _regular(path, values, dates, lines, gaps, notes)
    _check_holes(path, holes, chosen, missing, notes, fixed=bool(trained_by))
    return Series(path.stem, chosen, _forward(values), dates, notes, zone)


def columns_of(
    path: Path, columns: Sequence[str] | None = None, date_column: str | None = None, date_format: str | None = None
) -> list[str]:
    """The columns that :func:`read_csv` would read, judged by the first lines of the file.

    Raises:
        UserError: as :func:`read_csv`.
    """
    header, _, rows = _table(path, _text(path, lines=4))
    header, rows = _joined(header, rows, _date_parts(header, rows, date_column or date_format), columns or ())
    return _columns(path, header, rows, columns, date_column, date_format, "")[1]


def _date_parts(header: list[str], rows: list[list[str]], given: str | None) -> list[str]:
    """Names of the columns that are one date together: a year, a month and smaller parts, or a date and its time of
    day; [] if there are none, or another column holds whole dates. given: the date's column or format, if the user
    named one; there are no parts then."""
    named = {name.lower(): name for name in header}
    if given:
        return []
    if "date" in named:
        clock = [part for part in (("time",) if "time" in named else _CLOCK) if part in named]
        days = [row[header.index(named["date"])] for row in rows]
        if not clock or (clock[0] == _CLOCK[0] and len(set(days)) == len(days)):  # one row a day: hours are a channel
            return []
        found = [named["date"], *(named[part] for part in clock)]
    elif {"year", "month"} <= set(named) and not set(_CERTAIN) & set(named):
        found = [named[part] for part in _PARTS if part in named]
    else:
        return []
    first = _joined(header, rows[:1], found, ())[1][0][0]
    return found if any(_parsed(first, form) for form in (None, *FORMATS)) else []


def _joined(
    header: list[str], rows: list[list[str]], parts: list[str], columns: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """The table with a first column "date" in place of those of ``parts`` that ``columns`` does not name."""
    if not parts:
        return header, rows
    places = {name.lower(): header.index(name) for name in parts}
    kept = [i for i, name in enumerate(header) if name not in parts or name in columns]

    def date(row: list[str]) -> str:
        """The day and the time of day; a part without a column is its first."""
        cells = {part: row[places[part]].zfill(2) if part in places else first for part, first in _PARTS.items()}
        day = row[places["date"]] if "date" in places else "-".join(cells[part] for part in ("year", "month", "day"))
        return f"{day} " + (row[places["time"]] if "time" in places else ":".join(cells[part] for part in _CLOCK))

    return ["date", *(header[i] for i in kept)], [[date(row), *(row[i] for i in kept)] for row in rows]


def _columns(
    path: Path, header: list[str], rows: list[list[str]], columns: Sequence[str] | None, date_column: str | None,
    date_format: str | None, trained_by: str,
) -> tuple[int | None, list[str], list[str]]:  # fmt: skip
    """Return the place of the date column, the columns of numbers to read, and notes."""
    place, notes = _date_place(path, header, rows, date_column, date_format), list[str]()
    names = [name for i, name in enumerate(header) if i != place]
    if columns is None and names and names[0] == "" and [row[header.index("")] for row in rows[:2]] in (
        ["0", "1"], ["1", "2"],
    ):  # fmt: skip
        names = names[1:]
        notes.append("the first column has no name and counts rows: it is left out")
    chosen = list(columns) if columns is not None else names
    if columns is None and (undated := [name for name in names if name.lower() in _CERTAIN]) and place is None:
        raise UserError(
            f"{path}: the numbers in the column {undated[0]!r} are no dates that are known; set forecast.date_format "
            "(such as '%Y%m'), or name the columns to read in forecast.columns"
        )
    for name in chosen:
        if name not in names:
            if trained_by:
                raise UserError(f"{path}: no column {name!r}; {trained_by} was trained on {', '.join(chosen)}, the "
                                f"file has {', '.join(names)}; give its columns those names")  # fmt: skip
            raise UserError(f"forecast.columns: given {name!r}; {path} has {', '.join(names)}")
    check_once(chosen)
    if not chosen:
        raise UserError(f"{path}: no column of numbers besides the date; add one, or name it in forecast.columns")
    return place, chosen, notes


def check_once(columns: Sequence[str]):
    """
    Raises:
        UserError: a column stands twice in forecast.columns.
    """
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise UserError(f"forecast.columns: given {twice[0]!r} twice; name each column once")


def _text(path: Path, lines: int | None = None) -> str:
    """Read all of a file, or its first ``lines`` lines that are not empty."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            return file.read() if lines is None else "".join(islice(filter(str.strip, file), lines))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name a CSV file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 (byte {error.start}); save it as UTF-8") from None


def _table(path: Path, text: str) -> tuple[list[str], list[int], list[list[str]]]:
    """Return the header, the rows' line numbers, and the rows' cells, without empty columns that have no name."""
    first = re.sub('"[^"]*"', "", text.partition("\n")[0])  # a quoted name may hold a separator
    separator = max(",;\t|", key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    try:
        table = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.line_num}: {error}; mend this line") from None
    header, lines, rows = [cell.strip() for cell in (table[0][1] if table else [])], [], []
    if all(_is_number(cell) or any(_parsed(cell, form) for form in (None, *FORMATS)) for cell in header):
        raise UserError(f"{path}: line 1 has no names of columns; add a header, such as date{separator}value")
    for number, row in table[1:]:
        if not row:
            continue
        if len(row) != len(header):
            raise UserError(f"{path}: line {number} has {len(row)} cells, the header {len(header)} (separator "
                            f"{separator!r}); mend this line")  # fmt: skip
        lines.append(number)
        rows.append([cell.strip() if separator == "," else _with_point(cell.strip()) for cell in row])
    if len(rows) < 3:
        raise UserError(f"{path}: {len(rows)} rows; a series has at least 3")
    kept = [i for i, name in enumerate(header) if name or any(row[i] for row in rows)]
    if len(kept) < len(header):
        header, rows = [header[i] for i in kept], [[row[i] for i in kept] for row in rows]
    if len(set(header)) < len(header):
        double = next(name for name in header if header.count(name) > 1)
        raise UserError(f"{path}: line 1: two columns are called {double!r}; give each its own name")
    return header, lines, rows


def _with_point(cell: str) -> str:
    """Replace a decimal comma by a point; leave other cells, such as a date with a comma, unchanged."""
    pointed = cell.replace(",", ".")
    return pointed if _is_number(pointed) else cell


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _date_place(
    path: Path, header: list[str], rows: list[list[str]], given: str | None, form: str | None
) -> int | None:
    if given is not None:
        if given not in header:
            raise UserError(f"forecast.date_column: given {given!r}; {path} has {', '.join(header)}")
        return header.index(given)
    if form is not None:
        fits = [i for i, cell in enumerate(rows[0]) if _parsed(cell, form)]
        named = [i for i, name in enumerate(header) if name.lower() in DATE_NAMES]
        both = [i for i in named if i in fits]
        if found := both or fits or named:  # if it does not fit, _dates names the cell
            return found[0]
        raise UserError(
            f"forecast.date_format: given {form!r}; no column of {path} has such dates; correct it, or leave it out"
        )
    for i, name in enumerate(header):
        cell, known = rows[0][i], name.lower()
        if known in DATE_NAMES and (not _is_number(cell) or known == "year"):
            return i
        if known in COUNTED and any(_parsed(cell, form) for form in (None, *_COMPACT, *_UNIX)):
            return i
    for i, cell in enumerate(rows[0]):
        if not _is_number(cell) and any(_parsed(cell, form) for form in (None, *FORMATS)):
            return i
    return None


def _parsed(cell: str, form: str | None) -> datetime | None:
    """The date in a cell, or None. form: strptime's notation, _QUARTERS or a key of _UNIX; None: ISO 8601."""
    try:
        if form is None:
            return datetime.fromisoformat(cell)
        if form in _UNIX:
            seconds = float(cell) / _UNIX[form]
            return datetime(1970, 1, 1) + timedelta(seconds=seconds) if 1e8 <= seconds < 1e10 else None
        if form == _QUARTERS:
            found = re.fullmatch("([0-9]{4})[- ]?[Qq]([1-4])", cell)
            return datetime(int(found[1]), 3 * int(found[2]) - 2, 1) if found else None
        if form in _COMPACT and (len(cell) != _COMPACT[form] or not "1900" <= cell < "2200"):
            return None
        return datetime.strptime(cell, form)
    except ValueError:
        return None


def _dates(
    path: Path, cells: list[str], lines: list[int], given: str | None, notes: list[str]
) -> tuple[list[datetime], tzinfo | None]:  # fmt: skip
    """The dates without their zone, in ascending order if one reading has it; and the zone."""
    best: tuple[int, list[datetime]] = (-1, [])
    found: list[tuple[str | None, list[datetime]]] = []
    for form in (given,) if given else (None, *FORMATS):
        dates: list[datetime] = []
        for cell in cells:
            if (date := _parsed(cell, form)) is None:
                break
            dates.append(date)
        if len(dates) == len(cells):
            found.append((form, dates))
        best = max(best, (len(dates), dates), key=lambda pair: pair[0])
    if not found:
        at = best[0]
        remedy = "mend it, or correct forecast.date_format" if given else (
            "mend it, or set forecast.date_format (such as '%d.%m.%Y %H:%M')"
        )  # fmt: skip
        raise UserError(f"{path}: line {lines[at]}: {cells[at]!r} is not a date like the others; {remedy}")
    # 03/04/2020 may be March or April: the reading whose rows ascend, at the most equal steps, is right.
    ascending = [(form, dates) for form, dates in found if _ascend(_without_zone(dates))]
    if len(ascending) > 1:
        ascending.sort(key=lambda reading: _uneven(_without_zone(reading[1])))
    form, dates = (ascending or found)[0]
    others = [other for other, _ in ascending if other not in (form, *_UNIX)]
    if others and form is not None:
        notes.append(f"dates were read as {form}, and could be {others[0]}: forecast.date_format decides")
    if len({date.utcoffset() for date in dates}) > 1:
        notes.append("the dates' distance to UTC varies: they were converted to UTC")
        return _without_zone(dates), UTC
    return _without_zone(dates), dates[0].tzinfo


def _without_zone(dates: list[datetime]) -> list[datetime]:
    """Drop time zones: local times if all have the same distance to UTC, else UTC."""
    if len({date.utcoffset() for date in dates}) > 1:
        dates = [date.astimezone(UTC) if date.tzinfo else date for date in dates]
    return [date.replace(tzinfo=None) for date in dates]


def _ascend(dates: list[datetime]) -> bool:
    return all(a < b for a, b in pairwise(dates))


def _uneven(dates: list[datetime]) -> int:
    """Number of steps between ascending dates that are not the usual one."""
    step = usual_step(dates)
    return sum(step.between(a, b) != (1, False) for a, b in pairwise(dates))


def _numbers(path: Path, places: list[int], header: list[str], lines: list[int], rows: list[list[str]],
             fixed: bool) -> np.ndarray:  # fmt: skip
    """Parse the cells of ``places``; a missing number is NaN. fixed: whether the user cannot choose the columns."""
    values = np.empty((len(rows), len(places)))
    for at, row in enumerate(rows):
        try:
            values[at] = [float(row[i]) if row[i].lower() not in MISSING else np.nan for i in places]
        except ValueError:
            i = next(i for i in places if not _is_number(row[i]) and row[i].lower() not in MISSING)
            other = "" if fixed else ", or name the columns to read in forecast.columns"
            raise UserError(f"{path}: line {lines[at]}: {row[i]!r} in the column {header[i]!r} is not a number; mend it"
                            f"{other}") from None  # fmt: skip
    if (beyond := np.abs(values) > LARGEST).any():
        at, column = np.argwhere(beyond)[0]
        raise UserError(f"{path}: line {lines[at]}: the column {header[places[column]]!r} has {values[at, column]:g}, "
                        f"numbers may have at most {LARGEST:g}; mend it")  # fmt: skip
    return values


def _check_order(path: Path, dates: list[datetime], lines: list[int], set_back: bool):
    """Check that dates ascend. set_back: rows may go back by up to an hour, as clocks do in autumn."""
    for at in range(1, len(dates)):
        back = dates[at - 1] - dates[at]
        hour = timedelta(0) <= back <= timedelta(hours=1) and dates[at].hour + dates[at].minute > 0
        if back < timedelta(0) or (hour and set_back):
            continue
        again = len(dates) - len(set(dates))
        if again > 5 and 4 * again >= len(dates):
            raise UserError(f"{path}: {len(dates)} rows have {len(set(dates))} different dates; a file has one row for "
                            "each date: give each series a column of its own")  # fmt: skip
        clock = ", or if it is a clock set back: forecast.gaps=ignore" if hour else ""
        if not back:
            raise UserError(f"{path}: line {lines[at]}: {dates[at]} is there twice; remove one of the two rows{clock}")
        raise UserError(f"{path}: line {lines[at]}: {dates[at]} comes after {dates[at - 1]}; sort the rows by "
                        f"date{clock}")  # fmt: skip


def _regular(
    path: Path, values: np.ndarray, dates: list[datetime], lines: list[int], gaps: str, notes: list[str]
) -> tuple[np.ndarray, list[datetime]]:
    """Return rows at equal steps; absent rows are NaN if gaps are filled."""
    step = usual_step(dates)
    steps = [step.between(a, b) for a, b in pairwise(dates)]
    for at, (_, rest) in enumerate(steps, start=1):
        if rest and gaps != "ignore":
            raise UserError(f"{path}: line {lines[at]}: {dates[at]} is {dates[at] - dates[at - 1]} after the row "
                            f"before, the usual step is {step}: the steps are irregular; resample it, or set "
                            "forecast.gaps=ignore")  # fmt: skip
    uneven = [at for at, (count, rest) in enumerate(steps, start=1) if count != 1 or rest]
    if not uneven:
        return values, dates
    places = [0, *accumulate(count for count, _ in steps)]
    absent = places[-1] + 1 - len(dates)
    if gaps == "refuse":
        raise UserError(
            f"{path}: line {lines[uneven[0]]}: {absent} rows are absent in {len(uneven)} gaps (the first "
            f"before {dates[uneven[0]]}; the usual step is {step}); set forecast.gaps=fill, or ignore"
        )
    if gaps == "ignore":
        notes.append(f"{len(uneven)} of {len(steps)} steps are not {step}: rows are taken as they follow each other")
        return values, dates
    whole = np.full((places[-1] + 1, values.shape[1]), np.nan)
    whole[places] = values
    notes.append(f"{absent} absent rows in {len(uneven)} gaps were filled with the row before")
    return whole, [step.later(dates[0], i) for i in range(len(whole))]


def _check_holes(
    path: Path, holes: np.ndarray, columns: list[str], missing: str, notes: list[str], fixed: bool
):  # fmt: skip
    """Refuse missing numbers in the file's rows, or note that they are filled.

    Args:
        holes: bool (rows, channels), where a number is missing.
        fixed: whether the user cannot choose the columns.
    """
    known = [name for name, missed in zip(columns, holes.T, strict=True) if not missed.all()]
    if empty := [name for name in columns if name not in known]:
        remedy = f"set forecast.columns=[{', '.join(known)}]" if known and not fixed else "fill it"
        raise UserError(f"{path}: the column {empty[0]!r} has no number at all; {remedy}")
    if not (count := int(holes.sum())):
        return
    share = f"{100 * holes.mean():.2g} %"
    if missing == "refuse":
        column = int(holes.any(0).argmax())
        raise UserError(f"{path}: {count} cells have no number ({share}; the first in the column {columns[column]!r}); "
                        "set forecast.missing=fill")  # fmt: skip
    notes.append(f"{count} cells without a number ({share}) got the one before")


def _forward(values: np.ndarray) -> np.ndarray:
    """Replace NaN by the last number above, or else by the first below."""
    known = ~np.isnan(values)
    at = np.where(known, np.arange(len(values))[:, None], 0)
    at = np.maximum.accumulate(at, axis=0)
    at = np.maximum(at, known.argmax(0))
    return np.take_along_axis(values, at, axis=0)
