"""Anchoring a mirrored table anew after its slot was lost: a fresh slot, then a diff that writes only what differs.

The diff compares the heap, as the snapshot of the new slot shows it, with the lake as it stands, and brings the lake to
exactly that state in one commit that also moves F to the slot's first position. Until that commit F lies before the
slot, which is how a worker that finds a half-made anchor knows to make it again. Ranges that heap retention has retired
are the lake's alone and are never touched. Memory: as `compare.py` and `mend.py`.
"""

from __future__ import annotations

from dataclasses import replace

import structlog

from modak.catalog.journal import Journal
from modak.catalog.lease import Epoch
from modak.catalog.records import Cutline, TableRecord, TableState
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core.errors import Conflict, ModakError, Refused
from modak.core.faults import reach
from modak.core.ids import OpId, new_op_id
from modak.core.states import OpPhase
from modak.lake.model import data_folder
from modak.postgres.changes.lsn import read_lsn, write_lsn
from modak.postgres.changes.slot import PLUGIN, SlotState
from modak.postgres.describe import describe
from modak.tables.mirror.altered import ALTERED, traces
from modak.tables.mirror.compare import Sides, Stretch, differing, sides_of
from modak.tables.mirror.leaves import REWRITTEN, rewritten_files, true_leaves
from modak.tables.mirror.mend import Mended, land_mended, write_differing
from modak.tables.mirror.pump.evolve import RECOPY, columns_differ, follow, mapped_columns
from modak.tables.mirror.replication import HISTORY, fresh_slot, history_of, look_at_slot, publish
from modak.tables.site import Site
from modak.tables.tidy import finish_operations, give_up
from modak.tables.verify.point import Point

log = structlog.get_logger()

TRIES = 3

_DEFERRABLE = "SELECT 1 FROM pg_index WHERE indrelid = %s AND indisprimary AND NOT indimmediate"


def slot_trouble(site: Site, table: TableRecord, frontier: str | None) -> str | None:
    """Why the slot of a table cannot be followed from F on, in words for an operator; None: it can."""
    return trouble_of(look_at_slot(site, table), frontier)


def trouble_of(slot: SlotState | None, frontier: str | None) -> str | None:
    """The same of a slot that has been looked at."""
    if slot is None:
        return "its replication slot is gone"
    if slot.plugin != PLUGIN:
        return f"its replication slot belongs to another plugin, {slot.plugin}"
    if slot.lost or slot.confirmed_lsn is None:
        return "its replication slot has lost WAL that was still needed"
    if frontier is not None and slot.confirmed_lsn > read_lsn(frontier):
        return "its replication slot begins after what the lake has"
    if frontier is not None and slot.flush_lsn < read_lsn(frontier):
        return "the server's WAL ends before what the lake has: it is another server, or an older one"
    return None


def history_trouble(site: Site, line: Cutline) -> str | None:
    """Why F means nothing on this server, although a slot of the right name may be there; None: it does."""
    known = line.lake_props.get(HISTORY)
    now = known and history_of(site)
    if now is None or known == now:
        return None
    return f"the server is another one, or has taken up an earlier state: its history was {known} and is {now}"


def healing_trouble(site: Site, table: TableRecord, line: Cutline) -> str | None:
    """Why the changes before `heal_until` do not tell which rows there are; None: they do, or there are none.

    Under a deferrable key a row may come before another leaves its key. Where the lake may know either, a row that came
    and went looks the same.
    """
    if line.heal_until is None:
        return None
    with site.connect(autocommit=True) as conn:
        deferrable = conn.execute(_DEFERRABLE, (table.relid,)).fetchone()
    return "rows were copied while they may have changed places under a deferrable key" if deferrable else None


