"""Which files an Iceberg table can show as they are: an explicit table of types, and what the format itself widens.

Iceberg reads int as long, float as double and a decimal as one of more digits. Everything else must have the type of
its column in every file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

_TYPES = {
    pa.bool_(): "boolean",
    pa.int8(): "int",
    pa.int16(): "int",
    pa.int32(): "int",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.large_string(): "string",
    pa.binary(): "binary",
    pa.large_binary(): "binary",
    pa.date32(): "date",
}
_WIDER = {("int", "long"), ("float", "double")}
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")


def joined(columns: Mapping[str, str], schema: pa.Schema) -> dict[str, str] | str:
    """The columns of a table with those of one more file; or why the file does not fit, in words that follow "it"."""
    wide = dict(columns)
    folded = {name.casefold(): name for name in columns}
    for field in schema:
        name, kind = field.name, lake_type(field.type)
        if kind is None:
            return f"it has the column {name!r} of type {field.type}, which Iceberg does not read as it is"
        if folded.setdefault(name.casefold(), name) != name:
            return f"it has the column {name!r}, which differs from another one only in case"
        common = widened(wide.get(name, kind), kind)
        if common is None:
            return f"it has the column {name!r} of type {kind}, and others have {wide[name]}"
        wide[name] = common
    return wide


def lake_type(kind: Any) -> str | None:
    """Iceberg's type of a column of a file, `None` if it has none for that."""
    if pa.types.is_dictionary(kind):
        return lake_type(kind.value_type)
    if pa.types.is_timestamp(kind):
        if kind.unit != "us":
            return None
        return "timestamp" if kind.tz is None else "timestamptz"
    if pa.types.is_decimal128(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return _TYPES.get(kind)


def widened(one: str, other: str) -> str | None:
    """The type as which Iceberg reads both, `None` if there is none."""
    if one == other:
        return one
    for narrow, wide in ((one, other), (other, one)):
        if (narrow, wide) in _WIDER:
            return wide
    digits = [_DECIMAL.fullmatch(kind) for kind in (one, other)]
    if digits[0] and digits[1] and digits[0][2] == digits[1][2]:
        return max(one, other, key=lambda kind: int(kind[len("decimal(") :].partition(",")[0]))
    return None
