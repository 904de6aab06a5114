"""Who does the heavy lifting of a pass: the worker's own process, or Spark.

A plan and its bounds are the same for every engine, and so is the kernel that reads and writes files. `embedded` works
in the driver, bin after bin and part after part of a listing, and needs no Spark job; `spark` gives bins to tasks and
lets Spark list and compare files (`comparing.py`), so that a table of any size is looked after in the memory of a batch
per task. Both pass one conformance suite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Protocol, TypeVar

import structlog

from modak.core.errors import ModakError, UsageError
from modak.lake.model import LakeName
from modak.lake.rewrite import Gathering, Rewriting, Rewritten
from modak.storage.store import Entry
from modak.storage.uri import normal, tail
from modak.tables.site import Site

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from modak.lake.iceberg.reaching import Freed

log = structlog.get_logger()

Value = TypeVar("Value")
Progress = Callable[[int, int], None]

TASK_BYTES = 256 << 20
"""What one task reads at most, unless a single bin is larger."""
LISTED_AT_ONCE = 100_000
"""So many listed files are held by an engine that compares in this process."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """A file that nothing references."""

    uri: str
    size: int


Unreferenced = Callable[[], Iterator[Orphan]]
"""Loads the table and yields the files of a listing that none of its snapshots reaches."""


class MaintenanceEngine(Protocol):
    """Executes the steps of a plan that touch many files."""

    name: str

    def tasks(self) -> int:
        """How many tasks are worth having."""

    def gather(self, tasks: Sequence[Gathering]) -> list[int]:
        """Gather foreign equality deletes."""

    def rewrite(self, tasks: Sequence[Rewriting], progress: Progress) -> list[tuple[Rewritten, ...]]:
        """Write bins anew."""

    def unreached(self, name: LakeName, freed: Freed) -> Iterator[str]:
        """The data and delete files that snapshots have freed, streamed; some may come more than once."""

    def listed(self, name: LakeName, folder: str, before: datetime) -> Iterator[Unreferenced]:
        """The files below a folder that were last written before a moment, in one part or more.

        A part has been listed as a whole when it is given. To ask it is to load the table, which must not happen
        before the caller has seen which operations are in flight.
        """


def batches(items: Iterable[Value], size: int) -> Iterator[list[Value]]:
    """The items, so many at a time."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


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

    def unreached(self, name: LakeName, freed: Freed) -> Iterator[str]:
        return freed.files()

    def listed(self, name: LakeName, folder: str, before: datetime) -> Iterator[Unreferenced]:
        old = (entry for entry in self._site.store.list(folder) if entry.modified < before)
        while part := {tail(entry.uri): entry for entry in islice(old, LISTED_AT_ONCE)}:
            yield partial(self._unreferenced, name, part)

    def _unreferenced(self, name: LakeName, part: dict[str, Entry]) -> Iterator[Orphan]:
        for path in self._site.lake.reachable(name):
            part.pop(tail(path), None)
        return (Orphan(entry.uri, entry.size) for entry in part.values())


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

    def unreached(self, name: LakeName, freed: Freed) -> Iterator[str]:
        if freed.gone.isEmpty():
            return
        from modak.spark.session import gateway_of
        from modak.tables.maintenance import comparing

        spark, lake = self._site.spark, self._site.lake
        try:
            with gateway_of(spark).guard():
                then, now = (
                    comparing.reached(spark, lake.java_table_at(name, where)) for where in (freed.before, freed.now)
                )
                for row in comparing.without(then, now):
                    yield normal(row["path"])
        except ModakError:
            raise
        except Exception as error:
            # Another expiry, or another tool, has removed manifests meanwhile: Spark cannot go on without them. Each
            # store says so in its own way.
            log.warning("expiry.without_spark", table=str(name), because=str(error).partition("\n")[0])
            yield from freed.files()

    def listed(self, name: LakeName, folder: str, before: datetime) -> Iterator[Unreferenced]:
        from modak.tables.maintenance import comparing

        yield partial(self._unreferenced, name, comparing.listed(self._site.spark, folder, before, self.tasks()))

    def _unreferenced(self, name: LakeName, listed: DataFrame) -> Iterator[Orphan]:
        from modak.tables.maintenance import comparing

        lake = self._site.lake
        table = lake.load(name)
        if table is None:
            return
        known = comparing.reached(self._site.spark, lake.java_table_at(name, table.metadata_location))
        for row in comparing.without(listed, known):
            yield Orphan(row["path"], row["size"])
