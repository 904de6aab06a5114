"""Erasures that wait: for a leader who executes them, and then for readers who still hold older snapshots.

The condition is kept only until it has been executed, then its digest alone: it may name the very person. Which
snapshots may show the rows is a sequence number, so a maintenance pass needs nothing else to finish an erasure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, LiteralString

import structlog

from modak.catalog.records import OpRecord
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
_ASK: LiteralString = """
    INSERT INTO modak.erasures (table_id, digest, condition, requested_by) VALUES (%s, %s, %s, session_user)
    RETURNING erasure_id
"""
_ASKED: LiteralString = "SELECT 1 FROM modak.erasures WHERE condition IS NOT NULL LIMIT 1"
_CLAIM: LiteralString = """
    UPDATE modak.erasures e SET claimed_epoch = %(epoch)s
    FROM modak.tables t
    WHERE t.table_id = e.table_id AND e.erasure_id = (
        SELECT erasure_id FROM modak.erasures
        WHERE condition IS NOT NULL AND claimed_epoch IS DISTINCT FROM %(epoch)s
        ORDER BY erasure_id LIMIT 1 FOR UPDATE SKIP LOCKED
    )
    RETURNING e.erasure_id, t.schema_name, t.table_name, e.condition
"""
_ANSWER: LiteralString = """
    UPDATE modak.erasures SET condition = NULL, answered_at = clock_timestamp(), outcome = %s, error = %s
    WHERE erasure_id = %s AND claimed_epoch = %s
"""
_WITHDRAW: LiteralString = """
    UPDATE modak.erasures SET condition = NULL, answered_at = clock_timestamp(), error = 'withdrawn'
    WHERE erasure_id = %s AND claimed_epoch IS NULL AND condition IS NOT NULL
"""
_WAITING: LiteralString = """
    SELECT DISTINCT t.schema_name, t.table_name FROM modak.erasures e JOIN modak.tables t USING (table_id)
    WHERE e.finished_at IS NULL AND e.below_sequence IS NOT NULL
        AND NOT EXISTS (SELECT FROM modak.pauses z WHERE z.table_id = e.table_id)
    ORDER BY 1, 2
"""
_BELOW: LiteralString = """
    UPDATE modak.erasures SET below_sequence = %s, evidence = evidence || %s, finished_at = NULL WHERE erasure_id = %s
"""
_FINISH: LiteralString = """
    UPDATE modak.erasures SET finished_at = clock_timestamp(), evidence = evidence || %s
    WHERE erasure_id = %s AND finished_at IS NULL
"""


@dataclass(frozen=True, slots=True)
class Asked:
    """An erasure that this leader executes."""

    erasure_id: int
    table: TableName
    condition: str


@dataclass(frozen=True, slots=True)
class Answer:
    """How far an erasure that was asked for has come."""

    claimed: bool
    answered: bool
    outcome: Mapping[str, Any] | None
    error: str | None


def begin(writer: CatalogWriter, table_id: int, condition: str) -> int:
    """Write an erasure down before anything is changed."""
    reach("erasures.before_begin")
    with writer.step() as tx:
        row = tx.conn.execute(_BEGIN, (table_id, _digest(condition))).fetchone()
    reach("erasures.after_begin")
    assert row is not None
    return int(row[0])


def ask(site: Site, name: TableName, condition: str) -> int:
    """Ask the leader for an erasure; its number."""
    table_id = site.reader.state(name).table.table_id
    reach("erasures.before_ask")
    with site.writer(None).step() as tx:
        row = tx.conn.execute(_ASK, (table_id, _digest(condition), condition)).fetchone()
    reach("erasures.after_ask")
    assert row is not None
    return int(row[0])


def withdraw(site: Site, erasure_id: int) -> bool:
    """Take back what no leader has begun; whether it could be."""
    reach("erasures.before_withdraw")
    with site.writer(None).step() as tx:
        done = tx.conn.execute(_WITHDRAW, (erasure_id,)).rowcount
    reach("erasures.after_withdraw")
    return done == 1


def asked_for(site: Site) -> bool:
    """Whether somebody waits for a leader to execute an erasure."""
    with site.connect(autocommit=True) as conn:
        return conn.execute(_ASKED).fetchone() is not None


def claim(writer: CatalogWriter) -> Asked | None:
    """Take the oldest erasure that is asked for; one whose leader died is taken up by the next."""
    assert writer.epoch is not None
    reach("erasures.before_claim")
    with writer.step() as tx:
        row = tx.conn.execute(_CLAIM, {"epoch": writer.epoch.number}).fetchone()
    reach("erasures.after_claim")
    return None if row is None else Asked(int(row[0]), TableName(row[1], row[2]), str(row[3]))


def answer(writer: CatalogWriter, erasure_id: int, outcome: Mapping[str, Any], error: str | None) -> None:
    """Tell whoever asked, and forget the condition."""
    from psycopg.types.json import Jsonb

    assert writer.epoch is not None
    reach("erasures.before_answer")
    with writer.step() as tx:
        tx.conn.execute(_ANSWER, (Jsonb(dict(outcome)), error, erasure_id, writer.epoch.number))
    reach("erasures.after_answer")


def look(site: Site, erasure_id: int) -> Answer | None:
    """How far an erasure has come; nothing when its table was unregistered."""
    with site.connect(autocommit=True) as conn:
        row = conn.execute(
            "SELECT claimed_epoch IS NOT NULL, answered_at IS NOT NULL, outcome, error FROM modak.erasures"
            " WHERE erasure_id = %s",
            (erasure_id,),
        ).fetchone()
    return None if row is None else Answer(*row)


def waiting(site: Site) -> list[TableName]:
    """Tables some of whose older snapshots still have to go."""
    with site.connect(autocommit=True) as conn:
        return [TableName(schema, name) for schema, name in conn.execute(_WAITING)]


def _digest(condition: str) -> str:
    return hashlib.sha256(condition.encode()).hexdigest()


def erased(writer: CatalogWriter, erasure_id: int, below: int, evidence: dict[str, Any]) -> None:
    """The rows are gone from the present state: older snapshots have to go, even if all seemed gone."""
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
    stored = bool(freeing(site, record.table_id))
    waiting = 0
    for erasure_id, below in rows:
        if oldest < below or stored:
            waiting += 1
            continue
        reach("erasures.before_finish")
        with writer.step() as tx:
            tx.conn.execute(_FINISH, (Jsonb({"oldest_snapshot_sequence": oldest}), erasure_id))
        reach("erasures.after_finish")
        log.info("erasure.finished", table=str(name), erasure=erasure_id)
    return waiting


def freeing(site: Site, table_id: int) -> tuple[OpRecord, ...]:
    """Operations that have still to delete files which no snapshot reaches: snapshots go in an instant, files later."""
    return tuple(op for op in site.reader.unfinished_ops(table_id) if op.landed and _has_files_to_delete(op))


def _has_files_to_delete(op: OpRecord) -> bool:
    return any(op.cleanup.get(key) for key in ("expired_from", "expired", "freed"))
