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


def remove(conn: Conn, leaf_oid: int) -> None:
    """Take both triggers off a leaf, in the caller's transaction; a leaf that is gone is fine."""
    reach("capture.before_remove")
    try:
        conn.execute("SELECT modak.remove_capture(%s)", (leaf_oid,))
    except psycopg.Error as error:
        raise translate(error) from error
    reach("capture.after_remove")
