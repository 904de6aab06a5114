"""Dates and timestamps in Postgres' text, ISO style in UTC, as days and microseconds since 1970.

Arrow reads what most columns hold. What it does not know (years of five digits, before Christ, infinity) is taken apart
by one pattern for the whole column, and the days are counted in the proleptic Gregorian calendar.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from modak.postgres.changes.wire import malformed

DAY_MICROS = 86_400_000_000
_PATTERN = (
    r"^(?P<sign>-?)(?P<infinity>infinity)?(?P<year>\d*)-?(?P<month>\d*)-?(?P<day>\d*)"
    r"(?: (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:\.(?P<fraction>\d+))?)?(?:\+00)?(?P<bc> BC)?$"
)


class TooLate(Exception):
    """A finite timestamp lies behind what microseconds since 1970 in 64 bits hold."""


def dates(texts: pa.Array) -> pa.Array:
    """Dates; infinity is the largest number of days, minus infinity its negative."""
    try:
        return texts.cast(pa.date32())
    except pa.ArrowInvalid:
        parts = _parts(texts)
        return _placed(_days(parts).astype(np.int64), parts, 2**31 - 1).cast(pa.int32()).cast(pa.date32())


def timestamps(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Timestamps, with or without a zone (which is UTC); infinity as for dates."""
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        parts = _parts(texts)
        return _placed(_micros(parts), parts, 2**63 - 1).cast(kind)


def _parts(texts: pa.Array) -> dict[str, Any]:
    found = pc.extract_regex(texts, _PATTERN)
    if found.null_count > texts.null_count:
        raise malformed("a text is not a date or timestamp")
    return {"valid": texts.is_valid(), **{field.name: pc.struct_field(found, field.name) for field in found.type}}


def _number(parts: dict[str, Any], name: str) -> npt.NDArray[np.int64]:
    texts = pc.fill_null(parts[name], "")
    return np.asarray(pc.if_else(pc.equal(texts, ""), "0", texts).cast(pa.int64()))


def _flag(parts: dict[str, Any], name: str) -> npt.NDArray[np.bool_]:
    return np.asarray(pc.not_equal(pc.fill_null(parts[name], ""), "").cast(pa.int8())).astype(bool)


def _days(parts: dict[str, Any]) -> npt.NDArray[np.int64]:
    """Days since 1970, by eras of 400 years that begin in March."""
    year, month, day = (_number(parts, name) for name in ("year", "month", "day"))
    year = np.where(_flag(parts, "bc"), 1 - year, year) - (month <= 2)
    era = year // 400
    of_era = year - era * 400
    of_year = (153 * (month + np.where(month > 2, -3, 9)) + 2) // 5 + day - 1
    return np.asarray(era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468)


def _micros(parts: dict[str, Any]) -> npt.NDArray[np.int64]:
    days = _days(parts)
    hour, minute, second = (_number(parts, name) for name in ("hour", "minute", "second"))
    fraction = pc.utf8_rpad(pc.fill_null(parts["fraction"], ""), 6, "0").cast(pa.int64())
    of_day = (hour * 3600 + minute * 60 + second) * 1_000_000 + np.asarray(fraction)
    last_day, last_micro = divmod(2**63 - 1, DAY_MICROS)
    finite = ~_flag(parts, "infinity")
    if np.any(finite & ((days > last_day) | ((days == last_day) & (of_day >= last_micro)))):
        raise TooLate
    return np.asarray(days * DAY_MICROS + of_day)


def _placed(values: npt.NDArray[np.int64], parts: dict[str, Any], infinity: int) -> pa.Array:
    endless, negative = _flag(parts, "infinity"), _flag(parts, "sign")
    placed = np.where(endless, np.where(negative, -infinity, infinity), values)
    return pa.array(placed, mask=~np.asarray(parts["valid"].cast(pa.int8())).astype(bool))
