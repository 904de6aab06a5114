"""Where rows with given keys lie in the lake, as values: keys in, new deletion vectors out.

Fold, pump, ingest and erasure know keys; a deletion vector needs positions. The keys travel in Arrow files (one per
task that made them), the lake's files are grouped into tasks of similar size, and each task looks its keys up in its
files. Nothing here does I/O; `lake/iceberg/locate.py` is the plugin that reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from modak.core.axis import TierKey
from modak.lake.model import LakeColumn, LakeFile, Vector

TASK_ROWS = 4_000_000
"""Lake rows per task: about a tenth of a second for each million, so that a task is worth its start."""


@dataclass(frozen=True, slots=True)
class KeyFile:
    """An Arrow IPC file of keys (typed key columns, no NULL) and the range of its tier keys, both ends included."""

    uri: str
    rows: int
    lower: TierKey
    upper: TierKey


@dataclass(frozen=True, slots=True)
class Lookup:
    """One task: these files may hold rows with these keys."""

    files: tuple[LakeFile, ...]
    keys: tuple[KeyFile, ...]
    columns: tuple[LakeColumn, ...]
    """The key columns, in the order of the columns of the key files."""
    tier_key: str
    folder: str
    task: str

    @property
    def rows(self) -> int:
        """Lake rows to look at."""
        return sum(found.file.rows for found in self.files)


@dataclass(frozen=True, slots=True)
class LocatedFile:
    """What was found in one data file: how many rows, and the vectors that come and go because of them."""

    path: str
    rows: int
    vector: Vector | None = None
    replaced: tuple[Vector, ...] = ()


@dataclass(frozen=True, slots=True)
class Located:
    """Every row of a snapshot that carries one of the keys, as deletion vectors that are written but not visible."""

    snapshot_id: int | None
    files: tuple[LocatedFile, ...] = ()

    @property
    def rows(self) -> int:
        """Rows found, without those that were deleted before."""
        return sum(found.rows for found in self.files)

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The new vectors, one per file in which something was found."""
        return tuple(found.vector for found in self.files if found.vector is not None)

    @property
    def replaced(self) -> tuple[Vector, ...]:
        """Older vectors that the new ones contain."""
        return tuple(vector for found in self.files for vector in found.replaced)


def overlaps(found: LakeFile, keys: KeyFile) -> bool:
    """Whether a file can hold one of the keys, by the bounds of its tier key; unknown bounds exclude nothing."""
    return not (
        (found.lower is not None and keys.upper < found.lower) or (found.upper is not None and keys.lower > found.upper)
    )


def plan_lookups(
    files: Iterable[LakeFile],
    keys: Sequence[KeyFile],
    columns: Sequence[LakeColumn],
    tier_key: str,
    folder: str,
    *,
    least_tasks: int = 1,
    prefix: str = "locate",
) -> tuple[Lookup, ...]:
    """Group the files that can hold keys into tasks of similar numbers of rows."""
    wanted = [found for found in files if any(overlaps(found, one) for one in keys)]
    rows = sum(found.file.rows for found in wanted)
    # Whole rounds over the cores: a last task alone would leave the others without work.
    rounds = max(1, -(-rows // (TASK_ROWS * least_tasks)))
    count = min(len(wanted), rounds * least_tasks)
    groups: list[list[LakeFile]] = [[] for _ in range(count)]
    # Neighbours along the tier key share a task, which then needs only the keys of their range.
    before = 0
    for found in sorted(wanted, key=lambda each: (each.lower is not None, each.lower or 0, each.file.path)):
        middle = before + found.file.rows // 2
        groups[min(count - 1, middle * count // max(1, rows))].append(found)
        before += found.file.rows
    return tuple(
        Lookup(
            tuple(group),
            tuple(one for one in keys if any(overlaps(found, one) for found in group)),
            tuple(columns),
            tier_key,
            folder,
            f"{prefix}-{number:05d}",
        )
        for number, group in enumerate(group for group in groups if group)
    )
