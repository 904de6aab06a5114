"""What a start does first: finish or undo what an earlier process left, and say so.

Operations of registered tables are dealt with table by table (`tidy.finish_operations`); here are those that belong
to no table: registrations that never landed and purges that were cut short.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import LiteralString

import structlog

from modak.catalog.journal import Journal
from modak.catalog.lease import Epoch
from modak.catalog.records import OpRecord
from modak.core.faults import reach
from modak.core.states import OpPhase
from modak.tables.mirror.replication import withdraw
from modak.tables.site import Site
from modak.tables.tidy import discard_operation, finish_operations, purge

log = structlog.get_logger()

# An export holds locks and a snapshot, a drop the lock against readers who pin, a transaction whatever it has touched.
_ASLEEP: LiteralString = """
    SELECT a.pid FROM pg_stat_activity a, modak.leader l
    WHERE a.datname = current_database() AND a.usename = current_user AND a.backend_start < l.acquired_at AND (
        a.application_name = 'modak export'
        OR (a.application_name IN ('modak', 'modak commit', 'modak step')
            AND a.state = 'idle in transaction' AND a.state_change < l.acquired_at)
        OR EXISTS (
            SELECT FROM pg_locks k JOIN modak.tables t
                ON modak.pin_lock_key(t.table_id) = (k.classid::int8 << 32 | k.objid::int8)
            WHERE k.pid = a.pid AND k.locktype = 'advisory' AND k.objsubid = 1 AND k.granted
                AND k.mode = 'ExclusiveLock' AND k.database = a.datid
        )
    )
"""


def repair(site: Site, epoch: Epoch) -> int:
    """Deal with every operation that has not ended; returns how many there were."""
    _end_sleepers(site)
    writer = site.writer(epoch)
    handled = 0
    records = {record.table_id: record for record in site.reader.tables()}
    for record in records.values():
        for op, removed in finish_operations(site, writer, site.reader.state(record.name)):
            _say(op, {"table": str(record.name), "files_removed": removed})
            handled += 1
    journal = Journal(writer)
    for op in site.reader.unfinished_ops():
        if op.table_id in records:
            continue
        handled += 1
        if op.landed or journal.landed(op.op_id):
            landed = site.reader.op(op.op_id) or op
            if landed.cleanup.get("withdraw"):
                withdraw(site, landed.cleanup["withdraw"])
            if landed.cleanup.get("purge"):
                removed = purge(site, writer, landed)
            else:
                removed = 0
                journal.finish(op.op_id)
        else:
            location = _location(op)
            removed = discard_operation(site, location, op) if location else 0
            journal.abandon(op.op_id, op.phase)
        _say(op, {"table": str(op.plan.get("table", "?")), "files_removed": removed})
    return handled


def _end_sleepers(site: Site) -> None:
    """A leader that sleeps or is cut off still holds what it held; nobody but leaders does such work, so that goes."""
    with site.connect(autocommit=True) as conn:
        asleep = [pid for (pid,) in conn.execute(_ASLEEP)]
        if not asleep:
            return
        reach("repair.before_terminate")
        conn.execute("SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) AS pid", (asleep,))
        reach("repair.after_terminate")
    log.warning("repair.sleepers_ended", backends=len(asleep))


def _location(op: OpRecord) -> str | None:
    """The table's folder, which the catalog may have forgotten; the operation's own folders lie two levels below it."""
    for folder in op.folders:
        if f"/op-{op.op_id}" in folder:
            return folder.rstrip("/").rsplit("/", 2)[0]
    return None


def _say(op: OpRecord, more: Mapping[str, object]) -> None:
    was = "landed, tidied" if op.phase is OpPhase.COMMITTED else f"{op.phase}, undone"
    log.warning("repair.cleaned", op=op.op_id, kind=op.kind, was=was, **more)
