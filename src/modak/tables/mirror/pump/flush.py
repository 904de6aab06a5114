"""One flush: columns, rows, positions and the commit, in this order; and what is worth remembering for the next.

A few thousand changes are written by this process: Arrow into Parquet, Iceberg's metadata through the gateway, no Spark
job. A batch beyond `plan.DRIVER_ROWS` hands its rows to Spark tasks, and keys that would have to be read out of many
unknown lake rows are looked for in tasks too. The live files and the lake table are remembered between flushes as long
as nobody else commits. Memory: one part of the batch, and an entry per live file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import structlog

from modak.catalog.journal import Journal
from modak.catalog.records import TableState
from modak.catalog.write import CatalogWriter
from modak.core.errors import Conflict, ModakError, Refused
from modak.core.faults import reach
from modak.core.ids import OpId, new_op_id
from modak.core.states import OpPhase
from modak.lake.iceberg.keycache import KeyCache
from modak.lake.iceberg.scan import scan_schema
from modak.lake.model import DataFile, LakeColumn, LakeFile, LakeTable, data_folder
from modak.lake.types import MappedColumn
from modak.postgres.changes.lsn import write_lsn
from modak.postgres.model import PgTable
from modak.tables.mirror.pump.buffer import Buffer
from modak.tables.mirror.pump.columns import Columns, Seen
from modak.tables.mirror.pump.commit import Flush, commit, live_after, move_frontier
from modak.tables.mirror.pump.evolve import follow, known_columns, mapped_columns
from modak.tables.mirror.pump.find import TASK_ROWS, Hit, Listing, Look, Wanted, candidates, look, with_bounds
from modak.tables.mirror.pump.generated import with_generated
from modak.tables.mirror.pump.plan import in_driver
from modak.tables.mirror.pump.write import Applied, Rows, Target, apply_part, keep_rows, write_rows
from modak.tables.site import Site
from modak.tables.tidy import finish_operations, give_up
from modak.tables.upkeep import trim_snapshots

log = structlog.get_logger()

TIDY_EVERY = 20
TRIM_EVERY = 100
OURS = frozenset({"pump", "evolve"})
AGAIN = 5


class Flusher:
    """Lands the batches of one table."""

    def __init__(self, site: Site, writer: CatalogWriter, keys: Path) -> None:
        self._site = site
        self._writer = writer
        self._cache = KeyCache(keys)
        self._listing = Listing()
        self._lake: LakeTable | None = None
        self._flushes = 0

    def forget(self) -> None:
        """Remember nothing: somebody else may have changed everything."""
        self._listing, self._lake = Listing(), None

    def lake(self, state: TableState) -> LakeTable:
        """The lake table."""
        if self._lake is None or self._lake.snapshot_id != state.cutline.snapshot_id:
            self._lake = self._site.lake.load(state.table.lake)
            if self._lake is None:
                raise Refused("lake.missing", f"The lake table {state.table.lake} is gone from the catalog.")
        return self._lake

    def tidy(self, state: TableState) -> None:
        """Finish what flushes have left to tidy."""
        now = self._site.reader.state(state.table.name)
        ours = tuple(op for op in now.unfinished if op.kind in OURS)
        finish_operations(self._site, self._writer, replace(now, unfinished=ours))

    def flush(self, state: TableState, buffer: Buffer, columns: Columns, frontier: int) -> TableState:
        """Commit a batch that ends at `frontier`; the state afterwards."""
        if self._flushes % TIDY_EVERY == 0:
            self.tidy(state)
        for again in range(AGAIN):
            try:
                self._flush(state, buffer, columns, frontier)
                break
            except Conflict as conflict:
                if conflict.code != "mirror.again" or again == AGAIN - 1:
                    raise
                self.forget()
        self._flushes += 1
        if self._flushes % TRIM_EVERY == 0:
            trim_snapshots(self._site, self._writer, state.table.name)
            self.forget()
        return self._site.reader.state(state.table.name)

    def follow(self, state: TableState, heap: PgTable) -> bool:
        """Give the lake the columns of the heap as it was a moment ago; whether that changed anything."""
        mapped, lake = mapped_columns(state.table, heap), self.lake(state)
        names = {column.attnum: column.name for column in heap.columns}
        if not _other_columns(names, mapped, lake, heap.oid):
            return False
        self._lake = follow(self._site, self._writer, state, heap, mapped, lake)
        return True

    def _flush(self, state: TableState, buffer: Buffer, columns: Columns, frontier: int) -> None:
        seen = columns.seen
        record = state.table
        # Nothing seen: only a truncation.
        if seen is not None and _other_columns(seen.names, seen.mapped, self.lake(state), record.relid):
            self._lake = follow(self._site, self._writer, state, seen.heap, seen.mapped, self.lake(state))
            state = self._site.reader.state(record.name)
        lake = self.lake(state)
        files = {} if buffer.truncated else self._files(state, lake.snapshot_id)
        op_id = new_op_id(self._site.clock)
        folder = data_folder(record.location, op_id)
        plan = {"changes": buffer.changes, "frontier": write_lsn(frontier), "truncated": buffer.truncated}
        Journal(self._writer).begin(op_id, record.table_id, "pump", plan, [folder])
        try:
            applied = self._applied(state, lake, seen, buffer, files, op_id)
            flush = Flush(
                state,
                frontier,
                buffer.changes,
                applied,
                buffer.truncated,
                files if not buffer.truncated else self._files(state, lake.snapshot_id),
                lake.snapshot_id,
                folder,
                columns.before,
                seen.shape.identity if seen is not None else (),
                replayable=not buffer.spilled and in_driver(buffer.changes),
            )
            if not flush.changes_rows:
                move_frontier(self._writer, state.cutline, frontier, columns.before)
                Journal(self._writer).abandon(op_id, OpPhase.PLANNED)
                return
            self._land(flush, op_id)
        except ModakError as error:
            give_up(self._site, self._writer, record.location, op_id, error)
            raise
        if applied.missing:
            log.warning("mirror.rows_missing", table=str(record.name), rows=applied.missing)

    def _land(self, flush: Flush, op_id: OpId) -> None:
        def locate(lake: LakeTable, wanted: Sequence[Wanted]) -> tuple[Sequence[Hit], Mapping[str, LakeFile]]:
            self._lake = lake
            files = self._files(flush.state, lake.snapshot_id)
            keys = self._keys(lake, flush)
            return [hit for one in wanted for hit in self._find(one, files, keys)], files

        landed, vectors = commit(self._site, self._writer, op_id, flush, locate)
        lake = self.lake(flush.state)
        tier = lake.column(flush.state.table.tier_key)
        added = [with_bounds(file, tier.field_id if tier else None) for file in flush.applied.files]
        self._listing.files = live_after(self._listing.files, flush.truncated, added, vectors)
        self._listing.snapshot_id = landed.prepared.snapshot_id
        self._lake = replace(
            lake, snapshot_id=landed.prepared.snapshot_id, metadata_location=landed.prepared.new_location
        )

    def _applied(
        self,
        state: TableState,
        lake: LakeTable,
        seen: Seen | None,
        buffer: Buffer,
        files: Mapping[str, LakeFile],
        op_id: OpId,
    ) -> Applied:
        applied = Applied()
        if seen is None or not buffer.changes:
            return applied
        target = self._target(state, lake, seen, op_id)
        names = {column.attnum: column.name for column in seen.heap.columns}
        keys = tuple(_column(lake, names[number]) for number in seen.shape.identity)

        def find(wanted: Wanted) -> Sequence[Hit]:
            return self._find(wanted, files, keys)

        def complete(some: pa.Table) -> pa.Table:
            return with_generated(self._site, seen, some)

        def rows() -> Iterator[pa.RecordBatch]:
            for part in buffer.parts():
                yield from apply_part(part, target, None if buffer.truncated else find, complete, applied)

        reach("pump.before_write")
        applied.files = self._here(target, rows()) if in_driver(buffer.changes) else self._in_tasks(target, rows())
        reach("pump.written")
        return applied

    def _here(self, target: Target, rows: Iterator[pa.RecordBatch]) -> tuple[DataFile, ...]:
        writer = target.writer("pump")
        with writer:
            for batch in rows:
                writer.write(pa.RecordBatch.from_arrays(batch.columns, schema=writer.schema))
            return tuple(writer.close())

    def _in_tasks(self, target: Target, rows: Iterator[pa.RecordBatch]) -> tuple[DataFile, ...]:
        from modak.spark.distribute import distribute

        items = []
        schema = scan_schema(target.columns)
        for number, batch in enumerate(rows):
            uri = f"{target.folder}/{number:05d}-rows.arrow"
            keep_rows(uri, schema, iter((batch,)))
            items.append(Rows(uri, target, f"{number:05d}"))
        return tuple(file for files in distribute(self._site.spark, write_rows, items) for file in files)

    def _target(self, state: TableState, lake: LakeTable, seen: Seen, op_id: OpId) -> Target:
        numbers = {name: number for number, name in seen.names.items()}
        cut = tuple(sorted({part.upper for part in state.partitions if part.upper is not None}))
        return Target(
            lake.schema,
            tuple(numbers.get(column.name) for column in lake.schema),
            lake,
            seen.names[state.table.tier_attnum],
            data_folder(state.table.location, op_id),
            self._site.settings.lake.target_file_bytes,
            cut,
        )

    def _files(self, state: TableState, snapshot_id: int | None) -> Mapping[str, LakeFile]:
        record = state.table

        def read(snapshot: int) -> Iterator[LakeFile]:
            return self._site.lake.files(record.lake, snapshot, column=_tier_name(self._lake, record.tier_key))

        self._listing.at(snapshot_id, read)
        return self._listing.files

    def _keys(self, lake: LakeTable, flush: Flush) -> tuple[LakeColumn, ...]:
        known = known_columns(lake, flush.state.table.relid)
        return tuple(_column(lake, known[number]) for number in flush.identity)

    def _find(self, wanted: Wanted, files: Mapping[str, LakeFile], keys: tuple[LakeColumn, ...]) -> Sequence[Hit]:
        chosen = candidates(files.values(), wanted)
        unknown = sum(each.file.rows for each in chosen if each.file.path not in self._listing.met)
        if unknown > TASK_ROWS:
            return self._find_in_tasks(wanted, chosen, keys)
        reach("pump.before_find")
        hits = look(Look(tuple(chosen), keys, wanted), self._cache)
        reach("pump.found")
        self._listing.met |= {each.file.path for each in chosen}
        return hits

    def _find_in_tasks(self, wanted: Wanted, chosen: Sequence[LakeFile], keys: tuple[LakeColumn, ...]) -> Sequence[Hit]:
        from modak.spark.distribute import distribute

        groups: list[list[LakeFile]] = [[]]
        rows = 0
        for each in chosen:
            if rows > TASK_ROWS:
                groups.append([])
                rows = 0
            groups[-1].append(each)
            rows += each.file.rows
        tasks = [Look(tuple(group), keys, wanted) for group in groups]
        return [hit for hits in distribute(self._site.spark, look, tasks) for hit in hits]


def _other_columns(names: Mapping[int, str], mapped: Sequence[MappedColumn], lake: LakeTable, relid: int) -> bool:
    """Whether the lake has other columns than the table at this point of the WAL."""
    if known_columns(lake, relid) != names:
        return True
    types = {column.column.name: column.column.type for column in mapped}
    return any(types.get(column.name, column.type) != column.type for column in lake.schema)


def _column(lake: LakeTable, name: str) -> LakeColumn:
    found = lake.column(name)
    if found is None:
        raise Refused(
            "mirror.key_missing",
            f"The lake table {lake.identifier} has no column {name}, by which rows are found.",
            hint="Somebody changed its schema; add the column again, or register the table anew.",
        )
    return found


def _tier_name(lake: LakeTable | None, tier_key: str) -> str | None:
    return tier_key if lake is not None and lake.column(tier_key) is not None else None
