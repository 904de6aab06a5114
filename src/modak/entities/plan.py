"""What flush, init, compaction and gc will do, decided without I/O: dry runs print the plans that runners execute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from modak.entities.config import MIB, CDCConfig, CompactionConfig
from modak.entities.manifest import Manifest, ManifestEntry
from modak.entities.paths import is_temporary

GRACE_MS = 15 * 60 * 1000
"""How long a file that has left the store is kept for readers."""
HOUR_MS = 3_600_000
TASK_BYTES = 512 * MIB
"""Rows of about this size are pivoted by one task of an init."""
MIN_TASK_ROWS = 20_000
"""Fewer rows are not worth a task of their own."""


@dataclass(frozen=True, slots=True)
class FlushDecision:
    """Whether the dirty rows of a schema are flushed now, and why."""

    schema_id: int
    dirty: int
    oldest_ms: int
    """`changed_at` of the oldest dirty row; 0 when there is none."""
    flush: bool
    because: str


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Row ids from `lower` on and before `upper`; `None` is the end of all keys. Ranges of a plan cover every key."""

    lower: str | None = None
    upper: str | None = None

    def meets(self, entry: ManifestEntry) -> bool:
        """Whether a file may have rows in this range; one that does not say is looked into."""
        if not entry.min_row_id or not entry.max_row_id:
            return True
        below = self.upper is not None and entry.min_row_id >= self.upper
        above = self.lower is not None and entry.max_row_id < self.lower
        return not below and not above


@dataclass(frozen=True, slots=True)
class Rewrite:
    """All base and delta files become new base files, range by range."""

    sources: tuple[ManifestEntry, ...]
    ranges: tuple[KeyRange, ...]
    because: str

    @property
    def rows(self) -> int:
        """Rows that will be read."""
        return sum(entry.row_count for entry in self.sources)


@dataclass(frozen=True, slots=True)
class Promotion:
    """Deltas that are large enough to be base files as they are, if a look at their keys finds no overlap."""

    deltas: tuple[ManifestEntry, ...]
    others: tuple[ManifestEntry, ...]
    otherwise: Rewrite | None
    """What is done where keys do overlap."""


@dataclass(frozen=True, slots=True)
class Nothing:
    """Why base and delta stay as they are."""

    because: str


@dataclass(frozen=True, slots=True)
class Collection:
    """What gc does: files to delete now, and unlisted ones whose grace begins now."""

    delete: tuple[str, ...] = ()
    notice: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Differences:
    """How a manifest and the objects of its schema differ."""

    delta_orphans: tuple[str, ...] = ()
    base_orphans: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    missing: tuple[ManifestEntry, ...] = ()
    waiting: tuple[str, ...] = field(default=())
    """Files that have left the store by a swap and wait for gc; these are no difference."""
    lost_manifest: str = ""
    """Where the manifest should be, if rows were flushed and there is none."""

    @property
    def any(self) -> bool:
        """Whether something is not as it should be."""
        return bool(self.delta_orphans or self.base_orphans or self.leftovers or self.missing or self.lost_manifest)


def plan_flush(schema_id: int, dirty: int, oldest_ms: int, now_ms: int, config: CDCConfig) -> FlushDecision:
    """Flush when enough rows are dirty, or one has been for too long."""
    age = now_ms - oldest_ms
    if dirty == 0:
        return FlushDecision(schema_id, 0, 0, False, "no row is dirty")
    if dirty >= config.min_records:
        return FlushDecision(schema_id, dirty, oldest_ms, True, f"{dirty} rows are dirty")
    if age >= config.max_age_ms:
        return FlushDecision(schema_id, dirty, oldest_ms, True, f"the oldest change is {max(age, 0) // 1000} s old")
    return FlushDecision(
        schema_id,
        dirty,
        oldest_ms,
        False,
        f"{dirty} of {config.min_records} rows are dirty, the oldest for {max(age, 0) // 1000} s",
    )


