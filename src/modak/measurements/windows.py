"""Stretches of data time that files are kept by: hours, days, weeks and months, each inside one of the next.

Weeks are those of a month (days 1–7, 8–14, 15–21, 22–end): calendar weeks would cross the ends of months, and a file of
such a week could then belong to two months.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum

_HOUR = timedelta(hours=1)
_DAY = timedelta(days=1)
_LAST_WEEK = 3
_FOLDER = re.compile(r"(\d{4})/(\d{2})(?:/w([1-4])|/(\d{2})(?:/(\d{2}))?)?")


class Level(Enum):
    """How wide a window is, from the narrowest to the widest."""

    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"

    @property
    def width(self) -> int:
        """The rank among the levels; a wider window has a larger one."""
        return _ORDER[self]


_ORDER = {level: rank for rank, level in enumerate(Level)}


@dataclass(frozen=True, slots=True)
class Window:
    """One hour, day, week or month, in UTC; `end` is the first instant after it."""

    level: Level
    start: datetime

    @property
    def end(self) -> datetime:
        """The first instant that is not in the window any more."""
        start = self.start
        if self.level is Level.HOUR:
            return start + _HOUR
        if self.level is Level.DAY:
            return start + _DAY
        if self.level is Level.WEEK and start.day <= 1 + 7 * (_LAST_WEEK - 1):
            return start + 7 * _DAY
        return (start.replace(day=28) + 4 * _DAY).replace(day=1)

    @property
    def folder(self) -> str:
        """The folder of the window inside a measurement: `2026/11/16/09`, `2026/11/16`, `2026/11/w3` or `2026/11`."""
        start = self.start
        if self.level is Level.HOUR:
            return f"{start:%Y/%m/%d/%H}"
        if self.level is Level.DAY:
            return f"{start:%Y/%m/%d}"
        if self.level is Level.WEEK:
            return f"{start:%Y/%m}/w{(start.day - 1) // 7 + 1}"
        return f"{start:%Y/%m}"

    def __contains__(self, other: object) -> bool:
        return isinstance(other, Window) and self.start <= other.start and other.end <= self.end

    def widened(self, level: Level) -> Window:
        """The window of a level that this one lies in."""
        return window_of(level, self.start)


def window_of(level: Level, moment: datetime) -> Window:
    """The window of a level that a moment falls into."""
    moment = moment.astimezone(UTC)
    hour = moment.replace(minute=0, second=0, microsecond=0)
    if level is Level.HOUR:
        return Window(level, hour)
    day = hour.replace(hour=0)
    if level is Level.DAY:
        return Window(level, day)
    if level is Level.WEEK:
        return Window(level, day.replace(day=1 + 7 * min((day.day - 1) // 7, _LAST_WEEK)))
    return Window(level, day.replace(day=1))


def window_at(folder: str) -> Window | None:
    """The window whose folder this is, `None` for a folder that is none."""
    match = _FOLDER.fullmatch(folder)
    if match is None:
        return None
    year, month, week, day, hour = (int(part) if part else None for part in match.groups())
    assert year is not None
    assert month is not None
    try:
        if week is not None:
            return Window(Level.WEEK, datetime(year, month, 1 + 7 * (week - 1), tzinfo=UTC))
        if day is None:
            return Window(Level.MONTH, datetime(year, month, 1, tzinfo=UTC))
        if hour is None:
            return Window(Level.DAY, datetime(year, month, day, tzinfo=UTC))
        return Window(Level.HOUR, datetime(year, month, day, hour, tzinfo=UTC))
    except ValueError:
        return None
