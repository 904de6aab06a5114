"""Builders for planner tests: a table state in one line."""

from __future__ import annotations

from modak.core.axis import Axis
from modak.core.names import TableName
from modak.core.states import PartitionState
from modak.tables.tiering.plan import Partition, TableState

EVENTS = TableName("public", "events")


def part(lower: int | None, upper: int | None, state: PartitionState = PartitionState.HOT, **more: object) -> Partition:
    return Partition(f"p_{lower}", lower, upper, state, **more)  # type: ignore[arg-type]


def grid(
    *bounds: tuple[int | None, int | None],
    cut_line: int = 0,
    high_water: int | None = None,
    states: tuple[PartitionState, ...] = (),
    axis: Axis = Axis.INTEGER,
    **more: object,
) -> TableState:
    known = states + (PartitionState.HOT,) * (len(bounds) - len(states))
    partitions = tuple(part(low, high, state) for (low, high), state in zip(bounds, known, strict=True))
    return TableState(EVENTS, axis, cut_line, high_water, partitions, **more)  # type: ignore[arg-type]
