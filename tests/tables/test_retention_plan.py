"""How far the retention line may move, without any database."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import UTC, date, datetime
from typing import Any

import pytest

from modak.catalog.records import Cutline, PartitionRecord, Pin, TableRecord, TableState
from modak.core.axis import Axis, Width
from modak.core.names import TableName
from modak.core.states import PartitionState
from modak.lake.model import LakeName
from modak.tables.retention.plan import RetentionPlan, Waiting, fit, plan_retention

NAME = TableName("public", "events")
WIDTH = Width(100)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
DROPPED, TIERED, HOT = PartitionState.DROPPED, PartitionState.TIERED, PartitionState.HOT


def part(lower: int | None, upper: int | None, state: PartitionState) -> PartitionRecord:
    return PartitionRecord(
        name=f"events_{lower}",
        lower=lower,
        upper=upper,
        leaf_oid=1,
        leaf_schema="public",
        state=state,
        partition_id=1,
        table_id=1,
        trigger_oid=None,
        updated_at=NOW,
    )


def table(
    bounds: list[int],
    t: int,
    retention: int | None,
    *,
    living: int | None = None,
    line: int | None = None,
    axis: Axis = Axis.INTEGER,
    width: Width = WIDTH,
    layout: dict[str, Any] | None = None,
    pins: int = 0,
) -> TableState:
    """A table with partitions between the bounds; those from `living` on (or the cut-line) are in the heap."""
    stands = t if living is None else living
    spans = itertools.pairwise(bounds)
    partitions = [part(low, up, DROPPED if low < stands else TIERED if low < t else HOT) for low, up in spans]
    record = TableRecord(
        name=NAME,
        relid=1,
        mode="tiered",
        pk_columns=("id",),
        pk_attnums=(1,),
        tier_key="ts",
        tier_attnum=2,
        axis=axis,
        width=width,
        profile_id=1,
        lake=LakeName(("modak", "public"), "events"),
        location="file:///lake/events",
        layout={"transform": "truncate", "width": 100, "column": "ts"} if layout is None else layout,
        lake_retention=retention,
        table_id=1,
        maintenance_policy={},
        frozen=None,
        created_at=NOW,
    )
    pin = Pin(
        pin_id=1,
        table_id=1,
        snapshot_id=1,
        t=t,
        retention_line=line,
        metadata_location="m",
        created_at=NOW,
        expires_at=NOW,
        holder="somebody",
    )
    cutline = Cutline(table_id=1, t=t, snapshot_id=1, metadata_location="m", retention_line=line, first_floor=bounds[0])
    return TableState(
        table=record,
        cutline=cutline,
        partitions=tuple(partitions),
        pins=(pin,) * pins,
        unfinished=(),
    )


GRID = [0, 100, 200, 300, 400, 500]


def test_the_line_is_the_largest_bound_that_lies_the_retention_behind_the_cut_line() -> None:
    assert plan_retention(table(GRID, 200, 50)) == RetentionPlan(NAME, None, 100, ((0, 100),))
    assert plan_retention(table(GRID, 400, 100, line=100)) == RetentionPlan(NAME, 100, 300, ((100, 200), (200, 300)))


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (table(GRID, 200, None), "for ever"),
        (table(GRID, 200, 150), "old enough"),
        (table(GRID, 200, 50, line=100), "old enough"),
        (table(GRID, 200, 5000), "old enough"),
    ],
)
def test_without_anything_due_it_stays_and_nothing_holds_it(state: TableState, why: str) -> None:
    plan = plan_retention(state)
    assert isinstance(plan, Waiting)
    assert why in plan.reason
    assert not plan.held


def test_a_partition_that_stands_in_the_heap_holds_it_at_its_lower_bound() -> None:
    assert plan_retention(table(GRID, 400, 50, living=200)) == RetentionPlan(NAME, None, 200, ((0, 100), (100, 200)))
    held = plan_retention(table(GRID, 400, 50, living=200, line=200))
    assert held == Waiting(NAME, "partition events_200 still has its rows in the heap", held=True)
    open_below = table(GRID, 400, 50)
    open_below = replace(open_below, partitions=(part(None, 0, HOT), *open_below.partitions))
    assert isinstance(plan_retention(open_below), Waiting)


def test_a_staged_load_holds_it_below_its_first_row() -> None:
    assert plan_retention(table(GRID, 400, 50), staged_from=250) == RetentionPlan(
        NAME, None, 200, ((0, 100), (100, 200))
    )
    held = plan_retention(table(GRID, 400, 50), staged_from=7)
    assert held == Waiting(NAME, "a staged load waits for its adoption", held=True)
    assert plan_retention(table(GRID, 400, 50), staged_from=390).to == 300  # type: ignore[union-attr]


def test_a_pin_or_a_frozen_table_defers_what_is_due() -> None:
    assert plan_retention(table(GRID, 400, 50, pins=1)) == Waiting(NAME, "a reader holds a pin", held=True)
    frozen = table(GRID, 400, 50)
    frozen = replace(frozen, table=replace(frozen.table, frozen={"snapshot": 1}))
    assert isinstance(plan_retention(frozen), Waiting)
    assert plan_retention(table(GRID, 200, 150, pins=1)) == Waiting(NAME, "no row of the lake is old enough")


def test_the_grid_is_that_of_the_partitions_not_of_zero() -> None:
    assert plan_retention(table([50, 150, 250, 350], 350, 60)).to == 250  # type: ignore[union-attr]
    assert plan_retention(table([-250, -150, -50, 50], 50, 60)).to == -50  # type: ignore[union-attr]


def test_where_partitions_are_no_longer_known_the_grid_goes_on_by_widths_from_the_floor() -> None:
    later = table([1000, 1100, 1200], 1100, 430)
    later = replace(later, cutline=replace(later.cutline, first_floor=30))
    assert plan_retention(later).to == 630  # type: ignore[union-attr]


def months(*starts: tuple[int, int]) -> list[int]:
    return [Axis.DATE.of(date(year, month, 1)) for year, month in starts]


def test_calendar_months_are_widths() -> None:
    bounds = months((2025, 1), (2025, 2), (2025, 3), (2025, 4), (2025, 5))
    state = table(
        bounds, bounds[3], 40, axis=Axis.DATE, width=Width(1, months=True), layout={"transform": "month", "width": None}
    )
    assert plan_retention(state) == RetentionPlan(NAME, None, bounds[1], ((bounds[0], bounds[1]),))
    unknown = replace(state, partitions=())
    assert plan_retention(unknown) == RetentionPlan(NAME, None, bounds[1], ((bounds[0], bounds[1]),))


def test_a_file_that_reaches_over_the_bound_lowers_it_to_where_files_are_whole() -> None:
    state = table(GRID, 400, 50)
    plan = plan_retention(state)
    assert isinstance(plan, RetentionPlan)
    assert fit(plan, state, [(0, 99), (100, 199), (200, 299), (300, 350)]) == plan
    assert fit(plan, state, [(0, 99), (100, 199), (200, 310)]).to == 200  # type: ignore[union-attr]
    assert fit(plan, state, [(0, 99), (120, 230), (210, 310)]).to == 100  # type: ignore[union-attr]
    assert fit(plan, state, []) == plan
    waiting = fit(plan, state, [(0, 99), (50, 230), (210, 310)])
    assert waiting == Waiting(NAME, "a lake file reaches over every bound that is due", held=True)
    assert isinstance(fit(plan, state, [(-(2**63), 2**63 - 1)]), Waiting)


def test_lake_buckets_that_begin_elsewhere_than_partitions_do_not_hold_the_line_for_ever() -> None:
    state = table([50, 150, 250, 350], 350, 60)
    plan = plan_retention(state)
    assert isinstance(plan, RetentionPlan)
    assert plan.to == 250
    merged = [(50, 99), (100, 199), (200, 299)]
    assert fit(plan, state, merged).to == 200  # type: ignore[union-attr]
    done = replace(state, cutline=replace(state.cutline, retention_line=200))
    assert isinstance(fit(plan, done, merged[2:]), Waiting)


@pytest.mark.parametrize(
    ("transform", "axis", "start"),
    [
        ("hour", Axis.TIMESTAMPTZ, datetime(2025, 3, 4, 5, tzinfo=UTC)),
        ("day", Axis.TIMESTAMPTZ, datetime(2025, 3, 4, tzinfo=UTC)),
        ("day", Axis.DATE, date(2025, 3, 4)),
        ("month", Axis.TIMESTAMP, datetime(2025, 3, 1, tzinfo=UTC)),
        ("year", Axis.DATE, date(2025, 1, 1)),
    ],
)
def test_a_bucket_of_time_begins_in_utc(transform: str, axis: Axis, start: date) -> None:
    beginning = axis.of(start)
    inside = axis.of(datetime(2025, 3, 4, 5, 30, tzinfo=UTC))
    year = axis.of(date(2027, 1, 1)) - axis.of(date(2026, 1, 1))
    floor = axis.of(date(1999, 1, 1))
    state = table(
        [floor, inside + year],
        inside + 2 * year,
        year,
        axis=axis,
        width=Width(50 * year),
        layout={"transform": transform},
    )
    plan = plan_retention(state)
    assert isinstance(plan, RetentionPlan)
    assert fit(plan, state, [(inside, plan.to)]).to == beginning  # type: ignore[union-attr]
