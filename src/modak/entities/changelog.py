"""The change log: which rows of a schema are dirty, and marking exactly those versions that were exported.

A version of the dirty slot is known by its `xmin`. A writer that stamped its change before an export and committed
after it has made another version, so it stays dirty, whatever its stamp says. Rows whose values do not fit wait in
quarantine, until they or the registry change. A batch of ids is held in memory, never the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql

from modak.core.names import TableName
from modak.entities.tables import EntityTables, identifier

_FIT = """
NOT EXISTS (SELECT FROM {quarantine} q WHERE q.schema_id = c.schema_id AND q.row_id = c.row_id
            AND q.version = c.xmin::text AND q.registry = %(digest)s)
"""
_STATS = "SELECT count(*), coalesce(min(changed_at), 0) FROM {log} WHERE schema_id = %(schema)s AND flushed_at = 0"
_FIT_STATS = """
SELECT count(*), coalesce(min(c.changed_at), 0) FROM {log} c
WHERE c.schema_id = %(schema)s AND c.flushed_at = 0 AND {fit}
"""
_SELECT = """
SELECT row_id, changed_at FROM {log} WHERE schema_id = %(schema)s AND flushed_at = 0
ORDER BY changed_at, row_id LIMIT %(limit)s
"""
# Rows of a part as two lists: a hundred thousand rows one by one would cost more than their export.
_SELECT_PARTS = """
SELECT string_agg(row_id::text, ',' ORDER BY row_id), string_agg(xmin::text, ',' ORDER BY row_id), count(*) FROM (
    SELECT c.row_id, c.xmin, (row_number() OVER (ORDER BY c.changed_at, c.row_id) - 1) / %(rows)s AS part FROM {log} c
    WHERE c.schema_id = %(schema)s AND c.flushed_at = 0 AND {fit}
    ORDER BY c.changed_at, c.row_id LIMIT %(limit)s
) AS oldest GROUP BY part ORDER BY part
"""
_DIRTY_SCHEMAS = """
WITH RECURSIVE found(schema_id) AS (
    (SELECT schema_id FROM {log} WHERE flushed_at = 0 ORDER BY schema_id LIMIT 1)
    UNION ALL
    SELECT (SELECT l.schema_id FROM {log} l WHERE l.flushed_at = 0 AND l.schema_id > found.schema_id
            ORDER BY l.schema_id LIMIT 1)
    FROM found WHERE found.schema_id IS NOT NULL
)
SELECT schema_id FROM found WHERE schema_id IS NOT NULL
"""
# A live row without any slot was there before anybody watched, so it is in a base or nowhere; the first one that is
# found ends the search.
_STORED = """
SELECT EXISTS (SELECT FROM {log} WHERE schema_id = %(schema)s AND flushed_at <> 0) OR EXISTS (
    SELECT FROM {main} m WHERE m.ltbase_schema_id = %(schema)s AND m.ltbase_deleted_at IS NULL
    AND NOT EXISTS (SELECT FROM {log} c WHERE c.schema_id = %(schema)s AND c.row_id = m.ltbase_row_id)
)
"""
# The previous flushed slot goes, so the log stays as long as the store has rows; its stamp is passed on, so that stamps
# of a row only grow. It is looked up row by row, in the index: nobody can foresee how many rows `mine` has, and where
# two lists of them are joined Postgres may compare each with each.
_MARK = """
WITH mine AS MATERIALIZED (
    SELECT c.ctid AS at, c.row_id, last.flushed_at, last.changed_at FROM {log} c
    CROSS JOIN LATERAL (
        SELECT max(p.flushed_at) AS flushed_at, max(p.changed_at) AS changed_at FROM {log} p
        WHERE p.schema_id = %(schema)s AND p.row_id = c.row_id AND p.flushed_at <> 0
    ) AS last
    {chosen} FOR UPDATE OF c SKIP LOCKED
), previous AS (
    DELETE FROM {log} c USING mine WHERE mine.flushed_at IS NOT NULL
    AND c.schema_id = %(schema)s AND c.row_id = mine.row_id AND c.flushed_at <> 0
), settled AS (
    DELETE FROM {quarantine} q USING mine WHERE q.schema_id = %(schema)s AND q.row_id = mine.row_id
), marked AS (
    UPDATE {log} c
    SET flushed_at = greatest(%(now)s::int8, coalesce(mine.flushed_at, 0) + 1),
        changed_at = greatest(c.changed_at, coalesce(mine.changed_at + 1, c.changed_at))
    FROM mine WHERE c.ctid = mine.at AND c.schema_id = %(schema)s AND c.flushed_at = 0
    RETURNING c.row_id
)
SELECT {answer} FROM marked
"""
_DIRTY_SLOT = "c.schema_id = %(schema)s AND c.flushed_at = 0"
_EXPORTED = f"""
JOIN unnest(%(rows)s::uuid[], %(versions)s::text[]::xid[]) AS e(row_id, version)
ON e.row_id = c.row_id AND e.version = c.xmin WHERE {_DIRTY_SLOT}
"""
_LISTED = f"JOIN unnest(%(rows)s::uuid[]) AS e(row_id) ON e.row_id = c.row_id WHERE {_DIRTY_SLOT} AND {{stamped}}"
_STAMPED = "c.changed_at <= %(snapshot)s"
_QUARANTINE = """
INSERT INTO {quarantine} (schema_id, row_id, version, registry, reason, noticed_at)
SELECT %(schema)s, e.row_id, e.version, %(digest)s, e.reason, %(now)s
FROM unnest(%(rows)s::uuid[], %(versions)s::text[], %(reasons)s::text[]) AS e(row_id, version, reason)
ON CONFLICT (schema_id, row_id) DO UPDATE
SET version = EXCLUDED.version, registry = EXCLUDED.registry, reason = EXCLUDED.reason, noticed_at = EXCLUDED.noticed_at
"""
_DIRTY = """
INSERT INTO {log} (schema_id, row_id, flushed_at, changed_at)
SELECT %(schema)s, row_id, 0, %(now)s FROM unnest(%(rows)s::uuid[]) AS row_id ORDER BY row_id
ON CONFLICT (schema_id, row_id, flushed_at) DO NOTHING
"""
_DIRTY_RANGE = """
INSERT INTO {log} (schema_id, row_id, flushed_at, changed_at)
SELECT %(schema)s, row_id, 0, %(now)s FROM (
    SELECT ltbase_row_id AS row_id FROM {main} WHERE ltbase_schema_id = %(schema)s
    UNION SELECT row_id FROM {log} WHERE schema_id = %(schema)s
) AS known WHERE row_id BETWEEN %(low)s::uuid AND %(high)s::uuid ORDER BY row_id
ON CONFLICT (schema_id, row_id, flushed_at) DO NOTHING
"""
_QUARANTINED = """
SELECT q.row_id::text, q.reason FROM {quarantine} q JOIN {log} c
ON c.schema_id = q.schema_id AND c.row_id = q.row_id AND c.flushed_at = 0 AND q.version = c.xmin::text
WHERE q.schema_id = %(schema)s AND q.registry = %(digest)s ORDER BY q.row_id LIMIT %(limit)s
"""
_COUNT_QUARANTINED = """
SELECT count(*) FROM {quarantine} q JOIN {log} c
ON c.schema_id = q.schema_id AND c.row_id = q.row_id AND c.flushed_at = 0 AND q.version = c.xmin::text
WHERE q.schema_id = %(schema)s AND q.registry = %(digest)s
"""
_VERSIONS = f"""
SELECT c.row_id::text, c.xmin::text FROM {{log}} c JOIN unnest(%(rows)s::uuid[]) AS e(row_id) ON e.row_id = c.row_id
WHERE {_DIRTY_SLOT}
"""  # noqa: S608 - composed of constants
_SLOTS = f"""
SELECT string_agg(row_id::text, ',' ORDER BY row_id), string_agg(xmin::text, ',' ORDER BY row_id), count(*) FROM (
    SELECT c.row_id, c.xmin, (row_number() OVER (ORDER BY c.row_id) - 1) / %(rows)s AS page FROM {{log}} c
    WHERE {_DIRTY_SLOT}
) AS seen GROUP BY page ORDER BY page
"""  # noqa: S608 - composed of constants
PAGE_ROWS = 50_000
"""Dirty rows of a snapshot that are held at once."""


@dataclass(frozen=True, slots=True)
class Part:
    """Dirty rows that go into one file: their ids in order and the version of each slot, with commas between them."""

    row_ids: str
    versions: str
    count: int

    @property
    def slots(self) -> dict[str, str]:
        """The version of each row."""
        return dict(zip(self.row_ids.split(","), self.versions.split(","), strict=True))

    def without(self, row_ids: Set[str]) -> Part:
        """The same rows but for some."""
        kept = {row_id: version for row_id, version in self.slots.items() if row_id not in row_ids}
        return Part(",".join(kept), ",".join(kept.values()), len(kept))


@dataclass(frozen=True, slots=True)
class Unfit:
    """A row that cannot be exported as it is, and why."""

    row_id: str
    reason: str


def get_change_log_stats(conn: psycopg.Connection[Any], table: str, schema_id: int) -> tuple[int, int]:
    """How many rows of a schema are not flushed, and the oldest `changed_at` among them (0 without any)."""
    row = conn.execute(_composed(_STATS, _alone(table)), {"schema": schema_id}).fetchone()
    return (int(row[0]), int(row[1])) if row else (0, 0)


def select_batch_row_ids(
    conn: psycopg.Connection[Any], table: str, schema_id: int, batch_size: int
) -> tuple[list[UUID], int]:
    """The ids of the longest-dirty rows of a schema, and the highest `changed_at` among them."""
    query = _composed(_SELECT, _alone(table))
    rows = conn.execute(query, {"schema": schema_id, "limit": batch_size}).fetchall()
    return [row[0] for row in rows], max((int(row[1]) for row in rows), default=0)


def mark_flushed(conn: psycopg.Connection[Any], table: str, schema_id: int, snapshot: int, flushed_at: int) -> int:
    """Mark every row flushed whose change is stamped at or before `snapshot`; how many there were.

    For programs that know that nobody writes. `run_once` never marks by stamps: a change that is committed after an
    export may carry an older one.
    """
    names = {"schema": schema_id, "now": flushed_at, "snapshot": snapshot}
    chosen = f"WHERE {_DIRTY_SLOT} AND {_STAMPED}"
    row = conn.execute(_mark(_alone(table), chosen, "count(*)"), names).fetchone()
    return int(row[0]) if row else 0


def mark_flushed_ids_at_snapshot(
    conn: psycopg.Connection[Any],
    table: str,
    schema_id: int,
    row_ids: Sequence[UUID | str],
    snapshot: int,
    flushed_at: int,
    versions: Sequence[str] | None = None,
) -> list[UUID]:
    """Mark rows flushed and return the ids that really were; a row that has changed meanwhile stays dirty.

    With `versions`, the `xmin` of each exported slot, exactly those versions are marked, as `run_once` does it; without
    them, as the seed has it, rows whose change is stamped at or before `snapshot`.
    """
    names: dict[str, object] = {
        "schema": schema_id,
        "now": flushed_at,
        "snapshot": snapshot,
        "rows": [str(row_id) for row_id in row_ids],
    }
    if versions is None:
        chosen = _LISTED.format(stamped=_STAMPED)
    else:
        chosen = _EXPORTED
        names["versions"] = list(versions)
    return [row[0] for row in conn.execute(_mark(_alone(table), chosen, "row_id"), names)]


class ChangeLog:
    """The change log of one schema, as flows use it: quarantined rows are out of counts and batches."""

    def __init__(self, tables: EntityTables, schema_id: int, digest: str) -> None:
        self.schema_id = schema_id
        self._tables = tables
        self._names: dict[str, object] = {"schema": schema_id, "digest": digest}

    def stats(self, conn: psycopg.Connection[Any]) -> tuple[int, int]:
        """How many rows can be flushed, and the oldest stamp among them."""
        row = conn.execute(self._sql(_FIT_STATS), self._names).fetchone()
        return (int(row[0]), int(row[1])) if row else (0, 0)

    def batch(self, conn: psycopg.Connection[Any], limit: int, part_rows: int) -> list[Part]:
        """The longest-dirty rows as the connection's snapshot sees them, in parts of at most so many."""
        rows = conn.execute(self._sql(_SELECT_PARTS), {**self._names, "limit": limit, "rows": part_rows})
        return [Part(*row) for row in rows.fetchall()]

    def mark(self, conn: psycopg.Connection[Any], exported: Part, now: int) -> int:
        """Mark exactly the versions that were exported, as `mark_flushed_ids_at_snapshot` does; how many there were."""
        names = {
            **self._names,
            "rows": f"{{{exported.row_ids}}}",
            "versions": f"{{{exported.versions}}}",
            "now": now,
        }
        row = conn.execute(_mark(self._tables, _EXPORTED, "count(*)"), names).fetchone()
        return int(row[0]) if row else 0

    def quarantine(
        self, conn: psycopg.Connection[Any], unfit: Sequence[Unfit], versions: Sequence[str], now: int
    ) -> None:
        """Put rows aside until they or the registry change."""
        names = {
            **self._names,
            "rows": [each.row_id for each in unfit],
            "versions": list(versions),
            "reasons": [each.reason for each in unfit],
            "now": now,
        }
        conn.execute(self._sql(_QUARANTINE), names)

    def quarantined(self, conn: psycopg.Connection[Any], limit: int) -> list[Unfit]:
        """Rows that wait in quarantine now."""
        return [Unfit(*row) for row in conn.execute(self._sql(_QUARANTINED), {**self._names, "limit": limit})]

    def count_quarantined(self, conn: psycopg.Connection[Any]) -> int:
        """How many there are."""
        row = conn.execute(self._sql(_COUNT_QUARANTINED), self._names).fetchone()
        return int(row[0]) if row else 0

    def put_aside(
        self, conn: psycopg.Connection[Any], unfit: Sequence[Unfit], seen: psycopg.Connection[Any], now: int
    ) -> None:
        """Quarantine rows as the snapshot of `seen` has them, clean ones too; what changed since is only dirty."""
        names = {**self._names, "rows": [each.row_id for each in unfit], "now": now}
        before = dict(seen.execute(self._sql(_VERSIONS), names).fetchall())
        with conn.transaction():
            # Whoever changes one of them now waits for us, and makes another version of it.
            made = conn.execute(self._sql(f"{_DIRTY} RETURNING row_id::text, xmin::text"), names).fetchall()
            versions = {**dict(made), **before}
            known = [each for each in unfit if each.row_id in versions]
            self.quarantine(conn, known, [versions[each.row_id] for each in known], now)

    def make_dirty(self, conn: psycopg.Connection[Any], row_ids: Sequence[str], now: int) -> int:
        """Have rows exported again; those that are dirty already are."""
        return conn.execute(self._sql(_DIRTY), {**self._names, "rows": list(row_ids), "now": now}).rowcount

    def make_range_dirty(self, conn: psycopg.Connection[Any], low: str, high: str, now: int) -> int:
        """Have every row with an id in a range exported again that Postgres has or once had."""
        return conn.execute(self._sql(_DIRTY_RANGE), {**self._names, "low": low, "high": high, "now": now}).rowcount

    def slots(self, conn: psycopg.Connection[Any]) -> Iterator[Part]:
        """Every dirty row as the connection's snapshot sees it, quarantined ones too, in pages.

        Which versions a snapshot sees, only Postgres can say: the numbers of subtransactions are not in its text.
        """
        with conn.cursor(name="slots") as cursor:
            cursor.execute(self._sql(_SLOTS), {**self._names, "rows": PAGE_ROWS})
            while page := cursor.fetchone():
                yield Part(*page)

    def stored(self, conn: psycopg.Connection[Any]) -> bool:
        """Whether rows of the schema are in files or nowhere, so that there must be a manifest."""
        row = conn.execute(self._sql(_STORED), self._names).fetchone()
        return row is not None and bool(row[0])

    def _sql(self, text: str) -> sql.Composed:
        return _composed(text.replace("{fit}", _FIT), self._tables)


def dirty_schemas(conn: psycopg.Connection[Any], tables: EntityTables) -> list[int]:
    """The schemas that have dirty rows; the index is hopped through, not read."""
    return [int(row[0]) for row in conn.execute(_composed(_DIRTY_SCHEMAS, tables))]


def _mark(tables: EntityTables, chosen: str, answer: str) -> sql.Composed:
    return _composed(_MARK.replace("{chosen}", chosen).replace("{answer}", answer), tables)


def _alone(table: str) -> EntityTables:
    log = TableName.parse(table)
    return EntityTables(log, log, log)


def _composed(text: str, tables: EntityTables) -> sql.Composed:
    template: Any = text
    return sql.SQL(template).format(
        log=identifier(tables.log), main=identifier(tables.main), quarantine=identifier(tables.quarantine)
    )
