"""Who does the heavy lifting of a pass: the worker's own process, or Spark.

A plan and its bounds are the same for every engine, and so is the kernel that reads and writes files. `embedded` works
in the driver, bin after bin, and needs no Spark job; `spark` gives bins to tasks and lets Spark list and compare
files, so that a table of any size is looked after in the memory of a batch per task. Both pass one conformance suite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from modak.core.errors import UsageError
from modak.core.faults import reach
from modak.lake.model import LakeName
from modak.lake.rewrite import Gathering, Rewriting, Rewritten
from modak.storage.access import key_of
from modak.storage.store import Entry, Store
from modak.storage.uri import normal
from modak.tables.site import Site

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Progress = Callable[[int, int], None]

TASK_BYTES = 256 << 20
"""What one task reads at most, unless a single bin is larger."""
_LISTED_AT_ONCE = 50_000


class MaintenanceEngine(Protocol):
    """Executes the steps of a plan that touch many files."""

    name: str

    def tasks(self) -> int:
        """How many tasks are worth having."""

    def gather(self, tasks: Sequence[Gathering]) -> list[int]:
        """Gather foreign equality deletes."""

    def rewrite(self, tasks: Sequence[Rewriting], progress: Progress) -> list[tuple[Rewritten, ...]]:
        """Write bins anew."""

    def freed(self, name: LakeName, before: str, after: str) -> list[str] | None:
        """Files that the metadata `before` reaches and `after` does not; None: the lake lists them by itself."""

    def listed(self, folder: str, before: datetime) -> list[Entry]:
        """The files below a folder that were last written before a moment; the listing has ended when this returns."""

    def unreferenced(self, name: LakeName, listed: Sequence[Entry]) -> Iterator[Entry]:
        """Those of the listed files that no snapshot of the table reaches, which is loaded after they were listed."""


def engine_of(site: Site, name: str | None = None) -> MaintenanceEngine:
    """The engine that the settings (or the caller) name."""
    chosen = name or site.settings.maintenance.engine
    if chosen == "embedded":
        return Embedded(site)
    if chosen == "spark":
        return Spark(site)
    raise UsageError("usage.engine", f"There is no maintenance engine {chosen!r}.", hint="Known: spark, embedded.")


class Embedded:
    """Everything in this process, one bin at a time."""

    name = "embedded"

    def __init__(self, site: Site) -> None:
        self._site = site

    def tasks(self) -> int:
        """One after the other."""
        return 1

    def gather(self, tasks: Sequence[Gathering]) -> list[int]:
        from modak.lake.iceberg.equality import gather

        return [gather(task) for task in tasks]

    def rewrite(self, tasks: Sequence[Rewriting], progress: Progress) -> list[tuple[Rewritten, ...]]:
        from modak.lake.iceberg.rewrite import rewrite_bins

        done = []
        for number, task in enumerate(tasks):
            done.append(rewrite_bins(task))
            progress(number + 1, len(tasks))
        return done

    def freed(self, name: LakeName, before: str, after: str) -> list[str] | None:
        return None

    def listed(self, folder: str, before: datetime) -> list[Entry]:
        return [entry for entry in self._site.store.list(folder) if entry.modified < before]

    def unreferenced(self, name: LakeName, listed: Sequence[Entry]) -> Iterator[Entry]:
        old = {entry.uri: entry for entry in listed}
        if old:
            for path in self._site.lake.reachable(name):
                old.pop(path, None)
        yield from old.values()


class Spark:
    """Bins in Spark tasks, files compared as DataFrames."""

    name = "spark"

    def __init__(self, site: Site) -> None:
        self._site = site

    def tasks(self) -> int:
        """Two rounds over the cores, so that an uneven one does not leave a core idle for long."""
        return 2 * int(self._site.spark.sparkContext.defaultParallelism)

    def gather(self, tasks: Sequence[Gathering]) -> list[int]:
        from modak.lake.iceberg.equality import gather
        from modak.spark.distribute import distribute

        return distribute(self._site.spark, gather, tasks)

    def rewrite(self, tasks: Sequence[Rewriting], progress: Progress) -> list[tuple[Rewritten, ...]]:
        from modak.lake.iceberg.rewrite import rewrite_bins
        from modak.spark.distribute import distribute

        return distribute(self._site.spark, rewrite_bins, tasks, on_progress=progress)

    def freed(self, name: LakeName, before: str, after: str) -> list[str] | None:
        lake = self._site.lake
        old, new = (self._every_file(lake.java_table_at(name, where)) for where in (before, after))
        reach("expiry.before_compare")
        gone = old.join(new, "path", "left_anti").toLocalIterator()
        found = sorted(normal(row[0]) for row in gone)
        reach("expiry.after_compare")
        return found

    def listed(self, folder: str, before: datetime) -> list[Entry]:
        from modak.spark.distribute import distribute

        site = self._site
        items = [Listing(one, before) for one in site.store.folders(folder)]
        return [entry for found in distribute(site.spark, list_old, items) for entry in found]

    def unreferenced(self, name: LakeName, listed: Sequence[Entry]) -> Iterator[Entry]:
        from pyspark import StorageLevel

        spark = self._site.spark
        # Compared by the part after the scheme: engines write one local path in several ways.
        table = self._site.lake.load(name)
        if table is None:
            return
        known = self._files(self._site.lake.java_table_at(name, table.metadata_location)).selectExpr(
            "regexp_replace(path, '^[a-zA-Z0-9]+:/*|^/+', '') AS tail"
        )
        known.persist(StorageLevel.DISK_ONLY)
        try:
            rest = iter(listed)
            while part := {entry.uri: entry for entry in islice(rest, _LISTED_AT_ONCE)}:
                frame = spark.createDataFrame([(uri, _tail(uri)) for uri in part], "uri string, tail string")
                for row in frame.join(known, "tail", "left_anti").select("uri").collect():
                    yield part[row[0]]
        finally:
            known.unpersist()

    def _every_file(self, table: Any) -> DataFrame:
        """Data, delete files, manifests and manifest lists of every snapshot."""
        manifests = self._frame(table, "ALL_MANIFESTS").selectExpr("path")
        lists = self._frame(table, "SNAPSHOTS").selectExpr("manifest_list AS path")
        return self._files(table).union(manifests).union(lists).distinct()

    def _files(self, table: Any) -> DataFrame:
        return self._frame(table, "ALL_FILES").selectExpr("file_path AS path").distinct()

    def _frame(self, table: Any, kind: str) -> DataFrame:
        from pyspark.sql import DataFrame

        from modak.spark.session import gateway_of

        spark = self._site.spark
        jvm = gateway_of(spark).jvm
        java_session: Any = spark._jsparkSession
        chosen = getattr(jvm.org.apache.iceberg.MetadataTableType, kind)
        made = jvm.org.apache.iceberg.spark.SparkTableUtil.loadMetadataTable(java_session, table, chosen)
        return DataFrame(made, spark)


@dataclass(frozen=True, slots=True)
class Listing:
    """One task: a folder to be listed."""

    folder: str
    before: datetime


def list_old(task: Listing) -> list[Entry]:
    """Inside a task: the files of a folder that were last written before a moment."""
    key = key_of(task.folder)
    store = Store.of(key.root, key.props)
    return [entry for entry in store.list(task.folder) if entry.modified < task.before]


def _tail(uri: str) -> str:
    return normal(uri).partition("://")[2].lstrip("/")
