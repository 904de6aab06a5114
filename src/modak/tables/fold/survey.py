"""Looking at what waits in the delta, without taking it: marks along the next batch, and how large the debt is."""

from __future__ import annotations

from typing import Any, LiteralString

import psycopg

from modak.catalog.records import TableState
from modak.core.axis import TierKey
from modak.tables.fold.plan import DRIVER_ROWS, Backlog, Mark

Conn = psycopg.Connection[Any]

MARKS = 64

_WAITING: LiteralString = """
    table_id = %(table)s AND folded_generation IS NULL AND tier_key < %(t)s
        AND (%(r)s::bigint IS NULL OR tier_key >= %(r)s::bigint)
"""
_ASKED_FOR: LiteralString = """
    SELECT count(*), min(tier_key), max(tier_key), array_agg(tier_key) FILTER (WHERE version %% %(every)s = 0)
"""
_EXTENT: LiteralString = f"""
    {_ASKED_FOR} FROM (SELECT tier_key, version FROM modak.delta WHERE {_WAITING} LIMIT %(most)s) waiting
"""  # noqa: S608
_WHOLE_EXTENT: LiteralString = f"{_ASKED_FOR} FROM modak.delta WHERE {_WAITING}"
_SMALL: LiteralString = "SELECT pg_relation_size('modak.delta') <= %s::bigint"
_ROW_BYTES = 1_024
"""A delta of at most so many bytes per row of a batch is walked whole: without a limit Postgres uses several cores."""
_BY_TIER_KEY: LiteralString = f"""
    SELECT n, tier_key, NULL FROM (
        SELECT tier_key, row_number() OVER (ORDER BY tier_key) AS n, lead(1) OVER (ORDER BY tier_key) AS next
        FROM (SELECT tier_key FROM modak.delta WHERE {_WAITING} ORDER BY tier_key LIMIT %(most)s) waiting
    ) numbered
    WHERE (n - 1) %% %(step)s = 0 OR next IS NULL ORDER BY n
"""  # noqa: S608
_BY_KEY: LiteralString = f"""
    SELECT n, tier_key, pk FROM (
        SELECT tier_key, pk, row_number() OVER by_key AS n, lead(1) OVER by_key AS next
        FROM (
            SELECT tier_key, pk COLLATE "C" AS pk FROM modak.delta WHERE {_WAITING}
            ORDER BY tier_key, pk COLLATE "C" LIMIT %(most)s
        ) waiting WINDOW by_key AS (ORDER BY tier_key, pk)
    ) numbered
    WHERE (n - 1) %% %(step)s = 0 OR next IS NULL ORDER BY n
"""  # noqa: S608


def has_rows(conn: Conn, table_id: int) -> bool:
    """Whether a table has any delta rows, folded or not."""
    row = conn.execute("SELECT EXISTS (SELECT FROM modak.delta WHERE table_id = %s)", (table_id,)).fetchone()
    return bool(row and row[0])


def survey(conn: Conn, state: TableState, below: TierKey | None, batch: int) -> Backlog:
    """Marks along the next batch of unfolded rows from R on and below a tier key."""
    line = state.cutline
    if below is None:
        return Backlog((), more=False)
    values = {
        "table": state.table.table_id,
        "t": below,
        "r": line.retention_line,
        "most": batch + 1,
        "step": max(1, batch // MARKS),
        "every": max(1, batch // (16 * MARKS)),
    }
    small = conn.execute(_SMALL, (batch * _ROW_BYTES,)).fetchone()
    extent = _WHOLE_EXTENT if small and small[0] else _EXTENT
    row: tuple[int, int, int, list[int] | None] | None = conn.execute(extent, values).fetchone()
    count, first, last, sample = row or (0, 0, 0, None)
    if count > batch:
        found = _marks(conn, _BY_TIER_KEY, values, batch)
        return _marks(conn, _BY_KEY, values, batch) if found.undecided else found
    if count < 2:
        return Backlog((Mark(1, first),) if count else (), more=False)
    # The whole backlog is one batch: shares need not be exact, and sorting it would take as long as reading it.
    if count > DRIVER_ROWS and len(set(sample or ())) < MARKS:
        # Whole days of corrections have one tier key; only then are key texts worth the sorting.
        return _marks(conn, _BY_KEY, values, batch)
    return Backlog((Mark(1, first), *_spread(sorted(sample or ()), count, first, last), Mark(count, last)), more=False)


def _spread(sample: list[int], count: int, first: int, last: int) -> list[Mark]:
    """A mark for each tier key of a sorted sample, numbered as if the sample were evenly spread."""
    places: dict[int, int] = {}
    for at, key in enumerate(sample):
        places.setdefault(key, 1 + (at + 1) * (count - 1) // (len(sample) + 1))
    return [Mark(number, key) for key, number in places.items() if first < key < last and 1 < number < count]


def _marks(conn: Conn, query: LiteralString, values: dict[str, Any], batch: int) -> Backlog:
    marks = tuple(Mark(*row) for row in conn.execute(query, values))
    return Backlog(marks, more=bool(marks) and marks[-1].number > batch)
