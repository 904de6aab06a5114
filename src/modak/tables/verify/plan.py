"""What one verification will look at: bands of the tier key, which of them have a heap side, and the tasks. Pure.

A band is a stretch of the axis between two neighbouring partition bounds, from the retention line to the cut-line.
Where an attached partition covers a band, heap and lake both hold its rows and every column is compared; elsewhere the
lake is alone and its structure is checked. `--since` and `--sample` choose bands, because a band is the least that both
sides can read without reading the rest.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from modak.core.axis import TierKey
from modak.core.names import TableName
from modak.lake.model import LakeFile
from modak.postgres.model import Leaf

GROUP_ROWS = 16_000_000
"""Keys that one task compares with each other: eight bytes each, and as much again while they are sorted."""
END_OF_AXIS = 2**63 - 1
TASK_ROWS = 4_000_000
"""Rows of small files that share a task."""


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of the axis; no bound: open. `leaf` is the partition that holds its rows in the heap."""

    index: int
    lower: TierKey | None
    upper: TierKey
    leaf: TableName | None
    chosen: bool = True

    @property
    def compared(self) -> bool:
        """Whether heap and lake both have its rows."""
        return self.leaf is not None


@dataclass(frozen=True, slots=True)
class Bands:
    """All bands of a table, in order, between the retention line and the cut-line."""

    edges: tuple[TierKey, ...]
    bands: tuple[Band, ...]
    open_below: bool
    open_above: bool = False
    """Whether the last band has no end; its upper bound is then no edge."""

    def at(self, key: TierKey) -> int:
        """The band of a key; −1 below the first, `len(bands)` at or above the cut-line."""
        return bisect_right(self.edges, key) - (0 if self.open_below else 1)

    def within(self, lower: TierKey | None, upper: TierKey | None) -> tuple[Band, ...]:
        """The chosen bands that keys of `lower` to `upper` (both included) can lie in."""
        first = 0 if lower is None else max(self.at(lower), 0)
        last = len(self.bands) - 1 if upper is None else min(self.at(upper), len(self.bands) - 1)
        return tuple(band for band in self.bands[first : last + 1] if band.chosen)

    @property
    def chosen(self) -> tuple[Band, ...]:
        """The bands to look at."""
        return tuple(band for band in self.bands if band.chosen)


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Files that one task reads, each with whether the task counts it (a file may be read twice, for two reasons).

    `of` shares: the task holds the keys against each other whose hash falls into share `residue`; 0: it does not.
    """

    files: tuple[tuple[LakeFile, bool], ...]
    whole_rows: bool
    residue: int = 0
    of: int = 0


def plan_bands(
    cut_line: TierKey | None,
    retention_line: TierKey | None,
    partitions: Iterable[tuple[TierKey | None, TierKey | None]],
    leaves: Sequence[Leaf],
    *,
    since: TierKey | None = None,
) -> Bands:
    """Cut the cold half of a table at the bounds of its partitions, those of dropped ones too."""
    if cut_line is None:
        return Bands((), (), open_below=True)
    bounds = {bound for pair in partitions for bound in pair} | {side for leaf in leaves for side in _sides(leaf)}
    floor = retention_line
    edges = {edge for edge in (*bounds, since) if edge is not None and edge < cut_line and _above(edge, floor)}
    if floor is not None and floor < cut_line:
        edges.add(floor)
    ordered = (*sorted(edges), cut_line)
    lowers: list[TierKey | None] = [*ordered[:-1]] if floor is not None else [None, *ordered[:-1]]
    uppers = ordered[1:] if floor is not None else ordered
    bands = [
        Band(at, lower, upper, _covering(lower, upper, leaves), since is None or upper > since)
        for at, (lower, upper) in enumerate(zip(lowers, uppers, strict=True))
    ]
    return Bands(ordered, tuple(bands), open_below=floor is None)


def plan_mirror_bands(
    table: TableName,
    cuts: Iterable[TierKey | None],
    *,
    lower: TierKey | None = None,
    upper: TierKey | None = None,
    since: TierKey | None = None,
) -> Bands:
    """Cut a stretch of a mirrored table, whose rows heap and lake both have; without bounds all of it."""
    inner = {cut for cut in (*cuts, since) if cut is not None and _above(cut, lower) and (upper is None or cut < upper)}
    lowers = [lower, *sorted(inner)]
    uppers = [*sorted(inner), END_OF_AXIS if upper is None else upper]
    bands = tuple(
        Band(at, low, high, table, since is None or high > since)
        for at, (low, high) in enumerate(zip(lowers, uppers, strict=True))
    )
    edges = (*(() if lower is None else (lower,)), *(uppers[:-1] if upper is None else uppers))
    return Bands(edges, bands, open_below=lower is None, open_above=upper is None)


def sample_bands(bands: Bands, fraction: float, seed: int) -> Bands:
    """Keep a share of the chosen bands, at least one; another seed, other bands."""
    chosen = [band.index for band in bands.chosen]
    wanted = max(1, round(len(chosen) * fraction)) if chosen else 0
    kept = set(random.Random(seed).sample(chosen, wanted))  # noqa: S311 - which bands, not a secret
    return replace(bands, bands=tuple(replace(band, chosen=band.index in kept) for band in bands.bands))


def plan_files(files: Iterable[LakeFile], bands: Bands, *, everything: bool = True) -> list[FileGroup]:
    """The lake's share of the work; `everything`: also files that lie in no band at all, where no row should be.

    Files of compared bands are read whole. Of other files only the keys are read, together with all files whose tier
    keys overlap theirs, because a key could be in any of them; a large group is shared out by the keys' hashes.
    """
    whole: list[tuple[LakeFile, bool]] = []
    alone: list[tuple[LakeFile, bool]] = []
    for file in files:
        met = bands.within(file.lower, file.upper)
        compared = any(band.compared for band in met)
        if compared:
            whole.append((file, True))
        if any(not band.compared for band in met) or (everything and not met):
            alone.append((file, not compared))
    groups = [FileGroup(tuple(packed), True) for packed in _packed([[entry] for entry in whole])]
    for packed in _packed(_chains(alone)):
        shares = max(1, -(-_rows(packed) // GROUP_ROWS))
        for share in range(shares):
            entries = tuple((file, counted and share == 0) for file, counted in packed)
            groups.append(FileGroup(entries, False, share, shares))
    return groups


def _chains(files: Sequence[tuple[LakeFile, bool]]) -> list[list[tuple[LakeFile, bool]]]:
    """Files in groups whose tier keys do not meet."""
    chains: list[list[tuple[LakeFile, bool]]] = []
    reach = -math.inf
    for entry in sorted(files, key=lambda entry: _low(entry[0])):
        if not chains or _low(entry[0]) > reach:
            chains.append([])
        chains[-1].append(entry)
        reach = max(reach, math.inf if entry[0].upper is None else entry[0].upper)
    return chains


def _packed(chains: Iterable[list[tuple[LakeFile, bool]]]) -> list[list[tuple[LakeFile, bool]]]:
    """Small groups put together, so that a task is worth its start."""
    packed: list[list[tuple[LakeFile, bool]]] = []
    for chain in chains:
        if packed and _rows(packed[-1]) + _rows(chain) <= TASK_ROWS:
            packed[-1] += chain
        else:
            packed.append(list(chain))
    return packed


def _rows(entries: Iterable[tuple[LakeFile, bool]]) -> int:
    return sum(file.file.rows for file, _ in entries)


def _low(file: LakeFile) -> float:
    return -math.inf if file.lower is None else file.lower


def _sides(leaf: Leaf) -> tuple[TierKey | None, TierKey | None]:
    return (leaf.lower, leaf.upper)


def _above(edge: TierKey, floor: TierKey | None) -> bool:
    return floor is None or edge > floor


def _covering(lower: TierKey | None, upper: TierKey, leaves: Sequence[Leaf]) -> TableName | None:
    """The attached partition that a band lies in."""
    for leaf in leaves:
        starts = leaf.lower is None or (lower is not None and leaf.lower <= lower)
        if starts and leaf.upper is not None and upper <= leaf.upper:
            return leaf.table_name
    return None
