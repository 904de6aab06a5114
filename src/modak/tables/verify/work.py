"""What the tasks of a verification do: read one share of the heap, the lake or the delta, and answer one question.

`Count` adds up fingerprints and checks files on the way; `Gather` returns the hashes of rows in a few buckets; `Fetch`
returns a few rows by the hashes of their keys. The three sources give batches of one schema, so heap and lake rows go
through the same code. A task holds one batch, its tallies, and for `Fetch` as many rows as were asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from modak.core.axis import TierKey
from modak.lake.decode import arrow_schema, decoded
from modak.lake.types import quoted_identifier, select_list
from modak.postgres.arrow import stream
from modak.postgres.dsn import Dsn
from modak.postgres.snapshot import HeldLeaf
from modak.postgres.splits import Split, ctid_predicate
from modak.tables.verify.files import live_batches
from modak.tables.verify.fingerprint import Numbers, Prints, Tally, axis_values, prints
from modak.tables.verify.overlay import DeltaRange, Hidden, hidden, upserts
from modak.tables.verify.plan import Bands, FileGroup
from modak.tables.verify.report import Finding
from modak.tables.verify.shape import Shape

Side = Literal["heap", "cold"]

FETCHED = 10_000
"""Rows that one task returns at most."""
SAMPLE = 20
"""Findings of one kind that a task names."""


@dataclass(frozen=True, slots=True)
class Window:
    """The bands that a share of the work can meet, cut out of all bands."""

    edges: tuple[TierKey, ...]
    first: int
    chosen: frozenset[int]
    compared: frozenset[int]
    lower: TierKey | None
    upper: TierKey
    floor: TierKey | None
    cut_line: TierKey
    open_above: bool = False

    @classmethod
    def of(cls, bands: Bands, lower: TierKey | None, upper: TierKey | None) -> Window | None:
        """The bands from the one of `lower` to the one of `upper`; nothing when there are no bands."""
        if not bands.bands:
            return None
        last = len(bands.bands) - 1
        begin = 0 if lower is None else min(max(bands.at(lower), 0), last)
        end = last if upper is None else min(max(bands.at(upper), 0), last)
        met = bands.bands[begin : end + 1]
        floor = met[0].lower
        endless = bands.open_above and met[-1].index == last
        edges = (() if floor is None else (floor,)) + tuple(band.upper for band in (met[:-1] if endless else met))
        return cls(
            edges,
            begin - (0 if floor is None else 1),
            frozenset(band.index for band in met if band.chosen),
            frozenset(band.index for band in met if band.chosen and band.compared),
            floor,
            met[-1].upper,
            bands.bands[0].lower,
            bands.bands[-1].upper,
            bands.open_above,
        )

    def place(self, keys: Any) -> Any:
        """The band of every key; rows outside of the window get a number that is in no set."""
        return np.searchsorted(np.asarray(self.edges, np.int64), keys, side="right") + self.first

    def outside(self, keys: Any) -> Any:
        """Which keys lie outside of all bands, beyond the retention line or the cut-line."""
        above = np.zeros(len(keys), bool) if self.open_above else keys >= self.cut_line
        return above if self.floor is None else above | (keys < self.floor)


@dataclass(frozen=True, slots=True)
class HeapSource:
    """A range of pages of one partition."""

    leaf: HeldLeaf
    pages: Split


@dataclass(frozen=True, slots=True)
class LakeSource:
    """Some data files; `overlaid`: whether the delta has rows among theirs."""

    group: FileGroup
    overlaid: bool


@dataclass(frozen=True, slots=True)
class DeltaSource:
    """The delta rows of the window."""


@dataclass(frozen=True, slots=True)
class Count:
    """Add up fingerprints per band and bucket."""


@dataclass(frozen=True, slots=True)
class Gather:
    """The hashes of all rows in some buckets, per band."""

    buckets: Mapping[int, frozenset[int]]


@dataclass(frozen=True, slots=True)
class Fetch:
    """The rows with these hashes of keys (in order)."""

    keys: Numbers
    only_keys: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """One task: where to read, under which snapshot, and what to answer."""

    dsn: Dsn
    snapshot: str
    table_id: int
    generation: int
    shape: Shape
    window: Window
    source: HeapSource | LakeSource | DeltaSource
    ask: Count | Gather | Fetch

    @property
    def side(self) -> Side:
        """Which side of the comparison the rows belong to."""
        return "heap" if isinstance(self.source, HeapSource) else "cold"

    def delta(self) -> DeltaRange:
        """The delta rows of the window."""
        window = self.window
        return DeltaRange(self.dsn, self.snapshot, self.table_id, self.generation, window.lower, window.upper)


@dataclass(slots=True)
class Answer:
    """What one task has found."""

    side: Side
    tally: Tally = field(default_factory=Tally)
    live: dict[int, int] = field(default_factory=dict)
    """Rows in files, per band, hidden ones too."""
    findings: list[Finding] = field(default_factory=list)
    outside: list[int] = field(default_factory=list)
    """Tier keys of a few lake rows that lie in no band."""
    outside_rows: int = 0
    twice: Any = None
    """Hashes of keys that came more than once."""
    gathered: list[tuple[Prints, Prints]] = field(default_factory=list)
    rows: pa.Table | None = None
    copies: Any = None
    """The hash of the key of every row in `rows`."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows with their keys' hashes and bands."""

    batch: pa.RecordBatch
    keys: Prints
    bands: Any

    def only(self, rows: Any) -> _Piece:
        if rows.all():
            return self
        return _Piece(self.batch.filter(pa.array(rows)), self.keys[rows], self.bands[rows])


