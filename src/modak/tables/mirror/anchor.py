"""From a registered table to one that the pump can follow: publish it, make its slot, bring its rows into the lake.

Three ways lead there. An empty lake is filled by a copy; an interrupted copy goes on where its journal ends; and where
neither would do (the lake has rows from before, the slot of the interrupted copy is gone, columns have changed since)
a diff writes what differs. F is set when the rows have landed, and only then does the pump begin.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from modak.catalog.records import TableRecord, TableState
from modak.core.names import TableName
from modak.postgres.describe import describe
from modak.tables.mirror.chunks import Chunk, read_chunks
from modak.tables.mirror.copy import copy_all, copy_rest
from modak.tables.mirror.pump.evolve import columns_differ
from modak.tables.mirror.reanchor import reanchor
from modak.tables.mirror.replication import look_at_slot, publish
from modak.tables.site import Site
from modak.tables.tidy import copying_alone, finish_operations

log = structlog.get_logger()


def anchor(site: Site, name: TableName) -> int | None:
    """Bring a mirrored table to where the pump takes over; how many rows were written, None if it was there already."""
    state = site.reader.state(name)
    record = state.table
    if state.cutline.frontier is not None:
        return None
    with copying_alone(site, record.table_id):
        for op, removed in finish_operations(site, site.writer(None), state, copying=True):
            log.info("repair.cleaned", table=str(name), op=op.op_id, kind=op.kind, files_removed=removed)
        state = site.reader.state(name)
        if state.cutline.frontier is not None:
            return None
        publish(site, site.writer(None), record)
        with site.connect(autocommit=True) as conn:
            journaled = read_chunks(conn, record.table_id)
        begun = any(chunk.committed for chunk in journaled)
        if not begun and state.cutline.snapshot_id is None:
            return copy_all(site, state)
        if begun and _can_go_on(site, record, journaled):
            return copy_rest(site, state, journaled)
        log.info("mirror.anchored_by_diff", table=str(name))
        return reanchor(site, None, record)


def _can_go_on(site: Site, record: TableRecord, journaled: Sequence[Chunk]) -> bool:
    """Whether the slot still has every change since the first chunk, and the lake the columns of the heap."""
    slot = look_at_slot(site, record)
    if slot is None or slot.lost:
        log.warning("copy.slot_lost", table=str(record.name))
        return False
    with site.connect(autocommit=True) as conn:
        heap = describe(conn, record.name, record.tier_key)
    lake = site.lake.load(record.lake)
    if columns_differ(record, heap, lake):
        log.warning("copy.columns_changed", table=str(record.name), chunks=len(journaled))
        return False
    return True


def anchored(state: TableState) -> bool:
    """Whether the pump can follow the table."""
    return state.table.mode == "mirrored" and state.cutline.frontier is not None
