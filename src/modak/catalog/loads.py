"""Labels of Stream Load and the folders that their batches are staged into.

A label is accepted in the transaction that writes its rows, and is unique per table: that is what makes a load happen
once. A stage is written down, for good, before its first file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, LiteralString

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from modak.core.axis import TierKey
from modak.core.errors import Conflict

Conn = psycopg.Connection[Any]

_COLUMNS: LiteralString = """
    label, state, hot_rows, delta_rows, spooled_rows, staged_files, rejected_rows, lower_bound, upper_bound, files,
    accepted, pg_snapshot::text AS pg_snapshot, stage_id, op_id, error
"""
_FIND: LiteralString = f"SELECT {_COLUMNS} FROM modak.load_labels WHERE table_id = %s AND label = %s"  # noqa: S608
_STAGED: LiteralString = f"""
    SELECT {_COLUMNS} FROM modak.load_labels WHERE table_id = %s AND state = 'staged' ORDER BY accepted LIMIT %s
"""  # noqa: S608
_LOCK: LiteralString = "SELECT pg_try_advisory_xact_lock(hashtextextended('modak label ' || %s || ' ' || %s, 0))"
_ACCEPT: LiteralString = """
    INSERT INTO modak.load_labels AS l (table_id, label, state, hot_rows, delta_rows, spooled_rows, staged_files,
        rejected_rows, lower_bound, upper_bound, files, accepted, pg_snapshot, stage_id)
    VALUES (%(table)s, %(label)s, %(state)s, %(hot)s, %(delta)s, %(spooled)s, %(staged)s, %(rejected)s, %(lower)s,
        %(upper)s, %(files)s, nextval('modak.load_order'), pg_current_snapshot(), %(stage)s)
    ON CONFLICT (table_id, label) DO UPDATE SET state = excluded.state, hot_rows = excluded.hot_rows,
        delta_rows = excluded.delta_rows, spooled_rows = excluded.spooled_rows, staged_files = excluded.staged_files,
        rejected_rows = excluded.rejected_rows, lower_bound = excluded.lower_bound, upper_bound = excluded.upper_bound,
        files = excluded.files, accepted = excluded.accepted, pg_snapshot = excluded.pg_snapshot,
        stage_id = excluded.stage_id, error = NULL, op_id = NULL, accepted_xid = pg_current_xact_id(),
        updated_at = clock_timestamp()
    WHERE l.state = 'failed'
"""
_ADOPTED: LiteralString = """
    UPDATE modak.load_labels SET state = 'committed', op_id = %(op)s, updated_at = clock_timestamp()
    WHERE table_id = %(table)s AND label = ANY (%(labels)s) AND state = 'staged'
"""
_FAILED: LiteralString = """
    UPDATE modak.load_labels SET state = 'failed', error = %(error)s, updated_at = clock_timestamp()
    WHERE table_id = %(table)s AND label = %(label)s AND state = 'staged'
"""
_STAGE: LiteralString = """
    INSERT INTO modak.load_stages (stage_id, table_id, label, folder) VALUES (%s, %s, %s, %s)
"""
_OVER: LiteralString = """
    SELECT s.stage_id, s.table_id, s.label, s.folder FROM modak.load_stages s
    LEFT JOIN modak.load_labels l ON l.table_id = s.table_id AND l.label = s.label AND l.stage_id = s.stage_id
    LEFT JOIN modak.tables t ON t.table_id = s.table_id
    WHERE (%(stage)s::text IS NULL OR s.stage_id = %(stage)s) AND (l.state = 'committed' OR (
        coalesce(l.state, 'none') <> 'staged' AND greatest(s.created_at, l.updated_at) < clock_timestamp() -
            -- What somebody wrote by hand and is no number holds up no other table.
            make_interval(secs => 3600 * coalesce(
                CASE WHEN t.maintenance_policy ->> 'orphan_grace_hours' ~ '^[0-9]{1,6}$'
                THEN (t.maintenance_policy ->> 'orphan_grace_hours')::float8 END, %(hours)s))))
    ORDER BY s.created_at
"""
_WAITING: LiteralString = """
    SELECT t.schema_name, t.table_name FROM modak.tables t
    WHERE EXISTS (SELECT FROM modak.load_labels l WHERE l.table_id = t.table_id AND l.state = 'staged')
        AND NOT EXISTS (SELECT FROM modak.pauses z WHERE z.table_id = t.table_id)
    ORDER BY 1, 2
