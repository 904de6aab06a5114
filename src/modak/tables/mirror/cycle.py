"""What a mirrored table needs once in a while besides its pump: leaves that came or went, old partitions, corrections.

The thread that pumps a table calls this between two flushes, so F stands still meanwhile. A leaf that is attached with
rows, or detached, changes the table without a word in the change stream: its stretch is noted and, once F has passed
the place in the WAL where it was noticed, compared and mended like a lost slot's, but only there. Memory: as
`compare.py` and `mend.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, LiteralString

import psycopg
import structlog

from modak.catalog.journal import Journal
from modak.catalog.lease import Epoch
from modak.catalog.records import Cutline, TableRecord, TableState
from modak.catalog.write import CatalogWriter
from modak.core.axis import TierKey
from modak.core.errors import Conflict, ModakError
from modak.core.faults import reach
from modak.core.ids import new_op_id
from modak.core.names import TableName
from modak.core.states import OpPhase, PartitionState
from modak.lake.model import data_folder
from modak.postgres.changes.lsn import read_lsn, write_lsn
from modak.postgres.connect import translate
from modak.postgres.describe import describe
from modak.tables import premake
from modak.tables.fold.run import FoldReport, fold
from modak.tables.mirror.altered import ALTERED, traces, was_altered
from modak.tables.mirror.compare import Stretch, differing, sides_of
from modak.tables.mirror.copy import wal_position
from modak.tables.mirror.identity import ensure_identity
from modak.tables.mirror.leaves import TrueLeaf, as_partitions, bounded_leaves
from modak.tables.mirror.mend import land_mended, write_differing
from modak.tables.mirror.pump.evolve import RECOPY, columns_differ
from modak.tables.mirror.reanchor import require_same_columns
from modak.tables.mirror.retire import Retired, retire
from modak.tables.observe import observe, sync
from modak.tables.premake import plan_premake
from modak.tables.site import Site
from modak.tables.tidy import finish_operations, give_up, open_spill
from modak.tables.upkeep import release_tags, trim_snapshots
from modak.tables.verify.point import Point

log = structlog.get_logger()

Conn = psycopg.Connection[Any]

_NOTE: LiteralString = """
    INSERT INTO modak.mirror_diffs (table_id, lower_bound, upper_bound, after_lsn, reason)
    VALUES (%s, %s, %s, pg_current_wal_insert_lsn(), %s)
"""
_DUE: LiteralString = """
    SELECT d.diff_id, d.lower_bound, d.upper_bound, d.reason
    FROM modak.mirror_diffs d JOIN modak.cutline c USING (table_id)
    WHERE d.table_id = %s AND d.after_lsn <= c.frontier ORDER BY d.diff_id
"""

_APART: LiteralString = """
    SELECT EXISTS (
        SELECT FROM modak.mirror_diffs d JOIN modak.cutline c USING (table_id) JOIN modak.partitions p USING (table_id)
        WHERE d.table_id = %s AND p.state NOT IN ('hot', 'dropped')
            AND int8range(d.lower_bound, d.upper_bound) * int8range(c.t, NULL)
                && int8range(p.lower_bound, p.upper_bound))
"""


@dataclass(frozen=True, slots=True)
class MirrorReport:
    """What one look did."""

    table: TableName
    noted: tuple[str, ...] = ()
    """Stretches that have to be compared, and why."""
    mended_rows: int = 0
    retired: Retired = field(default_factory=Retired)
    folded: FoldReport | None = None
    premade: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether anything happened."""
        return bool(self.noted or self.mended_rows or self.retired.changed or self.premade) or (
            self.folded is not None and self.folded.changed
        )


@dataclass(frozen=True, slots=True)
class Apart:
    """A stretch whose rows came or went without a word in the change stream."""

    stretch: Stretch
    reason: str


def mirror_cycle(site: Site, epoch: Epoch, name: TableName) -> MirrorReport:
    """Look after a mirrored table that has a frontier; the caller pumps it in the same thread."""
    try:
        return _cycle(site, epoch, name)
    except psycopg.Error as error:
        raise translate(error) from error


def _cycle(site: Site, epoch: Epoch, name: TableName) -> MirrorReport:
    writer = site.writer(epoch)
    state = site.reader.state(name)
    if state.table.mode != "mirrored" or state.cutline.frontier is None:
        return MirrorReport(name)
    for op, removed in finish_operations(site, writer, state):
        log.info("repair.cleaned", table=str(name), op=op.op_id, kind=op.kind, files_removed=removed)
    with site.connect(autocommit=True) as conn:
        busy = ensure_identity(conn, state.table, writer.hold)
        if busy:
            log.info("mirror.identity_deferred", table=str(name), relations=[str(each) for each in busy])
        noted = [apart.reason for apart in _note_leaves(conn, writer, state, busy)]
        noted += _note_altered(site, writer, conn, state.table)
        mended = _mend_due(site, writer, conn, name)
        report = MirrorReport(name, tuple(noted), mended)
        if state.table.heap_retention is not None:
            report = _age(site, epoch, conn, name, report)
    trim_snapshots(site, writer, name)
    release_tags(site, writer, name)
    return report


