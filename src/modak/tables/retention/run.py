"""Moving the retention line: whole lake files, the delta rows below the line and R itself go in one transaction.

The daemon looks at every table with a lake retention once a cycle. A reader with a pin, a heap partition that still
stands or a staged load only defer it; nothing is rewritten. The data files stay in the warehouse until the snapshots
that show them expire. Memory is bounded by a few numbers per lake file of the range that expires.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import LiteralString

import psycopg
import structlog

from modak.catalog.journal import Journal
from modak.catalog.lease import Epoch
from modak.catalog.records import TableState
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core.axis import TierKey
from modak.core.errors import Conflict, ModakError
from modak.core.ids import OpId, new_op_id
from modak.core.names import TableName
from modak.core.states import OpPhase
from modak.lake.changes import Change, DeleteRange, Range, SetProperties
from modak.lake.model import LakeTable, Prepared
from modak.postgres.connect import translate
from modak.tables.landing import land
from modak.tables.retention.plan import RETENTION_LINE, RetentionPlan, Waiting, fit, plan_retention
from modak.tables.site import Site
from modak.tables.tidy import discard_operation, finish_operations

log = structlog.get_logger()

DEFERRING = {
    "catalog.pinned": "a reader holds a pin",
    "catalog.requirement": "a heap partition or a staged load has come into the range",
    "lake.partial_file": "somebody has merged lake files over the bound",
}
"""Errors that only say: not now."""

_STAGED: LiteralString = """
    SELECT min(lower_bound) FROM modak.load_labels WHERE table_id = %s AND state IN ('staging', 'staged')
"""
_NOTHING_IN_THE_WAY: LiteralString = """
    SELECT NOT EXISTS (
        SELECT FROM modak.partitions p WHERE p.table_id = %(table)s AND p.state <> 'dropped'
            AND (p.lower_bound IS NULL OR p.lower_bound < %(to)s)
    ) AND NOT EXISTS (
        SELECT FROM modak.load_labels l WHERE l.table_id = %(table)s AND l.state IN ('staging', 'staged')
            AND l.lower_bound < %(to)s
    )
"""
_STRAGGLERS: LiteralString = "SELECT EXISTS (SELECT FROM modak.delta WHERE table_id = %s AND tier_key < %s)"

_LEAST, _MOST = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class Doomed:
    """The lake files that a plan removes."""

    files: int = 0
    rows: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """What one look did: the line's new place and what went, or why it stays."""

    table: TableName
    moved_to: str | None = None
    doomed: Doomed = Doomed()
    waiting: str | None = None


def retain(site: Site, epoch: Epoch, name: TableName) -> RetentionReport:
    """Move the retention line of a table as far as it may go now, in the name of a leader's epoch."""
    try:
        return _retain(site, epoch, name)
    except psycopg.Error as error:
        raise translate(error) from error


def plan_now(site: Site, state: TableState) -> tuple[RetentionPlan | Waiting, Doomed]:
    """What retention would do now; looks at the lake only when something is due."""
    plan = plan_retention(state, _staged_from(site, state.table.table_id))
    lake = None if isinstance(plan, Waiting) else site.lake.load(state.table.lake)
    if isinstance(plan, Waiting) or lake is None or lake.snapshot_id is None:
        return plan, Doomed()
    column = state.table.tier_key
    found = site.lake.files(lake.identifier, lake.snapshot_id, column=column, rows=Range(column, None, plan.to))
    # A file without bounds may hold anything.
    files = [
        (
            _LEAST if file.lower is None else file.lower,
            _MOST if file.upper is None else file.upper,
            file.file.rows,
            file.file.bytes,
        )
        for file in found
    ]
    fitting = fit(plan, state, ((lower, upper) for lower, upper, _, _ in files))
    if isinstance(fitting, Waiting):
        return fitting, Doomed()
    going = [(rows, size) for _, upper, rows, size in files if upper < fitting.to]
    return fitting, Doomed(len(going), sum(rows for rows, _ in going), sum(size for _, size in going))


