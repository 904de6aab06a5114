"""The first copy: chunks along the primary key, read by parallel tasks under one snapshot, appended to an empty lake.

`copy_all` reads under the snapshot that came with the slot, so that what the slot brings is exactly what the copy has
not seen. `copy_rest` goes on after an interruption, under a later snapshot: changes between the slot and that snapshot
are then in the copy *and* in the stream, and up to `heal_until` the pump takes inserts as upserts. Each commit takes
the files of several tasks together with the journal of their chunks; what a crash throws away is one commit's worth. A
small table is copied in this process. Memory: as an export's, one batch and one row group per task, in the driver one
entry per chunk and file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from modak.catalog.journal import Journal
from modak.catalog.records import TableRecord, TableState
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core.errors import Conflict, ModakError, Refused
from modak.core.faults import reach
from modak.core.ids import OpId, new_op_id
from modak.core.names import TableName
from modak.core.states import OpPhase
from modak.lake.changes import Append, Change
from modak.lake.model import DataFile, LakeColumn, LakeTable, Prepared, data_folder
from modak.lake.types import MappedColumn, quoted_identifier, select_list
from modak.postgres.changes.lsn import read_lsn, write_lsn
from modak.postgres.describe import describe
from modak.postgres.model import PgTable
from modak.postgres.snapshot import ExportSnapshot
from modak.tables.landing import land
from modak.tables.mirror import chunks as cutting
from modak.tables.mirror.altered import ALTERED, traces
from modak.tables.mirror.chunks import COMMITTED, Chunk, Key, Run, group, plan_chunks, primary_key, write_chunks
from modak.tables.mirror.leaves import REWRITTEN, rewritten_files, true_leaves
from modak.tables.mirror.replication import HISTORY, fresh_slot, history_of, look_at_slot
from modak.tables.registration.preflight import map_columns
from modak.tables.site import Site
from modak.tables.tidy import finish_operations, give_up
from modak.tables.tiering.export import Split, write_split

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = structlog.get_logger()

DRIVER_BYTES = 4 << 20
"""Up to so many heap bytes no Spark is needed."""
FEW_VALUES = 2_000
"""A column of at most this many different values is worth a dictionary."""


@dataclass(frozen=True, slots=True)
class Source:
    """The table that is copied, as it is while our lock keeps its definition."""

    heap: PgTable
    bytes: int
    key: Key
    mapped: tuple[MappedColumn, ...]
    lake: LakeTable

    @property
    def columns(self) -> tuple[LakeColumn, ...]:
        """The lake's columns in the order in which the heap is read."""
        known = {column.name: column for column in self.lake.schema}
        return tuple(known[one.column.name] for one in self.mapped)


def copy_all(site: Site, state: TableState) -> int:
    """Copy a table from the beginning, under a new slot; returns how many rows."""
    record, writer = state.table, site.writer(None)
    with ExportSnapshot(site.dsn, held_leaves(site, record)) as held:
        with fresh_slot(site, writer, record) as slot:
            source = look(site, record, held)
            with site.connect(autocommit=True) as conn:
                planned = plan_chunks(conn, source.heap, source.bytes, source.key, record.chunk_rows or 50_000)
                here = traces(conn, record.relid)
            reach("copy.before_plan")
            with writer.step() as tx:
                # Columns that are written anew before an interrupted copy goes on are noticed, too.
                now = site.reader.state(record.name).cutline
                tx.move(now, replace(now, lake_props={**now.lake_props, ALTERED: here}))
                write_chunks(tx.conn, record.table_id, planned)
            reach("copy.after_plan")
            log.info("copy.planned", table=str(record.name), chunks=len(planned), bytes=source.bytes)
            rows = _run(site, writer, record, source, planned, slot.snapshot)
            held.check()
        with site.connect(autocommit=True) as conn:
            rewritten = rewritten_files(true_leaves(conn, record.relid))
        finish(site, record, slot.consistent_lsn, rewritten)
    return rows


