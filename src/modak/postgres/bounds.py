"""Partition bounds: from the text that Postgres shows to axis values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from modak.core.axis import Axis
from modak.core.errors import ModakError

_HIGHEST = 2**63 - 1
_LOWEST = -(2**63)
_RANGE = re.compile(r"FOR VALUES FROM \((.*)\) TO \((.*)\)", re.DOTALL)
_VALUE = re.compile(r"\s*(?:'((?:[^']|'')*)'(?:::[^,]+)?|([^\s,']+))\s*(,|$)", re.DOTALL)
# Timestamps become exact numerics; a date minus a date is a whole number of days.
_TO_AXIS = {
    Axis.DATE: "v::date - date '1970-01-01'",
    Axis.TIMESTAMP: "extract(epoch FROM v::timestamp) * 1000000",
    Axis.TIMESTAMPTZ: "extract(epoch FROM v::timestamptz) * 1000000",
}
_FINITE = {Axis.DATE: "v::date", Axis.TIMESTAMP: "v::timestamp", Axis.TIMESTAMPTZ: "v::timestamptz"}


@dataclass(frozen=True, slots=True)
class RangeBound:
    """The bound of a range partition as text, one entry per partition column; `None` is MINVALUE or MAXVALUE."""

    lower: tuple[str | None, ...]
    upper: tuple[str | None, ...]


def parse_bound(text: str) -> RangeBound | None:
    """Read `FOR VALUES FROM (…) TO (…)`; `None` for DEFAULT, list and hash partitions."""
    match = _RANGE.fullmatch(text.strip())
    return RangeBound(_values(match[1]), _values(match[2])) if match else None


def _values(text: str) -> tuple[str | None, ...]:
    values: list[str | None] = []
    at = 0
    while True:
        match = _VALUE.match(text, at)
        if match is None:
            raise ModakError("postgres.bound", f"The partition bound ({text}) cannot be read.")
        if match[1] is not None:
            values.append(match[1].replace("''", "'"))
        else:
            values.append(None if match[2] in ("MINVALUE", "MAXVALUE") else match[2])
        at = match.end()
        if not match[3]:
            return tuple(values)


def to_axis(conn: psycopg.Connection[Any], axis: Axis, texts: Sequence[str]) -> list[int]:
    """Axis values of Postgres texts, in order; infinity and what lies beyond int64 become the ends of the axis."""
    if axis is Axis.INTEGER:
        return [int(text) for text in texts]
    finite, value = _FINITE[axis], _TO_AXIS[axis]
    # Both fragments are constants of this module.
    query = (
        f"SELECT CASE WHEN isfinite({finite}) THEN ({value})::numeric(30, 0)::text END, {finite} > 'epoch'"  # noqa: S608
        " FROM unnest(%s::text[]) WITH ORDINALITY AS given(v, place) ORDER BY place"
    )
    rows = conn.execute(query, (list(texts),)).fetchall()
    return [_within_axis(int(text)) if text is not None else (_HIGHEST if future else _LOWEST) for text, future in rows]


def _within_axis(value: int) -> int:
    return max(_LOWEST, min(_HIGHEST, value))


def edge_or_open(value: int, *, upper: bool) -> int | None:
    """-infinity as a lower bound is MINVALUE, infinity as an upper one MAXVALUE: no finite row tells them apart."""
    return None if value == (_HIGHEST if upper else _LOWEST) else value
