"""Another life for the same table, in place: tiered with its heap kept ↔ mirrored.

Both keep every row in the heap, so the heap is the truth while the table changes. Towards a mirror, the lake stays as
it is and a diff brings what it lacks; until that has landed the table reads from its heap alone. Back to tiering, the
lake is emptied in the transaction that changes the mode, and the next passes tier the old partitions again: a mirror's
files mix rows of all ages and cannot be cut at a cut-line. A step that is cut short is taken up by the same command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, LiteralString

import psycopg
import structlog
from psycopg.types.json import Jsonb

from modak.catalog import capture, moves, spill
from modak.catalog.journal import Journal
from modak.catalog.records import NewPartition, TableRecord, TableState
from modak.catalog.write import CommitTransaction
from modak.core.errors import ModakError, Refused, UsageError
from modak.core.faults import reach
from modak.core.ids import new_op_id
from modak.core.names import TableName
from modak.core.states import OpPhase, PartitionState
from modak.lake.changes import Change, DeleteRange, SetProperties
from modak.lake.model import LakeTable, Prepared
from modak.postgres.describe import describe
from modak.postgres.model import PgTable
from modak.tables.landing import land
from modak.tables.mirror.anchor import anchor
from modak.tables.mirror.leaves import as_partitions, bounded_leaves
from modak.tables.mirror.preflight import MODE, PLAIN_MIRROR, inspect_mirror, look
from modak.tables.mirror.replication import patiently, plan_withdrawal, withdraw
from modak.tables.observe import holds_rows, new_partition
from modak.tables.registration.preflight import Preflight, bounded, inspect, open_below
from modak.tables.registration.register import FIRST_FLOOR
from modak.tables.registration.request import CHUNK_ROWS, RegisterRequest
from modak.tables.site import Site
from modak.tables.tidy import finish_operations, give_up, open_spill
from modak.tables.tiering.commit import CUT_LINE
from modak.tables.upkeep import commit_aside

log = structlog.get_logger()

Conn = psycopg.Connection[Any]

LOCK_MILLIS = 200

_BEGIN_AGAIN: LiteralString = """
    WITH gone AS (DELETE FROM modak.cutline WHERE table_id = %(table)s
        RETURNING snapshot_id, metadata_location, lake_props, generation)
    SELECT snapshot_id, metadata_location, lake_props, generation FROM gone
"""
_LINE: LiteralString = """
    INSERT INTO modak.cutline (table_id, t, snapshot_id, metadata_location, lake_props, generation)
    VALUES (%s, %s, %s, %s, %s, %s)
"""
_MODE: LiteralString = """
    UPDATE modak.tables SET mode = %(mode)s, keep_heap = %(keep)s, chunk_rows = %(chunk)s
    WHERE table_id = %(table)s AND mode <> %(mode)s
"""


def convert(site: Site, name: TableName, mode: str) -> int:
    """Give a table another mode; the rows that were written into the lake for it."""
    state = site.reader.state(name)
    if mode == "mirrored":
        return _to_mirrored(site, state)
    if mode == "tiered":
        return _to_tiered(site, state)
    raise UsageError("usage.mode", f"Unknown mode {mode!r}.", hint="Use tiered or mirrored.")


def _to_mirrored(site: Site, state: TableState) -> int:
    record = state.table
    if record.mode == "tiered":
        _refuse_unless_whole(site, state)
        heap = _checked(site, record, "mirrored")
        finish_operations(site, site.writer(None), state)
        _switch(site, record, heap)
    elif state.cutline.frontier is not None:
        raise Refused("convert.same", f"{record.name} is mirrored already.", hint="Nothing was changed.")
    record = site.reader.state(record.name).table
    _take_off(site, site.reader.state(record.name))
    _tell_readers(site, site.reader.state(record.name))
    rows = anchor(site, record.name) or 0
    log.info("convert.done", table=str(record.name), mode="mirrored", rows=rows)
    return rows


def _tell_readers(site: Site, state: TableState) -> None:
    """The lake table's own properties say what kind of table it is, for whoever finds it without us."""
    lake = site.lake.load(state.table.lake)
    if lake is not None and lake.properties.get(MODE) == PLAIN_MIRROR and CUT_LINE not in lake.properties:
        return
    properties = SetProperties({MODE: PLAIN_MIRROR}, frozenset({CUT_LINE}))
    commit_aside(site, site.writer(None), state, "convert", lambda _lake, _state: [properties])


