"""The one transaction of a fold: new rows, deletion vectors, S and the retirement of exactly the tuples that were read.

Positions are only good for the snapshot in which they were found. When somebody else has committed in between, the
files that changed are looked through again before the next attempt; after a few attempts others wait for ours
(`landing.py`), so the loop ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, LiteralString

from modak.catalog.journal import Journal
from modak.catalog.records import TableState
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core.errors import Conflict
from modak.core.ids import OpId
from modak.core.states import OpPhase
from modak.lake.changes import Change, RowDelta
from modak.lake.locate import Located
from modak.lake.model import DataFile, LakeTable, Prepared
from modak.tables.fold.plan import FoldPlan
from modak.tables.fold.write import Written
from modak.tables.foreign import refuse_foreign_rows
from modak.tables.landing import land
from modak.tables.site import Site

if TYPE_CHECKING:
    from modak.lake.iceberg.locate import Locator

_NONE_STAGED: LiteralString = """
    SELECT NOT EXISTS (
        SELECT FROM modak.load_labels WHERE table_id = %s AND state = 'staged'
            AND pg_visible_in_snapshot(accepted_xid, %s::pg_snapshot)
    )
"""
_NONE_TAKEN_IN: LiteralString = """
    SELECT NOT EXISTS (SELECT FROM modak.op_log WHERE table_id = %s AND kind IN ('ingest', 'adopt')
        AND xact_id IS NOT NULL AND NOT pg_visible_in_snapshot(xact_id, %s::pg_snapshot))
"""
SOON_ROWS = 20_000_000
"""Up to so many lake rows are looked through while the transaction already removes delta tuples: about a second."""
MOST_KEPT = 1_000
"""Up to so many files the journal names one by one; tidying then need not ask the snapshot which ones it has."""
_AT: LiteralString = "SELECT snapshot_id IS NOT DISTINCT FROM %s FROM modak.cutline WHERE table_id = %s"


@dataclass(frozen=True, slots=True)
class Batch:
    """What a fold has written and found, ready to land."""

    plan: FoldPlan
    written: tuple[Written, ...]
    locator: Locator
    pg_snapshot: str

    @property
    def rows(self) -> int:
        """Delta rows that were read."""
        return sum(share.rows for share in self.written)

    @property
    def files(self) -> tuple[DataFile, ...]:
        """The data files of the new rows."""
        return tuple(file for share in self.written for file in share.files)


def commit(site: Site, writer: CatalogWriter, state: TableState, lake: LakeTable, op_id: OpId, batch: Batch) -> Located:
    """Land a batch; returns what was located in the snapshot on which it landed."""
    retires_early = not batch.plan.in_driver
    if retires_early and batch.files and batch.locator.rows_at(lake.snapshot_id) <= SOON_ROWS:
        return _land(site, writer, state.table.table_id, op_id, batch)
    located = batch.locator.at(lake.snapshot_id)
    if batch.files or located.vectors:
        return _land(site, writer, state.table.table_id, op_id, batch)
    # Only tombstones of rows that are nowhere: the lake is already what they ask for.
    _retire(site, writer, state, lake, op_id, batch)
    return located


def _land(site: Site, writer: CatalogWriter, table_id: int, op_id: OpId, batch: Batch) -> Located:
    landed: list[Located] = []

    def changes(lake: LakeTable, now: TableState) -> Sequence[Change]:
        _require_room(batch.plan, now)
        located = batch.locator.at(lake.snapshot_id)
        landed[:] = [located]
        return [
            RowDelta(
                rows=batch.files,
                vectors=located.vectors,
                removed_vectors=located.replaced,
                validate_from=lake.snapshot_id,
            )
        ]

    def within(tx: CommitTransaction, prepared: Prepared, now: TableState) -> None:
        becomes = replace(now.cutline, snapshot_id=prepared.snapshot_id, metadata_location=prepared.new_location)
        _require_newest(tx, now.table.table_id, batch)
        tx.move(now.cutline, becomes)
        tx.retire_delta(now.table.table_id, batch.plan.whole, batch.pg_snapshot)
        vectors = landed[0].vectors
        tx.count(rows=batch.rows, files=len(batch.files), vectors=len(vectors), replaced=landed[0].rows)
        kept = [*(file.path for file in batch.files), *(vector.path for vector in vectors)]
        if len(kept) <= MOST_KEPT:
            tx.tidy_later(kept=kept)

    def begin(op_id: OpId) -> AbstractContextManager[CommitTransaction]:
        return writer.transaction_retiring(op_id, table_id, batch.plan.whole, batch.pg_snapshot)

    # Few tuples are gone before a thread for them would have started.
    early = None if batch.plan.in_driver else begin
    land(site, writer, batch.plan.table, op_id, OpPhase.WRITING, changes, within, "fold", early)
    return landed[0]


def _retire(site: Site, writer: CatalogWriter, state: TableState, lake: LakeTable, op_id: OpId, batch: Batch) -> None:
    record, line = state.table, state.cutline
    refuse_foreign_rows(site, writer, record, lake, line.snapshot_id)
    Journal(writer).phase(op_id, OpPhase.WRITING, OpPhase.PREPARED, attempt=1)
    with writer.transaction(op_id) as tx:
        tx.require_not_frozen(record.table_id)
        _require_newest(tx, record.table_id, batch)
        tx.require("S moved while a fold looked at it.", _AT, (line.snapshot_id, record.table_id))
        tx.retire_delta(record.table_id, batch.plan.whole, batch.pg_snapshot)
        tx.count(rows=batch.rows, files=0, vectors=0, replaced=0)
        tx.tidy_later(attempt=1, metadata=line.metadata_location, snapshot=line.snapshot_id)


def _require_newest(tx: CommitTransaction, table_id: int, batch: Batch) -> None:
    """What was read must not be older than rows that have come into the lake, or are about to, by another way."""
    seen = (table_id, batch.pg_snapshot)
    tx.require("A load was staged before this fold looked.", _NONE_STAGED, seen)
    tx.require("An ingest or load has landed since this fold looked.", _NONE_TAKEN_IN, seen)


def _require_room(plan: FoldPlan, now: TableState) -> None:
    """The lines may move while a fold reads, never so that rows would land outside of [R, T)."""
    line = now.cutline
    expired = line.retention_line is not None and plan.whole.lower < line.retention_line
    if expired or line.t is None or plan.cut_to > line.t:
        raise Conflict("fold.lines_moved", f"The lines of {plan.table} moved across the rows that were to be folded.")
