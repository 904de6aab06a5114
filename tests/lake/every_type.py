"""A table with a column of every kind of type, rows for it, and how to compare what different readers make of them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from modak.core.names import TableName
from modak.lake.decode import arrow_schema, decoded
from modak.lake.model import LakeColumn
from modak.lake.types import MappedColumn, map_column, select_list
from modak.postgres.arrow import stream
from modak.postgres.describe import describe
from modak.postgres.dsn import Dsn

TYPES_SQL = """
CREATE TYPE mood AS ENUM ('sad', 'it''s, "ok"', 'happy');
CREATE TYPE pair AS (x int, y text);
CREATE DOMAIN price AS numeric(8, 3) CHECK (VALUE >= 0);
"""

_INT2, _INT4, _INT8 = 2**15, 2**31, 2**63


def _ints(limit: int) -> st.SearchStrategy[str]:
    return st.one_of(st.sampled_from([-limit, limit - 1, 0]), st.integers(-limit, limit - 1)).map(str)


def _decimals(digits: int, scale: int) -> st.SearchStrategy[str]:
    largest = 10**digits - 1
    return st.one_of(st.sampled_from([largest, -largest, 0]), st.integers(-largest, largest)).map(
        lambda unscaled: f"{Decimal(unscaled).scaleb(-scale, _exact()):f}"
    )


def _exact() -> Any:
    from decimal import Context

    return Context(prec=80)


_words = st.text(st.characters(exclude_characters="\x00", exclude_categories=("Cs",)), max_size=20)
_floats = st.one_of(st.sampled_from(["NaN", "Infinity", "-Infinity", "-0", "0"]), st.floats(allow_nan=False).map(repr))
_float32 = st.one_of(st.sampled_from(["NaN", "-0"]), st.floats(width=32, allow_nan=False).map(repr))
_dates = st.one_of(
    st.sampled_from(["infinity", "-infinity", "4713-01-01 BC", "0044-03-15 BC", "0001-12-31 BC", "5874897-12-31"]),
    st.dates().map(date.isoformat),
)
_odd_stamps = """
infinity
-infinity
4713-01-01 00:00:00 BC
0044-03-15 12:00:00.000001 BC
1969-12-31 23:59:59.999999
294247-01-10 04:00:54.775806
12345-06-07 08:09:10
0001-01-01 00:00:00
"""
_stamps = st.one_of(st.sampled_from(_odd_stamps.strip().splitlines()), st.datetimes().map(datetime.isoformat))
_zoned = (
    st.tuples(_stamps, st.sampled_from(["", "+00", "-08", "+05:45"]))
    .map(lambda parts: parts[0] + parts[1] if parts[0][0].isdigit() and " BC" not in parts[0] else parts[0])
    .filter(lambda text: not text.startswith(("294247", "0001-01-01", "9999-12-31")))
)
_times = st.one_of(st.sampled_from(["24:00:00", "00:00:00"]), st.times().map(lambda time: time.isoformat()))
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["a", 'q"', "é"]), lambda x: st.lists(x, max_size=3)
)
_bytea = st.binary(max_size=20).map(lambda value: "\\x" + value.hex())
_uuids = st.uuids().map(str)
_moods = st.sampled_from(["sad", 'it\'s, "ok"', "happy"])


def _json_text(value: object) -> str:
    import json

    return json.dumps(value)


def _array(elements: st.SearchStrategy[str]) -> st.SearchStrategy[list[str | None]]:
    return st.lists(st.one_of(st.none(), elements), max_size=4)


COLUMNS: dict[str, tuple[str, st.SearchStrategy[Any]]] = {
    "b": ("bool", st.sampled_from(["t", "f"])),
    "i2": ("int2", _ints(_INT2)),
    "i4": ("int4", _ints(_INT4)),
    "i8": ("int8", _ints(_INT8)),
    "f4": ("float4", _float32),
    "f8": ("float8", _floats),
    "n12_2": ("numeric(12,2)", _decimals(12, 2)),
    "n38_10": ("numeric(38,10)", _decimals(38, 10)),
    "n3_5": ("numeric(3,5)", _decimals(3, 5)),
    "n3_minus2": ("numeric(3,-2)", _decimals(5, 0).filter(lambda text: abs(int(text)) < 99_900)),
    "n_free": ("numeric", _decimals(38, 18)),
    "n_wide": ("numeric(50,10)", _decimals(28, 10)),
    "t": ("text", st.one_of(st.just("x" * 10_000), _words)),
    "v": ("varchar(20)", _words),
    "c": ("char(20)", st.sampled_from(["", "ab", "ab  ", "  é", "a" * 20])),
    "nm": ("name", st.sampled_from(["", "one name"])),
    "ch": ('"char"', st.sampled_from(["a", "Z"])),
    "by": ("bytea", _bytea),
    "u": ("uuid", _uuids),
    "d": ("date", _dates),
    "ts": ("timestamp", _stamps),
    "tz": ("timestamptz", _zoned),
    "tm": ("time", _times),
    "tmz": ("timetz", st.tuples(_times, st.sampled_from(["+00", "-08:30"])).map("".join)),
    "iv": ("interval", st.sampled_from(["P1Y2M3DT4H5M6.7S", "-1 day", "0", "infinity", "1 mon -1 day"])),
    "j": ("json", _json.map(_json_text)),
    "jb": ("jsonb", _json.map(_json_text)),
    "e": ("mood", _moods),
    "rg": ("int4range", st.sampled_from(["[1,5)", "empty", "(,3]"])),
    "mr": ("int4multirange", st.sampled_from(["{[1,3),[5,7)}", "{}"])),
    "cp": ("pair", st.sampled_from(['(1,"a b")', "(,)"])),
    "ip": ("inet", st.sampled_from(["10.0.0.1", "::1/64"])),
    "ci": ("cidr", st.sampled_from(["10.0.0.0/8"])),
    "mac": ("macaddr", st.sampled_from(["08:00:2b:01:02:03"])),
    "bt": ("bit(3)", st.sampled_from(["101", "000"])),
    "vb": ("varbit", st.sampled_from(["", "10111"])),
    "m": ("money", st.sampled_from(["12.34", "-5"])),
    "o": ("oid", st.sampled_from(["0", "4294967295"])),
    "lsn": ("pg_lsn", st.sampled_from(["0/0", "16/B374D848"])),
    "pt": ("point", st.sampled_from(["(1.5,-2)"])),
    "tv": ("tsvector", st.sampled_from(["'a':1 'b'", ""])),
    "dm": ("price", _decimals(8, 3).map(lambda text: text.lstrip("-"))),
    "a_b": ("bool[]", _array(st.sampled_from(["t", "f"]))),
    "a_i2": ("int2[]", _array(_ints(_INT2))),
    "a_i4": ("int4[]", _array(_ints(_INT4))),
    "a_f8": ("float8[]", _array(_floats)),
    "a_n": ("numeric(10,2)[]", _array(_decimals(10, 2))),
    "a_nf": ("numeric[]", _array(_decimals(38, 18))),
    "a_t": ("text[]", _array(st.one_of(st.sampled_from(["NULL", "", "{", ",", '"', "\\", "a b"]), _words))),
    "a_c": ("char(4)[]", _array(st.sampled_from(["ab", "abcd", ""]))),
    "a_by": ("bytea[]", _array(_bytea)),
    "a_u": ("uuid[]", _array(_uuids)),
    "a_d": ("date[]", _array(_dates)),
    "a_ts": ("timestamp[]", _array(_stamps)),
    "a_tz": ("timestamptz[]", _array(_zoned)),
    "a_tm": ("time[]", _array(_times)),
    "a_jb": ("jsonb[]", _array(_json.map(_json_text))),
    "a_e": ("mood[]", _array(_moods)),
    "a_ip": ("inet[]", _array(st.sampled_from(["10.0.0.1", "10.1.1.1/8", "::1"]))),
    "a_bx": ("box[]", st.sampled_from([[], ["(1,1),(0,0)"]])),
}

ROW = st.tuples(*(st.one_of(st.none(), values) for _, values in COLUMNS.values()))
ROWS = st.lists(ROW, min_size=1, max_size=12)


def create_sql(table: str) -> str:
    columns = ", ".join(f"{name} {kind}" for name, (kind, _) in COLUMNS.items())
    return f"CREATE TABLE {table} (k bigint PRIMARY KEY, {columns})"


def insert(conn: Any, table: str, rows: Sequence[tuple[Any, ...]], first: int = 1) -> None:
    """Insert rows given as texts (arrays: lists of texts)."""
    slots = ", ".join(
        f"%s::text[]::{kind}" if kind.endswith("[]") else f"%s::text::{kind}" for kind, _ in COLUMNS.values()
    )
    with conn.cursor() as cursor:
        cursor.executemany(
            f"INSERT INTO {table} VALUES (%s, {slots})", [(at, *row) for at, row in enumerate(rows, first)]
        )


def mapped_columns(conn: Any, table: str, **options: Any) -> list[MappedColumn]:
    """The columns of a table with field ids, as a created lake table would have them."""
    found = []
    for at, column in enumerate(describe(conn, TableName("public", table)).columns, 1):
        mapped = map_column(column, **options)
        assert isinstance(mapped, MappedColumn), mapped
        element = 1000 + at if mapped.column.element is not None else None
        found.append(replace(mapped, column=replace(mapped.column, field_id=at, element_id=element)))
    return found


def read_heap(dsn: Dsn, table: str, mapped: Sequence[MappedColumn]) -> pa.Table:
    """All rows as an export would have them, ordered by key."""
    schema = arrow_schema([column.column for column in mapped])
    with stream(dsn, f"SELECT {select_list(mapped)} FROM {table} ORDER BY k") as batches:
        return pa.Table.from_batches(list(decoded(batches, mapped, schema)), schema)


def lake_columns(mapped: Sequence[MappedColumn]) -> list[LakeColumn]:
    return [column.column for column in mapped]


def plain(values: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Values that compare: moments as raw numbers, floats by their spelling (so that NaN is NaN and -0 is not 0)."""
    if isinstance(values, pa.ChunkedArray):
        return [value for chunk in values.chunks for value in plain(chunk)]
    kind = values.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = plain(values.values)
        ends = values.offsets.to_pylist()
        return [
            inner[ends[at] : ends[at + 1]] if there else None for at, there in enumerate(values.is_valid().to_pylist())
        ]
    if pa.types.is_timestamp(kind):
        return list(values.cast(pa.int64()).to_pylist())
    if pa.types.is_date(kind):
        return list(values.cast(pa.int32()).to_pylist())
    if pa.types.is_floating(kind):
        return [None if value is None else repr(value) for value in values.to_pylist()]
    if kind == pa.uuid():
        return [None if value is None else uuid.UUID(bytes=value) for value in values.storage.to_pylist()]
    return list(values.to_pylist())


def differences(left: pa.Table, right: pa.Table) -> dict[str, tuple[list[Any], list[Any]]]:
    """The columns in which two tables differ."""
    found = {name: (plain(left.column(name)), plain(right.column(name))) for name in left.column_names}
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}
