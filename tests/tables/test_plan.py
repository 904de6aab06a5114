"""The tiering planners: pure, so every rule is tested without a database."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from modak.core.axis import Axis
from modak.core.states import PartitionState
from modak.tables.tiering.plan import Blocked, TieringPlan, plan_reclaim, plan_tiering, survey
from tests.tables.builders import grid, part

THREE = ((0, 100), (100, 200), (200, 300))


def names(plan: TieringPlan | Blocked) -> list[str]:
    assert isinstance(plan, TieringPlan), plan
    return [p.name for p in plan.partitions]


def test_two_of_three_partitions_are_old_enough():
    plan = plan_tiering(grid(*THREE, high_water=250), lag=0)
    assert names(plan) == ["p_0", "p_100"]
    assert (plan.cut_from, plan.cut_to) == (0, 200)


def test_the_lag_keeps_a_partition_hot_until_it_has_passed():
    assert names(plan_tiering(grid(*THREE, high_water=250), lag=50)) == ["p_0", "p_100"]
    assert names(plan_tiering(grid(*THREE, high_water=250), lag=51)) == ["p_0"]


def test_what_is_missing_is_told_in_the_words_of_the_tier_key():
    state = replace(grid((0, 7), high_water=5), axis=Axis.DATE)
    plan = plan_tiering(state, lag=3)
    assert isinstance(plan, Blocked)
    assert plan.reason == "p_0 is not old enough: the highest tier key 1970-01-06 must grow by 5d 0h"


def test_a_table_without_rows_waits():
    plan = plan_tiering(grid(*THREE), lag=0)
    assert isinstance(plan, Blocked)
    assert "no rows" in plan.reason
    assert not plan.alarming


def test_a_gap_at_the_cut_line_is_named_with_the_statement_that_mends_it():
    plan = plan_tiering(grid((100, 200), (200, 300), high_water=900), lag=0)
    assert isinstance(plan, Blocked)
    assert plan.alarming
    assert "FROM ('0') TO ('100')" in plan.reason


def test_a_gap_further_up_lets_the_partitions_below_it_go():
    state = grid((0, 100), (200, 300), high_water=900)
    assert names(plan_tiering(state, lag=0)) == ["p_0"]
    assert [f.code for f in survey(state)] == ["grid.gap"]


def test_a_sealed_partition_is_finished_even_when_the_lag_grew():
    state = grid(*THREE, high_water=250, states=(PartitionState.TIERING, PartitionState.SEALING))
    assert names(plan_tiering(state, lag=10_000)) == ["p_0", "p_100"]


def test_one_operation_stays_below_the_byte_limit_but_always_moves_something():
    state = grid(*THREE, high_water=900)
    big = replace(state, partitions=tuple(replace(p, bytes=10) for p in state.partitions))
    assert names(plan_tiering(big, lag=0, limit_bytes=20)) == ["p_0", "p_100"]
    assert names(plan_tiering(big, lag=0, limit_bytes=1)) == ["p_0"]


def test_a_frozen_table_is_not_tiered():
    plan = plan_tiering(grid(*THREE, high_water=900, frozen="a foreign snapshot changed rows"), lag=0)
    assert isinstance(plan, Blocked)
    assert plan.alarming


def test_open_ended_and_default_partitions_are_named():
    state = grid((None, 0), (0, 100), (100, None), high_water=150)
    state = replace(state, partitions=(*state.partitions, part(None, None, is_default=True, has_rows=True)))
    assert {f.code for f in survey(state)} == {"grid.minvalue", "grid.maxvalue", "grid.default"}
    assert names(plan_tiering(state, lag=0)) == ["p_0"]


def test_a_partition_made_below_the_cut_line_is_reported():
    state = grid((0, 100), (100, 200), cut_line=100, high_water=150)
    assert [f.code for f in survey(state)] == ["grid.below_cut_line"]


def test_a_partition_that_straddles_the_cut_line_is_reported():
    state = grid((50, 200), cut_line=100, high_water=150)
    (finding,) = survey(state)
    assert (finding.code, "reaches below the cut-line 100" in finding.message) == ("grid.below_cut_line", True)
    assert not survey(grid((50, 200), cut_line=100, states=(PartitionState.TIERED,)))


def test_a_pin_keeps_the_heap_copy_it_reads():
    tiered = (PartitionState.TIERED, PartitionState.TIERED)
    state = grid(*THREE, cut_line=200, high_water=250, states=tiered)
    assert [p.name for p in plan_reclaim(state, 0).drop] == ["p_0", "p_100"]
    pinned = replace(state, pinned_cut_lines=(100,))
    assert [p.name for p in plan_reclaim(pinned, 0).drop] == ["p_0"]
    assert [reason for _, reason in plan_reclaim(pinned, 0).kept] == ["a pinned reader still reads it from the heap"]


def test_keep_heap_never_drops():
    state = grid(*THREE, cut_line=200, high_water=250, states=(PartitionState.TIERED,), keep_heap=True)
    assert plan_reclaim(state, 0).drop == ()


def test_a_tiered_partition_with_other_bounds_than_then_stays_and_is_named():
    was = part(0, 100, PartitionState.TIERED)
    state = grid((100, 200), high_water=900)
    moved = replace(state, cut_line=100, partitions=(replace(was, journaled=(0, 50)), *state.partitions))
    assert plan_reclaim(moved, reclaim_lag=0).drop == ()
    assert [f.code for f in survey(moved)] == ["grid.rebound"]
    same = replace(moved, partitions=(replace(was, journaled=(0, 100)), *state.partitions))
    assert [p.name for p in plan_reclaim(same, reclaim_lag=0).drop] == ["p_0"]


def test_the_reclaim_lag_is_measured_from_the_high_water_mark():
    state = grid(*THREE, cut_line=200, high_water=250, states=(PartitionState.TIERED, PartitionState.TIERED))
    assert [p.name for p in plan_reclaim(state, 100).drop] == ["p_0"]


@given(
    cuts=st.sets(st.integers(-1000, 1000), min_size=2, max_size=12),
    drop=st.sets(st.integers(0, 11)),
    high=st.integers(-1500, 1500),
    lag=st.integers(0, 500),
)
def test_a_plan_is_always_contiguous_from_the_cut_line_and_old_enough(
    cuts: set[int], drop: set[int], high: int, lag: int
) -> None:
    edges = sorted(cuts)
    bounds = [pair for i, pair in enumerate(itertools.pairwise(edges)) if i not in drop]
    plan = plan_tiering(grid(*bounds, cut_line=edges[0], high_water=high), lag)
    if isinstance(plan, Blocked):
        return
    cursor = edges[0]
    for partition in plan.partitions:
        assert partition.lower == cursor
        assert partition.upper is not None
        assert partition.upper <= high - lag
        cursor = partition.upper
    assert plan.cut_to == cursor