def _age(site: Site, epoch: Epoch, conn: Conn, name: TableName, report: MirrorReport) -> MirrorReport:
    """Partitions are made ahead and fall behind, and corrections of what has left the heap go into the lake."""
    writer = site.writer(epoch)
    sync(site, conn, writer, name)
    open_spill(site, writer, name)
    observed = observe(site, conn, name)
    planned = plan_premake(observed.state, site.settings.tiering.premake_partitions, observed.heap.time_zone)
    premade = premake.run(planned, conn, observed.record.axis, writer.hold)
    if premade.made:
        sync(site, conn, writer, name)
        ensure_identity(conn, observed.record, writer.hold)
    # What is retired is never compared again.
    apart = _waits_for_comparison(site, conn, observed.record)
    retired = Retired(waiting="heap and lake have to be compared first") if apart else retire(site, epoch, conn, name)
    folded = None if _columns_differ(site, conn, observed.record) else fold(site, epoch, name)
    return replace(report, retired=retired, folded=folded, premade=tuple(part.name for part in premade.made))


def _columns_differ(site: Site, conn: Conn, record: TableRecord) -> bool:
    """Whether the change stream still has a change of columns to bring; it comes at its own place among the rows."""
    heap = describe(conn, record.name, record.tier_key)
    lake = site.lake.load(record.lake)
    return columns_differ(record, heap, lake)


def _waits_for_comparison(site: Site, conn: Conn, record: TableRecord) -> bool:
    """Whether rows over which the cut-line would move next are to be compared first."""
    line = site.reader.cutline(record.table_id)
    row = conn.execute(_APART, (record.table_id,)).fetchone()
    return bool(row and row[0]) or (line is not None and RECOPY in line.lake_props)


def leaf_changes(
    known: dict[int, tuple[Stretch, str]], here: tuple[TrueLeaf, ...], floor: TierKey | None
) -> tuple[Apart, ...]:
    """Which stretches have to be compared because leaves came or went. Pure."""
    found: list[Apart] = []
    for leaf in here:
        was = known.get(leaf.oid)
        now = Stretch(leaf.lower, leaf.upper)
        if was is None and leaf.pages:
            found.append(Apart(now, f"{leaf.name} was attached"))
        elif was is None and leaf.kind == "r" and leaf.relfilenode != leaf.oid:
            found.append(Apart(now, f"{leaf.name} was truncated or rewritten before it was watched"))
        elif was is not None and (was[0] != now or was[1] not in ("", leaf.attachment)):
            found.append(Apart(now, f"{leaf.name} was detached and attached again"))
            if was[0] != now:
                found.append(Apart(was[0], f"{leaf.name} was detached"))
    gone = set(known) - {leaf.oid for leaf in here}
    found += [Apart(known[oid][0], "a leaf was detached or dropped") for oid in sorted(gone)]
    return tuple(each for apart in found if (each := _above(apart, floor)) is not None)


def _above(apart: Apart, floor: TierKey | None) -> Apart | None:
    """What of a stretch the heap is the truth of; what heap retention has retired is never compared."""
    lower, upper = apart.stretch.lower, apart.stretch.upper
    if floor is None:
        return apart
    if upper is not None and upper <= floor:
        return None
    return Apart(Stretch(floor if lower is None else max(lower, floor), upper), apart.reason)


def _note_leaves(
    conn: Conn, writer: CatalogWriter, state: TableState, unwatched: Collection[TableName]
) -> tuple[Apart, ...]:
    record = state.table
    heap = describe(conn, record.name, record.tier_key)
    here = tuple(leaf for leaf in bounded_leaves(conn, heap) if leaf.oid != record.relid)
    retained = record.heap_retention is not None
    hot = [part for part in state.living() if part.state is PartitionState.HOT]
    known = {part.leaf_oid: (Stretch(part.lower, part.upper), part.attachment) for part in hot}
    aging = {part.leaf_oid for part in state.living()} - set(known)
    tops = {leaf.oid for leaf in heap.leaves if leaf.is_default} if retained else set()
    here = tuple(leaf for leaf in here if leaf.oid not in aging and leaf.oid not in tops)
    # An empty leaf becomes known with its guard, so that a TRUNCATE before that can be told from its file.
    here = tuple(leaf for leaf in here if leaf.oid in known or leaf.pages or leaf.name not in unwatched)
    found = leaf_changes(known, here, state.cutline.t)
    gone = set(known) - {leaf.oid for leaf in here}
    new = tuple(leaf for leaf in here if leaf.oid not in known)
    moved = [leaf for leaf in here if leaf.oid in known and _moved(state, leaf)]
    if not (found or gone or new or moved):
        return ()
    reach("mirror.before_leaves")
    with writer.step() as tx:
        for oid in gone:
            tx.forget_partition(record.table_id, oid)
        for leaf in moved:
            tx.update_partition(record.table_id, leaf.oid, leaf.name.name, leaf.name.schema, leaf.lower, leaf.upper)
            tx.conn.execute(
                "UPDATE modak.partitions SET attachment = %s WHERE table_id = %s AND leaf_oid = %s AND state = 'hot'",
                (leaf.attachment, record.table_id, leaf.oid),
            )
        tx.add_partitions(record.table_id, as_partitions(new, heap))
        for apart in found:
            tx.conn.execute(_NOTE, (record.table_id, apart.stretch.lower, apart.stretch.upper, apart.reason))
    reach("mirror.after_leaves")
    for apart in found:
        log.warning("mirror.leaf_changed", table=str(record.name), reason=apart.reason)
    return found