"""
_PRESSURE: LiteralString = """
    SELECT (SELECT count(*) FROM modak.load_labels WHERE table_id = %(table)s AND state = 'staged'),
        (SELECT count(*) FROM (SELECT FROM modak.delta WHERE table_id = %(table)s AND folded_generation IS NULL
            LIMIT %(most)s) d)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A load that was accepted, or failed at its adoption."""

    label: str
    state: str
    hot_rows: int
    delta_rows: int
    spooled_rows: int
    staged_files: int
    rejected_rows: int
    lower_bound: TierKey | None
    upper_bound: TierKey | None
    files: Any
    accepted: int | None
    pg_snapshot: str | None
    stage_id: str | None
    op_id: str | None
    error: str | None

    @property
    def stands(self) -> bool:
        """Whether the label sent again gives this result; one that failed may be sent anew."""
        return self.state in ("committed", "staged")


@dataclass(frozen=True, slots=True)
class Stage:
    """A folder of staged files."""

    stage_id: str
    table_id: int | None
    label: str
    folder: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a load brings, to be written down under its label."""

    table_id: int
    label: str
    hot_rows: int
    delta_rows: int
    spooled_rows: int
    rejected_rows: int
    lower: TierKey | None
    upper: TierKey | None
    files: Any
    staged_files: int
    stage_id: str | None

    @property
    def state(self) -> str:
        """Staged while its files wait for their adoption."""
        return "staged" if self.staged_files else "committed"


def try_lock(conn: Conn, table_id: int, label: str) -> bool:
    """Hold a label until the transaction ends, unless somebody else does."""
    row = conn.execute(_LOCK, (str(table_id), label)).fetchone()
    return bool(row and row[0])


def find(conn: Conn, table_id: int, label: str) -> Label | None:
    """What is known of a label."""
    with conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(_FIND, (table_id, label)).fetchone()
    return None if row is None else Label(**row)


def staged(conn: Conn, table_id: int, most: int) -> list[Label]:
    """Labels that wait to be adopted, in the order in which they were accepted."""
    with conn.cursor(row_factory=dict_row) as cursor:
        return [Label(**row) for row in cursor.execute(_STAGED, (table_id, most))]


def accept(conn: Conn, load: Accepted) -> None:
    """Write a load down under its label, in the transaction that writes its rows."""
    done = conn.execute(
        _ACCEPT,
        {
            "table": load.table_id,
            "label": load.label,
            "state": load.state,
            "hot": load.hot_rows,
            "delta": load.delta_rows,
            "spooled": load.spooled_rows,
            "staged": load.staged_files,
            "rejected": load.rejected_rows,
            "lower": load.lower,
            "upper": load.upper,
            "files": Jsonb(load.files),
            "stage": load.stage_id,
        },
    ).rowcount
    if done != 1:
        raise Conflict("load.label_taken", f"Label {load.label!r} was accepted meanwhile.")


def adopted(conn: Conn, table_id: int, labels: Sequence[str], op_id: str) -> None:
    """The files of these labels are in the lake: all of them, or the transaction ends here."""
    done = conn.execute(_ADOPTED, {"table": table_id, "labels": list(labels), "op": op_id}).rowcount
    if done != len(labels):
        raise Conflict("load.labels_moved", "A staged label was dealt with by somebody else.", retryable=True)


def fail(conn: Conn, table_id: int, label: str, error: str) -> bool:
    """A label whose files cannot be adopted fails, alone."""
    return conn.execute(_FAILED, {"table": table_id, "label": label, "error": error}).rowcount == 1


def open_stage(conn: Conn, stage: Stage) -> None:
    """Write down a folder before anything is written into it."""
    conn.execute(_STAGE, (stage.stage_id, stage.table_id, stage.label, stage.folder))


def stages_over(conn: Conn, grace: timedelta) -> list[Stage]:
    """Stages that nobody needs: adopted, or left by a failure or a crash longer ago than the grace."""
    return _over(conn, grace)


def is_over(conn: Conn, stage: Stage, grace: timedelta) -> bool:
    """Whether that is still so, and no load that writes into the stage is under way."""
    # The label first: a load that has just ended has given the stage a label, which is looked for only then.
    if stage.table_id is not None and not try_lock(conn, stage.table_id, stage.label):
        return False
    return bool(_over(conn, grace, stage.stage_id))


def _over(conn: Conn, grace: timedelta, stage_id: str | None = None) -> list[Stage]:
    hours = grace.total_seconds() / 3600
    return [Stage(*row) for row in conn.execute(_OVER, {"stage": stage_id, "hours": hours})]


def forget_stage(conn: Conn, stage_id: str) -> None:
    """A stage's folder is gone."""
    conn.execute("DELETE FROM modak.load_stages WHERE stage_id = %s", (stage_id,))


def waiting(conn: Conn) -> list[tuple[str, str]]:
    """Tables with staged labels that nobody holds back, by schema and name."""
    return [(schema, name) for schema, name in conn.execute(_WAITING)]


def pressure(conn: Conn, table_id: int, most_delta: int) -> tuple[int, int]:
    """Staged labels, and corrections that wait to be folded (counted up to a limit)."""
    row = conn.execute(_PRESSURE, {"table": table_id, "most": most_delta}).fetchone()
    assert row is not None
    return int(row[0]), int(row[1])
