"""What one tiering pass will do, decided without I/O.

`plan_tiering` picks the contiguous run of partitions above the cut-line that has aged enough; `plan_reclaim` picks
the tiered partitions whose heap copy nobody needs any more; `survey` names everything about the partition grid that
an operator must know. Dry runs print these plans, the runners execute the same values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from modak.core.axis import Axis, TierKey
from modak.core.names import TableName, quote
from modak.core.states import PartitionState

MAX_OPERATION_BYTES = 32 << 30
"""One operation moves at most about this much heap, so that its snapshot does not hold back VACUUM for hours."""

_SEALED = frozenset({PartitionState.SEALING, PartitionState.TIERING})
_IN_LAKE = frozenset({PartitionState.TIERED, PartitionState.DROPPED})


@dataclass(frozen=True, slots=True)
class Partition:
    """A heap partition as the planner sees it; a missing bound is MINVALUE or MAXVALUE."""

    name: str
    lower: TierKey | None
    upper: TierKey | None
    state: PartitionState = PartitionState.HOT
    bytes: int = 0
    rows: int = 0
    is_default: bool = False
    has_rows: bool = False
    diverts: bool = False
    """Whether historical rows that would land in it go to the delta."""
    attached: bool = True
    journaled: tuple[TierKey | None, TierKey | None] | None = None
    """The bounds that it had when it was sealed; nothing while it is hot."""

    @property
    def rebound(self) -> bool:
        """Whether somebody has attached it again with other bounds since it was sealed."""
        return self.journaled is not None and self.journaled != (self.lower, self.upper)

    @property
    def bounded(self) -> bool:
        """Whether both ends are plain values, so that the partition can age."""
        return not self.is_default and self.lower is not None and self.upper is not None


@dataclass(frozen=True, slots=True)
class TableState:
    """Everything a planner may look at, observed at one moment."""

    table: TableName
    axis: Axis
    cut_line: TierKey
    high_water: TierKey | None
    partitions: tuple[Partition, ...]
    keep_heap: bool = False
    frozen: str | None = None
    pinned_cut_lines: tuple[TierKey, ...] = ()


@dataclass(frozen=True, slots=True)
class TieringPlan:
    """What one tiering operation will move. Printed by --dry-run, executed by `run`."""

    table: TableName
    partitions: tuple[Partition, ...]
    cut_from: TierKey
    cut_to: TierKey

    @property
    def bytes(self) -> int:
        """Heap bytes that will be read."""
        return sum(p.bytes for p in self.partitions)

    @property
    def rows(self) -> int:
        """Rows that will move, by Postgres' own estimate."""
        return sum(p.rows for p in self.partitions)


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why nothing will be tiered now, in words for an operator; `alarming` when waiting alone will not help."""

    table: TableName
    reason: str
    alarming: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about the partition grid that somebody should know, by the partition's name where there is one."""

    code: str
    message: str
    partition: str | None = None


@dataclass(frozen=True, slots=True)
class ReclaimPlan:
    """Which tiered partitions leave the heap now, and why the others stay."""

    table: TableName
    drop: tuple[Partition, ...] = ()
    kept: tuple[tuple[Partition, str], ...] = field(default=())


def plan_tiering(state: TableState, lag: int, limit_bytes: int = MAX_OPERATION_BYTES) -> TieringPlan | Blocked:
    """The contiguous run of partitions from the cut-line on that has fallen `lag` behind the high-water mark."""
    if state.frozen:
        return Blocked(state.table, state.frozen, alarming=True)
    chosen: list[Partition] = []
    moved = 0
    for partition in _contiguous(state):
        sealed = partition.state in _SEALED
        if not sealed and not _aged(partition, state.high_water, lag):
            break
        # What is sealed already goes first and together; the limit only keeps more from joining.
        if chosen and not sealed and moved + partition.bytes > limit_bytes:
            break
        chosen.append(partition)
        moved += partition.bytes
    if not chosen:
        return _nothing_ready(state, lag)
    last = chosen[-1].upper
    assert last is not None
    return TieringPlan(state.table, tuple(chosen), state.cut_line, last)


def plan_reclaim(state: TableState, reclaim_lag: int) -> ReclaimPlan:
    """The tiered partitions that have fallen `reclaim_lag` behind and that no pinned reader reads from the heap."""
    drop: list[Partition] = []
    kept: list[tuple[Partition, str]] = []
    for partition in sorted(state.partitions, key=_lower):
        if partition.state is not PartitionState.TIERED or partition.upper is None:
            continue
        if state.keep_heap:
            kept.append((partition, "the table keeps its heap"))
        elif partition.rebound:
            kept.append((partition, "its bounds are no longer those with which it was tiered"))
        elif not _aged(partition, state.high_water, reclaim_lag):
            kept.append((partition, "the reclaim lag has not passed"))
        elif any(pinned < partition.upper for pinned in state.pinned_cut_lines):
            kept.append((partition, "a pinned reader still reads it from the heap"))
        else:
            drop.append(partition)
    return ReclaimPlan(state.table, tuple(drop), tuple(kept))


def survey(state: TableState) -> tuple[Finding, ...]:
    """Gaps, open-ended and DEFAULT partitions, and rows the cut-line has left behind: named, never silently ignored."""
    return tuple(_survey(state))