def _switch(site: Site, record: TableRecord, heap: PgTable) -> None:
    """From here on the heap alone is read, and nothing below a cut-line is anywhere but there."""
    with site.connect(autocommit=True) as conn:
        leaves = as_partitions(bounded_leaves(conn, heap), heap)
    reach("convert.before_switch")
    with site.writer(None).step() as tx:
        _require_no_pins(tx.conn, record)
        tx.conn.execute(_MODE, {"mode": "mirrored", "keep": False, "chunk": CHUNK_ROWS, "table": record.table_id})
        _begin_again(tx.conn, record, None)
        _replace_partitions(tx.conn, record, leaves)
    reach("convert.after_switch")


def _take_off(site: Site, state: TableState) -> None:
    """The capture triggers and the spill go; what they have written meanwhile the heap has too."""
    record = state.table
    with site.connect(autocommit=True) as conn:
        for leaf in bounded_leaves(conn, describe(conn, record.name, record.tier_key)):
            patiently(site, record.name, partial(_without_capture, site, leaf.oid))
        patiently(site, record.name, partial(_without_spill, site, record))
    with site.writer(None).step() as tx:
        tx.conn.execute("DELETE FROM modak.delta WHERE table_id = %s", (record.table_id,))


def _to_tiered(site: Site, state: TableState) -> int:
    record = state.table
    if record.mode == "tiered":
        raise Refused("convert.same", f"{record.name} is tiered already.", hint="Nothing was changed.")
    if record.heap_retention is not None:
        raise Refused(
            "convert.heap_retention",
            f"{record.name} is mirrored with heap retention: its heap is not complete any more.",
            hint="Only a mirror that keeps its whole heap can become a tiered table.",
        )
    heap = _checked(site, record, "tiered")
    finish_operations(site, site.writer(None), state)
    _empty_and_switch(site, record, heap)
    open_spill(site, site.writer(None), record.name)
    log.info("convert.done", table=str(record.name), mode="tiered")
    return 0


def _empty_and_switch(site: Site, record: TableRecord, heap: PgTable) -> None:
    writer, op_id = site.writer(None), new_op_id(site.clock)
    floor = bounded(heap)[0].lower
    followed = plan_withdrawal(site, record)
    Journal(writer).begin(op_id, record.table_id, "convert", {"table": [record.name.schema, record.name.name]})

    def changes(lake: LakeTable, _now: TableState) -> Sequence[Change]:
        properties = SetProperties({FIRST_FLOOR: str(floor)}, frozenset({MODE}))
        emptied = [DeleteRange(record.tier_key, None, None)] if lake.snapshot_id is not None else []
        return [*emptied, properties]

    def within(tx: CommitTransaction, prepared: Prepared, now: TableState) -> None:
        tx.steps.append(partial(_require_no_pins, record=record))
        becomes = replace(now.cutline, snapshot_id=prepared.snapshot_id, metadata_location=prepared.new_location)
        tx.move(now.cutline, replace(becomes, frontier=None, heal_until=None))
        tx.change("The mode", _MODE, {"mode": "tiered", "keep": True, "chunk": None, "table": record.table_id})
        tx.steps.append(partial(_begin_again, record=record, t=floor))
        leaves = [new_partition(leaf) for leaf in bounded(heap)]
        tx.steps.append(partial(_replace_partitions, record=record, leaves=leaves))
        tx.forget("DELETE FROM modak.mirror_health WHERE table_id = %s", (record.table_id,))
        tx.tidy_later(withdraw=followed)

    try:
        reach("convert.before_empty")
        land(site, writer, record.name, op_id, OpPhase.PLANNED, changes, within, "convert")
        reach("convert.after_empty")
    except ModakError as error:
        give_up(site, writer, record.location, op_id, error)
        raise
    withdraw(site, followed)
    finish_operations(site, writer, site.reader.state(record.name))


