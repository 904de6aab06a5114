"""Which corrections one commit takes, and how they are shared out: decided without any I/O."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modak.catalog.records import DeltaRange
from modak.core.names import TableName
from modak.tables.fold.debt import debt_level, debt_problem
from modak.tables.fold.plan import DRIVER_ROWS, Backlog, FoldPlan, Mark, plan_fold

EVENTS = TableName("public", "events")


def marks(rows: list[tuple[int, str]], batch: int, step: int, *, with_pk: bool) -> Backlog:
    """What the survey would see of these rows, which are in order."""
    seen = rows[: batch + 1]
    chosen = [at for at in range(len(seen)) if at % step == 0 or at == len(seen) - 1]
    found = tuple(Mark(at + 1, seen[at][0], seen[at][1] if with_pk else None) for at in chosen)
    return Backlog(found, more=len(seen) > batch)


def inside(row: tuple[int, str], share: DeltaRange) -> bool:
    after = row[0] > share.lower or (row[0] == share.lower and (share.lower_pk is None or row[1] >= share.lower_pk))
    before = row[0] < share.upper or (row[0] == share.upper and share.upper_pk is not None and row[1] < share.upper_pk)
    return after and before


def test_nothing_waits_nothing_is_planned() -> None:
    assert plan_fold(EVENTS, Backlog((), more=False), 2) is None


def test_a_few_corrections_are_folded_in_this_process() -> None:
    backlog = Backlog((Mark(1, 5), Mark(3, 170)), more=False)
    assert plan_fold(EVENTS, backlog, 8) == FoldPlan(EVENTS, 3, (DeltaRange(5, 171),), more=False, in_driver=True)


def test_many_corrections_give_every_core_a_share() -> None:
    step = 10_000
    backlog = Backlog(tuple(Mark(n + 1, n * 3) for n in range(0, 100_001, step)), more=False)
    plan = plan_fold(EVENTS, backlog, 4)
    assert plan is not None
    assert not plan.in_driver
    assert len(plan.shares) == 4
    assert plan.whole == DeltaRange(0, 300_001)
    assert [share.lower for share in plan.shares[1:]] == [share.upper for share in plan.shares[:-1]]


def test_a_batch_ends_before_the_first_row_that_does_not_fit() -> None:
    plan = plan_fold(EVENTS, Backlog((Mark(1, 5), Mark(11, 80)), more=True), 2)
    assert plan is not None
    assert (plan.rows, plan.whole, plan.more, plan.cut_to) == (10, DeltaRange(5, 80), True, 80)


def test_a_tier_key_with_more_rows_than_a_batch_is_cut_by_key() -> None:
    with pytest.raises(ValueError, match="key texts"):
        plan_fold(EVENTS, Backlog((Mark(1, 5), Mark(11, 5)), more=True), 2)
    plan = plan_fold(EVENTS, Backlog((Mark(1, 5, "a"), Mark(11, 5, "k")), more=True), 2)
    assert plan is not None
    assert plan.whole == DeltaRange(5, 5, None, "k")
    assert plan.cut_to == 6


@given(
    rows=st.sets(st.tuples(st.integers(0, 6), st.text("abc", max_size=3)), min_size=1, max_size=60),
    batch=st.integers(1, 40),
    step=st.integers(1, 10),
    cores=st.integers(1, 5),
)
def test_shares_take_every_row_of_the_batch_once_and_never_more_than_fit(
    rows: set[tuple[int, str]], batch: int, step: int, cores: int
) -> None:
    ordered = sorted(rows)
    backlog = marks(ordered, batch, step, with_pk=False)
    if backlog.undecided:
        backlog = marks(ordered, batch, step, with_pk=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("modak.tables.fold.plan.DRIVER_ROWS", 3)
        plan = plan_fold(EVENTS, backlog, cores)
    assert plan is not None
    taken = [row for row in ordered if inside(row, plan.whole)]
    assert taken == ordered[: len(taken)]
    assert 0 < len(taken) <= min(batch, plan.rows)
    assert plan.more or taken == ordered
    for row in taken:
        assert sum(inside(row, share) for share in plan.shares) == 1
    assert plan.cut_to > taken[-1][0]


def test_debt_is_told_from_the_limit_on_and_is_an_error_at_four_times_as_much() -> None:
    assert [debt_level(rows, 100) for rows in (0, 99, 100, 399, 400)] == [None, None, "warning", "warning", "error"]
    assert debt_problem(99, 100) is None
    assert debt_problem(4_000, 100) == "4,000 corrections wait to be folded (error from 400)"


def test_the_driver_takes_what_a_spark_task_would_only_delay() -> None:
    step = DRIVER_ROWS
    small = plan_fold(EVENTS, Backlog((Mark(1, 0), Mark(DRIVER_ROWS, 9)), more=False), 2)
    large = plan_fold(EVENTS, Backlog((Mark(1, 0), Mark(step, 5), Mark(DRIVER_ROWS + 1, 9)), more=False), 2)
    assert small is not None
    assert large is not None
    assert (small.in_driver, large.in_driver) == (True, False)