def _retain(site: Site, epoch: Epoch, name: TableName) -> RetentionReport:
    state = site.reader.state(name)
    if state.table.lake_retention is None:
        return RetentionReport(name)
    writer = site.writer(epoch)
    _remove_stragglers(site, writer, state)
    plan, doomed = plan_now(site, state)
    if isinstance(plan, Waiting):
        return _defer(site, state, plan)
    axis = state.table.axis
    log.info(
        "retention.planned",
        table=str(name),
        line=axis.literal(plan.to),
        bands=len(plan.bands),
        files=doomed.files,
        rows=doomed.rows,
    )
    op_id = new_op_id(site.clock)
    journaled = {"from": plan.start, "to": plan.to, "table": [name.schema, name.name]}
    Journal(writer).begin(op_id, state.table.table_id, "retention", journaled)
    try:
        _commit(site, writer, op_id, plan, doomed)
    except ModakError as error:
        if not _give_up(site, writer, state, op_id, error):
            raise
        return _defer(site, state, Waiting(name, DEFERRING[error.code], held=True))
    site.told -= {told for told in site.told if told[0] == state.table.table_id and told[1].startswith("retention: ")}
    log.info("retention.committed", table=str(name), line=axis.literal(plan.to), files=doomed.files, rows=doomed.rows)
    finish_operations(site, writer, site.reader.state(name))
    return RetentionReport(name, axis.literal(plan.to), doomed)


def _commit(site: Site, writer: CatalogWriter, op_id: OpId, plan: RetentionPlan, doomed: Doomed) -> None:
    def changes(lake: LakeTable, state: TableState) -> Sequence[Change]:
        if state.pins:
            raise Conflict("catalog.pinned", f"A reader has pinned {plan.table}.")
        column = state.table.tier_key
        line = SetProperties({RETENTION_LINE: str(plan.to)})
        # Without a file below the line a delete would make an empty snapshot; the line moves all the same.
        gone = site.lake.overlapping_files(lake.identifier, column, None, plan.to)
        return [DeleteRange(column, None, plan.to), line] if gone else [line]

    def within(tx: CommitTransaction, prepared: Prepared, state: TableState) -> None:
        table_id = state.table.table_id
        tx.require_no_pins(table_id)
        tx.require(
            f"Heap rows or a staged load have come below {plan.to}.",
            _NOTHING_IN_THE_WAY,
            {"table": table_id, "to": plan.to},
        )
        becomes = replace(
            state.cutline,
            retention_line=plan.to,
            snapshot_id=prepared.snapshot_id,
            metadata_location=prepared.new_location,
        )
        tx.move(state.cutline, becomes)
        tx.expire_delta(table_id, plan.to)
        tx.count(files=doomed.files, rows=doomed.rows, bytes=doomed.bytes)

    land(site, writer, plan.table, op_id, OpPhase.PLANNED, changes, within, "retention")


def _give_up(site: Site, writer: CatalogWriter, state: TableState, op_id: OpId, error: ModakError) -> bool:
    """Undo an operation that has not landed; whether the error only defers it."""
    deferred = error.code in DEFERRING
    op = site.reader.op(op_id)
    if op is not None and not Journal(writer).landed(op_id):
        discard_operation(site, state.table.location, op)
        if deferred:
            Journal(writer).abandon(op_id, op.phase)
        else:
            Journal(writer).fail(op_id, op.phase, error)
    return deferred


def _defer(site: Site, state: TableState, waiting: Waiting) -> RetentionReport:
    """Say once why a line that is due does not move."""
    told = (state.table.table_id, f"retention: {waiting.reason}")
    if waiting.held and told not in site.told:
        site.told.add(told)
        log.info("retention.deferred", table=str(waiting.table), because=waiting.reason)
    return RetentionReport(waiting.table, waiting=waiting.reason)


def _staged_from(site: Site, table_id: int) -> TierKey | None:
    with site.connect(autocommit=True) as conn:
        row = conn.execute(_STAGED, (table_id,)).fetchone()
    return None if row is None or row[0] is None else int(row[0])


def _remove_stragglers(site: Site, writer: CatalogWriter, state: TableState) -> None:
    """A write that began before the line moved and ended after it has left rows below the line: nobody reads them."""
    table_id, line = state.table.table_id, state.cutline.retention_line
    if line is None:
        return
    with site.connect(autocommit=True) as conn:
        row = conn.execute(_STRAGGLERS, (table_id, line)).fetchone()
    if row and row[0]:
        with writer.step() as tx:
            gone = tx.expire_delta(table_id, line)
        log.info("retention.stragglers", table=str(state.table.name), rows=gone)
