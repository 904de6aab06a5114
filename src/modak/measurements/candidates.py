"""Which files of a window are worth merging, and in what portions: decided without I/O.

Age counts per file, by the earlier of flush stamp and last change, so neither a trickle of new files nor a stamp in the
future can hold a window back for ever. A window is worth a merge when enough files have gathered that are no output of
the tier itself. Outputs of the tier that stayed below half of the target join in; larger ones are never rewritten, so
every row is rewritten a bounded number of times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum

from modak.measurements.layout import TIER_WORDS, FileName, Place, parse_path
from modak.measurements.windows import Level, Window
from modak.storage.objects import Meta

MAX_FILES_PER_BATCH = 30
"""How many files a batch holds where nobody says otherwise."""
MOST_FILES_PER_BATCH = 500
SORT_FROM = 8
"""A window of so many times the target is sorted as a whole, over all cores."""
_LARGE = 4
"""A batch of so many times the target is closed, however few files it has."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Files of one window that will be merged; `files` are their paths, `pins` the versions that were seen."""

    database: str
    measurement: str
    partition_path: str
    files: tuple[str, ...]
    tier: str
    partition_time: datetime
    batch_number: int = 0
    total_batches: int = 0
    pins: tuple[Meta, ...] = ()

    @property
    def file_count(self) -> int:
        """How many files there are."""
        return len(self.files)

    @property
    def bytes(self) -> int:
        """How large they are together, as far as they have been seen."""
        return sum(pin.size for pin in self.pins)


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """When a tier takes files, and how large its outputs become."""

    name: str
    level: Level
    min_age: timedelta
    min_files: int
    target_bytes: int
    enabled: bool = True
    skip_age_after: timedelta | None = None
    """Windows that ended so long ago are being filled in late; their files are taken at any age."""

    @property
    def word(self) -> str:
        """The word at the end of an output's name."""
        return TIER_WORDS[self.level]

    def is_own(self, place: Place, said: FileName) -> bool:
        """Whether a file is an output of this tier."""
        return place.window.level is self.level and said.tier == self.word


class Engine(Enum):
    """What merges a window."""

    TASK = "task"
    SORT = "sort"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """How a window is merged, and why so. Printed by --dry-run, executed by the manager."""

    engine: Engine
    reason: str
    batches: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """A file of a measurement as a listing showed it."""

    meta: Meta
    place: Place
    said: FileName

    @classmethod
    def of(cls, meta: Meta) -> Seen | None:
        """What a path says; `None` where it is no file of a measurement."""
        found = parse_path(meta.path)
        return cls(meta, *found) if found is not None else None

    @property
    def written(self) -> datetime:
        """When the file was written: the stamp, unless the store saw the file earlier than that."""
        if self.said.stamp is None:
            return self.meta.modified
        return min(self.said.stamp.second, self.meta.modified)


def choose(policy: TierPolicy, window: Window, files: Iterable[Seen], now: datetime) -> tuple[Seen, ...]:
    """The files of a window that the tier takes now, oldest first; none if too few have gathered."""
    if not policy.enabled:
        return ()
    limit = now if _filled_in_late(policy, window, now) else now - policy.min_age
    fresh: list[Seen] = []
    small: list[Seen] = []
    for file in files:
        if file.place.window not in window or file.written > limit:
            continue
        if not policy.is_own(file.place, file.said):
            fresh.append(file)
        elif file.meta.size * 2 < policy.target_bytes:
            small.append(file)
    if len(fresh) < max(policy.min_files, 1):
        return ()
    return tuple(sorted((*fresh, *small), key=lambda file: (file.written, file.meta.path)))


def candidate(policy: TierPolicy, place: Place, files: Sequence[Seen]) -> Candidate:
    """What was chosen, in the form that people and jobs see."""
    pins = tuple(file.meta for file in files)
    paths = tuple(pin.path for pin in pins)
    return Candidate(place.database, place.measurement, place.folder, paths, policy.name, place.window.start, pins=pins)


def split_candidate_into_batches(candidate: Candidate, batch_size: int = MAX_FILES_PER_BATCH) -> list[Candidate]:
    """Portions of at most `batch_size` files in order; a single file at the end joins the portion before it."""
    size = MAX_FILES_PER_BATCH if batch_size < 2 else min(batch_size, MOST_FILES_PER_BATCH)
    starts = list(range(0, candidate.file_count, size)) or [0]
    return _cut(candidate, _without_single(starts, candidate.file_count))


def fill_batches(candidate: Candidate, target_bytes: int, least_files: int) -> list[Candidate]:
    """Portions that reach the target in bytes and a number of files; a few large files are enough as well."""
    starts, files, size = [0], 0, 0
    for index, pin in enumerate(candidate.pins):
        if files >= 2 and size >= target_bytes and (files >= least_files or size >= _LARGE * target_bytes):
            starts.append(index)
            files = size = 0
        files, size = files + 1, size + pin.size
    return _cut(candidate, _without_single(starts, candidate.file_count))


def plan_window(candidate: Candidate, policy: TierPolicy, least_files: int, *, can_sort: bool) -> WindowPlan:
    """How a window is merged: batches in tasks, or one sort over all cores where it is too large for that."""
    batches = fill_batches(candidate, policy.target_bytes, least_files)
    large = candidate.bytes >= SORT_FROM * policy.target_bytes
    if large and can_sort:
        why = f"its size is {candidate.bytes / policy.target_bytes:.0f} times the target: one sort over all cores"
        return WindowPlan(Engine.SORT, why, (candidate,))
    if large:
        return WindowPlan(Engine.TASK, "it is large, but without Spark there is no sort over all cores", tuple(batches))
    return WindowPlan(Engine.TASK, "each batch fits a task", tuple(batches))


def halves(candidate: Candidate) -> tuple[Candidate, Candidate] | None:
    """Two portions of half the files each; `None` when a half would hold fewer than two."""
    middle = candidate.file_count // 2
    if middle < 2:
        return None
    first, second = (replace(part, batch_number=candidate.batch_number) for part in _cut(candidate, [0, middle]))
    return first, second


def _filled_in_late(policy: TierPolicy, window: Window, now: datetime) -> bool:
    return policy.skip_age_after is not None and window.end + policy.skip_age_after <= now


def _without_single(starts: list[int], count: int) -> list[int]:
    return starts[:-1] if len(starts) > 1 and count - starts[-1] == 1 else starts


def _cut(candidate: Candidate, starts: list[int]) -> list[Candidate]:
    ends = [*starts[1:], candidate.file_count]
    total = len(starts)
    return [
        replace(
            candidate,
            files=candidate.files[start:end],
            pins=candidate.pins[start:end],
            batch_number=number,
            total_batches=total if total > 1 else 0,
        )
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
