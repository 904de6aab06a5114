"""Files listed and compared as Spark DataFrames, so that only those which may go come to the driver, a batch at a time.

Tasks list folders and read manifests; what a listing has found is laid down on the executors' disks once and not
listed again, because its moment counts. Memory is bounded by a batch in each task and one in the driver.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from modak.spark.frames import frame_of
from modak.spark.session import gateway_of
from modak.storage.access import Key, key_of
from modak.storage.store import Entry, Store
from modak.tables.maintenance.engine import batches

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, Row, SparkSession

AT_ONCE = 10_000
"""Rows that the driver, or a task that lists, holds at a time."""
_PLAIN = "regexp_replace(regexp_replace(path, '^[a-zA-Z][a-zA-Z0-9+.-]*:', ''), '(/[.])*/+', '/')"
_TAIL = f"ltrim('/', {_PLAIN}) AS tail"
"""Files are compared by the part after the scheme: engines write one local path in several ways."""


@dataclass(frozen=True, slots=True)
class Listing:
    """One task: the files of some of a folder's folders that were last written before a moment."""

    folder: str
    before: datetime
    share: int
    shares: int
    key: Key

    def holds(self, folder: str) -> bool:
        """Whether a folder is this task's; decided by its name, since each task looks for the folders itself."""
        return zlib.crc32(folder.encode()) % self.shares == self.share

    def old(self) -> Iterator[Entry]:
        """Inside a task: the files."""
        store = Store.of(self.key.root, self.key.props)
        for folder in filter(self.holds, store.folders(self.folder)):
            yield from (entry for entry in store.list(folder) if entry.modified < self.before)


def listed(spark: SparkSession, folder: str, before: datetime, tasks: int) -> DataFrame:
    """The files (`path`, `size`, `tail`) below a folder that were last written before a moment, all listed by now."""
    from pyspark.sql.types import LongType, StringType, StructField, StructType

    schema = StructType([StructField("path", StringType()), StructField("size", LongType())])
    key = key_of(folder)
    items = [Listing(folder, before, share, tasks, key) for share in range(tasks)]
    return _laid_down(frame_of(spark, schema, items, list_old)).selectExpr("path", "size", _TAIL)


def list_old(task: Listing) -> Iterator[pa.RecordBatch]:
    """Inside a task: what it lists, as Arrow."""
    import pyarrow as pa

    for part in batches(task.old(), AT_ONCE):
        columns = [[entry.uri for entry in part], [entry.size for entry in part]]
        yield pa.RecordBatch.from_arrays(
            [pa.array(columns[0], pa.string()), pa.array(columns[1], pa.int64())], names=["path", "size"]
        )


def reached(spark: SparkSession, table: Any) -> DataFrame:
    """The data and delete files (`path`, `tail`) of every snapshot of an Iceberg table."""
    from pyspark.sql import DataFrame

    jvm = gateway_of(spark).jvm
    java_session: Any = spark._jsparkSession
    kind = jvm.org.apache.iceberg.MetadataTableType.ALL_FILES
    made = jvm.org.apache.iceberg.spark.SparkTableUtil.loadMetadataTable(java_session, table, kind)
    return DataFrame(made, spark).selectExpr("file_path AS path").selectExpr("path", _TAIL)


def without(some: DataFrame, others: DataFrame) -> Iterator[Row]:
    """The rows of `some` whose file is not in `others`, each file once, streamed."""
    found = _laid_down(some.join(others.select("tail"), "tail", "left_anti").dropDuplicates(["tail"]))
    with gateway_of(found.sparkSession).guard():
        parts = -(-found.count() // AT_ONCE)
    # A partition comes to the driver as a whole, so none is larger than a batch.
    return iter(found.repartition(parts).toLocalIterator()) if parts else iter(())


def _laid_down(frame: DataFrame) -> DataFrame:
    """The same rows, computed now and never again: blocks that are lost are an error."""
    from pyspark import StorageLevel

    with gateway_of(frame.sparkSession).guard():
        return frame.localCheckpoint(eager=True, storageLevel=StorageLevel.DISK_ONLY)
