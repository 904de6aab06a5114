"""Heap retention: partitions of a mirrored table that have aged leave the heap, once the lake has everything of them.

A leaf is sealed first: from then on the capture trigger writes its changes into the delta, in the writer's transaction.
When F has passed the seal, the lake holds all that came before and the delta all that came after, so the cut-line may
move over the leaf and seam readers lose nothing. Then it is dropped as a tiered one is: no pin, still watched, DETACH
and DROP, neither of which says a word in the change stream. The delta of a range folds when F has passed its drop:
until then the WAL may bring older images than the delta has.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
import structlog

from modak.catalog import capture
from modak.catalog.lease import Epoch
from modak.catalog.records import PartitionRecord, TableRecord
from modak.catalog.write import CatalogWriter
from modak.core.errors import Conflict, ModakError
from modak.core.faults import reach
from modak.core.names import TableName
from modak.core.states import PartitionState
from modak.postgres.changes.lsn import read_lsn, write_lsn
from modak.tables.astray import astray
from modak.tables.observe import Observed, observe
from modak.tables.site import Site
from modak.tables.tiering.commit import WATCHED
from modak.tables.tiering.plan import Finding, Partition, ReclaimPlan, TieringPlan, plan_reclaim, plan_tiering
from modak.tables.tiering.reclaim import reclaim

log = structlog.get_logger()

LOCK_MILLIS = 50
TRIES = 20

_SEALED: LiteralString = """
    UPDATE modak.partitions SET sealed_lsn = pg_current_wal_insert_lsn()
    WHERE table_id = %s AND leaf_oid = %s AND state <> 'dropped'
"""
_ADVANCE: LiteralString = """
    UPDATE modak.cutline SET t = %(to)s WHERE table_id = %(table)s AND t = %(from)s AND frontier >= %(sealed)s::pg_lsn
"""
_UNSEEN: LiteralString = """
    DELETE FROM modak.delta WHERE table_id = %s AND tier_key >= %s AND tier_key < %s AND folded_into IS NULL
