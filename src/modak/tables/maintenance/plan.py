"""What a maintenance pass will do to one table, as data. Pure.

From what was observed (`observe.py`) and the policy in force to a `MaintenancePlan` with five steps, in the order in
which they run: delete debt, bin-pack, manifests, expiry, orphans. The plan carries the safety bounds that every step
and every engine must honour. `maintain --dry-run` prints it, the runner executes it step by step and plans the later
ones anew from what the earlier ones left. Size is bounded by `rewrite_max_input_files`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from modak.core.names import TableName
from modak.lake.model import LakeFile, Snapshot
from modak.lake.rewrite import Bin

Pass = Literal["debt", "pack", "manifests", "expiry", "orphans"]
PASSES: tuple[Pass, ...] = ("debt", "pack", "manifests", "expiry", "orphans")
SWITCH: Mapping[Pass, str] = {
    "debt": "delete_compaction_enabled",
    "pack": "rewrite_enabled",
    "manifests": "manifest_rewrite_enabled",
    "expiry": "snapshot_expiry_enabled",
    "orphans": "orphan_sweep_enabled",
}
_HOUR_MILLIS = 3_600_000
_SLACK_MILLIS = 60_000
"""Clocks of Postgres and of the lake's writers may differ by so much."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no step may touch, whoever executes it."""

    pinned: frozenset[int] = frozenset()
    """Snapshots that readers hold."""
    horizon: int | None = None
    """The sequence number of the oldest pinned snapshot: nothing from there on expires."""
    staged: frozenset[str] = frozenset()
    """Files of loads that wait for adoption or are being written."""
    kept: frozenset[int] = frozenset()
    """Published, current and tagged snapshots, and the bases of operations in flight."""
    in_flight_since: int | None = None
    """When the oldest operation in flight began (milliseconds): it may read any snapshot since."""
    in_flight: frozenset[str] = frozenset()
    """Operations in flight, whose folders are theirs."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything a planner may know about one table's lake."""

    table: TableName
    snapshot_id: int | None
    under_deletes: tuple[LakeFile, ...] = ()
    small: tuple[LakeFile, ...] = ()
    """Files below the target size that carry no delete."""
    more_under_deletes: bool = False
    more_small: bool = False
    dangling: int = 0
    """Equality delete files that no data file needs."""
    data_manifests: tuple[int, ...] = ()
    """Their sizes."""
    snapshots: tuple[Snapshot, ...] = ()
    bounds: Bounds = Bounds()
    now_millis: int = 0
    cut: tuple[int, ...] = ()
    """Where files of an unpartitioned table end."""
    erase_below: int | None = None
    """Snapshots below this sequence number show rows that are to be erased."""
    blocked: str | None = None


@dataclass(frozen=True, slots=True)
class RewriteStep:
    """Bins of files, each to become one file; all of them in one commit."""

    kind: Literal["debt", "pack"]
    bins: tuple[Bin, ...]
    dangling: int = 0
    more: bool = False
    """There is more than one commit may hold; it follows in another."""

    @property
    def files(self) -> int:
        """Data files to read."""
        return sum(len(one.files) for one in self.bins)

    @property
    def bytes_read(self) -> int:
        """Bytes to read."""
        return sum(one.bytes for one in self.bins)

    @property
    def bytes_written(self) -> int:
        """Bytes to write, as far as can be told beforehand."""
        return sum(round(one.bytes * (1 - one.deleted_rows / max(one.rows, 1))) for one in self.bins)

    @property
    def deletes(self) -> int:
        """Delete files that go."""
        return sum(one.deletes for one in self.bins) + self.dangling


@dataclass(frozen=True, slots=True)
class ManifestStep:
    """Data manifests to be written anew, clustered by partition."""

    manifests: int
    bytes: int
    clusters: int