def _checked(site: Site, record: TableRecord, mode: str) -> PgTable:
    """The same look that a registration of that mode would take."""
    request = RegisterRequest(
        record.name,
        record.pk_columns,
        record.tier_key,
        mode=mode,
        keep_heap=mode == "tiered",
        numeric_as=record.numeric_as,
    )
    with site.connect(autocommit=True) as conn:
        heap = describe(conn, record.name, record.tier_key)
        default_rows = any(holds_rows(conn, leaf) for leaf in heap.leaves if leaf.is_default)
        if mode == "mirrored":
            found: Preflight = inspect_mirror(heap, request, None, default_rows, look(conn, heap))[0]
        else:
            low_rows = [leaf.name for leaf in open_below(heap) if holds_rows(conn, leaf)]
            found = inspect(heap, request, None, default_rows, low_rows)[0]
    found.refuse_if_wrong(record.name)
    return heap


def _refuse_unless_whole(site: Site, state: TableState) -> None:
    record = state.table
    if not record.keep_heap:
        raise Refused(
            "convert.keep_heap",
            f"{record.name} does not keep its heap: rows that have left it are only in the lake.",
            hint="Only a table that was registered with --keep-heap can become a mirror in place.",
        )
    dropped = [part.name for part in state.partitions if part.state is PartitionState.DROPPED]
    living = [part.lower for part in state.living() if part.lower is not None]
    floor = state.cutline.first_floor
    if dropped or (floor is not None and living and floor < min(living)):
        raise Refused(
            "convert.lake_only",
            f"The lake of {record.name} has rows that its heap does not have any more"
            f" ({', '.join(dropped) or 'from an earlier registration'}); a mirror would delete them.",
            hint="Nothing was changed.",
        )
    with site.connect() as conn:
        _require_no_pins(conn, record)


def _require_no_pins(conn: Conn, record: TableRecord) -> None:
    row = conn.execute(
        "SELECT count(*) FROM modak.read_pins WHERE table_id = %s AND expires_at > clock_timestamp()",
        (record.table_id,),
    ).fetchone()
    if row and row[0]:
        raise Refused("convert.pinned", f"{record.name} is being read.", hint="Try again when the readers have ended.")


def _begin_again(conn: Conn, record: TableRecord, t: int | None) -> None:
    """The cut-line of another life may lie before that of this one, which a move would refuse."""
    row = conn.execute(_BEGIN_AGAIN, {"table": record.table_id}).fetchone()
    assert row is not None
    snapshot, location, props, generation = row
    conn.execute(_LINE, (record.table_id, t, snapshot, location, Jsonb(props), generation + 1))


def _replace_partitions(conn: Conn, record: TableRecord, leaves: Sequence[NewPartition]) -> None:
    conn.execute("DELETE FROM modak.partitions WHERE table_id = %s", (record.table_id,))
    moves.add_partitions(conn, record.table_id, leaves)


def _without_capture(site: Site, leaf_oid: int) -> bool:
    try:
        with site.writer(None).step(LOCK_MILLIS) as tx:
            capture.remove(tx.conn, leaf_oid)
    except ModakError as error:
        if error.code != "postgres.busy":
            raise
        return False
    return True


def _without_spill(site: Site, record: TableRecord) -> bool:
    with site.connect(autocommit=True) as conn:
        try:
            spill.disable(conn, record.name)
        except ModakError as error:
            if error.code != "postgres.busy":
                raise
            return False
    return True
