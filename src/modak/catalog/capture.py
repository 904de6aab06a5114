"""The capture trigger on a leaf: from its commit on, every change to the leaf is also a row of `modak.delta`.

Sealing installs it before the export snapshot is taken; advance and drop verify it. The callers bring their own short
transaction, because the trigger belongs together with the step of the partition. The bodies are in `002_capture.sql`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from modak.core.errors import ModakError
from modak.core.faults import reach
from modak.postgres.connect import translate

Conn = psycopg.Connection[Any]

TRIGGER = "!modak_capture"
TRUNCATE_GUARD = "!modak_no_truncate"

_LOOK = """
    SELECT g.tgname, g.oid, g.tgenabled = 'A', g.tgqual IS NULL AND g.tgtype = 29
        AND g.tgfoid = 'modak.capture'::regproc
        AND split_part(encode(g.tgargs, 'escape'), E'\\\\000', 1) = %(table_id)s::text
    FROM pg_catalog.pg_trigger g
    WHERE g.tgrelid = %(leaf)s AND g.tgname = ANY (%(names)s)
"""

_BROKEN = """
    SELECT * FROM (
        SELECT p.partition_name, CASE
            WHEN g.oid IS NULL THEN 'the capture trigger is missing'
            WHEN g.oid IS DISTINCT FROM p.trigger_oid THEN 'the capture trigger is not the one that was installed'
            WHEN g.tgenabled <> 'A' THEN 'the capture trigger was disabled or does not fire always'
            WHEN g.tgqual IS NOT NULL OR g.tgtype <> 29 OR g.tgfoid <> 'modak.capture'::regproc
                OR split_part(encode(g.tgargs, 'escape'), E'\\\\000', 1) <> p.table_id::text
                THEN 'the capture trigger was replaced'
            WHEN n.oid IS NULL OR n.tgenabled <> 'A' THEN 'the guard against TRUNCATE is missing or was disabled'
            WHEN pg_relation_filenode(c.oid) IS DISTINCT FROM p.relfilenode THEN 'the partition was rewritten'
        END AS why
        FROM modak.partitions p
        JOIN modak.tables t USING (table_id)
        JOIN pg_catalog.pg_class c ON c.oid = p.leaf_oid
        JOIN pg_catalog.pg_inherits i ON i.inhrelid = c.oid AND i.inhparent = t.relid
        LEFT JOIN pg_catalog.pg_trigger g ON g.tgrelid = c.oid AND g.tgname = %(trigger)s
        LEFT JOIN pg_catalog.pg_trigger n ON n.tgrelid = c.oid AND n.tgname = %(guard)s
        WHERE p.table_id = %(table)s AND p.state = 'tiered'
        ORDER BY p.lower_bound
    ) looked_at WHERE why IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class Watch:
    """Whether a leaf has been watched without a break; `broken` says what is wrong with it."""

    trigger_oid: int | None
    broken: str | None = None

    @property
    def holds(self) -> bool:
        """Whether every change since the install is in the delta."""
        return self.broken is None


def install(conn: Conn, table_id: int, leaf_oid: int) -> int:
    """Put the capture trigger and the TRUNCATE guard on a leaf, in the caller's transaction; returns the trigger."""
    reach("capture.before_install")
    try:
        row = conn.execute("SELECT modak.install_capture(%s, %s)", (table_id, leaf_oid)).fetchone()
    except psycopg.Error as error:
        raise translate(error) from error
    if row is None:
        raise ModakError("catalog.capture", f"No capture trigger was installed on leaf {leaf_oid}.")
    reach("capture.after_install")
    return int(row[0])


def verify(conn: Conn, table_id: int, leaf_oid: int, trigger_oid: int | None) -> Watch:
    """Whether the trigger that was installed is still there, the same one and always firing; else export again."""
    names = [TRIGGER, TRUNCATE_GUARD]
    rows = conn.execute(_LOOK, {"leaf": leaf_oid, "names": names, "table_id": table_id}).fetchall()
    found = {name: (oid, always, ours) for name, oid, always, ours in rows}
    if TRIGGER not in found:
        return Watch(None, "the capture trigger is missing")
    oid, always, ours = found[TRIGGER]
    if oid != trigger_oid:
        return Watch(oid, "the capture trigger is not the one that was installed")
    if not always:
        return Watch(oid, "the capture trigger was disabled or does not fire always")
    if not ours:
        return Watch(oid, "the capture trigger was replaced")
    if TRUNCATE_GUARD not in found or not found[TRUNCATE_GUARD][1]:
        return Watch(oid, "the guard against TRUNCATE is missing or was disabled")
    return Watch(oid)


def broken(conn: Conn, table_id: int) -> dict[str, str]:
    """The tiered leaves in the heap that were not watched without a break, by name, oldest first, and why; one look."""
    values = {"table": table_id, "trigger": TRIGGER, "guard": TRUNCATE_GUARD}
    return dict(conn.execute(_BROKEN, values).fetchall())


def remove(conn: Conn, leaf_oid: int) -> None:
    """Take both triggers off a leaf, in the caller's transaction; a leaf that is gone is fine."""
    reach("capture.before_remove")
    try:
        conn.execute("SELECT modak.remove_capture(%s)", (leaf_oid,))
    except psycopg.Error as error:
        raise translate(error) from error
    reach("capture.after_remove")