"""


@dataclass(frozen=True, slots=True)
class Retired:
    """What one look at the old partitions did."""

    sealed: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    """Partitions that the cut-line has moved over."""
    dropped: tuple[str, ...] = ()
    waiting: str | None = None
    held: Finding | None = None
    """Why none is dropped although some are due."""

    @property
    def changed(self) -> bool:
        """Whether anything happened."""
        return bool(self.sealed or self.passed or self.dropped)


def retire(site: Site, epoch: Epoch, conn: psycopg.Connection[Any], name: TableName) -> Retired:
    """Take one step with every partition that has fallen behind: seal, move the cut-line, drop."""
    observed = observe(site, conn, name)
    lag = observed.record.heap_retention
    assert lag is not None
    plan = plan_tiering(observed.state, lag)
    sealed: list[str] = []
    passed: tuple[str, ...] = ()
    waiting = None
    if isinstance(plan, TieringPlan):
        sealed = _seal_all(site, site.writer(epoch), observed, plan.partitions)
        passed, waiting = _advance(site, site.writer(epoch), name, plan)
    else:
        waiting = plan.reason
    if passed:
        observed = observe(site, conn, name)
    dropped, held = _drop(site, epoch, conn, observed, lag)
    return Retired(tuple(sealed), passed, dropped, waiting, held)


def _seal_all(site: Site, writer: CatalogWriter, observed: Observed, partitions: Sequence[Partition]) -> list[str]:
    sealed = []
    for partition in partitions:
        part = observed.records[partition.name]
        if part.state is PartitionState.HOT or part.sealed_lsn is None:
            _patiently(site, writer, observed.record, part, observed.leaves[partition.name].relfilenode)
            sealed.append(part.name)
    return sealed


def _patiently(site: Site, writer: CatalogWriter, record: TableRecord, part: PartitionRecord, file: int) -> None:
    for attempt in range(TRIES):
        try:
            reach("retire.before_seal")
            _seal(writer, record, part, file)
            reach("retire.after_seal")
            log.info("retire.sealed", table=str(record.name), partition=part.name)
            return
        except ModakError as error:
            if error.code != "postgres.busy" or attempt == TRIES - 1:
                raise
            # Give the writers that hold us off a moment of quiet before asking again.
            site.clock.sleep(random.uniform(0.05, 0.25) * (attempt + 1))  # noqa: S311


def _seal(writer: CatalogWriter, record: TableRecord, part: PartitionRecord, file: int) -> None:
    with writer.step(LOCK_MILLIS) as tx:
        trigger = capture.install(tx.conn, record.table_id, part.leaf_oid)
        tx.note_leaf(record.table_id, part.name, part.leaf_oid, file, trigger)
        # The lock has waited for every writer that did not know the trigger: their commits lie before here.
        tx.conn.execute(_SEALED, (record.table_id, part.leaf_oid))
        if part.trigger_oid is not None and part.lower is not None and part.upper is not None:
            # The trigger has missed something: only the WAL has all of it, and what the delta has may be older.
            tx.conn.execute(_UNSEEN, (record.table_id, part.lower, part.upper))
        if part.state is PartitionState.HOT:
            tx.partitions(record.table_id, (part.name,), PartitionState.HOT, PartitionState.SEALING)


def _advance(
    site: Site, writer: CatalogWriter, name: TableName, plan: TieringPlan
) -> tuple[tuple[str, ...], str | None]:
    """Move the cut-line over the partitions whose seal F has passed."""
    state = site.reader.state(name)
    frontier = _number(state.cutline.frontier)
    parts = {part.name: part for part in state.living()}
    ready: list[PartitionRecord] = []
    for partition in plan.partitions:
        part = parts.get(partition.name)
        if part is None or part.sealed_lsn is None or frontier is None or read_lsn(part.sealed_lsn) > frontier:
            break
        ready.append(part)
    if not ready:
        return (), "the mirror has not yet passed the partitions that are old enough"
    to, last = ready[-1].upper, max(read_lsn(part.sealed_lsn or "0/0") for part in ready)
    names = tuple(part.name for part in ready)
    reach("retire.before_advance")
    with writer.step() as tx:
        leaves = [part.leaf_oid for part in ready]
        watched = tx.conn.execute(WATCHED, {"table": state.table.table_id, "leaves": leaves}).fetchone()
        if not (watched and watched[0]):
            return (), _reseal_next_time(tx.conn, state.table, names)
        for step in ((PartitionState.SEALING, PartitionState.TIERING), (PartitionState.TIERING, PartitionState.TIERED)):
            sealing = [part.name for part in ready if part.state in (PartitionState.SEALING, step[0])]
            tx.partitions(state.table.table_id, sealing, *step)
        values = {"to": to, "table": state.table.table_id, "from": plan.cut_from, "sealed": write_lsn(last)}
        if tx.conn.execute(_ADVANCE, values).rowcount != 1:
            raise Conflict("catalog.cutline_moved", f"The cut-line of {name} has moved.")
    reach("retire.after_advance")
    log.info("retire.passed", table=str(name), partitions=names, cut_line=to)
    return names, None


def _reseal_next_time(conn: psycopg.Connection[Any], table: TableRecord, names: Sequence[str]) -> str:
    """A sealed leaf was rewritten, or its trigger was taken away: it counts as sealed when that is done again."""
    conn.execute(
        "UPDATE modak.partitions SET sealed_lsn = NULL WHERE table_id = %s AND partition_name = ANY (%s)"
        " AND state <> 'dropped'",
        (table.table_id, list(names)),
    )
    log.warning("retire.unwatched", table=str(table.name), partitions=list(names))
    return "a sealed partition was not watched without a break; it is sealed again"


def _drop(
    site: Site, epoch: Epoch, conn: psycopg.Connection[Any], observed: Observed, lag: int
) -> tuple[tuple[str, ...], Finding | None]:
    frontier = _number(observed.catalog.cutline.frontier)
    plan = plan_reclaim(observed.state, lag)
    behind = [p for p in plan.drop if _passed(observed.records[p.name], frontier)]
    held = astray(site, conn, site.writer(epoch), observed.record) if behind else None
    if held is not None:
        return (), held
    done = reclaim(site, conn, epoch, observed, ReclaimPlan(plan.table, tuple(behind), plan.kept))
    for name in done.unwatched:
        part = observed.records[name]
        row = conn.execute("SELECT coalesce(pg_relation_filenode(%s), 0)::int8", (part.leaf_oid,)).fetchone()
        _patiently(site, site.writer(epoch), observed.record, part, int(row[0]) if row else 0)
    return done.dropped, None


def _passed(part: PartitionRecord, frontier: int | None) -> bool:
    return part.sealed_lsn is not None and frontier is not None and read_lsn(part.sealed_lsn) <= frontier


def _number(lsn: str | None) -> int | None:
    return None if lsn is None else read_lsn(lsn)
