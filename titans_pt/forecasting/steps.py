"""The usual step between the rows of a series: months, business days, or a span of time."""

import calendar
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from statistics import mode

import numpy as np


class Step(ABC):
    """A step of dates; ``str(step)`` is its name for a reader."""

    @abstractmethod
    def between(self, first: datetime, second: datetime) -> tuple[int, bool]:
        """Number of whole steps from one date to another, and whether a part of a step is left over."""

    @abstractmethod
    def later(self, date: datetime, count: int) -> datetime:
        """The date ``count`` steps after ``date``."""

    @property
    @abstractmethod
    def season(self) -> tuple[str, int] | None:
        """Name and length in rows of the period that the seasonal baseline repeats; None without one."""


@dataclass(frozen=True)
class Months(Step):
    """``count`` months, 12 for years. at_end: the dates are the last days of their months."""

    count: int
    at_end: bool

    def between(self, first: datetime, second: datetime) -> tuple[int, bool]:
        whole, rest = divmod(12 * (second.year - first.year) + second.month - first.month, self.count)
        return whole, bool(rest)

    def later(self, date: datetime, count: int) -> datetime:
        years, month = divmod(date.month - 1 + self.count * count, 12)
        last = calendar.monthrange(date.year + years, month + 1)[1]
        day = last if self.at_end else min(date.day, last)  # the 30th of January is the last of February
        return date.replace(year=date.year + years, month=month + 1, day=day)

    @property
    def season(self) -> tuple[str, int] | None:
        return ("last year", 12 // self.count) if self.count < 12 and not 12 % self.count else None

    def __str__(self) -> str:
        return f"{self.count} month{'s' * (self.count > 1)}"


class BusinessDays(Step):
    """One day from Monday to Friday. Holidays count as days that are absent."""

    def between(self, first: datetime, second: datetime) -> tuple[int, bool]:
        return int(np.busday_count(first.date(), second.date())), False

    def later(self, date: datetime, count: int) -> datetime:
        day = np.busday_offset(date.date(), count, roll="forward")
        return datetime.combine(day.astype(object), date.time())

    @property
    def season(self) -> tuple[str, int]:
        return "last week", 5

    def __str__(self) -> str:
        return "1 business day"


@dataclass(frozen=True)
class Span(Step):
    """A span of time."""

    time: timedelta

    def between(self, first: datetime, second: datetime) -> tuple[int, bool]:
        whole, rest = divmod(second - first, self.time)
        return whole, bool(rest)

    def later(self, date: datetime, count: int) -> datetime:
        return date + self.time * count

    @property
    def season(self) -> tuple[str, int] | None:
        day = timedelta(days=1)
        if self.time == day:
            return "last week", 7
        return ("last day", day // self.time) if self.time < day and not day % self.time else None

    def __str__(self) -> str:
        return str(self.time)


def usual_step(dates: Sequence[datetime]) -> Step:
    """The most frequent step between neighbours, in months or business days if all ``dates`` agree with that.

    Args:
        dates: at least two, in ascending order.
    """
    span = Span(mode(b - a for a, b in pairwise(dates)))
    if len(dates) < 3 or len({date.time() for date in dates}) > 1:
        return span
    at_end = all((date + timedelta(days=1)).day == 1 for date in dates)
    if at_end or len({date.day for date in dates}) == 1:
        count = mode(12 * (b.year - a.year) + b.month - a.month for a, b in pairwise(dates))
        return Months(count, at_end) if count else span
    week_ends = dates[-1] - dates[0] >= timedelta(days=7)
    if span.time == timedelta(days=1) and week_ends and all(date.weekday() < 5 for date in dates):
        return BusinessDays()
    return span