def init_rows(config: CDCConfig, rows: int, cores: int) -> int:
    """Rows of one range of an init: exactly a batch where no file size is asked for, else as much as a task can pivot.

    Files themselves roll by the bytes that were written.
    """
    if config.target_file_size_mb == 0:
        return min(config.batch_size, config.max_batch_size)
    by_memory = max(1, TASK_BYTES // config.estimated_row_bytes)
    by_cores = max(-(-rows // max(cores, 1)), MIN_TASK_ROWS)
    return min(by_memory, by_cores, config.max_batch_size)


def init_lanes(config: CDCConfig, rows: int, cores: int) -> int:
    """Threads of an init that one task does alone, since it can hold all rows: the tables are then read only once."""
    fits = rows * config.estimated_row_bytes <= TASK_BYTES * cores and rows <= config.max_batch_size
    return cores if config.target_file_size_mb and fits and rows >= cores * MIN_TASK_ROWS else 1


def ranges(bounds: Iterable[str]) -> tuple[KeyRange, ...]:
    """Half-open ranges between sorted bounds, from the beginning of all keys to their end."""
    edges = [None, *sorted(set(bounds)), None]
    return tuple(KeyRange(lower, upper) for lower, upper in pairwise(edges))


def plan_compaction(manifest: Manifest, config: CompactionConfig, cores: int) -> Rewrite | Promotion | Nothing:
    """Rewrite when deltas are many against the base, promote them when they are large and stand beside it."""
    if not manifest.delta:
        return Nothing("there is no delta")
    rewrite = _rewrite(manifest, config, cores)
    promotable = tuple(entry for entry in manifest.delta if entry.tombstones == 0)
    if sum(entry.size_bytes for entry in promotable) >= config.target_base_size_mb * MIB:
        others = tuple(entry for entry in manifest.entries if entry not in promotable)
        return Promotion(promotable, others, rewrite)
    if rewrite is not None:
        return rewrite
    share = 100 * manifest.delta_rows / manifest.base_rows
    return Nothing(f"deltas are {share:.1f} % of the base, {config.dirty_ratio_pct} % are allowed")


def _rewrite(manifest: Manifest, config: CompactionConfig, cores: int) -> Rewrite | None:
    large = [entry for entry in manifest.delta if entry.size_bytes > config.max_delta_size_mb * MIB]
    if not manifest.base_rows or manifest.delta_rows * 100 > manifest.base_rows * config.dirty_ratio_pct:
        because = f"{manifest.delta_rows} delta rows stand against {manifest.base_rows} base rows"
    elif large:
        because = f"{len(large)} delta files are above {config.max_delta_size_mb} MiB"
    else:
        return None
    rows = manifest.base_rows + manifest.delta_rows
    # Few rows are merged by one task into one file.
    lanes = config.max_parallel_files or max(1, min(cores, rows // MIN_TASK_ROWS))
    return Rewrite(manifest.entries, ranges(cuts(manifest.entries, lanes, config.target_base_size_mb)), because)


def cuts(entries: Sequence[ManifestEntry], lanes: int, target_mb: int) -> list[str]:
    """Bounds between files, chosen so that the ranges between them read about the same number of bytes."""
    known = sorted((entry for entry in entries if entry.min_row_id), key=lambda entry: entry.min_row_id)
    total = sum(entry.size_bytes for entry in known)
    wanted = max(lanes, -(-total // (target_mb * MIB)))
    if wanted <= 1 or not known:
        return []
    cuts: list[str] = []
    seen = 0
    for before, after in pairwise(known):
        seen += before.size_bytes
        if seen >= total * (len(cuts) + 1) / wanted:
            cuts.append(after.min_row_id)
    if len(set(cuts)) + 1 >= lanes:
        return cuts
    # Fewer files than lanes: row ids are even enough to be cut by their value.
    low, high = (int(text.replace("-", ""), 16) for text in (known[0].min_row_id, max(e.max_row_id for e in known)))
    return [as_row_id(low + (high - low) * lane // lanes) for lane in range(1, lanes)] if high - low >= lanes else cuts


def as_row_id(number: int) -> str:
    """A 128-bit number as a row id."""
    text = f"{number:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def compare(manifest: Manifest, objects: Iterable[str], delta_folder: str) -> Differences:
    """What is listed and not there, and what is there and not listed."""
    found = frozenset(objects)
    leaving = {each.path for each in manifest.removed}
    unlisted = sorted(found - manifest.paths)
    return Differences(
        delta_orphans=tuple(p for p in unlisted if p not in leaving and not is_temporary(p) and _in(p, delta_folder)),
        base_orphans=tuple(
            p for p in unlisted if p not in leaving and not is_temporary(p) and not _in(p, delta_folder)
        ),
        leftovers=tuple(p for p in unlisted if p not in leaving and is_temporary(p)),
        missing=tuple(entry for entry in manifest.entries if entry.path not in found),
        waiting=tuple(p for p in unlisted if p in leaving),
    )


def plan_gc(manifest: Manifest, objects: Iterable[str], now_ms: int, grace_ms: int = GRACE_MS) -> Collection:
    """Delete what left the store longer ago than the grace; an unlisted file that nobody noticed begins to wait."""
    listed = manifest.paths
    since = {each.path: each.removed_at for each in manifest.removed if each.path not in listed}
    unlisted = sorted(set(objects) - listed)
    due = tuple(sorted(path for path, at in since.items() if now_ms - at >= grace_ms))
    return Collection(
        delete=due,
        notice=tuple(path for path in unlisted if path not in since),
        waiting=tuple(sorted(path for path, at in since.items() if now_ms - at < grace_ms)),
    )


def _in(path: str, folder: str) -> bool:
    return path.startswith(f"{folder}/")
