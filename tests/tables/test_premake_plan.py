"""How many partitions are made ahead, and what they are called."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from modak.core.axis import Axis
from modak.tables.premake import partition_name, plan_premake
from tests.tables.builders import grid


def test_two_widths_are_kept_empty_and_a_rerun_makes_none():
    state = grid((0, 100), (100, 200), high_water=150)
    plan = plan_premake(state, ahead=2)
    assert [(p.lower, p.upper) for p in plan.make] == [(200, 300), (300, 400)]
    made = grid((0, 100), (100, 200), (200, 300), (300, 400), high_water=150)
    assert plan_premake(made, ahead=2).make == ()


def test_nothing_is_made_for_an_empty_table_or_when_switched_off():
    assert plan_premake(grid((0, 100)), ahead=2).make == ()
    assert plan_premake(grid((0, 100), high_water=50), ahead=0).make == ()


def test_a_maxvalue_partition_leaves_nothing_to_make():
    assert plan_premake(grid((0, 100), (100, None), high_water=50), ahead=2).make == ()


def test_calendar_months_are_made_as_months():
    axis = Axis.TIMESTAMPTZ
    low, high = axis.of(datetime(2026, 1, 1)), axis.of(datetime(2026, 2, 1))  # noqa: DTZ001
    plan = plan_premake(grid((low, high), high_water=low, axis=axis), ahead=2)
    assert [axis.literal(p.lower) for p in plan.make] == ["2026-02-01 00:00:00+00", "2026-03-01 00:00:00+00"]
    assert [p.name for p in plan.make] == ["events_p20260201", "events_p20260301"]
    assert axis.literal(plan.make[-1].upper) == "2026-04-01 00:00:00+00"


def test_names_stay_unique_and_within_the_limit():
    taken = {"events_p200"}
    assert partition_name("events", 200, Axis.INTEGER, taken) == "events_p200_1"
    assert partition_name("events", -200, Axis.INTEGER, set()) == "events_pm200"
    assert len(partition_name("ä" * 60, 200, Axis.INTEGER, set()).encode()) <= 63


def test_the_width_comes_from_the_topmost_partition():
    state = replace(grid((0, 100), (100, 150), high_water=120))
    assert [(p.lower, p.upper) for p in plan_premake(state, 1).make] == [(150, 200)]