def reanchor(site: Site, epoch: Epoch | None, table: TableRecord) -> int:
    """Make a new slot and bring the lake to the heap's state at it, without a full copy; returns the rows written."""
    writer = site.writer(epoch)
    started = site.clock.monotonic()
    log.warning("mirror.reanchoring", table=str(table.name))
    publish(site, writer, table)
    for again in range(TRIES):
        try:
            mended, frontier = _anchor(site, writer, table)
            break
        except Conflict as conflict:
            if conflict.code != "mirror.columns_changed" or again == TRIES - 1:
                raise
            log.info("mirror.anchor_again", table=str(table.name), because=conflict.code)
    finish_operations(site, writer, site.reader.state(table.name), copying=True)
    log.warning(
        "mirror.reanchored",
        table=str(table.name),
        frontier=frontier,
        differing_keys=mended.keys,
        rows=mended.rows,
        seconds=round(site.clock.monotonic() - started, 2),
    )
    return mended.rows


def kept_by_heap(state: TableState) -> Stretch:
    """The tier keys whose rows the heap is the truth of: everything, or what lies at and above the cut-line."""
    return Stretch(state.cutline.t, None)


def bring_columns(site: Site, writer: CatalogWriter, table: TableRecord) -> None:
    """Let the lake have every column of the heap before rows are compared."""
    state = site.reader.state(table.name)
    with site.connect(autocommit=True) as conn:
        heap = describe(conn, table.name, table.tier_key)
    lake = site.lake.load(table.lake)
    if lake is None:
        raise Refused("lake.missing", f"The lake table {table.lake} is gone from the catalog.")
    follow(site, writer, state, heap, mapped_columns(table, heap), lake)


def require_same_columns(sides: Sides) -> None:
    """Under the lock: nobody has changed the columns since the lake got them."""
    record = sides.state.table
    if columns_differ(record, sides.heap, sides.lake):
        raise Conflict("mirror.columns_changed", f"The columns of {record.name} changed just now.")


def _anchor(site: Site, writer: CatalogWriter, table: TableRecord) -> tuple[Mended, str]:
    bring_columns(site, writer, table)
    op_id = new_op_id(site.clock)
    plan = {"table": [table.name.schema, table.name.name]}
    Journal(writer).begin(op_id, table.table_id, "reanchor", plan, [data_folder(table.location, op_id)])
    try:
        history = history_of(site)
        sides, mended, frontier, found = _differences(site, writer, table, op_id)

        def lines(line: Cutline) -> Cutline:
            props = {**line.lake_props, **found, HISTORY: history}
            props.pop(RECOPY, None)
            return replace(line, frontier=frontier, heal_until=None, lake_props=props)

        reach("reanchor.before_commit")
        land_mended(site, writer, sides, op_id, mended, "reanchor", lines, lambda tx: _forget_diffs(tx, table))
        reach("reanchor.committed")
    except ModakError as error:
        give_up(site, writer, table.location, op_id, error)
        raise
    return mended, frontier


def _differences(
    site: Site, writer: CatalogWriter, table: TableRecord, op_id: OpId
) -> tuple[Sides, Mended, str, dict[str, object]]:
    """Everything that reads: under the locks of a point, and the snapshot of the new slot."""
    with Point(site.dsn, table.name) as point, fresh_slot(site, writer, table) as slot:
        reach("reanchor.slot_made")
        Journal(writer).phase(op_id, OpPhase.PLANNED, OpPhase.WRITING)
        state = site.reader.state(table.name)
        with site.connect(autocommit=True) as conn:
            sides = sides_of(site, conn, state, point.pin.snapshot_id, slot.snapshot, kept_by_heap(state))
            files = rewritten_files(true_leaves(conn, table.relid))
            found: dict[str, object] = {REWRITTEN: files, ALTERED: traces(conn, table.relid)}
        require_same_columns(sides)
        mended = write_differing(sides, differing(sides), op_id)
        point.check()
    return sides, mended, write_lsn(slot.consistent_lsn), found


def _forget_diffs(tx: CommitTransaction, table: TableRecord) -> None:
    """What was to be compared in parts has been compared as a whole."""
    tx.forget("DELETE FROM modak.mirror_diffs WHERE table_id = %s", (table.table_id,))
