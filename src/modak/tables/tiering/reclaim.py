"""The heap copy goes: DETACH CONCURRENTLY → DROP → the spill takes over the range.

A leaf is dropped by OID, and only if it has the bounds with which it was tiered, is the very file that was exported,
looked at under the lock, and its capture trigger has watched it ever since. The drop and the step to `dropped` are one
Postgres transaction. Every lock is asked for in milliseconds; what is busy waits for the next cycle. Nothing is begun
while a long transaction is in the way: between detach and drop the rows of a leaf can be corrected in neither place. A
leaf that was not watched without a break is exported again instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
import structlog
from psycopg import sql

from modak.catalog import capture, pins, spill
from modak.catalog.lease import Epoch
from modak.catalog.records import PartitionRecord
from modak.catalog.write import CatalogWriter
from modak.core.errors import ModakError, NotLeader
from modak.core.faults import reach
from modak.core.states import PartitionState
from modak.postgres import ddl
from modak.postgres.describe import describe
from modak.tables.observe import Observed
from modak.tables.site import Site
from modak.tables.tiering.plan import ReclaimPlan

log = structlog.get_logger()

LOCK_MILLIS = 50

# To drop a leaf Postgres also locks the tables that its foreign keys refer to.
_HOLDERS = """
    SELECT virtualtransaction, coalesce(pid, 0) FROM pg_locks
    WHERE locktype = 'relation' AND granted AND pid IS DISTINCT FROM pg_backend_pid()
        AND (relation = ANY (%(held)s::oid[]) OR relation IN (
            SELECT confrelid FROM pg_constraint WHERE contype = 'f' AND conrelid = ANY (%(held)s::oid[])
        ))
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

_STILL = """
    SELECT coalesce(pg_relation_filenode(c.oid), 0)::int8, h.inhparent
    FROM pg_class c LEFT JOIN pg_inherits h ON h.inhrelid = c.oid WHERE c.oid = %s
"""


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """What left the heap, and which leaves have to be exported again first."""

    dropped: tuple[str, ...] = ()
    unwatched: tuple[str, ...] = ()


def reclaim(
    site: Site, conn: psycopg.Connection[Any], epoch: Epoch, observed: Observed, plan: ReclaimPlan
) -> Reclaimed:
    """Drop what the plan says, oldest first; the first that is busy ends the pass."""
    dropped: list[str] = []
    for partition in plan.drop:
        part = observed.records[partition.name]
        with pins.deleting(conn, part.table_id) as live:
            if live is None or any(pin.t is not None and part.upper is not None and pin.t < part.upper for pin in live):
                _defer(observed, part, "a reader pins it")
                break
            if _unwatched(conn, observed, part):
                return Reclaimed(tuple(dropped), (part.name,))
            if _rebound(conn, observed, part):
                _defer(observed, part, "its bounds are no longer those with which it was tiered")
                break
            holder = _in_the_way(site, conn, observed, part)
            if holder is not None:
                _defer(observed, part, f"process {holder} has a long transaction open on it or on what it refers to")
                break
            if not _detach(site.writer(epoch), conn, observed, part):
                _defer(observed, part, "the table is busy")
                break
            if not _drop(site, epoch, observed, part):
                break
        log.info("reclaim.dropped", table=str(plan.table), partition=part.name)
        dropped.append(part.name)
    _widen_spill(site.writer(epoch), conn, observed, set(dropped))
    return Reclaimed(tuple(dropped))


def _defer(observed: Observed, part: PartitionRecord, reason: str) -> None:
    log.info("reclaim.deferred", table=str(observed.record.name), partition=part.name, reason=reason)


def _unwatched(conn: psycopg.Connection[Any], observed: Observed, part: PartitionRecord) -> bool:
    watch = capture.verify(conn, part.table_id, part.leaf_oid, part.trigger_oid)
    row = conn.execute(_STILL, (part.leaf_oid,)).fetchone()
    if row is None:
        # Gone altogether: the next look at the partitions writes that down.
        return False
    if watch.holds and row[0] == part.relfilenode:
        return False
    why = watch.broken or "the partition was rewritten"
    log.warning("reclaim.unwatched", table=str(observed.record.name), partition=part.name, because=why)
    return True


def _rebound(conn: psycopg.Connection[Any], observed: Observed, part: PartitionRecord) -> bool:
    """Whether the leaf was attached with other bounds, through which rows have come that the lake need not have."""
    heap = describe(conn, observed.record.name, observed.record.tier_key)
    return any(
        leaf.oid == part.leaf_oid and (leaf.lower, leaf.upper) != (part.lower, part.upper) for leaf in heap.leaves
    )