def copy_rest(site: Site, state: TableState, journaled: Sequence[Chunk]) -> int:
    """Copy what an interrupted copy has left, under a snapshot of its own; returns how many rows."""
    record, writer = state.table, site.writer(None)
    slot = look_at_slot(site, record)
    if slot is None or slot.confirmed_lsn is None:
        raise Conflict("copy.slot_lost", f"The replication slot of {record.name} is gone.")
    with ExportSnapshot(site.dsn, held_leaves(site, record)) as held:
        # Whatever this snapshot shows was committed before here.
        until = wal_position(site)
        reach("copy.before_heal")
        with writer.step() as tx:
            now = site.reader.state(record.name).cutline
            tx.move(now, replace(now, heal_until=_later(now.heal_until, until)))
        reach("copy.after_heal")
        source = look(site, record, held)
        left = [chunk for chunk in journaled if not chunk.committed]
        log.info("copy.resumed", table=str(record.name), chunks=len(left), of=len(journaled))
        rows = _run(site, writer, record, source, journaled, held.id)
        held.check()
        finish(site, record, slot.confirmed_lsn)
    return rows


def held_leaves(site: Site, record: TableRecord) -> list[tuple[int, TableName]]:
    """The relations that hold rows, to be locked against rewrites while they are read."""
    with site.connect(autocommit=True) as conn:
        return [(leaf.oid, leaf.name) for leaf in true_leaves(conn, record.relid)]


def look(site: Site, record: TableRecord, held: ExportSnapshot) -> Source:
    """The table and its lake, after the lock that keeps both as they are."""
    with site.connect(autocommit=True) as conn:
        heap = describe(conn, record.name, record.tier_key)
        if heap.oid != record.relid:
            raise Refused("table.another", f"{record.name} is not the table that was registered.")
        key = primary_key(conn, heap)
    if not key.columns:
        raise Refused("copy.no_primary_key", f"{record.name} has lost its primary key.", hint="Add it again.")
    mapped, problems = map_columns(heap, record.numeric_as, frozenset({*record.pk_columns, record.tier_key}))
    if problems:
        raise Refused("evolve.column_type", problems[0].message, hint=problems[0].hint)
    lake = site.lake.load(record.lake)
    if lake is None:
        raise Refused("lake.missing", f"The lake table {record.lake} is gone from the catalog.")
    return Source(heap, sum(leaf.bytes for leaf in held.held), key, tuple(mapped), lake)


def finish(site: Site, record: TableRecord, consistent_lsn: int, rewritten: Mapping[str, int] | None = None) -> None:
    """Every row has landed: from here on the pump follows. `rewritten`, when nobody rewrote since the slot was made."""
    now = site.reader.state(record.name).cutline
    props = {**now.lake_props, HISTORY: history_of(site)}
    if rewritten:
        props[REWRITTEN] = dict(rewritten)
    healed = now.heal_until is None or read_lsn(now.heal_until) <= consistent_lsn
    reach("copy.before_frontier")
    with site.writer(None).step() as tx:
        frontier, heal_until = write_lsn(consistent_lsn), None if healed else now.heal_until
        becomes = replace(now, frontier=frontier, heal_until=heal_until, lake_props=props)
        tx.move(now, becomes)
    reach("copy.after_frontier")
    log.info("copy.landed", table=str(record.name), frontier=becomes.frontier, heal_until=becomes.heal_until)


def _run(
    site: Site, writer: CatalogWriter, record: TableRecord, source: Source, journaled: Sequence[Chunk], snapshot: str
) -> int:
    from modak.spark.conf import cores

    pending = [chunk for chunk in journaled if not chunk.committed]
    spark = None if source.bytes <= DRIVER_BYTES else site.spark
    lanes = max(cores(), spark.sparkContext.defaultParallelism) if spark else 1
    runs = group(pending, len(journaled), source.bytes, lanes)
    started = site.clock.monotonic()
    rows = done = 0
    for wave in _waves(runs, cutting.TASKS_PER_COMMIT * lanes):
        rows += _wave(site, writer, record, source, wave, snapshot, spark)
        done += sum(len(run.chunks) for run in wave)
        spent = max(site.clock.monotonic() - started, 1e-9)
        log.info(
            "copy.progress",
            table=str(record.name),
            chunks=done,
            of=len(pending),
            rows=rows,
            rows_per_second=round(rows / spent),
            seconds_left=round(spent / done * (len(pending) - done), 1),
        )
    return rows


def _waves(runs: Sequence[Run], size: int) -> Iterator[Sequence[Run]]:
    for at in range(0, len(runs), size):
        yield runs[at : at + size]


