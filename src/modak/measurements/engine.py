"""DuckDB as the merge and the readers use it: bounded, in UTC, told every type by name.

Files of one schema are read together and brought to the wanted schema by explicit casts. Nothing is inferred: neither
columns from folder names nor a common type of files that differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from modak.measurements.types import TIME, is_nanoseconds, plain

SHARE_OF_ENGINE = 0.6
"""The engine's part of the memory; the rest is Arrow's and Python's."""
_NAMES = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.uint8(): "UTINYINT",
    pa.uint16(): "USMALLINT",
    pa.uint32(): "UINTEGER",
    pa.uint64(): "UBIGINT",
    pa.float32(): "REAL",
    pa.float64(): "DOUBLE",
    pa.string(): "VARCHAR",
    pa.binary(): "BLOB",
    pa.date32(): "DATE",
    pa.time64("us"): "TIME",
    pa.timestamp("us"): "TIMESTAMP",
    pa.timestamp("us", tz="UTC"): "TIMESTAMPTZ",
}


@contextlib.contextmanager
def opened(work: Path, memory_bytes: int, threads: int) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection with a limit on its memory, in UTC, that spills into a folder of its own."""
    spill = work / "spill"
    spill.mkdir(parents=True, exist_ok=True)
    engine = duckdb.connect(
        config={
            "threads": threads,
            "memory_limit": f"{max(int(memory_bytes * SHARE_OF_ENGINE) >> 20, 64)}MiB",
            "temp_directory": str(spill),
            "autoinstall_known_extensions": False,
            "enable_external_access": True,
        }
    )
    try:
        engine.execute("SET TimeZone = 'UTC'")
        engine.execute("SET preserve_insertion_order = false")
        # It would keep what it has read of a file after the query, of files that are read once.
        engine.execute("SET enable_external_file_cache = false")
        yield engine
    finally:
        engine.close()


def columns(have: pa.Schema, want: pa.Schema) -> str:
    """The columns of a wanted schema, read from files that have another one."""
    return ", ".join(f"{_value(have, field)} AS {quoted(field.name)}" for field in want)


def _value(have: pa.Schema, want: pa.Field) -> str:
    index = have.get_field_index(want.name)
    if index < 0 or pa.types.is_null(have.field(index).type):
        # A nested type has no short name here, and needs none: the other side of the union has it.
        return "NULL" if pa.types.is_nested(want.type) else f"CAST(NULL AS {_type_name(want.type)})"
    column, kind = quoted(want.name), have.field(index).type
    if want.name == TIME:
        return _as_time(column, kind)
    if plain(kind) == want.type and not is_nanoseconds(kind):
        return column
    return f"CAST({column} AS {_type_name(want.type)})"


def _as_time(column: str, kind: Any) -> str:
    if pa.types.is_integer(kind):
        return f"CAST(make_timestamp(CAST({column} AS BIGINT)) AS TIMESTAMPTZ)"
    if pa.types.is_timestamp(kind) and kind.tz is None:
        return f"CAST(CAST({column} AS TIMESTAMP) AS TIMESTAMPTZ)"
    return f"CAST({column} AS TIMESTAMPTZ)"


def _type_name(kind: Any) -> str:
    if pa.types.is_decimal128(kind):
        return f"DECIMAL({kind.precision}, {kind.scale})"
    return _NAMES[kind]


def quoted(name: str) -> str:
    """A name as SQL takes it."""
    return '"' + name.replace('"', '""') + '"'