def _in_the_way(site: Site, conn: psycopg.Connection[Any], observed: Observed, part: PartitionRecord) -> int | None:
    """Who holds the table, the leaf or what they refer to for longer than we would wait; once begun, nobody matters."""
    leaf = observed.leaves.get(part.name)
    if leaf is None or leaf.detach_pending:
        return None
    # Of a table with a DEFAULT partition Postgres locks that one too: its bounds change.
    rest = [other.oid for other in observed.heap.leaves if other.is_default]
    watched = {"held": [observed.heap.oid, leaf.oid, *rest]}
    before = conn.execute(_HOLDERS, watched).fetchall()
    if not before:
        return None
    site.clock.sleep(LOCK_MILLIS / 1000)
    still = dict(conn.execute(_HOLDERS, watched).fetchall())
    return next((pid for transaction, pid in before if transaction in still), None)


def _detach(writer: CatalogWriter, conn: psycopg.Connection[Any], observed: Observed, part: PartitionRecord) -> bool:
    leaf = observed.leaves.get(part.name)
    if leaf is None:
        return True
    parent, child = (
        sql.Identifier(*n) for n in ((observed.heap.name.schema, observed.heap.name.name), (leaf.schema, leaf.name))
    )
    has_default = any(other.is_default for other in observed.heap.leaves)
    reach("reclaim.before_detach")
    detach = sql.SQL("ALTER TABLE {} DETACH PARTITION {} ").format(parent, child)
    if leaf.detach_pending:
        # It would wait for a transaction of ours that held the epoch; so we only look whether we lead. What was begun
        # ends so also where a DEFAULT partition has come meanwhile.
        with writer.step():
            pass
        done = ddl.attempt_outside(conn, detach + sql.SQL("FINALIZE"), LOCK_MILLIS)
    elif has_default:
        # Postgres detaches concurrently only without a DEFAULT partition.
        done = ddl.attempt(conn, detach, LOCK_MILLIS, writer.hold)
    else:
        # It allows no transaction around it, so one beside it holds the epoch.
        with writer.step():
            done = ddl.attempt_outside(conn, detach + sql.SQL("CONCURRENTLY"), LOCK_MILLIS)
    reach("reclaim.after_detach")
    return done


def _drop(site: Site, epoch: Epoch, observed: Observed, part: PartitionRecord) -> bool:
    name = sql.Identifier(part.leaf_schema, part.name)
    reach("reclaim.before_drop")
    try:
        with site.writer(epoch).step(LOCK_MILLIS) as tx:
            tx.conn.execute(sql.SQL("LOCK TABLE ONLY {} IN ACCESS EXCLUSIVE MODE").format(name))
            if not _is_the_exported_one(tx.conn, observed, part):
                return False
            tx.partitions(part.table_id, (part.name,), PartitionState.TIERED, PartitionState.DROPPED)
            tx.conn.execute(sql.SQL("DROP TABLE {}").format(name))
    except ModakError as error:
        if not error.retryable and error.code != "postgres.busy":
            log.error("reclaim.failed", table=str(observed.record.name), partition=part.name, error=error.message)
            raise
        _defer(observed, part, error.message)
        return False
    reach("reclaim.after_drop")
    return True


def _is_the_exported_one(conn: psycopg.Connection[Any], observed: Observed, part: PartitionRecord) -> bool:
    found = conn.execute(
        "SELECT to_regclass(%s)::oid", (f"{_quoted(part.leaf_schema)}.{_quoted(part.name)}",)
    ).fetchone()
    row = conn.execute(_STILL, (part.leaf_oid,)).fetchone()
    if found is None or found[0] != part.leaf_oid or row is None or row[1] is not None:
        log.warning("reclaim.changed", table=str(observed.record.name), partition=part.name)
        return False
    watch = capture.verify(conn, part.table_id, part.leaf_oid, part.trigger_oid)
    return watch.holds and row[0] == part.relfilenode


def _widen_spill(writer: CatalogWriter, conn: psycopg.Connection[Any], observed: Observed, dropped: set[str]) -> None:
    """Let plain INSERTs of historical rows reach the delta for all that has left the heap."""
    found = spill.find(conn, observed.record.table_id)
    if found is None or spill.diverts(conn, observed.record.table_id):
        # A DEFAULT partition takes what the spill does not; to attach a wider one, all of its rows would be looked at.
        return
    # A leaf that hangs between detach and drop keeps its range: another export of it would take the place of what came
    # in through the spill.
    leaves = [leaf.lower for leaf in observed.heap.leaves if not leaf.is_spill and leaf.name not in dropped]
    records = [part.lower for part in observed.records.values() if part.name not in dropped]
    floor = min([*(lower for lower in (*leaves, *records) if lower is not None), observed.state.cut_line])
    try:
        if floor > found.upper and not spill.widen(conn, observed.record.table_id, floor, LOCK_MILLIS, writer.hold):
            log.info("spill.deferred", table=str(observed.record.name), reason="the table is busy")
    except NotLeader:
        raise
    except ModakError as error:
        # A row in the spill, which is an alarm of its own; everything else goes on.
        log.error("spill.not_widened", table=str(observed.record.name), because=error.message, hint=error.hint)


def _quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'
