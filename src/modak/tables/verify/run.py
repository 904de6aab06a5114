"""One verification from its pin to its report: plan → count → compare → name.

Everything is read at one point (`point.py`); the tasks answer with sums, and only where sums differ rows are looked at.
The driver holds sums and samples, never rows of a band. Nothing is written anywhere but the pin, so a killed
verification leaves a pin that lapses.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import structlog
from psycopg import sql

from modak.catalog.records import TableState
from modak.core.axis import TierKey
from modak.core.errors import Refused
from modak.core.names import TableName, quote
from modak.lake.model import LakeTable
from modak.postgres.describe import describe
from modak.postgres.model import Leaf, PgTable
from modak.postgres.snapshot import HeldLeaf
from modak.postgres.splits import ctid_splits
from modak.tables.evolve import waiting_renames
from modak.tables.site import Site
from modak.tables.verify.compare import (
    Buckets,
    Differing,
    differing_buckets,
    duplicated,
    find_differing,
    in_portions,
    side_by_side,
)
from modak.tables.verify.fingerprint import Numbers, Tally
from modak.tables.verify.plan import Band, Bands, plan_bands, plan_files, sample_bands
from modak.tables.verify.point import Point
from modak.tables.verify.report import BandCount, Difference, Finding, VerifyReport
from modak.tables.verify.shape import Shape, shape_of
from modak.tables.verify.work import (
    Answer,
    Count,
    DeltaSource,
    Fetch,
    Gather,
    HeapSource,
    Job,
    LakeSource,
    Window,
    answer,
)

log = structlog.get_logger()

SPLIT_BYTES = 256 << 20
DELTA_ROWS = 500_000
"""Delta rows that share a task."""
SHOWN = 50
"""Differing keys that are named."""
MOST_TWICE = 1_000
"""Keys that a task has met twice and that are looked at again; of more it is only said that there are more."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a verification is limited to; `None`: everything."""

    since: TierKey | None = None
    sample: float | None = None
    seed: int = field(default_factory=lambda: secrets.randbits(31))
    """Which share: others in each run, the same ones when a repair is looked at again."""


@dataclass(frozen=True, slots=True)
class View:
    """A table at the point of a verification, with everything that its jobs are made of."""

    site: Site
    point: Point
    state: TableState
    heap: PgTable
    bands: Bands
    shape: Shape
    delta: dict[int, int]
    """Delta rows per band."""
    jobs: tuple[Job, ...]


OnView = Callable[[View, Sequence[Differing]], int]
"""What is done about differing keys while the point is still held; how many rows it concerned."""


def verify(
    site: Site, name: TableName, limits: Limits | None = None, on_differing: OnView | None = None
) -> VerifyReport:
    """Compare what heap and lake both have, and check the structure of the rest."""
    started = site.clock.monotonic()
    limits = limits or Limits()
    state = site.reader.state(name)
    if state.table.mode == "mirrored":
        return _mirrored(site, state, limits, on_differing)
    return _verify(site, name, limits, on_differing, started)


def _mirrored(site: Site, state: TableState, limits: Limits, on_differing: OnView | None) -> VerifyReport:
    from modak.tables.mirror.audit import audit, joined

    name, line = state.table.name, state.cutline
    mend = on_differing is not None
    hot = audit(site, name, since=limits.since, sample=limits.sample, seed=limits.seed, mend=mend)
    if line.t is None or line.t == line.first_floor:
        return hot
    return joined(_verify(site, name, limits, on_differing, site.clock.monotonic()), hot)