def _note_altered(site: Site, writer: CatalogWriter, conn: Conn, record: TableRecord) -> tuple[str, ...]:
    """Note that a column was written anew since the last look."""
    now = traces(conn, record.relid)
    line = site.reader.cutline(record.table_id)
    # With RECOPY everything is compared before long, and the traces are taken then.
    if line is None or line.lake_props.get(ALTERED) == now or RECOPY in line.lake_props:
        return ()
    altered = was_altered(line.lake_props.get(ALTERED), now)
    why = "a column was written anew"
    reach("mirror.before_altered")
    with writer.step() as tx:
        tx.move(line, replace(line, lake_props={**line.lake_props, ALTERED: now}))
        if altered:
            tx.conn.execute(_NOTE, (record.table_id, line.t, None, why))
    reach("mirror.after_altered")
    if not altered:
        return ()
    log.warning("mirror.column_altered", table=str(record.name), reason=why)
    if record.heap_retention is not None:
        log.warning("mirror.retired_rows_stay", table=str(record.name), below=line.t)
    return (why,)


def _moved(state: TableState, leaf: TrueLeaf) -> bool:
    part = next(part for part in state.living() if part.leaf_oid == leaf.oid)
    known = (part.name, part.leaf_schema, part.lower, part.upper, part.attachment)
    return known != (leaf.name.name, leaf.name.schema, leaf.lower, leaf.upper, leaf.attachment)


def _mend_due(site: Site, writer: CatalogWriter, conn: Conn, name: TableName) -> int:
    record = site.reader.state(name).table
    rows = 0
    for diff_id, lower, upper, reason in conn.execute(_DUE, (record.table_id,)).fetchall():
        try:
            rows += _mend(site, writer, record, diff_id, Stretch(lower, upper), reason)
        except Conflict as conflict:
            log.info("mirror.diff_deferred", table=str(name), reason=reason, because=conflict.code)
    return rows


def _mend(site: Site, writer: CatalogWriter, record: TableRecord, diff_id: int, stretch: Stretch, reason: str) -> int:
    op_id = new_op_id(site.clock)
    plan = {"table": [record.name.schema, record.name.name], "reason": reason}
    Journal(writer).begin(op_id, record.table_id, "diff", plan, [data_folder(record.location, op_id)])
    try:
        with Point(site.dsn, record.name) as point:
            state = site.reader.state(record.name)
            floor = state.cutline.t
            kept = _above(Apart(stretch, reason), floor)
            until = wal_position(site)
            Journal(writer).phase(op_id, OpPhase.PLANNED, OpPhase.WRITING)
            with site.connect(autocommit=True) as conn:
                sides = sides_of(
                    site, conn, state, point.pin.snapshot_id, point.snapshot, kept.stretch if kept else Stretch(0, 0)
                )
            require_same_columns(sides)
            mended = write_differing(sides, differing(sides), op_id)
            point.check()
        frontier = state.cutline.frontier

        def lines(line: Cutline) -> Cutline:
            if line.frontier != frontier:
                raise Conflict("mirror.frontier_moved", f"F of {record.name} has moved during a diff.")
            later = until if line.heal_until is None else max(until, read_lsn(line.heal_until))
            return replace(line, heal_until=write_lsn(later)) if mended.keys else line

        reach("diff.before_commit")
        land_mended(
            site,
            writer,
            sides,
            op_id,
            mended,
            "diff",
            lines,
            lambda tx: tx.change("A diff", "DELETE FROM modak.mirror_diffs WHERE diff_id = %s", (diff_id,)),
        )
        reach("diff.committed")
    except ModakError as error:
        give_up(site, writer, record.location, op_id, error)
        raise
    finish_operations(site, writer, site.reader.state(record.name))
    log.info("mirror.mended", table=str(record.name), reason=reason, differing_keys=mended.keys, rows=mended.rows)
    return mended.rows
