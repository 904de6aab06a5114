"""How the first copy of a table is cut: chunks along the primary key, tasks of neighbouring chunks, commits of tasks.

A chunk is what the journal knows, a task reads a run of them with one query, a commit takes several tasks. Where the
keys lie is asked of the table itself, exactly for a small one and by a sample of its pages for a large one; chunks are
then about as large as asked for. The first and the last chunk are open, so together they hold every row, whatever comes
and goes in between. Planning holds one key per chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from modak.catalog import pk
from modak.core.names import TableName
from modak.lake.types import quoted_identifier
from modak.postgres.connect import translate
from modak.postgres.model import PgTable

EXACT_BYTES = 64 << 20
"""Up to so many bytes of heap the keys are counted one by one."""
SAMPLED_PAGES = 4_000
"""Pages that a sample has at least; and a few for each chunk."""
PAGES_PER_CHUNK = 8
TASK_BYTES = 256 << 20
"""Heap bytes per task, as in tiering: a task costs a tenth of a second."""
LEAST_TASK_BYTES = 8 << 20
TASKS_PER_COMMIT = 8
"""Times the number of cores: what a crash throws away is at most so much."""

_KEY_COLUMNS: LiteralString = """
SELECT a.attname::text, format_type(a.atttypid, a.atttypmod)
FROM pg_index i CROSS JOIN unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, place)
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
WHERE i.indrelid = %s AND i.indisprimary AND k.place <= i.indnkeyatts ORDER BY k.place
"""
_WRITE: LiteralString = """
INSERT INTO modak.copy_progress (table_id, chunk, first_pk, last_pk)
SELECT %(table)s, c.number, c.first_pk, c.last_pk
FROM unnest(%(numbers)s::int[], %(firsts)s::text[], %(lasts)s::text[]) AS c (number, first_pk, last_pk)
"""
_READ: LiteralString = """
SELECT chunk, first_pk, last_pk, state, rows FROM modak.copy_progress WHERE table_id = %s ORDER BY chunk
"""
COMMITTED: LiteralString = """
UPDATE modak.copy_progress p SET state = 'committed', rows = n.rows, op_id = %(op)s, updated_at = clock_timestamp()
FROM unnest(%(chunks)s::int[], %(rows)s::bigint[]) AS n (chunk, rows)
WHERE p.table_id = %(table)s AND p.chunk = n.chunk AND p.state = 'planned'
"""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows after `first` up to and with `last`, in the order of the primary key; None is open."""

    number: int
    first: str | None
    last: str | None
    committed: bool = False
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Key:
    """The primary key's columns with the types that their texts are read back with."""

    columns: tuple[str, ...]
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring chunks that one task reads with one query."""

    chunks: tuple[Chunk, ...]

    @property
    def first(self) -> str | None:
        """Where it begins, exclusive."""
        return self.chunks[0].first

    @property
    def last(self) -> str | None:
        """Where it ends, inclusive."""
        return self.chunks[-1].last


def primary_key(conn: psycopg.Connection[Any], heap: PgTable) -> Key:
    """The columns along which the copy goes."""
    rows = conn.execute(_KEY_COLUMNS, (heap.oid,)).fetchall()
    return Key(tuple(row[0] for row in rows), tuple(row[1] for row in rows))


def plan_chunks(
    conn: psycopg.Connection[Any], heap: PgTable, total_bytes: int, key: Key, chunk_rows: int
) -> list[Chunk]:
    """Cut a table into chunks of about so many rows."""
    try:
        edges = (
            _exact(conn, heap.name, key, chunk_rows)
            if total_bytes <= EXACT_BYTES
            else _sampled(conn, heap.name, key, chunk_rows, total_bytes)
        )
    except psycopg.Error as error:
        raise translate(error) from error
    texts = [pk.encode(edge) for edge in edges]
    # Two neighbouring keys of a sample may be one and the same row.
    texts = list(dict.fromkeys(texts))
    return [
        Chunk(number, first, last)
        for number, (first, last) in enumerate(zip([None, *texts], [*texts, None], strict=True))
    ]


def write_chunks(conn: psycopg.Connection[Any], table_id: int, chunks: Sequence[Chunk]) -> None:
    """Journal the plan in place of an earlier one, in the caller's transaction."""
    conn.execute("DELETE FROM modak.copy_progress WHERE table_id = %s", (table_id,))
    conn.execute(
        _WRITE,
        {
            "table": table_id,
            "numbers": [chunk.number for chunk in chunks],
            "firsts": [chunk.first for chunk in chunks],
            "lasts": [chunk.last for chunk in chunks],
        },
    )


