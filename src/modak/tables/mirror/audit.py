"""Verify for mirrored tables: every row of the heap against the lake, although the lake follows a moment behind.

Heap and lake are read at one point and compared. A row that differs may only be on its way, so the mirror is waited for
until F has passed that point, and the row is looked at again: it counts when its heap row is still the same one and the
lake still has another. Rows that change faster than that are looked at a few times more, and counted as undecided.
Under heap retention the rows below the cut-line are verified as those of a tiered table. Memory: as `compare.py`, and
16 bytes for each differing key of the first portion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, LiteralString

import structlog

from modak.catalog.records import TableState
from modak.core.axis import TierKey
from modak.core.errors import ModakError
from modak.core.names import TableName
from modak.tables.mirror.compare import Sides, Stretch, rewindowed, sides_of
from modak.tables.mirror.copy import wal_position
from modak.tables.mirror.waiting import wait_for
from modak.tables.site import Site
from modak.tables.verify.plan import sample_bands
from modak.tables.verify.point import Point
from modak.tables.verify.report import BandCount, Difference, Finding, VerifyReport
from modak.tables.verify.work import Answer, Fetch, Gather

if TYPE_CHECKING:
    from modak.tables.verify.compare import Differing
    from modak.tables.verify.fingerprint import Tally

log = structlog.get_logger()

ROUNDS = 6
PATIENCE_SECONDS = 60.0
"""How long the mirror may take to come to the point that was compared."""
SHOWN = 50

_NOTE: LiteralString = """
    INSERT INTO modak.mirror_diffs (table_id, lower_bound, upper_bound, after_lsn, reason)
    VALUES (%s, %s, NULL, pg_current_wal_insert_lsn(), 'verify has found differences')