def _verify(site: Site, name: TableName, limits: Limits, on_differing: OnView | None, started: float) -> VerifyReport:
    _ = site.spark
    with Point(site.dsn, name) as point:
        view = look(site, point, name, limits)
        answers = _ask(view, view.jobs, "counting")
        heap, cold = Tally(), Tally()
        for one in answers:
            (heap if one.side == "heap" else cold).merge(one.tally)
        buckets = differing_buckets(heap, cold, view.bands)
        portions = in_portions(buckets)
        done = portions if on_differing else portions[:1]
        differing = [find_differing(_ask(view, _jobs_for(view, portion), "looking closer")) for portion in done]
        named = _name(view, differing)
        twice = _name_twice(view, answers)
        findings = [*_structure(view), *_said(view, answers)]
        repaired = on_differing(view, differing) if on_differing and differing else None
        point.check()
    rows = sum(map(len, differing)) + len(twice)
    # Sums that differ although no row of the first look does would be a fault of ours; never call that equal.
    rows = max(rows, 1) if buckets else rows
    return VerifyReport(
        table=name,
        cut_line=_literal(view, view.point.pin.t),
        retention_line=_literal(view, view.point.pin.retention_line),
        snapshot_id=view.point.pin.snapshot_id,
        bands=_counts(view, heap, answers, buckets),
        skipped_bands=len(view.bands.bands) - len(view.bands.chosen),
        differing_rows=rows,
        at_least=len(done) < len(portions)
        or any(one.twice is not None and len(one.twice) > MOST_TWICE for one in answers),
        differences=(*named, *twice[:SHOWN]),
        findings=tuple(findings),
        left_out=view.shape.left_out,
        compared_rows=sum(heap.rows(band.index) for band in view.bands.chosen),
        seconds=site.clock.monotonic() - started,
        since=limits.since,
        sample=limits.sample,
        repaired=repaired,
    )


def look(site: Site, point: Point, name: TableName, limits: Limits) -> View:
    """Everything that can be known before rows are read."""
    state = site.reader.state(name)
    record, pin = state.table, point.pin
    heap = describe(point.conn, name, record.tier_key)
    lake = site.lake.load(record.lake)
    if lake is None:
        raise Refused("lake.missing", f"The lake table {record.lake} is gone from the catalog.")
    shape = replace(shape_of(record, heap, lake), renames=waiting_renames(site, point.conn, record, heap))
    leaves = [leaf for leaf in heap.leaves if _has_rows_below(leaf, pin.t)]
    known = [(part.lower, part.upper) for part in state.partitions]
    bands = plan_bands(pin.t, pin.retention_line, known, leaves, since=limits.since)
    if limits.sample is not None:
        bands = sample_bands(bands, limits.sample, limits.seed)
    view = View(site, point, state, heap, bands, shape, _delta_rows(point, record.table_id, bands), ())
    return replace(view, jobs=tuple(_jobs(view, lake, leaves, limits)))


def _has_rows_below(leaf: Leaf, cut_line: TierKey | None) -> bool:
    if cut_line is None or leaf.is_spill or leaf.is_default or leaf.detach_pending or leaf.kind != "r":
        return False
    return leaf.upper is not None and leaf.upper <= cut_line


def _jobs(view: View, lake: LakeTable, leaves: Sequence[Leaf], limits: Limits) -> list[Job]:
    from modak.spark.conf import cores

    lanes = max(cores(), view.site.spark.sparkContext.defaultParallelism)
    wanted = {band.leaf for band in view.bands.chosen if band.compared}
    read = [leaf for leaf in leaves if leaf.table_name in wanted]
    total = sum(leaf.bytes for leaf in read) or 1
    jobs: list[Job] = []
    for leaf in read:
        window = Window.of(view.bands, leaf.lower, None if leaf.upper is None else leaf.upper - 1)
        held = HeldLeaf(leaf.oid, leaf.table_name, leaf.relfilenode, leaf.pages, leaf.bytes)
        share = max(1, round(lanes * leaf.bytes / total))
        for pages in ctid_splits(leaf.pages, leaf.bytes, SPLIT_BYTES, share):
            jobs += _job(view, window, HeapSource(held, pages))
    return [*jobs, *_lake_jobs(view, limits), *_delta_jobs(view)]


def _lake_jobs(view: View, limits: Limits) -> list[Job]:
    pin, record = view.point.pin, view.state.table
    if pin.snapshot_id is None:
        return []
    # The lake of a mirror has rows above the cut-line too; they are compared on their own.
    everything = limits.since is None and limits.sample is None and record.mode == "tiered"
    files = view.site.lake.files(record.lake, pin.snapshot_id, column=view.shape.lake_names[view.shape.tier])
    jobs: list[Job] = []
    for group in plan_files(files, view.bands, everything=everything):
        lowers = [file.lower for file, _ in group.files]
        uppers = [file.upper for file, _ in group.files]
        lower = None if None in lowers else min(low for low in lowers if low is not None)
        upper = None if None in uppers else max(high for high in uppers if high is not None)
        window = Window.of(view.bands, lower, upper)
        overlaid = any(view.delta.get(band.index) for band in view.bands.within(lower, upper))
        jobs += _job(view, window, LakeSource(group, overlaid))
    return jobs


