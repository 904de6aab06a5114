"""Writing what differs: heap rows whose keys differ become data files, and the keys of both sides become the lake rows
to delete.

A key that differs is taken out of the lake wherever it stands and written as the heap has it; one that only the lake
knows is only taken out. All portions go into one commit, and whatever else the flow moves (F, the end of healing, a
note of a diff that is done) goes with it. Memory is bounded by one batch and the writer's row group per task, and by
the hashes of one portion in the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import structlog

from modak.catalog.journal import Journal
from modak.catalog.records import Cutline, TableState
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core.faults import reach
from modak.core.ids import OpId
from modak.core.states import OpPhase
from modak.lake.changes import Append, Change, RowDelta
from modak.lake.locate import Located, LocatedFile, Lookup
from modak.lake.model import DataFile, LakeColumn, LakeTable, Layout, Prepared, data_folder
from modak.tables.fold.plan import DRIVER_LAKE_ROWS
from modak.tables.fold.write import Written
from modak.tables.landing import land
from modak.tables.mirror.compare import Sides
from modak.tables.site import Site
from modak.tables.verify.work import Job, rows_with

if TYPE_CHECKING:
    from modak.lake.iceberg.locate import Locator
    from modak.tables.verify.compare import Differing

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Mending:
    """One task: the rows of one source whose keys differ."""

    job: Job
    keys: Any
    """Hashes of keys, in order."""
    folder: str
    task: str
    columns: tuple[LakeColumn, ...]
    key_names: tuple[str, ...]
    tier_key: str
    layout: Layout
    spec_id: int
    target_bytes: int


@dataclass(frozen=True, slots=True)
class Mended:
    """What was written of a difference, not yet visible."""

    keys: int
    written: tuple[Written, ...]

    @property
    def files(self) -> tuple[DataFile, ...]:
        """The data files of heap rows."""
        return tuple(file for one in self.written for file in one.files)

    @property
    def rows(self) -> int:
        """Rows in them."""
        return sum(file.rows for file in self.files)


Lines = Callable[[Cutline], Cutline]
"""How the lines move with the commit."""
Also = Callable[[CommitTransaction], None]
"""What else happens in the same transaction."""


def write_differing(sides: Sides, portions: Iterable[Differing], op_id: OpId) -> Mended:
    """Write the rows and keys of everything that differs; nothing becomes visible."""
    import numpy as np

    record = sides.state.table
    known = {column.name: column for column in sides.lake.schema}
    columns = tuple(known[column.name] for column in sides.shape.columns)
    keys = tuple(sides.shape.columns[at].name for at in sides.shape.keys)
    folder = data_folder(record.location, op_id)
    written: list[Written] = []
    count = 0
    for number, portion in enumerate(portions):
        count += len(portion)
        sought = np.sort(portion.keys)
        tasks = [
            Mending(
                job,
                sought,
                folder,
                f"{number:03d}-{at:05d}",
                columns,
                keys,
                sides.shape.tier_column.name,
                sides.lake.layout,
                sides.lake.spec_id,
                sides.site.settings.lake.target_file_bytes,
            )
            for at, job in enumerate(sides.jobs)
        ]
        reach("mend.before_write")
        written += sides.run(mend, tasks)
        reach("mend.after_write")
    return Mended(count, tuple(written))


def mend(task: Mending) -> Written:
    """Inside a task: write the rows of the heap, and the keys of either side."""
    import pyarrow as pa

    from modak.lake.decode import arrow_schema
    from modak.lake.iceberg.files import FileWriter
    from modak.lake.iceberg.locate import KeyWriter

    known = {column.name: column for column in task.columns}
    key_schema = arrow_schema([known[name] for name in task.key_names])
    writer = FileWriter(
        task.folder,
        task.columns,
        task.layout,
        tier_key=task.tier_key,
        spec_id=task.spec_id,
        target_bytes=task.target_bytes,
        task=task.task,
    )
    rows = 0
    with writer, KeyWriter(f"{task.folder}/{task.task}-keys.arrow", key_schema, task.tier_key) as keys:
        for batch in rows_with(task.job, task.keys):
            rows += len(batch)
            picked = [batch.column(name) for name in task.key_names]
            keys.write(pa.RecordBatch.from_arrays(picked, schema=key_schema))
            if task.job.side == "heap":
                writer.write(pa.RecordBatch.from_arrays(batch.columns, schema=writer.schema))
        return Written(rows, keys.close(), tuple(writer.close()))


def land_mended(
    site: Site, writer: CatalogWriter, sides: Sides, op_id: OpId, mended: Mended, kind: str, lines: Lines, also: Also
) -> Located | None:
    """Make what was written visible, and move the lines with it; without any difference only the lines move."""
    record = sides.state.table
    if not mended.keys:
        _only_lines(site, writer, sides, op_id, lines, also)
        return None
    locator = _locator(site, sides, mended, data_folder(record.location, op_id))
    landed: list[Located] = []

    def changes(lake: LakeTable, now: TableState) -> Sequence[Change]:
        lines(now.cutline)
        located = locator.at(lake.snapshot_id)
        landed[:] = [located]
        if not located.vectors:
            return [Append(mended.files)]
        return [
            RowDelta(
                rows=mended.files,
                vectors=located.vectors,
                removed_vectors=located.replaced,
                validate_from=lake.snapshot_id,
            )
        ]

    def within(tx: CommitTransaction, prepared: Prepared, now: TableState) -> None:
        moved = lines(now.cutline)
        becomes = replace(moved, snapshot_id=prepared.snapshot_id, metadata_location=prepared.new_location)
        tx.move(now.cutline, becomes)
        also(tx)
        tx.count(keys=mended.keys, rows=mended.rows, removed=landed[0].rows, files=len(mended.files))

    land(site, writer, record.name, op_id, OpPhase.WRITING, changes, within, kind)
    return landed[0]


def _only_lines(site: Site, writer: CatalogWriter, sides: Sides, op_id: OpId, lines: Lines, also: Also) -> None:
    state = site.reader.state(sides.state.table.name)
    Journal(writer).phase(op_id, OpPhase.WRITING, OpPhase.PREPARED, attempt=1)
    line = state.cutline
    with writer.transaction(op_id) as tx:
        tx.move(line, lines(line))
        also(tx)
        tx.count(keys=0, rows=0, removed=0, files=0)
        tx.tidy_later(attempt=1, metadata=line.metadata_location, snapshot=line.snapshot_id)


def _locator(site: Site, sides: Sides, mended: Mended, folder: str) -> Locator:
    from modak.lake.iceberg.locate import Locator, look_up
    from modak.spark.conf import cores

    known = {column.name: column for column in sides.lake.schema}
    keys = [known[sides.shape.columns[at].name] for at in sides.shape.keys]

    def run(tasks: Sequence[Lookup]) -> Sequence[tuple[LocatedFile, ...]]:
        reach("mend.before_locate")
        if sides.in_driver and sum(task.rows for task in tasks) <= DRIVER_LAKE_ROWS:
            found: Sequence[tuple[LocatedFile, ...]] = [look_up(task) for task in tasks]
        else:
            from modak.spark.distribute import distribute

            found = distribute(site.spark, look_up, tasks)
        reach("mend.after_locate")
        return found

    return Locator(
        site.lake,
        sides.state.table.lake,
        [one.keys for one in mended.written],
        keys,
        sides.shape.tier_column.name,
        folder,
        run,
        least_tasks=1 if sides.in_driver else cores(),
    )
