"""`modak.read`, `modak.read_lake` and `modak.snapshot`: tables across heap and lake as DataFrames, for programs that
bring a session.

Settings come from `MODAK_*` as everywhere, or as an argument. A snapshot is held while its context is open. A plain
`read` holds one of its own until no Spark job has run for a while, because a DataFrame is read only when it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from modak.core.errors import UsageError
from modak.core.names import TableName
from modak.runtime.opening import open_site
from modak.tables.mirror.copy import wal_position
from modak.tables.mirror.waiting import wait_for
from modak.tables.seam import read as seam
from modak.tables.seam.pinned import LIFETIME_SECONDS, Point
from modak.tables.seam.plan import plan_lake, plan_seam
from modak.tables.site import Site

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from modak.config import Settings

WAIT_SECONDS = 60.0
IDLE_SECONDS = 300.0
"""How long a plain `read` keeps its snapshot while no Spark job runs."""


class Snapshot:
    """Several reads at one point in time."""

    def __init__(self, spark: SparkSession, point: Point) -> None:
        self._spark = spark
        self._point = point

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that can be read."""
        return tuple(map(str, self._point.tables))

    def read(self, table: str, columns: Sequence[str] | None = None, where: str | Column | None = None) -> DataFrame:
        """The rows of a table at this point; use the frame before the snapshot ends."""
        return seam.read(self._spark, self._point, TableName.parse(table), columns, where)


def read(
    spark: SparkSession,
    table: str,
    columns: Sequence[str] | None = None,
    where: str | Column | None = None,
    *,
    settings: Settings | None = None,
    idle_seconds: float = IDLE_SECONDS,
) -> DataFrame:
    """A registered table, heap and lake together, as it is now; the frame is good until it is idle for a while."""
    return _read(spark, TableName.parse(table), columns, where, settings, idle_seconds, plan_seam, None)


def read_lake(
    spark: SparkSession,
    table: str,
    columns: Sequence[str] | None = None,
    where: str | Column | None = None,
    *,
    settings: Settings | None = None,
    idle_seconds: float = IDLE_SECONDS,
    wait_seconds: float = WAIT_SECONDS,
) -> DataFrame:
    """A mirrored table from its lake, as soon as that has all that was committed before the call; spares the heap."""
    return _read(spark, TableName.parse(table), columns, where, settings, idle_seconds, plan_lake, wait_seconds)


def _read(
    spark: SparkSession,
    name: TableName,
    columns: Sequence[str] | None,
    where: str | Column | None,
    settings: Settings | None,
    idle_seconds: float,
    planner: seam.Planner,
    wait_seconds: float | None,
) -> DataFrame:
    with ExitStack() as undo:
        site = undo.enter_context(_site(spark, settings))
        if wait_seconds is not None:
            _wait(site, name, wait_seconds)
        point = Point(site, [name])
        undo.callback(point.abandon)
        frame = seam.read(spark, point, name, columns, where, planner)
        tracker = spark.sparkContext.statusTracker()
        keep = undo.pop_all()
        point.end_when_idle(idle_seconds, lambda: bool(tracker.getActiveJobsIds()), keep.close)
    return frame


def _wait(site: Site, name: TableName, seconds: float) -> None:
    record = site.reader.state(name).table
    if record.mode != "mirrored":
        raise UsageError("seam.mode", f"{name} is {record.mode}: its lake alone is not the whole table.")
    wait_for(site, name, wal_position(site), seconds)


@contextmanager
def snapshot(
    spark: SparkSession,
    tables: Sequence[str] | None = None,
    *,
    settings: Settings | None = None,
    lifetime_seconds: float = LIFETIME_SECONDS,
) -> Iterator[Snapshot]:
    """One point in time over the named tables, or over all registered ones; held until the block ends."""
    with _site(spark, settings) as site:
        names = [TableName.parse(each) for each in tables] if tables is not None else None
        point = Point(
            site,
            names if names is not None else [record.name for record in site.reader.tables()],
            lifetime_seconds=lifetime_seconds,
        )
        try:
            yield Snapshot(spark, point)
        except BaseException:
            point.abandon()
            raise
        point.close()


@contextmanager
def _site(spark: SparkSession, settings: Settings | None) -> Iterator[Site]:
    from modak import config

    with open_site(settings or config.load()) as site:
        site.use(spark)
        yield site