def _delta_jobs(view: View) -> list[Job]:
    """The delta in portions of whole bands."""
    jobs: list[Job] = []
    portion: list[Band] = []
    rows = 0
    for band in [*(band for band in view.bands.chosen if view.delta.get(band.index)), None]:
        if portion and (
            band is None or rows + view.delta[band.index] > DELTA_ROWS or band.index != portion[-1].index + 1
        ):
            window = Window.of(view.bands, portion[0].lower, portion[-1].upper - 1)
            jobs += _job(view, window, DeltaSource())
            portion, rows = [], 0
        if band is not None:
            portion.append(band)
            rows += view.delta[band.index]
    return jobs


def _job(view: View, window: Window | None, source: HeapSource | LakeSource | DeltaSource) -> list[Job]:
    if window is None:
        return []
    shape = view.shape
    if isinstance(source, LakeSource) and not source.group.whole_rows:
        shape = shape.only_keys()
    record, point = view.state.table, view.point
    made = Job(view.site.dsn, point.snapshot, record.table_id, point.pin.generation, shape, window, source, Count())
    return [made]


def _ask(view: View, jobs: Sequence[Job], doing: str) -> list[Answer]:
    from modak.spark.distribute import distribute

    clock, table = view.site.clock, str(view.state.table.name)
    started = clock.monotonic()

    def progress(done: int, total: int) -> None:
        spent = clock.monotonic() - started
        left = round(spent / done * (total - done), 1) if done else None
        log.info("verify.progress", table=table, doing=doing, tasks=done, of=total, seconds_left=left)

    return distribute(view.site.spark, answer, jobs, on_progress=progress if len(jobs) > 1 else None)


def _jobs_for(view: View, buckets: Buckets) -> list[Job]:
    """The jobs that can meet some buckets, asking for the hashes of their rows."""
    ask = Gather(buckets)
    return [replace(job, ask=ask) for job in view.jobs if job.window.compared & buckets.keys() and _is_compared(job)]


def _is_compared(job: Job) -> bool:
    """Whether a job's rows belong to a comparison; files of which only keys are read do not."""
    return not (isinstance(job.source, LakeSource) and not job.source.group.whole_rows)


def _name(view: View, differing: Sequence[Differing]) -> list[Difference]:
    import numpy as np

    if not any(map(len, differing)):
        return []
    whole = Differing(
        np.concatenate([one.keys for one in differing]), np.concatenate([one.kinds for one in differing])
    ).first(SHOWN)
    return side_by_side(view.shape, whole, _fetch(view, Fetch(np.sort(whole.keys)), "naming rows"))


def ask_for(view: View, keys: Numbers, doing: str) -> list[Answer]:
    """The key columns of all rows of compared bands whose keys have these hashes."""
    import numpy as np

    return _fetch(view, Fetch(np.sort(keys), only_keys=True), doing)


def _fetch(view: View, ask: Fetch, doing: str) -> list[Answer]:
    jobs = [replace(job, ask=ask) for job in view.jobs if job.window.compared and _is_compared(job)]
    return _ask(view, jobs, doing)


def _name_twice(view: View, answers: Sequence[Answer]) -> list[Difference]:
    import numpy as np

    jobs = []
    for job, one in zip(view.jobs, answers, strict=True):
        if one.twice is not None and len(one.twice):
            jobs.append(replace(job, ask=Fetch(np.sort(one.twice[:MOST_TWICE]), only_keys=True)))
    return duplicated(view.shape.only_keys(), _ask(view, jobs, "naming rows")) if jobs else []


def _structure(view: View) -> list[Finding]:
    """What one query can tell about delta and spill, under the same snapshot."""
    findings = []
    table_id, retention = view.state.table.table_id, view.point.pin.retention_line
    if retention is not None:
        row = view.point.conn.execute(
            "SELECT count(*), min(pk) FROM modak.delta WHERE table_id = %s AND tier_key < %s AND folded_into IS NULL",
            (table_id, retention),
        ).fetchone()
        if row and row[0]:
            what = f"{row[0]} delta rows lie below the retention line, for instance key {row[1]}."
            findings.append(Finding("delta.below_retention", what))
    if not view.bands.bands and view.point.pin.snapshot_id is not None:
        # Nothing may be in the lake, so there are no bands in which tasks would count.
        found = sum(file.file.rows for file in view.site.lake.files(view.state.table.lake, view.point.pin.snapshot_id))
        if found:
            what = f"{found} lake rows lie outside the retention line and the cut-line, between which nothing is."
            findings.append(Finding("lake.outside", what))
    for leaf in view.heap.leaves:
        if leaf.is_spill:
            query = sql.SQL("SELECT count(*) FROM ONLY {}").format(sql.Identifier(leaf.schema, leaf.name))
            row = view.point.conn.execute(query).fetchone()
            if row and row[0]:
                findings.append(Finding("spill.rows", f"{row[0]} rows lie in the spill partition {leaf.name}."))
    return [*findings, *_hidden(view)]


