"""Erasures that wait: snapshots that still show erased rows expire as soon as no reader holds them.

The condition is not kept, only its digest: it may name the very person. Which snapshots may show the rows is a sequence
number, so a maintenance pass needs nothing else to finish an erasure.
"""

from __future__ import annotations

from typing import Any, LiteralString

import structlog

from modak.catalog.write import CatalogWriter
from modak.core.faults import reach
from modak.core.names import TableName
from modak.tables.site import Site

log = structlog.get_logger()

_OPEN: LiteralString = """
    SELECT erasure_id, below_sequence FROM modak.erasures
    WHERE table_id = %s AND finished_at IS NULL AND below_sequence IS NOT NULL
"""
_BEGIN: LiteralString = """
    INSERT INTO modak.erasures (table_id, digest, requested_by) VALUES (%s, %s, session_user) RETURNING erasure_id
"""
_BELOW: LiteralString = "UPDATE modak.erasures SET below_sequence = %s, evidence = evidence || %s WHERE erasure_id = %s"
_FINISH: LiteralString = """
    UPDATE modak.erasures SET finished_at = clock_timestamp(), evidence = evidence || %s
    WHERE erasure_id = %s AND finished_at IS NULL
"""


def begin(writer: CatalogWriter, table_id: int, digest: str) -> int:
    """Write an erasure down before anything is changed."""
    reach("erasures.before_begin")
    with writer.step() as tx:
        row = tx.conn.execute(_BEGIN, (table_id, digest)).fetchone()
    reach("erasures.after_begin")
    assert row is not None
    return int(row[0])


def erased(writer: CatalogWriter, erasure_id: int, below: int, evidence: dict[str, Any]) -> None:
    """The rows are gone from the present state: older snapshots have to go."""
    from psycopg.types.json import Jsonb

    reach("erasures.before_erased")
    with writer.step() as tx:
        tx.conn.execute(_BELOW, (below, Jsonb(evidence), erasure_id))
    reach("erasures.after_erased")


def finish(site: Site, writer: CatalogWriter, name: TableName) -> int:
    """End the erasures of a table whose last old snapshot is gone; how many are still open."""
    from psycopg.types.json import Jsonb

    record = site.reader.table(name)
    if record is None:
        return 0
    with site.connect(autocommit=True) as conn:
        rows = conn.execute(_OPEN, (record.table_id,)).fetchall()
    if not rows:
        return 0
    lake = site.lake.load(record.lake)
    oldest = min((each.sequence_number for each in site.lake.snapshots(lake)), default=0) if lake else 0
    waiting = 0
    for erasure_id, below in rows:
        if oldest < below:
            waiting += 1
            continue
        reach("erasures.before_finish")
        with writer.step() as tx:
            tx.conn.execute(_FINISH, (Jsonb({"oldest_snapshot_sequence": oldest}), erasure_id))
        reach("erasures.after_finish")
        log.info("erasure.finished", table=str(name), erasure=erasure_id)
    return waiting
