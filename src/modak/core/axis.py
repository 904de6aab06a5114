"""The tier-key axis: every kind of tier key as one order-preserving int64.

Integers are themselves, dates are days and timestamps microseconds since 1970 (UTC). T, R, partition bounds and
`modak.delta` hold axis values only, so planners compare plain integers and never see a type. Calendar months are a
width of their own, because no fixed number of days is a month.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from enum import StrEnum
from zoneinfo import ZoneInfo

from modak.core.errors import UsageError

_DAY = 86_400_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SPAN = re.compile(r"(\d+)\s*(us|ms|s|m|h|d|w)?")
_UNIT = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
    "d": _DAY,
    "w": 7 * _DAY,
}

TierKey = int


class Axis(StrEnum):
    """What an axis value means."""

    INTEGER = "integer"
    DATE = "date"
    TIMESTAMP = "timestamp"
    TIMESTAMPTZ = "timestamptz"

    @property
    def is_time(self) -> bool:
        """Whether axis values are points in time."""
        return self is not Axis.INTEGER

    @property
    def unit(self) -> int:
        """Microseconds that one step of a time axis stands for."""
        return _DAY if self is Axis.DATE else 1

    def of(self, value: int | date | datetime) -> TierKey:
        """The axis value of a Python value; a naive datetime is taken as UTC."""
        if isinstance(value, datetime):
            aware = value if value.tzinfo else value.replace(tzinfo=UTC)
            micros = (aware - _EPOCH) // timedelta(microseconds=1)
            return micros // self.unit
        if isinstance(value, date):
            days = value.toordinal() - _EPOCH.toordinal()
            return days if self is Axis.DATE else days * _DAY
        return int(value)

    def moment(self, key: TierKey) -> datetime:
        """The point in time of an axis value (time axes only)."""
        return _EPOCH + timedelta(microseconds=key * self.unit)

    def literal(self, key: TierKey) -> str:
        """The axis value as Postgres text of the column's own type, for bounds and messages."""
        match self:
            case Axis.INTEGER:
                return str(key)
            case Axis.DATE:
                return f"{self.moment(key):%Y-%m-%d}"
            case Axis.TIMESTAMP:
                return _iso(self.moment(key))
            case Axis.TIMESTAMPTZ:
                return _iso(self.moment(key)) + "+00"

    def span(self, text: str) -> int:
        """A length on this axis: `100`, and on time axes also `7d`, `12h`, `30m`, `2w`."""
        match = _SPAN.fullmatch(text.strip())
        if match is None or (match[2] and not self.is_time):
            units = " or a duration such as 7d or 12h" if self.is_time else ""
            raise UsageError("usage.span", f"{text!r} is not a length.", hint=f"Write a whole number{units}.")
        if match[2] is None:
            return int(match[1])
        micros = int(match[1]) * _UNIT[match[2]]
        return -(-micros // self.unit)

    def length(self, units: int) -> str:
        """A length as `span` reads it back, in the largest unit that says it exactly: `100`, `7d`, `12h`."""
        if not self.is_time or not units:
            return str(units)
        micros = units * self.unit
        name = next(name for name in ("d", "h", "m", "s", "ms", "us") if micros % _UNIT[name] == 0)
        return f"{micros // _UNIT[name]}{name}"

    def roughly(self, units: int) -> str:
        """A length at a glance: `1,200`, `3d 4h`, `5h 10m`, `42s`."""
        if not self.is_time:
            return f"{units:,}"
        seconds = units * self.unit // _UNIT["s"]
        (days, rest), (hours, minutes) = divmod(seconds, 86_400), divmod(seconds // 60, 60)
        if days:
            return f"{days}d {rest // 3600}h"
        return f"{hours}h {minutes}m" if seconds >= 60 else f"{seconds}s"


def _iso(moment: datetime) -> str:
    text = f"{moment:%Y-%m-%d %H:%M:%S}"
    return f"{text}.{moment.microsecond:06d}" if moment.microsecond else text


def literal(axis: Axis, key: TierKey | None) -> str | None:
    """A key as people write it; one that no calendar holds stays a number."""
    if key is None:
        return None
    try:
        return axis.literal(key)
    except OverflowError:
        return str(key)


@dataclass(frozen=True, slots=True)
class Width:
    """The size of a partition: a fixed length on the axis, or a number of calendar months in a time zone."""

    amount: int
    months: bool = False
    zone: str = "UTC"

    @classmethod
    def between(cls, lower: TierKey, upper: TierKey, axis: Axis, zone: str = "UTC") -> Width:
        """Read the width off an existing partition; first-of-month bounds mean calendar months."""
        if axis.is_time:
            for name in dict.fromkeys(("UTC", zone) if axis is Axis.TIMESTAMPTZ else ("UTC",)):
                months = _months_between(lower, upper, axis, ZoneInfo(name))
                if months:
                    return cls(months, months=True, zone=name)
        return cls(upper - lower)

    def after(self, lower: TierKey, axis: Axis) -> TierKey:
        """The upper bound of the partition that starts at `lower`."""
        if not self.months:
            return lower + self.amount
        local = axis.moment(lower).astimezone(ZoneInfo(self.zone))
        ahead = local.year * 12 + local.month - 1 + self.amount
        return axis.of(local.replace(year=ahead // 12, month=ahead % 12 + 1))

    def __str__(self) -> str:
        return f"{self.amount} month{'s' if self.amount > 1 else ''}" if self.months else str(self.amount)


def _months_between(lower: TierKey, upper: TierKey, axis: Axis, zone: tzinfo) -> int:
    try:
        first, last = (axis.moment(key).astimezone(zone) for key in (lower, upper))
    except OverflowError:
        return 0
    for moment in (first, last):
        if (moment.day, moment.hour, moment.minute, moment.second, moment.microsecond) != (1, 0, 0, 0, 0):
            return 0
    return (last.year - first.year) * 12 + last.month - first.month
