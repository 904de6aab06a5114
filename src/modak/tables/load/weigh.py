"""Which rows of a refused batch are to blame.

Postgres refuses a batch as a whole and tells the first reason. Only then are the rows weighed one by one: as texts in a
temporary table with their lines, in a transaction that is rolled back. Looked at are values that are none of their
column (an enum's, a domain's, a length), NOT NULL, CHECK and keys that come again; of a repeated key the first row
stands. What only the whole table can tell (another UNIQUE, a trigger of the user) stays a refusal of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, LiteralString

import psycopg
from psycopg import sql

LINE = "modak_line"

_COLUMNS: LiteralString = """
    SELECT attname, format_type(atttypid, atttypmod), attnotnull FROM pg_attribute
    WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped AND attname = ANY (%s)
"""
_CHECKS: LiteralString = """
    SELECT c.conname, pg_get_expr(c.conbin, c.conrelid) FROM pg_constraint c
    WHERE c.conrelid = %s AND c.contype = 'c' AND NOT EXISTS (
        SELECT FROM unnest(c.conkey) k JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = k
        WHERE a.attname <> ALL (%s))
    ORDER BY c.conname
"""


def weigh(
    conn: psycopg.Connection[Any],
    table: int,
    columns: Sequence[str],
    given: Sequence[str],
    key: Sequence[str],
    pieces: Iterable[bytes],
) -> dict[int, str]:
    """Line → reason of every row that the table (by OID) cannot take.

    `pieces` are CSV of the line and the columns; those that are not given by any row get their defaults and are not
    looked at.
    """
    _take(conn, columns, pieces)
    shapes = {str(name): (str(kind), bool(full)) for name, kind, full in conn.execute(_COLUMNS, (table, list(given)))}
    found: dict[int, str] = {}
    if conn.info.server_version >= 160_000:
        for name, (kind, _) in shapes.items():
            _note(found, conn, _MISFIT.format(column=sql.Identifier(name)), (f"column {name}: ", kind, kind))
    typed = [
        sql.SQL("{0}::{1} AS {0}").format(sql.Identifier(name), sql.SQL(kind)) for name, (kind, _) in shapes.items()
    ]
    conn.execute(
        sql.SQL("CREATE TEMP TABLE modak_typed ON COMMIT DROP AS SELECT {}, {} FROM modak_texts").format(
            sql.Identifier(LINE), sql.SQL(", ").join(typed)
        )
        + sql.SQL(" WHERE {} <> ALL (%s)").format(sql.Identifier(LINE)),
        (list(found),),
    )
    for name in (name for name, (_, full) in shapes.items() if full):
        _note(found, conn, _EMPTY.format(column=sql.Identifier(name)), (f"column {name} is NULL",))
    for name, expression in conn.execute(_CHECKS, (table, list(given))).fetchall():
        check = sql.SQL(expression.replace("%", "%%"))
        _note(found, conn, _BREACH.format(check=check), (f"it violates check constraint {name}",))
    _note(found, conn, _AGAIN.format(key=sql.SQL(", ").join(map(sql.Identifier, key))), (list(found),))
    return found


_MISFIT = sql.SQL(
    "SELECT modak_line, %s || (pg_input_error_info({column}, %s)).message FROM modak_texts"
    " WHERE NOT pg_input_is_valid({column}, %s)"
)
_EMPTY = sql.SQL("SELECT modak_line, %s FROM modak_typed WHERE {column} IS NULL")
_BREACH = sql.SQL("SELECT modak_line, %s FROM modak_typed WHERE NOT ({check})")
_AGAIN = sql.SQL(
    "SELECT modak_line, 'its key comes again, first on line ' || earlier FROM ("
    "  SELECT modak_line, first_value(modak_line) OVER (PARTITION BY {key} ORDER BY modak_line) AS earlier"
    "  FROM modak_typed WHERE modak_line <> ALL (%s)) r"
    " WHERE modak_line <> earlier"
)


def _take(conn: psycopg.Connection[Any], columns: Sequence[str], pieces: Iterable[bytes]) -> None:
    texts = sql.SQL(", ").join(sql.SQL("{} text").format(sql.Identifier(name)) for name in columns)
    conn.execute(
        sql.SQL("CREATE TEMP TABLE modak_texts ({} bigint, {}) ON COMMIT DROP").format(sql.Identifier(LINE), texts)
    )
    with conn.cursor().copy("COPY modak_texts FROM STDIN (FORMAT csv)") as copy:
        for piece in pieces:
            copy.write(piece)


def _note(
    found: dict[int, str], conn: psycopg.Connection[Any], question: sql.Composed, given: Sequence[object]
) -> None:
    for line, reason in conn.execute(question, given):
        found.setdefault(int(line), str(reason))
