"""What one fold will take out of the delta: which rows, in which shares, and where the work is done. Pure.

The survey (`survey.py`) walks the unfolded rows of [R, T) in the order of their tier keys, up to one batch, and leaves
a mark every so many rows; the planner turns marks into ranges. A thousand corrections are folded in this process,
because starting Spark tasks would take longer than the work; a million are worth them.
"""

from __future__ import annotations

from dataclasses import dataclass

from modak.catalog.records import DeltaRange, TableState
from modak.core.axis import TierKey
from modak.core.names import TableName
from modak.core.states import PartitionState
from modak.postgres.changes.lsn import read_lsn

DRIVER_ROWS = 20_000
"""Up to so many corrections the driver reads by itself: a tenth of a second, which is what one Spark task costs."""
DRIVER_LAKE_ROWS = 4_000_000
"""Up to so many lake rows the driver looks through by itself, for the same reason."""
SHARE_ROWS = 500_000
"""A task's share: more rows would leave cores without work at the end, fewer would not be worth a task."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A row of the backlog by its number (from 1) and place. No key text: the survey looked at tier keys only."""

    number: int
    tier_key: TierKey
    pk: str | None = None


@dataclass(frozen=True, slots=True)
class Backlog:
    """The head of what waits to be folded: first and last row always have a mark, rows in between at equal steps."""

    marks: tuple[Mark, ...]
    more: bool
    """The last mark is the first row that does not fit into the batch any more."""

    @property
    def undecided(self) -> bool:
        """Whether tier keys alone cannot tell the batch from the rest: one of them has more rows than a batch."""
        return self.more and self.marks[-1].pk is None and self.marks[-1].tier_key == self.marks[0].tier_key


@dataclass(frozen=True, slots=True)
class FoldPlan:
    """One commit's worth of corrections. Printed by --dry-run, executed by `run`."""

    table: TableName
    rows: int
    """At most so many; exact unless the batch ends between rows of one tier key."""
    shares: tuple[DeltaRange, ...]
    more: bool
    in_driver: bool

    @property
    def whole(self) -> DeltaRange:
        """All shares as one range."""
        first, last = self.shares[0], self.shares[-1]
        return DeltaRange(first.lower, last.upper, first.lower_pk, last.upper_pk)

    @property
    def cut_to(self) -> TierKey:
        """The end, exclusive, of the tier keys that the batch can hold."""
        return self.whole.upper + (self.whole.upper_pk is not None)


def foldable_below(state: TableState) -> TierKey | None:
    """The tier key below which corrections may go into the lake: the cut-line.

    A mirrored table brings the WAL of a leaf until it is dropped, and could lay an older image over a newer one that
    was folded; so its corrections wait until F has passed the drop.
    """
    line = state.cutline
    if line.t is None or state.table.mode == "tiered":
        return line.t
    frontier = -1 if line.frontier is None else read_lsn(line.frontier)
    here = [
        part.lower
        for part in state.partitions
        if part.lower is not None
        and (
            part.state is not PartitionState.DROPPED
            or part.dropped_lsn is None
            or read_lsn(part.dropped_lsn) > frontier
        )
    ]
    return min([*here, line.t])


def plan_fold(table: TableName, backlog: Backlog, cores: int) -> FoldPlan | None:
    """The next batch, cut into shares; nothing when nothing waits."""
    if not backlog.marks:
        return None
    first, last = backlog.marks[0], backlog.marks[-1]
    rows = last.number - backlog.more
    if backlog.undecided:
        raise ValueError("a batch within one tier key needs marks with key texts")
    upper, upper_pk = (last.tier_key, last.pk) if backlog.more else (last.tier_key + 1, None)
    shares = 1 if rows <= DRIVER_ROWS else max(cores, -(-rows // SHARE_ROWS))
    cuts = _cuts(backlog, rows, shares)
    lowers: list[tuple[TierKey, str | None]] = [(first.tier_key, None), *((cut.tier_key, cut.pk) for cut in cuts)]
    uppers = [*lowers[1:], (upper, upper_pk)]
    ranges = (
        DeltaRange(low, high, low_pk, high_pk)
        for (low, low_pk), (high, high_pk) in zip(lowers, uppers, strict=True)
        if (low, low_pk or "") < (high, high_pk or "")
    )
    return FoldPlan(table, rows, tuple(ranges), backlog.more, rows <= DRIVER_ROWS)


def _cuts(backlog: Backlog, rows: int, shares: int) -> list[Mark]:
    """The marks nearest to equal shares, each place once and none at the ends."""
    first, last = backlog.marks[0], backlog.marks[-1]
    inner = [mark for mark in backlog.marks[1:-1] if mark.tier_key > first.tier_key or mark.pk is not None]
    if backlog.more:
        inner = [mark for mark in inner if (mark.tier_key, mark.pk or "") < (last.tier_key, last.pk or "")]
    cuts: list[Mark] = []
    for share in range(1, shares):
        if not inner:
            break
        wanted = rows * share // shares
        nearest = min(inner, key=lambda mark: abs(mark.number - wanted))
        if not cuts or (nearest.tier_key, nearest.pk or "") > (cuts[-1].tier_key, cuts[-1].pk or ""):
            cuts.append(nearest)
    return cuts
