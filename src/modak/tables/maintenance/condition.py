"""Which rows an erasure is about, in the words of Postgres and in those of Spark.

What a person wrote as a condition is the same text for both, but for quotes: Spark takes `"a"` for a text and a
backslash for an escape. A key is not left to two readers at all. Postgres casts each of its values to the column's
type, and from the canonical text comes the value that the lake has. It travels to the leader as a JSON object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
from psycopg import sql

from modak.catalog.records import TableState
from modak.core.errors import UsageError
from modak.core.names import TableName
from modak.postgres.describe import describe
from modak.tables.registration.preflight import map_columns
from modak.tables.site import Site

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

_QUOTED = re.compile(r"'(?:[^']|'')*'" + r'|"(?:[^"]|"")*"')
# Without the modifier of the column: a value that is too long for it is no other, shorter value.
_TYPE: LiteralString = """
    SELECT format_type(atttypid, -1) FROM pg_attribute WHERE attrelid = %s AND attname = %s AND NOT attisdropped
"""


@dataclass(frozen=True, slots=True)
class Condition:
    """The rows that are meant."""

    heap: str
    """As Postgres reads it."""
    lake: Callable[[DataFrame], DataFrame]
    """The rows of a lake snapshot that it leaves."""


def by_key(site: Site, name: TableName, key: Mapping[str, str] | str) -> str:
    """The row of a key as a text that `read` understands; Postgres must understand each value."""
    record = site.reader.state(name).table
    columns = record.pk_columns
    if isinstance(key, str):
        if len(columns) != 1:
            raise UsageError(
                "usage.pk", f"The key of {name} is {', '.join(columns)}.", hint=f"Write --pk {columns[0]}=… --pk …"
            )
        key = {columns[0]: key}
    if set(key) != set(columns):
        raise UsageError("usage.pk", f"The key of {name} is {', '.join(columns)}.", hint="Name each with --pk.")
    with site.connect(autocommit=True) as conn:
        return json.dumps({column: _canonical(conn, record.relid, column, key[column]) for column in columns})


def read(site: Site, state: TableState, text: str) -> Condition:
    """A condition as it was asked for: what `by_key` gave, or what a person wrote."""
    if not text.startswith("{"):
        return Condition(text, lambda frame: frame.where(for_spark(text)))
    try:
        return _of_key(site, state, json.loads(text))
    except (json.JSONDecodeError, KeyError):
        raise UsageError("usage.where", "The condition begins like a key and is none.") from None


def for_spark(text: str) -> str:
    """A condition of Postgres with the texts and names that stand in quotes as Spark writes them."""

    def quoted(match: re.Match[str]) -> str:
        inner, mark = match[0][1:-1], match[0][0]
        if mark == '"':
            return "`" + inner.replace('""', '"').replace("`", "``") + "`"
        return "'" + inner.replace("\\", "\\\\").replace("''", "\\'") + "'"

    return _QUOTED.sub(quoted, text)


def _canonical(conn: psycopg.Connection[Any], relid: int, column: str, value: str) -> str:
    kind = conn.execute(_TYPE, (relid, column)).fetchone()
    if kind is None:
        raise UsageError("usage.pk", f"The key column {column} is gone from the heap.")
    try:
        row = conn.execute(sql.SQL("SELECT {}::{}::text").format(sql.Literal(value), sql.SQL(kind[0]))).fetchone()
    except psycopg.DataError as error:
        raise UsageError("usage.pk", f"{value!r} is no value of {column}: {error.diag.message_primary}") from error
    assert row is not None
    return str(row[0])


def _of_key(site: Site, state: TableState, texts: Mapping[str, str]) -> Condition:
    import pyarrow as pa

    from modak.lake.parse import parse_text

    record = state.table
    with site.connect(autocommit=True) as conn:
        table = describe(conn, record.name, record.tier_key)
        each = [sql.SQL("{} = {}").format(sql.Identifier(name), sql.Literal(text)) for name, text in texts.items()]
        heap = sql.SQL(" AND ").join(each).as_string(conn)
    mapped, _ = map_columns(table, record.numeric_as, frozenset({*record.pk_columns, record.tier_key}))
    known = {one.column.name: one for one in mapped}
    values = {name: parse_text(known[name], pa.array([text]))[0] for name, text in texts.items()}

    def lake(frame: DataFrame) -> DataFrame:
        from pyspark.sql import functions

        for name, value in values.items():
            frame = frame.where(functions.col("`" + name.replace("`", "``") + "`") == _lake_value(value))
        return frame

    return Condition(heap, lake)


def _lake_value(value: pa.Scalar[Any]) -> Column:
    import pyarrow as pa
    from pyspark.sql import functions

    # Through numbers: no text says infinity or a year before the first one to Spark.
    if pa.types.is_date32(value.type):
        return functions.date_from_unix_date(functions.lit(value.value))
    if pa.types.is_timestamp(value.type):
        moment = functions.timestamp_micros(functions.lit(value.value))
        return moment if value.type.tz else moment.cast("timestamp_ntz")
    plain = value.as_py()
    return functions.lit(str(plain) if isinstance(value, pa.UuidScalar) else plain)
