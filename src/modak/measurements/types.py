"""One schema for files that differ: an explicit table of lossless widenings, decided from the footers alone.

The engine is never asked to find a common type: int64 and double meet in double there, and 2⁵³ and 2⁵³ + 1 become one
value; a timestamp without zone is shifted by the session's. Whatever is not in this table is a conflict, and the files
on its smaller side stay as they are. `time` is the exception that it must be: its types are brought to UTC microseconds
by rules of their own (`merge.py` reads them so).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

TIME = "time"
TIME_TYPE = pa.timestamp("us", tz="UTC")
TAGS_KEY = b"arc:tags"
"""The footer key under which a writer names its tag columns."""

_SIGNED = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_UNSIGNED = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64()}
_EXACT_IN_FLOAT = {pa.int8(), pa.int16()}
_EXACT_IN_DOUBLE = {pa.int8(), pa.int16(), pa.int32(), pa.float32()}
_DECIMAL_DIGITS = 38


@dataclass(frozen=True)
class Footer:
    """What the end of a file says about it."""

    path: str
    rows: int
    schema: pa.Schema
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Files of one and the same schema."""

    schema: pa.Schema
    paths: tuple[str, ...]
    rows: int


@dataclass(frozen=True)
class Unified:
    """The schema that holds all groups without loss, and the files that it cannot hold, with the reason."""

    schema: pa.Schema
    groups: tuple[Group, ...]
    aside: tuple[tuple[str, str], ...]
    tags: tuple[str, ...]

    @property
    def rows(self) -> int:
        """Rows of all groups."""
        return sum(group.rows for group in self.groups)


def unify(footers: Sequence[Footer]) -> Unified:
    """One schema for as many rows as possible: groups join by size, and one that does not fit is set aside."""
    aside: list[tuple[str, str]] = []
    taken: list[Group] = []
    columns: dict[str, Any] = {}
    for group in sorted(_groups(footers), key=lambda group: (-group.rows, group.paths)):
        try:
            columns = _joined(columns, group.schema)
            taken.append(group)
        except Conflicting as conflict:
            aside.extend((path, str(conflict)) for path in group.paths)
    kept = {path for group in taken for path in group.paths}
    tags = sorted({tag for footer in footers if footer.path in kept for tag in footer.tags})
    fields = [pa.field(TIME, columns.pop(TIME))] if TIME in columns else []
    # A column that no file has a value for keeps a type that every reader knows.
    fields += [pa.field(name, pa.string() if pa.types.is_null(kind) else kind) for name, kind in columns.items()]
    return Unified(pa.schema(fields), tuple(taken), tuple(aside), tuple(tags))


class Conflicting(Exception):
    """Why a schema does not join the others, in words."""


def _groups(footers: Iterable[Footer]) -> list[Group]:
    gathered: dict[Any, list[Footer]] = {}
    for footer in footers:
        gathered.setdefault(footer.schema.remove_metadata(), []).append(footer)
    return [
        Group(schema, tuple(footer.path for footer in some), sum(footer.rows for footer in some))
        for schema, some in gathered.items()
    ]


def _joined(columns: dict[str, Any], schema: pa.Schema) -> dict[str, Any]:
    joined = dict(columns)
    folded = {name.casefold(): name for name in columns}
    own: set[str] = set()
    if TIME not in schema.names:
        raise Conflicting("it has no column time")
    for field in schema:
        name, fold = field.name, field.name.casefold()
        if fold in own or folded.get(fold, name) != name:
            raise Conflicting(f"column {name!r} differs from another one only in case")
        own.add(fold)
        kind = time_type(field.type) if name == TIME else plain(field.type)
        if kind is None:
            raise Conflicting(f"column {name!r} has the type {field.type}, which cannot be merged safely")
        wide = kind if name not in joined else wider(joined[name], kind)
        if wide is None:
            raise Conflicting(f"column {name!r} is {kind} here and {joined[name]} elsewhere, with no type for both")
        joined[name] = wide
    return joined


def time_type(kind: Any) -> Any | None:
    """The type of `time` in the output, if a column of this type can be read as a time at all."""
    is_time = pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_integer(kind) or _is_text(kind)
    return TIME_TYPE if is_time else None


def plain(kind: Any) -> Any | None:  # noqa: PLR0911 - a table
    """The type that a column has for us: without dictionaries, large offsets and nanoseconds; `None` if unknown."""
    if pa.types.is_dictionary(kind):
        return plain(kind.value_type)
    if _is_text(kind):
        return pa.string()
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz="UTC" if kind.tz is not None else None)
    if pa.types.is_nested(kind):
        return kind if _plainly_nested(kind) else None
    if pa.types.is_date(kind):
        return pa.date32()
    if pa.types.is_time(kind):
        return pa.time64("us") if kind != pa.time64("ns") else None
    if pa.types.is_decimal128(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return kind
    return kind if kind in (pa.float32(), pa.float64()) else None


def wider(one: Any, other: Any) -> Any | None:  # noqa: PLR0911 - a table
    """The narrowest type that holds every value of both without loss; `None` if there is none."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_integer(one) and pa.types.is_integer(other):
        return _wider_integer(one, other)
    if pa.types.is_decimal128(one) and pa.types.is_decimal128(other):
        scale = max(one.scale, other.scale)
        digits = max(one.precision - one.scale, other.precision - other.scale) + scale
        return pa.decimal128(digits, scale) if digits <= _DECIMAL_DIGITS else None
    narrow, wide = (one, other) if pa.types.is_floating(other) else (other, one)
    if not pa.types.is_floating(wide):
        return None
    narrow = _UNSIGNED.get(narrow, narrow)
    if wide == pa.float32() and narrow in _EXACT_IN_FLOAT:
        return wide
    return pa.float64() if narrow in _EXACT_IN_DOUBLE or narrow == pa.float64() else None


def is_nanoseconds(kind: Any) -> bool:
    """Whether a column can hold what microseconds cannot; its values decide then."""
    return bool(pa.types.is_timestamp(kind) and kind.unit == "ns")


def _wider_integer(one: Any, other: Any) -> Any | None:
    if pa.types.is_unsigned_integer(one) and pa.types.is_unsigned_integer(other):
        return max(one, other, key=lambda kind: kind.bit_width)
    signed = [_UNSIGNED.get(kind, kind) for kind in (one, other)]
    if pa.uint64() in signed:
        return None
    return max(signed, key=_SIGNED.index)


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _plainly_nested(kind: Any) -> bool:
    parts = [kind.field(index).type for index in range(kind.num_fields)]
    return (pa.types.is_list(kind) or pa.types.is_struct(kind)) and all(
        _plainly_nested(part) if pa.types.is_nested(part) else plain(part) == part for part in parts
    )