@dataclass(frozen=True, slots=True)
class ExpiryStep:
    """Snapshots that go."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OrphanStep:
    """A listing of the data folder for files that are older than this and that nothing references."""

    older_than_millis: int


Step = RewriteStep | ManifestStep | ExpiryStep | OrphanStep


@dataclass(frozen=True, slots=True)
class MaintenancePlan:
    """What a pass will do, and what it must not touch."""

    table: TableName
    base: int | None
    bounds: Bounds
    policy: Mapping[str, Any]
    steps: Mapping[Pass, Step] = field(default_factory=dict)
    skipped: Mapping[Pass, str] = field(default_factory=dict)
    """Why a pass has nothing to do."""
    cut: tuple[int, ...] = ()

    @property
    def bytes_read(self) -> int:
        """Bytes that the rewrites read."""
        return sum(step.bytes_read for step in self.steps.values() if isinstance(step, RewriteStep))

    @property
    def bytes_written(self) -> int:
        """Bytes that the rewrites write, estimated."""
        return sum(step.bytes_written for step in self.steps.values() if isinstance(step, RewriteStep))


def plan_maintenance(seen: Observed, policy: Mapping[str, Any]) -> MaintenancePlan:
    """Every step that is due, and why the others are not."""
    planners = {
        "debt": _debt,
        "pack": _pack,
        "manifests": _manifests,
        "expiry": _expiry,
        "orphans": _orphans,
    }
    steps: dict[Pass, Step] = {}
    skipped: dict[Pass, str] = {}
    for name in PASSES:
        found = _off(name, seen, policy) or planners[name](seen, policy)
        if isinstance(found, str):
            skipped[name] = found
        else:
            steps[name] = found
    return MaintenancePlan(seen.table, seen.snapshot_id, seen.bounds, dict(policy), steps, skipped, seen.cut)


def _off(name: Pass, seen: Observed, policy: Mapping[str, Any]) -> str | None:
    if seen.blocked is not None:
        return seen.blocked
    erasing = seen.erase_below is not None and name in ("debt", "expiry")
    if erasing:
        # What a person asked to be gone goes, whatever the schedule says.
        return None
    if not policy["maintenance_enabled"]:
        return "maintenance_enabled is false"
    if not policy[SWITCH[name]]:
        return f"{SWITCH[name]} is false"
    return None


def _debt(seen: Observed, policy: Mapping[str, Any]) -> Step | str:
    least = 1 if seen.erase_below is not None else policy["delete_compaction_min_deletes"]
    due = [found for found in seen.under_deletes if found.deletes >= least]
    if not due and not seen.dangling:
        return "no data file carries enough deletes"
    bins = [Bin(tuple(files)) for files in _bins(due, policy["rewrite_target_bytes"], seen.cut)]
    return RewriteStep("debt", tuple(bins), seen.dangling, seen.more_under_deletes)


def _pack(seen: Observed, policy: Mapping[str, Any]) -> Step | str:
    bins = [files for files in _bins(seen.small, policy["rewrite_target_bytes"], seen.cut) if len(files) > 1]
    gathered = sum(map(len, bins))
    if gathered < policy["rewrite_min_input_files"]:
        least = policy["rewrite_min_input_files"]
        return f"{gathered} small files could be joined, {least} must have gathered"
    return RewriteStep("pack", tuple(Bin(tuple(files)) for files in bins), 0, seen.more_small)


def _bins(files: Iterable[LakeFile], target: int, cut: Sequence[int]) -> Iterable[list[LakeFile]]:
    """Files of one partition together, in the order of their tier keys, up to the target size."""
    groups: dict[str, list[LakeFile]] = defaultdict(list)
    for found in files:
        groups[partition_of(found, cut)].append(found)
    for partition in sorted(groups):
        current: list[LakeFile] = []
        size = 0
        for found in sorted(groups[partition], key=lambda each: (each.lower or 0, each.file.path)):
            if current and size + found.file.bytes > target:
                yield current
                current, size = [], 0
            current.append(found)
            size += found.file.bytes
        if current:
            yield current


def partition_of(found: LakeFile, cut: Sequence[int]) -> str:
    """The lake partition of a file, or the stretch between two cuts of an unpartitioned table."""
    entry = json.loads(found.file.json)
    band = sum(1 for each in cut if found.lower is not None and each <= found.lower)
    return f"{entry['spec-id']} {json.dumps(entry.get('partition'))} {band:06d}"


def _manifests(seen: Observed, policy: Mapping[str, Any]) -> Step | str:
    least = policy["manifest_rewrite_min_manifests"]
    count = len(seen.data_manifests)
    clusters = max(1, least // 4)
    if count < least or count <= clusters:
        return f"{count} manifests, {least} trigger a rewrite"
    return ManifestStep(count, sum(seen.data_manifests), clusters)


def _expiry(seen: Observed, policy: Mapping[str, Any]) -> Step | str:
    ids = expirable(seen, policy)
    return ExpiryStep(ids) if ids else "no snapshot may expire"


def expirable(seen: Observed, policy: Mapping[str, Any]) -> tuple[int, ...]:
    """Snapshots beyond the age or the number that the policy allows, oldest first, within the bounds."""
    listed = sorted(seen.snapshots, key=lambda each: each.sequence_number)
    bounds = seen.bounds
    too_old = seen.now_millis - policy["snapshot_retention_hours"] * _HOUR_MILLIS
    surplus = len(listed) - policy["snapshot_max_count"]
    newest = {each.id for each in listed[-policy["snapshot_min_retained"] :]}
    used = in_use(listed, bounds.in_flight_since)
    going: list[int] = []
    for place, each in enumerate(listed):
        if each.id in bounds.kept or each.id in bounds.pinned or each.id in used:
            continue
        if bounds.horizon is not None and each.sequence_number >= bounds.horizon:
            continue
        erased = seen.erase_below is not None and each.sequence_number < seen.erase_below
        due = each.id not in newest and (each.at_millis < too_old or place < surplus)
        if erased or due:
            going.append(each.id)
    return tuple(going)


def in_use(snapshots: Iterable[Snapshot], since: int | None) -> set[int]:
    """Snapshots that were current at any time since an operation in flight began."""
    if since is None:
        return set()
    listed = sorted(snapshots, key=lambda each: each.sequence_number)
    older = [each for each in listed if each.at_millis < since - _SLACK_MILLIS]
    return {each.id for each in listed[len(older) :]} | {each.id for each in older[-1:]}


def _orphans(seen: Observed, policy: Mapping[str, Any]) -> Step:
    return OrphanStep(seen.now_millis - policy["orphan_grace_hours"] * _HOUR_MILLIS)
