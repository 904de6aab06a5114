"""From heap pages to Parquet files: the step in which rows move.

The driver cuts the sealed leaves into ctid ranges of roughly equal bytes, all read under one exported snapshot, and
hands them to Spark tasks; a few megabytes it moves by itself, in less time than a task takes to start. A task streams
Arrow batches out of Postgres (COPY binary), decodes them column by column and writes its own files; what comes back is
a few hundred bytes of JSON per file. Memory per task is bounded by one batch and one row group, whatever the size of
the partition; the driver holds one entry per file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modak.core.faults import reach
from modak.core.ids import OpId
from modak.lake.decode import arrow_schema, decoded
from modak.lake.iceberg.files import FileWriter
from modak.lake.model import DataFile, LakeColumn, LakeTable, Layout, data_folder
from modak.lake.types import MappedColumn, quoted_identifier, select_list
from modak.postgres.arrow import stream
from modak.postgres.dsn import Dsn
from modak.postgres.snapshot import HeldLeaf
from modak.postgres.splits import Split as Pages
from modak.postgres.splits import ctid_predicate, ctid_splits

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPLIT_BYTES = 256 << 20
"""Heap bytes per task: each task costs a tenth of a second, so splits are large."""
DRIVER_BYTES = 4 << 20
"""Up to so many heap bytes no Spark is needed: some ten thousand rows, a tenth of a second."""


@dataclass(frozen=True, slots=True)
class Split:
    """One task's share of a leaf, with all that the task needs to know."""

    dsn: Dsn
    query: str
    snapshot: str
    folder: str
    task: str
    columns: tuple[LakeColumn, ...]
    mapped: tuple[MappedColumn, ...]
    layout: Layout
    tier_key: str
    spec_id: int
    target_bytes: int
    low_cardinality: frozenset[str]
    cut: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exported:
    """The files of one operation, written and closed but not visible."""

    files: tuple[DataFile, ...]

    @property
    def rows(self) -> int:
        """Rows in all files."""
        return sum(file.rows for file in self.files)

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class Source:
    """What is exported: leaves, the columns to read, and where the rows belong in the lake."""

    dsn: Dsn
    leaves: tuple[HeldLeaf, ...]
    mapped: tuple[MappedColumn, ...]
    lake: LakeTable
    tier_key: str
    low_cardinality: frozenset[str]
    target_bytes: int
    cut: tuple[int, ...]
    """Upper bounds of the leaves: files of an unpartitioned lake table end there too."""


def plan_splits(source: Source, op_id: OpId, snapshot: str, cores: int) -> tuple[Split, ...]:
    """Cut the leaves into tasks: enough to use every core, large enough to be worth a task."""
    columns = _in_heap_order(source)
    folder = data_folder(source.lake.location, op_id)
    splits: list[Split] = []
    total = sum(leaf.bytes for leaf in source.leaves) or 1
    for leaf in source.leaves:
        # Several leaves keep the cores busy together; each gets its share of them.
        share = max(1, round(cores * leaf.bytes / total))
        for pages in ctid_splits(leaf.pages, leaf.bytes, SPLIT_BYTES, share):
            splits.append(
                Split(
                    source.dsn,
                    _query(leaf, source.mapped, pages),
                    snapshot,
                    folder,
                    f"{len(splits):05d}",
                    columns,
                    source.mapped,
                    source.lake.layout,
                    source.tier_key,
                    source.lake.spec_id,
                    source.target_bytes,
                    source.low_cardinality,
                    source.cut,
                )
            )
    return tuple(splits)


def fits_driver(source: Source) -> bool:
    """Whether the leaves are so small that Spark tasks would cost more than the work."""
    return sum(leaf.bytes for leaf in source.leaves) <= DRIVER_BYTES


def export(
    splits: Sequence[Split], spark: SparkSession | None, on_progress: Callable[[int, int], None] | None = None
) -> Exported:
    """Run the splits as Spark tasks, or in this process where there is no session, and gather what they wrote."""
    reach("export.before_tasks")
    if spark is None:
        written = [write_split(split) for split in splits]
    else:
        from modak.spark.distribute import distribute

        written = distribute(spark, write_split, splits, on_progress=on_progress)
    reach("export.after_tasks")
    return Exported(tuple(file for files in written for file in files))


def write_split(split: Split) -> list[DataFile]:
    """Inside a task: stream one ctid range into files of its own."""
    writer = FileWriter(
        split.folder,
        split.columns,
        split.layout,
        tier_key=split.tier_key,
        spec_id=split.spec_id,
        target_bytes=split.target_bytes,
        low_cardinality=split.low_cardinality,
        task=split.task,
        cut=split.cut,
    )
    schema = arrow_schema(split.columns)
    reach("export.task_started")
    try:
        for batch in decoded(stream(split.dsn, split.query, snapshot=split.snapshot), split.mapped, schema):
            writer.write(batch)
            del batch
        reach("export.task_read")
        files = writer.close()
    except BaseException:
        writer.abort()
        raise
    reach("export.task_written")
    return files


def _query(leaf: HeldLeaf, mapped: Sequence[MappedColumn], pages: Pages) -> str:
    # Text, because it travels to an ADBC connection inside a task. Identifiers are quoted, page numbers are integers.
    name = f"{quoted_identifier(leaf.name.schema)}.{quoted_identifier(leaf.name.name)}"
    return f"SELECT {select_list(mapped)} FROM ONLY {name} WHERE {ctid_predicate(pages)}"  # noqa: S608


def _in_heap_order(source: Source) -> tuple[LakeColumn, ...]:
    """The lake's columns in the order in which the heap is read; a column that only the lake knows reads as NULL."""
    known = {column.name: column for column in source.lake.schema}
    return tuple(known[column.column.name] for column in source.mapped)
