"""Heap and lake of a mirrored table, or of a stretch of it, held against each other with the fingerprints of verify.

Both sides are read once and answer with sums per band and bucket of keys; only buckets that differ are looked into, a
portion at a time. What heap and lake hold is read by tasks, a small table by this process. Memory: 24 bytes per bucket
and band, and the hashes of at most one portion of rows in the driver; one batch in a task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from modak.catalog.records import TableState
from modak.core.axis import TierKey
from modak.core.errors import Refused
from modak.lake.model import LakeTable
from modak.postgres.describe import describe
from modak.postgres.model import PgTable
from modak.postgres.snapshot import HeldLeaf
from modak.postgres.splits import ctid_splits
from modak.tables.fold.plan import DRIVER_LAKE_ROWS
from modak.tables.mirror.copy import DRIVER_BYTES
from modak.tables.mirror.leaves import TrueLeaf, bounded_leaves
from modak.tables.site import Site
from modak.tables.verify.plan import Bands, plan_files, plan_mirror_bands
from modak.tables.verify.shape import Shape, shape_of
from modak.tables.verify.work import Answer, Count, Gather, HeapSource, Job, LakeSource, Window, answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from modak.tables.verify.compare import Differing

SPLIT_BYTES = 256 << 20

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tier keys from `lower` on and before `upper`; None is open."""

    lower: TierKey | None = None
    upper: TierKey | None = None


@dataclass(frozen=True, slots=True)
class Sides:
    """Both sides of a table at one point, as jobs that read them."""

    site: Site
    state: TableState
    heap: PgTable
    lake: LakeTable
    shape: Shape
    bands: Bands
    jobs: tuple[Job, ...]
    in_driver: bool

    def run(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Apply a function to items: here, or in Spark tasks."""
        if self.in_driver:
            return [work(item) for item in items]
        from modak.spark.distribute import distribute

        return distribute(self.site.spark, work, items)

    def ask(self, jobs: Sequence[Job]) -> list[Answer]:
        """The answers of jobs."""
        return self.run(answer, jobs)


def sides_of(
    site: Site,
    conn: psycopg.Connection[Any],
    state: TableState,
    lake_snapshot: int | None,
    snapshot: str,
    stretch: Stretch,
    *,
    since: TierKey | None = None,
) -> Sides:
    """Look at a table whose leaves are locked; its heap is read under the exported `snapshot`, the lake at its own."""
    record = state.table
    heap = describe(conn, record.name, record.tier_key)
    lake = site.lake.load(record.lake)
    if lake is None:
        raise Refused("lake.missing", f"The lake table {record.lake} is gone from the catalog.")
    shape = shape_of(record, heap, lake)
    leaves = [leaf for leaf in bounded_leaves(conn, heap) if leaf.kind == "r" and _meets(leaf, stretch)]
    cuts = {edge for leaf in leaves for edge in (leaf.lower, leaf.upper)}
    bands = plan_mirror_bands(record.name, cuts, lower=stretch.lower, upper=stretch.upper, since=since)
    groups = []
    if lake_snapshot is not None:
        files = site.lake.files(record.lake, lake_snapshot, column=shape.lake_names[shape.tier])
        groups = plan_files(files, bands, everything=False)
    small = sum(leaf.bytes for leaf in leaves) <= DRIVER_BYTES
    few = sum(file.file.rows for group in groups for file, _ in group.files) <= DRIVER_LAKE_ROWS
    in_driver = small and few

    def job(source: HeapSource | LakeSource) -> Job:
        return Job(site.dsn, snapshot, record.table_id, 0, shape, _window(bands), source, Count())

    jobs = [job(HeapSource(_held(leaf), pages)) for leaf, pages in _heap_splits(site, leaves, in_driver)]
    jobs += [job(LakeSource(group, overlaid=False)) for group in groups]
    return Sides(site, state, heap, lake, shape, bands, tuple(jobs), in_driver)


def rewindowed(sides: Sides, bands: Bands) -> Sides:
    """The same sides, looking at other bands of the same cuts."""
    window = _window(bands)
    return replace(sides, bands=bands, jobs=tuple(replace(job, window=window) for job in sides.jobs))


def differing(sides: Sides) -> Iterator[Differing]:
    """The keys that differ, a portion at a time."""
    from modak.tables.verify.compare import differing_buckets, find_differing, in_portions
    from modak.tables.verify.fingerprint import Tally

    heap, cold = Tally(), Tally()
    for one in sides.ask(sides.jobs):
        (heap if one.side == "heap" else cold).merge(one.tally)
    for portion in in_portions(differing_buckets(heap, cold, sides.bands)):
        found = find_differing(sides.ask([replace(job, ask=Gather(portion)) for job in sides.jobs]))
        if len(found):
            yield found


def _heap_splits(site: Site, leaves: Sequence[TrueLeaf], in_driver: bool) -> Iterator[tuple[TrueLeaf, Any]]:
    from modak.spark.conf import cores

    lanes = 1 if in_driver else max(cores(), site.spark.sparkContext.defaultParallelism)
    total = sum(leaf.bytes for leaf in leaves) or 1
    for leaf in leaves:
        share = max(1, round(lanes * leaf.bytes / total))
        for pages in ctid_splits(leaf.pages, leaf.bytes, SPLIT_BYTES, share):
            yield leaf, pages


def _held(leaf: TrueLeaf) -> HeldLeaf:
    return HeldLeaf(leaf.oid, leaf.name, leaf.relfilenode, leaf.pages, leaf.bytes)


def _window(bands: Bands) -> Window:
    window = Window.of(bands, None, None)
    assert window is not None
    return window


def _meets(leaf: TrueLeaf, stretch: Stretch) -> bool:
    below = stretch.upper is not None and leaf.lower is not None and leaf.lower >= stretch.upper
    above = stretch.lower is not None and leaf.upper is not None and leaf.upper <= stretch.lower
    return not (below or above)
