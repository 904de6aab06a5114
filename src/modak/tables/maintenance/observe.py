"""Looking at a table's lake for the planner: candidates among its files, manifests, snapshots, and the bounds.

Files are streamed out of Iceberg's scan; only candidates are kept, and never more than one commit may rewrite.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import LiteralString

from modak.catalog.records import TableState
from modak.core.errors import Refused
from modak.core.names import TableName
from modak.lake.model import LakeFile, LakeTable
from modak.storage.uri import normal
from modak.tables.load.stage import Staged
from modak.tables.maintenance.plan import Bounds, Observed, partition_of
from modak.tables.maintenance.policy import Policy
from modak.tables.site import Site
from modak.tables.upkeep import kept_snapshots

_STAGED: LiteralString = """
    SELECT files FROM modak.load_labels WHERE table_id = %s AND state = 'staged'
"""
_ERASING: LiteralString = """
    SELECT max(below_sequence) FROM modak.erasures WHERE table_id = %s AND finished_at IS NULL
"""


@dataclass
class Candidates:
    """The files that a rewrite could take, and how many there were of every kind."""

    limit: int
    target: int
    cut: tuple[int, ...] = ()
    least_deletes: int = 1
    """Delete files that make a file due; one with fewer is neither due nor small."""
    only: frozenset[str] | None = None
    """Partitions whose small files are wanted; None: of all."""
    under_deletes: list[LakeFile] = field(default_factory=list)
    small: list[LakeFile] = field(default_factory=list)
    more_under_deletes: bool = False
    more_small: bool = False
    per_partition: Counter[str] = field(default_factory=Counter)

    def take(self, found: LakeFile) -> None:
        """Look at one file."""
        if found.deletes:
            if found.deletes < self.least_deletes:
                return
            if len(self.under_deletes) < self.limit:
                self.under_deletes.append(found)
            else:
                self.more_under_deletes = True
        elif found.file.bytes < self.target:
            partition = partition_of(found, self.cut)
            self.per_partition[partition] += 1
            if self.only is not None and partition not in self.only:
                return
            if len(self.small) < self.limit:
                self.small.append(found)
            else:
                self.more_small = True

    def crowded(self) -> Candidates:
        """For another look, at small files of partitions that have several to join."""
        several = frozenset(partition for partition, count in self.per_partition.items() if count > 1)
        return Candidates(self.limit, self.target, self.cut, self.least_deletes, several)


def observe(site: Site, name: TableName, policy: Policy, *, files: bool = True, ours: Collection[str] = ()) -> Observed:
    """The table's lake as it is now, with or without its files; operations `ours` do not count as in flight."""
    state = site.reader.state(name)
    lake = site.lake.load(state.table.lake)
    if lake is None:
        raise Refused("lake.missing", f"The lake table {state.table.lake} is gone from the catalog.")
    return observed(site, state, lake, policy, files=files, ours=ours)


def observed(
    site: Site, state: TableState, lake: LakeTable, policy: Policy, *, files: bool = True, ours: Collection[str] = ()
) -> Observed:
    """The same for a table that is already loaded."""
    snapshots = tuple(site.lake.snapshots(lake))
    bounds = bounds_of(site, state, lake, {each.id: each.sequence_number for each in snapshots}, ours=ours)
    cut = cuts(state, lake)
    erase_below = _erasing(site, state.table.table_id)
    least = 1 if erase_below is not None else policy["delete_compaction_min_deletes"]
    candidates = Candidates(policy["rewrite_max_input_files"], policy["rewrite_target_bytes"], cut, least)
    manifests: list[int] = []
    dangling = 0
    if lake.snapshot_id is not None:
        manifests, _ = site.lake.manifests(lake.identifier, lake.snapshot_id)
    if lake.snapshot_id is not None and files:
        for found in site.lake.files(lake.identifier, lake.snapshot_id, column=state.table.tier_key):
            candidates.take(found)
        if candidates.more_small:
            # One small file in each of very many partitions must not hide those that can be joined.
            candidates = candidates.crowded()
            for found in site.lake.files(lake.identifier, lake.snapshot_id, column=state.table.tier_key):
                candidates.take(found)
        current = next(each for each in snapshots if each.id == lake.snapshot_id)
        if int(current.summary.get("total-equality-deletes", "0")):
            every = {each.path for each in site.lake.equality_deletes(lake.identifier, lake.snapshot_id)}
            dangling = len(every - site.lake.needed_deletes(lake.identifier, lake.snapshot_id, ()))
    return Observed(
        table=state.table.name,
        snapshot_id=lake.snapshot_id,
        under_deletes=tuple(candidates.under_deletes),
        small=tuple(candidates.small),
        more_under_deletes=candidates.more_under_deletes,
        more_small=candidates.more_small,
        dangling=dangling,
        data_manifests=tuple(manifests),
        snapshots=snapshots,
        bounds=bounds,
        now_millis=round(site.clock.now().timestamp() * 1000),
        cut=cut,
        erase_below=erase_below,
        blocked=_blocked(state, lake),
    )


def cuts(state: TableState, lake: LakeTable) -> tuple[int, ...]:
    """Where the files of an unpartitioned table end: at the bounds of the Postgres partitions."""
    if lake.layout.transform is not None:
        return ()
    return tuple(sorted({part.upper for part in state.partitions if part.upper is not None}))


def bounds_of(
    site: Site, state: TableState, lake: LakeTable, sequence: dict[int, int], *, ours: Collection[str] = ()
) -> Bounds:
    """What no step may touch."""
    others = [op for op in state.unfinished if op.op_id not in ours and not op.landed]
    pinned = {pin.snapshot_id for pin in state.pins if pin.snapshot_id is not None}
    horizon = [sequence[each] for each in pinned if each in sequence]
    # A pin of a table whose lake was still empty holds everything that came since.
    horizon += [0 for pin in state.pins if pin.snapshot_id is None]
    since = min((op.started_at for op in others), default=None)
    return Bounds(
        pinned=frozenset(pinned),
        horizon=min(horizon, default=None),
        staged=frozenset(staged_files(site, state.table.table_id)),
        kept=frozenset(kept_snapshots(lake, state)),
        in_flight_since=None if since is None else round(since.timestamp() * 1000),
        in_flight=frozenset(op.op_id for op in state.unfinished),
    )


def staged_files(site: Site, table_id: int) -> set[str]:
    """Files of loads that wait for adoption."""
    with site.connect(autocommit=True) as conn:
        rows = conn.execute(_STAGED, (table_id,)).fetchall()
    return {normal(uri) for (files,) in rows for uri in Staged.of(files).uris}


def _erasing(site: Site, table_id: int) -> int | None:
    with site.connect(autocommit=True) as conn:
        row = conn.execute(_ERASING, (table_id,)).fetchone()
    return None if row is None or row[0] is None else int(row[0])


def _blocked(state: TableState, lake: LakeTable) -> str | None:
    if state.table.frozen is not None:
        return "a foreign snapshot has frozen publication"
    if lake.snapshot_id is None:
        return "the lake holds nothing yet"
    return None