"""


@dataclass(frozen=True, slots=True)
class _Round:
    """One comparison at one point."""

    position: int
    sides: Sides
    answers: tuple[Answer, ...]
    heap: Tally
    cold: Tally
    buckets: tuple[tuple[int, int, int], ...]
    at_least: bool
    found: Differing
    settled: Differing
    named: tuple[Difference, ...]
    snapshot_id: int | None


def audit(
    site: Site,
    name: TableName,
    *,
    since: TierKey | None = None,
    sample: float | None = None,
    seed: int = 0,
    mend: bool = False,
) -> VerifyReport:
    """Compare what heap and lake of a mirrored table hold; `mend`: have the daemon put right what differs."""
    started = site.clock.monotonic()
    state = site.reader.state(name)
    if state.cutline.frontier is None:
        raise ModakError(
            "verify.copying",
            f"The first copy of {name} has not landed yet.",
            hint="Run the same register command again to finish it.",
        )
    before: _Round | None = None
    for _ in range(ROUNDS):
        now = _compare(site, name, before, since, None if sample is None else (sample, seed))
        if not len(now.found) or len(now.settled) == len(now.found):
            break
        if before is None or now.position > before.position:
            wait_for(site, name, now.position, PATIENCE_SECONDS)
        before = now
    undecided = len(now.found) - len(now.settled)
    notes = []
    if undecided:
        notes.append(f"{undecided} rows change so fast that heap and lake could not be compared at one moment.")
    differing = len(now.settled)
    if now.buckets and not len(now.found):
        # Sums that differ although no row does would be a fault of ours; never call that equal.
        differing = max(differing, 1)
    if mend and differing:
        _note(site, state)
        notes.append("The daemon mends it when F has come here; verify again then.")
    return VerifyReport(
        table=name,
        cut_line=_literal(state, state.cutline.t),
        retention_line=_literal(state, state.cutline.retention_line),
        snapshot_id=now.snapshot_id,
        bands=_counts(state, now),
        skipped_bands=len(now.sides.bands.bands) - len(now.sides.bands.chosen),
        differing_rows=differing,
        at_least=now.at_least,
        differences=now.named,
        findings=tuple(_findings(now.answers)),
        left_out=now.sides.shape.left_out,
        compared_rows=sum(now.heap.rows(band.index) for band in now.sides.bands.chosen),
        seconds=site.clock.monotonic() - started,
        since=since,
        sample=sample,
        repaired=None,
        notes=tuple(notes),
    )


def joined(cold: VerifyReport, hot: VerifyReport) -> VerifyReport:
    """The two halves of a table with heap retention, below and above its cut-line, as one report."""
    return replace(
        cold,
        bands=(*cold.bands, *hot.bands),
        skipped_bands=cold.skipped_bands + hot.skipped_bands,
        differing_rows=cold.differing_rows + hot.differing_rows,
        at_least=cold.at_least or hot.at_least,
        differences=(*cold.differences, *hot.differences),
        findings=(*cold.findings, *hot.findings),
        compared_rows=cold.compared_rows + hot.compared_rows,
        seconds=cold.seconds + hot.seconds,
        notes=(*cold.notes, *hot.notes),
    )


def _compare(
    site: Site, name: TableName, before: _Round | None, since: TierKey | None, sample: tuple[float, int] | None
) -> _Round:
    from modak.tables.verify.compare import differing_buckets, find_differing, in_portions, side_by_side
    from modak.tables.verify.fingerprint import Tally

    with Point(site.dsn, name) as point:
        position = wal_position(site)
        state = site.reader.state(name)
        with site.connect(autocommit=True) as conn:
            sides = sides_of(
                site, conn, state, point.pin.snapshot_id, point.snapshot, Stretch(point.pin.t, None), since=since
            )
        if sample is not None:
            sides = _sampled(sides, *sample)
        answers = sides.ask(sides.jobs)
        heap, cold = Tally(), Tally()
        for one in answers:
            (heap if one.side == "heap" else cold).merge(one.tally)
        buckets = differing_buckets(heap, cold, sides.bands)
        portions = in_portions(buckets)
        asked = [replace(job, ask=Gather(portions[0])) for job in sides.jobs] if portions else []
        found = find_differing(sides.ask(asked))
        settled = _settled(before, found)
        named: Sequence[Difference] = ()
        if len(settled):
            some = settled.first(SHOWN)
            named = side_by_side(sides.shape, some, sides.ask([replace(j, ask=_fetch(some)) for j in sides.jobs]))
        point.check()
    return _Round(
        position,
        sides,
        tuple(answers),
        heap,
        cold,
        tuple(buckets),
        len(portions) > 1,
        found,
        settled,
        tuple(named),
        point.pin.snapshot_id,
    )


def _fetch(some: Differing) -> Fetch:
    import numpy as np

    return Fetch(np.sort(some.keys))


def _settled(before: _Round | None, found: Differing) -> Differing:
    """The rows that differed before, with the same heap row: F has passed the moment at which they were seen."""
    import numpy as np

    if before is None or not len(found) or not len(before.found):
        return found.only(np.zeros(len(found), bool))
    order = np.argsort(before.found.keys)
    keys, rows = before.found.keys[order], before.found.heap[order]
    at = np.minimum(np.searchsorted(keys, found.keys), len(keys) - 1)
    return found.only((keys[at] == found.keys) & (rows[at] == found.heap))


def _sampled(sides: Sides, fraction: float, seed: int) -> Sides:
    return rewindowed(sides, sample_bands(sides.bands, fraction, seed))


def _note(site: Site, state: TableState) -> None:
    with site.writer(None).step() as tx:
        tx.conn.execute(_NOTE, (state.table.table_id, state.cutline.t))


def _findings(answers: Sequence[Answer]) -> list[Finding]:
    return [finding for one in answers for finding in one.findings]


def _counts(state: TableState, now: _Round) -> tuple[BandCount, ...]:
    live: dict[int, int] = {}
    for one in now.answers:
        for band, rows in one.live.items():
            live[band] = live.get(band, 0) + rows
    differing: dict[int, int] = {}
    for band, _, _ in now.buckets:
        differing[band] = differing.get(band, 0) + 1
    last = len(now.sides.bands.bands) - 1
    return tuple(
        BandCount(
            lower=_literal(state, band.lower),
            upper="–" if band.index == last else _literal(state, band.upper) or "–",
            partition=None,
            heap_rows=now.heap.rows(band.index),
            lake_rows=live.get(band.index, 0),
            delta_rows=0,
            differing=differing.get(band.index, 0) if len(now.settled) else 0,
        )
        for band in now.sides.bands.chosen
    )


def _literal(state: TableState, key: Any) -> str | None:
    if key is None:
        return None
    try:
        return state.table.axis.literal(key)
    except OverflowError:
        return str(key)