def read_chunks(conn: psycopg.Connection[Any], table_id: int) -> list[Chunk]:
    """The journaled chunks, in order."""
    try:
        rows = conn.execute(_READ, (table_id,)).fetchall()
    except psycopg.Error as error:
        raise translate(error) from error
    return [Chunk(row[0], row[1], row[2], row[3] == "committed", row[4]) for row in rows]


def group(pending: Sequence[Chunk], total: int, total_bytes: int, cores: int) -> list[Run]:
    """Runs of neighbouring chunks, as many as are worth a task each. Pure."""
    if not pending:
        return []
    share = total_bytes * len(pending) // max(total, 1)
    wanted = max(math.ceil(share / TASK_BYTES), min(cores, share // LEAST_TASK_BYTES), 1)
    size = max(1, math.ceil(len(pending) / wanted))
    runs: list[list[Chunk]] = []
    for chunk in pending:
        follows = runs and runs[-1][-1].number + 1 == chunk.number and len(runs[-1]) < size
        if follows:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return [Run(tuple(run)) for run in runs]


def condition(key: Key, run: Run) -> str:
    """The WHERE condition of a run. Text, because it travels to an ADBC connection; names and values are quoted."""
    columns = ", ".join(quoted_identifier(column) for column in key.columns)
    left = f"({columns})" if len(key.columns) > 1 else columns
    parts = [
        f"{left} {operator} {_row(key, edge)}"
        for operator, edge in ((">", run.first), ("<=", run.last))
        if edge is not None
    ]
    return " AND ".join(parts) or "true"


def _row(key: Key, edge: str) -> str:
    values = pk.decode(edge, len(key.columns))
    typed = [f"{sql.Literal(value).as_string()}::{kind}" for value, kind in zip(values, key.types, strict=True)]
    return f"ROW({', '.join(typed)})" if len(typed) > 1 else typed[0]


def _exact(conn: psycopg.Connection[Any], name: TableName, key: Key, chunk_rows: int) -> list[tuple[str, ...]]:
    query = sql.SQL(
        "SELECT {texts} FROM (SELECT {columns}, row_number() OVER by_key AS n, lead(1) OVER by_key AS next"
        " FROM {table} WINDOW by_key AS (ORDER BY {columns})) r WHERE n %% %(rows)s = 0 AND next = 1 ORDER BY n"
    )
    return conn.execute(_named(query, name, key), {"rows": chunk_rows}).fetchall()


def _sampled(
    conn: psycopg.Connection[Any], name: TableName, key: Key, chunk_rows: int, total_bytes: int
) -> list[tuple[str, ...]]:
    pages = max(1, total_bytes // 8192)
    # A row takes some forty bytes at the very least; more pages than chunks need do no harm.
    wanted = max(SAMPLED_PAGES, PAGES_PER_CHUNK * total_bytes // (40 * chunk_rows))
    percent = min(100.0, 100.0 * wanted / pages)
    query = sql.SQL(
        "SELECT {texts} FROM (SELECT {columns}, row_number() OVER (ORDER BY {columns}) AS n, count(*) OVER () AS m,"
        " ceil(count(*) OVER () * 100 / {percent} / {rows})::int8 AS chunks"
        " FROM {table} TABLESAMPLE SYSTEM ({percent}) REPEATABLE (0)) r"
        " WHERE n < m AND n * chunks / m > (n - 1) * chunks / m ORDER BY n"
    )
    return conn.execute(_named(query, name, key, percent=sql.Literal(percent), rows=sql.Literal(chunk_rows))).fetchall()


def _named(query: sql.SQL, name: TableName, key: Key, **more: sql.Composable) -> sql.Composed:
    columns = [sql.Identifier(column) for column in key.columns]
    return query.format(
        texts=sql.SQL(", ").join(sql.SQL("{}::text").format(column) for column in columns),
        columns=sql.SQL(", ").join(columns),
        table=sql.Identifier(name.schema, name.name),
        **more,
    )