def _wave(
    site: Site,
    writer: CatalogWriter,
    record: TableRecord,
    source: Source,
    wave: Sequence[Run],
    snapshot: str,
    spark: SparkSession | None,
) -> int:
    """Read some runs of chunks and land them in one commit."""
    op_id = new_op_id(site.clock)
    numbers = [chunk.number for run in wave for chunk in run.chunks]
    plan = {"table": [record.name.schema, record.name.name], "chunks": [numbers[0], numbers[-1]]}
    Journal(writer).begin(op_id, record.table_id, "copy", plan, [data_folder(record.location, op_id)])
    try:
        Journal(writer).phase(op_id, OpPhase.PLANNED, OpPhase.WRITING)
        reach("copy.before_tasks")
        written = _written(_splits(site, record, source, wave, op_id, snapshot), spark)
        reach("copy.after_tasks")
        _land(site, writer, record, op_id, wave, written)
    except ModakError as error:
        give_up(site, writer, record.location, op_id, error)
        raise
    reach("copy.committed")
    finish_operations(site, writer, site.reader.state(record.name), copying=True)
    return sum(file.rows for files in written for file in files)


def _written(splits: Sequence[Split], spark: SparkSession | None) -> list[list[DataFile]]:
    if spark is None:
        return [write_split(split) for split in splits]
    from modak.spark.distribute import distribute

    return distribute(spark, write_split, splits)


def _splits(
    site: Site, record: TableRecord, source: Source, wave: Sequence[Run], op_id: OpId, snapshot: str
) -> list[Split]:
    few = frozenset(c.name for c in source.heap.columns if c.n_distinct is not None and 0 < c.n_distinct <= FEW_VALUES)
    name = f"{quoted_identifier(record.name.schema)}.{quoted_identifier(record.name.name)}"
    return [
        Split(
            site.dsn,
            f"SELECT {select_list(source.mapped)} FROM {name} WHERE {cutting.condition(source.key, run)}",  # noqa: S608
            snapshot,
            data_folder(record.location, op_id),
            f"{run.chunks[0].number:07d}",
            source.columns,
            source.mapped,
            source.lake.layout,
            record.tier_key,
            source.lake.spec_id,
            site.settings.lake.target_file_bytes,
            few,
            (),
        )
        for run in wave
    ]


def _land(
    site: Site,
    writer: CatalogWriter,
    record: TableRecord,
    op_id: OpId,
    wave: Sequence[Run],
    written: Sequence[Sequence[DataFile]],
) -> None:
    files = tuple(file for some in written for file in some)
    chunks = [chunk.number for run in wave for chunk in run.chunks]
    counts = [
        sum(file.rows for file in some) if at == 0 else 0
        for run, some in zip(wave, written, strict=True)
        for at in range(len(run.chunks))
    ]
    done = {"table": record.table_id, "chunks": chunks, "rows": counts, "op": op_id}
    if not files:
        # Nothing for the lake, but the journal has to know that these chunks are empty.
        with writer.step() as tx:
            tx.conn.execute(COMMITTED, done)
        _end_empty(site, writer, record, op_id)
        return

    def changes(_lake: LakeTable, _now: TableState) -> Sequence[Change]:
        return [Append(files)]

    def within(tx: CommitTransaction, prepared: Prepared, now: TableState) -> None:
        becomes = replace(now.cutline, snapshot_id=prepared.snapshot_id, metadata_location=prepared.new_location)
        tx.move(now.cutline, becomes)
        tx.change("The chunks of a copy", COMMITTED, done)
        tx.count(rows=sum(counts), files=len(files), bytes=sum(file.bytes for file in files), chunks=len(chunks))

    land(site, writer, record.name, op_id, OpPhase.WRITING, changes, within, "copy")


def _end_empty(site: Site, writer: CatalogWriter, record: TableRecord, op_id: OpId) -> None:
    op = site.reader.op(op_id)
    if op is not None:
        Journal(writer).abandon(op_id, op.phase)


def wal_position(site: Site) -> int:
    """Where the WAL ends now: whatever anybody has committed lies before it."""
    with site.connect(autocommit=True) as conn:
        row = conn.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return read_lsn(row[0])


def _later(known: str | None, lsn: int) -> str:
    return write_lsn(max(lsn, read_lsn(known))) if known else write_lsn(lsn)
