"""How far the retention line R may move now, decided without I/O.

`plan_retention` takes the largest bound of the partition grid that lies the table's lake retention behind the cut-line,
and no further than a living heap partition or a staged load. `fit` then lowers it to a bound at which every lake file
lies wholly on one side, because retention removes whole files and rewrites none. The result is a plan or the reason to
wait. Memory is bounded by one pair of numbers per lake file of the range that expires.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

from modak.catalog.records import TableRecord, TableState
from modak.core.axis import Axis, TierKey, Width
from modak.core.names import TableName, quote

RETENTION_LINE = "modak.retention-line"
"""Lake table property: R as of this metadata, so that a foreign reader knows where the lake begins."""
Span = tuple[TierKey, TierKey]
"""The lowest and the highest tier key of a file."""

_HOUR = 3_600_000_000
_DAY = 24 * _HOUR


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """Lake rows below `to` expire; `bands` are the stretches of the grid that go, oldest first."""

    table: TableName
    start: TierKey | None
    to: TierKey
    bands: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why the retention line stays; `held` when something stands in the way of what is due already."""

    table: TableName
    reason: str
    held: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """The bounds at which R may stand: those of the Postgres partitions, and whole widths from the nearest of them."""

    axis: Axis
    width: Width
    bounds: tuple[TierKey, ...]

    def at_or_below(self, key: TierKey) -> TierKey | None:
        """The largest bound that is not above `key`; none when the grid begins above it."""
        place = bisect_right(self.bounds, key)
        if not place:
            return None
        anchor = self.bounds[place - 1]
        if not self.width.months:
            return anchor + (key - anchor) // self.width.amount * self.width.amount
        while (following := self.width.after(anchor, self.axis)) <= key:
            anchor = following
        return anchor

    def bands(self, lower: TierKey, upper: TierKey) -> tuple[Span, ...]:
        """The stretches from one bound to another, oldest first."""
        found: list[Span] = []
        while upper > lower:
            below = self.at_or_below(upper - 1)
            start = lower if below is None else max(below, lower)
            found.append((start, upper))
            upper = start
        return tuple(reversed(found))


def plan_retention(state: TableState, staged_from: TierKey | None = None) -> RetentionPlan | Waiting:
    """The farthest that R may go: aligned to the grid, never past living heap rows or a staged load, never under a pin.

    `staged_from` is the lowest tier key that a staged load will bring.
    """
    record, line = state.table, state.cutline
    if record.lake_retention is None or record.width is None:
        return Waiting(record.name, "the table keeps its lake rows for ever")
    grid = grid_of(state, record.width)
    wanted = None if line.t is None else grid.at_or_below(line.t - record.lake_retention)
    if wanted is None or not _passes(wanted, state):
        return Waiting(record.name, "no row of the lake is old enough")
    held = _held(state, staged_from)
    if held is not None and held[0] < wanted:
        wanted = grid.at_or_below(held[0])
        if wanted is None or not _passes(wanted, state):
            return Waiting(record.name, held[1], held=True)
    if record.frozen is not None or state.pins:
        why = "a reader holds a pin" if state.pins else "a foreign snapshot has frozen publication"
        return Waiting(record.name, why, held=True)
    return _planned(state, grid, wanted)


def fit(plan: RetentionPlan, state: TableState, spans: Iterable[Span]) -> RetentionPlan | Waiting:
    """The plan, lowered to a bound that divides no lake file; `spans` are those of the files that begin below it."""
    width = state.table.width
    assert width is not None
    grid = grid_of(state, width)
    to: TierKey | None = plan.to
    # From the top down: a file that reaches over the bound pushes it to the file's beginning, where the next may reach
    # over it. One pass is enough, because files that end lower cannot reach over what is still higher.
    for lower, upper in sorted(spans, key=lambda span: span[1], reverse=True):
        if to is None or upper < to:
            break
        if lower < to:
            to = _below(lower, grid, state.table)
    if to is None or not _passes(to, state):
        return Waiting(plan.table, "a lake file reaches over every bound that is due", held=True)
    return plan if to == plan.to else _planned(state, grid, to)


def grid_of(state: TableState, width: Width) -> Grid:
    """The grid of a table: dropped partitions count, and its first floor where nothing older is known."""
    bounds = {bound for part in state.partitions for bound in (part.lower, part.upper) if bound is not None}
    if state.cutline.first_floor is not None:
        bounds.add(state.cutline.first_floor)
    return Grid(state.table.axis, width, tuple(sorted(bounds)))


def _planned(state: TableState, grid: Grid, to: TierKey) -> RetentionPlan:
    line = state.cutline
    lower = line.retention_line if line.retention_line is not None else line.first_floor
    bands = () if lower is None else grid.bands(lower, to)
    return replace(RetentionPlan(state.table.name, line.retention_line, to), bands=bands)


def _passes(key: TierKey, state: TableState) -> bool:
    """Whether R at `key` would be a move; at the first floor there is nothing below it yet."""
    line = state.cutline
    floor = line.retention_line if line.retention_line is not None else line.first_floor
    return floor is None or key > floor


def _held(state: TableState, staged_from: TierKey | None) -> tuple[TierKey, str] | None:
    """The lowest tier key that must not expire, and in whose favour."""
    least = -(2**63)
    held = [
        (
            least if part.lower is None else part.lower,
            f"partition {quote(part.name)} still has its rows in the heap",
        )
        for part in state.living()
    ]
    if staged_from is not None:
        held.append((staged_from, "a staged load waits for its adoption"))
    return min(held, default=None)


def _below(key: TierKey, grid: Grid, record: TableRecord) -> TierKey | None:
    """The next bound for R at or below a file's beginning.

    Buckets of the lake need not begin where partitions do, and a compaction merges files within a bucket: so a bucket's
    beginning is a bound too, or R could stay behind for ever.
    """
    found = [bound for bound in (grid.at_or_below(key), _bucket(key, record)) if bound is not None]
    return max(found, default=None)


def _bucket(key: TierKey, record: TableRecord) -> TierKey | None:
    """Where the lake partition of a tier key begins."""
    width = record.layout.get("width")
    match record.layout.get("transform"):
        case "truncate" if width:
            return key - key % int(width)
        case "hour":
            return key - key % _HOUR
        case "day":
            return key - key % (_DAY // record.axis.unit)
        case "month" | "year" as unit:
            try:
                moment = record.axis.moment(key)
            except OverflowError:
                return None
            first = moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
            return record.axis.of(first.replace(month=1) if unit == "year" else first)
        case _:
            return None