def _hidden(view: View) -> Iterator[Finding]:
    """Rows of the heap that no read shows although they have not expired: below the cut-line, and never tiered."""
    record, pin = view.state.table, view.point.pin
    cut_line = pin.t
    if cut_line is None or record.mode != "tiered":
        # A mirror has every row of the heap in the lake, wherever it lies.
        return
    compared = {band.leaf for band in view.bands.bands}
    tier = view.shape.mapped[view.shape.tier].column.name
    kind = next(column.type.name for column in view.heap.columns if column.name == tier)
    for leaf in view.heap.leaves:
        if leaf.is_spill or leaf.detach_pending or leaf.kind != "r" or leaf.table_name in compared:
            continue
        if not leaf.is_default and leaf.lower is not None and leaf.lower >= cut_line:
            continue
        query = sql.SQL("SELECT count(*) FROM ONLY {0} WHERE {1} < %s::{2} AND (%s::{2} IS NULL OR {1} >= %s::{2})")
        asked = query.format(sql.Identifier(leaf.schema, leaf.name), sql.Identifier(tier), sql.Identifier(kind))
        edges = (record.axis.literal(cut_line), _literal(view, pin.retention_line), _literal(view, pin.retention_line))
        row = view.point.conn.execute(asked, edges).fetchone()
        if row and row[0]:
            yield Finding(
                "heap.hidden",
                f"{row[0]} rows of partition {quote(leaf.name)} lie below the cut-line {_literal(view, cut_line)},"
                " where the lake is read: no read shows them.",
            )


def _said(view: View, answers: Sequence[Answer]) -> list[Finding]:
    findings = [finding for one in answers for finding in one.findings]
    rows = sum(one.outside_rows for one in answers)
    if rows and view.state.table.mode == "tiered":
        axis = view.state.table.axis
        some = sorted({key for one in answers for key in one.outside})[:10]
        keys = ", ".join(_said_key(axis.literal, key) for key in some)
        limits = f"[{_literal(view, view.point.pin.retention_line) or '–'}, {_literal(view, view.point.pin.t)})"
        findings.append(Finding("lake.outside", f"{rows} lake rows lie outside {limits}, at tier keys {keys}."))
    return findings


def _said_key(literal: Callable[[int], str], key: int) -> str:
    try:
        return literal(key)
    except OverflowError:
        return str(key)


def _delta_rows(point: Point, table_id: int, bands: Bands) -> dict[int, int]:
    """Delta rows per band, as the pin sees them."""
    if not bands.bands:
        return {}
    first = 0 if bands.open_below else -1
    rows = point.conn.execute(
        "SELECT width_bucket(d.tier_key, %s::bigint[]) AS at, count(*) FROM modak.delta d"
        " WHERE d.table_id = %s AND (d.folded_generation IS NULL OR d.folded_generation > %s) GROUP BY at",
        (list(bands.edges), table_id, point.pin.generation),
    )
    return {int(at) + first: int(count) for at, count in rows}


def _counts(
    view: View, heap: Tally, answers: Sequence[Answer], buckets: Sequence[tuple[int, int, int]]
) -> tuple[BandCount, ...]:
    live: dict[int, int] = {}
    for one in answers:
        for band, rows in one.live.items():
            live[band] = live.get(band, 0) + rows
    differing: dict[int, int] = {}
    for band, _, _ in buckets:
        differing[band] = differing.get(band, 0) + 1
    return tuple(
        BandCount(
            lower=_literal(view, band.lower),
            upper=_literal(view, band.upper) or "",
            partition=None if band.leaf is None else band.leaf.name,
            heap_rows=heap.rows(band.index) if band.compared else None,
            lake_rows=live.get(band.index, 0),
            delta_rows=view.delta.get(band.index, 0),
            differing=differing.get(band.index, 0),
        )
        for band in view.bands.chosen
    )


def _literal(view: View, key: TierKey | None) -> str | None:
    return None if key is None else _said_key(view.state.table.axis.literal, key)