def answer(job: Job) -> Answer:
    """Inside a task: read the source once and answer the question."""
    found = Answer(job.side)
    if isinstance(job.ask, Count):
        _count(job, found)
    elif isinstance(job.ask, Gather):
        for piece in _pieces(job, found):
            _gather(job.ask, job.shape, piece, found)
    else:
        _fetch(job, job.ask, found)
    return found


def rows_with(job: Job, keys: Numbers) -> Iterator[pa.RecordBatch]:
    """Inside a task: the rows of a source whose keys have one of these hashes (in order)."""
    for piece in _pieces(job, Answer(job.side)):
        kept = piece.only(np.isin(piece.keys.first, keys) & np.isin(piece.bands, list(job.window.chosen)))
        if len(kept.batch):
            yield kept.batch


def _count(job: Job, found: Answer) -> None:
    for piece in _pieces(job, found):
        chosen = np.isin(piece.bands, list(job.window.compared))
        kept = piece.only(chosen)
        if len(kept.batch):
            found.tally.add(_one(kept.bands), kept.keys, prints(kept.batch.columns))


def _one(bands: Any) -> Any:
    return int(bands[0]) if (bands == bands[0]).all() else bands


def _gather(ask: Gather, shape: Shape, piece: _Piece, found: Answer) -> None:
    wanted = np.zeros(len(piece.batch), bool)
    buckets = piece.keys.buckets
    for band, some in ask.buckets.items():
        wanted |= (piece.bands == band) & np.isin(buckets, list(some))
    kept = piece.only(wanted)
    if len(kept.batch):
        found.gathered.append((kept.keys, prints(kept.batch.columns)))


def _fetch(job: Job, ask: Fetch, found: Answer) -> None:
    tables: list[pa.Table] = []
    hashes: list[Numbers] = []
    room = FETCHED if not ask.only_keys else max(FETCHED, 4 * len(ask.keys))
    for piece in _pieces(job, found):
        kept = piece.only(np.isin(piece.keys.first, ask.keys))
        if not len(kept.batch) or room <= 0:
            continue
        few = kept.batch.slice(0, room)
        if ask.only_keys:
            few = few.select(list(job.shape.keys))
        tables.append(pa.Table.from_batches([few]))
        hashes.append(kept.keys.first[: len(few)])
        room -= len(few)
    if tables:
        found.rows = pa.concat_tables(tables)
        found.copies = np.concatenate(hashes)


def _pieces(job: Job, found: Answer) -> Iterator[_Piece]:
    if isinstance(job.source, LakeSource):
        yield from _lake(job, job.source, found)
        return
    batches = upserts(job.delta(), job.shape, found.findings)
    if isinstance(job.source, HeapSource):
        batches = _heap(job, job.source)
    for batch in batches:
        if len(batch):
            yield _piece(job, batch)


def _piece(job: Job, batch: pa.RecordBatch) -> _Piece:
    shape = job.shape
    keys = prints([batch.column(at) for at in shape.keys])
    return _Piece(batch, keys, job.window.place(axis_values(batch.column(shape.tier))))


def _heap(job: Job, source: HeapSource) -> Iterator[pa.RecordBatch]:
    # Text, because it travels to an ADBC connection. Identifiers are quoted, page numbers are integers.
    name = f"{quoted_identifier(source.leaf.name.schema)}.{quoted_identifier(source.leaf.name.name)}"
    where = ctid_predicate(source.pages)
    query = f"SELECT {select_list(job.shape.mapped)} FROM ONLY {name} WHERE {where}"  # noqa: S608
    yield from decoded(stream(job.dsn, query, snapshot=job.snapshot), job.shape.mapped, arrow_schema(job.shape.columns))


def _lake(job: Job, source: LakeSource, found: Answer) -> Iterator[_Piece]:
    group, counting = source.group, isinstance(job.ask, Count)
    shape = job.shape
    over = hidden(job.delta(), shape) if source.overlaid else Hidden(Prints(*(np.zeros(0, np.uint64),) * 2))
    seen: list[Numbers] = []
    for file, counted in group.files:
        findings = found.findings if counting and counted else []
        for batch in live_batches(file, shape, findings):
            piece = _piece(job, batch)
            if counting and counted:
                _note(job, piece, found)
            visible = piece.only(~over.hides(piece.keys))
            if group.whole_rows or not counting:
                yield visible
            if counting and group.of:
                seen.append(_to_hold(job, group, visible))
    if seen:
        found.twice = _twice(np.concatenate(seen))


def _note(job: Job, piece: _Piece, found: Answer) -> None:
    """Count a file's rows per band, and name those that should not be there."""
    for band, rows in zip(*np.unique(piece.bands, return_counts=True), strict=True):
        found.live[int(band)] = found.live.get(int(band), 0) + int(rows)
    values = axis_values(piece.batch.column(job.shape.tier))
    wrong = job.window.outside(values)
    if wrong.any():
        found.outside_rows += int(wrong.sum())
        found.outside += [int(value) for value in values[wrong][: SAMPLE - len(found.outside)]]


def _to_hold(job: Job, group: FileGroup, piece: _Piece) -> Numbers:
    """The keys that this task holds against each other: those of bands without a heap side, of its share."""
    alone = list(job.window.chosen - job.window.compared)
    mine = np.isin(piece.bands, alone)
    if group.of > 1:
        mine &= piece.keys.first % np.uint64(group.of) == group.residue
    return piece.keys.first[mine]


def _twice(hashes: Numbers) -> Numbers:
    hashes.sort()
    return np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