def _survey(state: TableState) -> Iterator[Finding]:
    for partition in state.partitions:
        if partition.is_default:
            rows = (
                "holds rows that will never be tiered"
                if partition.has_rows
                else "is empty, but rows that land in it stay"
            )
            past = (
                "Historical rows that are inserted go to the delta"
                if partition.diverts
                else "Historical rows stay too, and no read looks here below the cut-line. Let them go to the delta:"
                f" SELECT modak_enable_transparent_writes('{state.table}')"
            )
            yield Finding("grid.default", f"DEFAULT partition {quote(partition.name)} {rows}. {past}.", partition.name)
        elif partition.lower is None:
            yield Finding(
                "grid.minvalue",
                f"Partition {quote(partition.name)} starts at MINVALUE and is not tiered; no read looks here"
                " below the cut-line, and INSERTs of historical rows are refused unless there is a DEFAULT partition."
                " Split it at a value.",
                partition.name,
            )
        elif partition.upper is None:
            yield Finding(
                "grid.maxvalue",
                f"Partition {quote(partition.name)} ends at MAXVALUE: it is not tiered, and premake has nothing to do.",
                partition.name,
            )
        elif partition.rebound and partition.journaled is not None:
            low, high = ("" if end is None else state.axis.literal(end) for end in partition.journaled)
            yield Finding(
                "grid.rebound",
                f"Partition {quote(partition.name)} was tiered as '{low}' to '{high}' and then attached with other"
                " bounds: it stays in the heap, with whatever else was written to it. Move other rows out and attach"
                " it as it was.",
                partition.name,
            )
        elif partition.lower < state.cut_line and partition.state not in _IN_LAKE:
            lies = "lies" if partition.upper <= state.cut_line else "reaches"
            yield Finding(
                "grid.below_cut_line",
                f"Partition {quote(partition.name)} {lies} below the cut-line {state.axis.literal(state.cut_line)}, but"
                " was never tiered; its rows there are not read through the seam. Move them elsewhere and drop it.",
                partition.name,
            )
    if state.keep_heap:
        yield from _not_kept(state)
    yield from _gaps(state)


def _not_kept(state: TableState) -> Iterator[Finding]:
    """A table that keeps its heap loses nothing when somebody takes a tiered partition away, but should know of it."""
    for partition in state.partitions:
        if partition.attached or not partition.bounded or partition.lower is None or partition.upper is None:
            continue
        low, high = state.axis.literal(partition.lower), state.axis.literal(partition.upper)
        if partition.state is PartitionState.DROPPED:
            yield Finding(
                "keep_heap.dropped",
                f"Partition {quote(partition.name)} was dropped although the table keeps its heap: the rows from {low}"
                f" to {high} are in the lake only.",
            )
        else:
            yield Finding(
                "keep_heap.detached",
                f"Partition {quote(partition.name)} was detached although the table keeps its heap: the lake has its"
                f" rows from {low} to {high}. Attach it again, or drop it to write there through the delta.",
                partition.name,
            )


def _gaps(state: TableState) -> Iterator[Finding]:
    cursor = state.cut_line
    for partition in _above(state):
        assert partition.lower is not None
        assert partition.upper is not None
        if partition.lower > cursor:
            low, high = state.axis.literal(cursor), state.axis.literal(partition.lower)
            yield Finding(
                "grid.gap",
                f"There is no partition for {low} to {high}, so nothing from {quote(partition.name)} on can be tiered. "
                f"Create it: CREATE TABLE … PARTITION OF {state.table} FOR VALUES FROM ('{low}') TO ('{high}').",
                partition.name,
            )
        cursor = max(cursor, partition.upper)


def _above(state: TableState) -> list[Partition]:
    bounded = [p for p in state.partitions if p.bounded and p.state not in _IN_LAKE]
    return sorted((p for p in bounded if p.lower is not None and p.lower >= state.cut_line), key=_lower)


def _contiguous(state: TableState) -> Iterator[Partition]:
    cursor = state.cut_line
    for partition in _above(state):
        if partition.lower != cursor or partition.upper is None:
            return
        yield partition
        cursor = partition.upper


def _lower(partition: Partition) -> TierKey:
    return partition.lower if partition.lower is not None else -(2**63)


def _aged(partition: Partition, high_water: TierKey | None, lag: int) -> bool:
    return high_water is not None and partition.upper is not None and partition.upper <= high_water - lag


def _nothing_ready(state: TableState, lag: int) -> Blocked:
    above: Sequence[Partition] = _above(state)
    if not above:
        return Blocked(state.table, "there is no partition above the cut-line")
    first = above[0]
    if first.lower != state.cut_line:
        gaps: Iterable[Finding] = _gaps(state)
        return Blocked(state.table, next(iter(gaps)).message, alarming=True)
    if state.high_water is None:
        return Blocked(state.table, "the table has no rows yet")
    assert first.upper is not None
    missing = first.upper + lag - state.high_water
    return Blocked(
        state.table,
        f"{quote(first.name)} is not old enough: the highest tier key {state.axis.literal(state.high_water)}"
        f" must grow by {state.axis.roughly(missing)}",
    )
