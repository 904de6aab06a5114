"""Columns whose values somebody writes anew in the heap, of which the change stream says nothing."""

from __future__ import annotations

import pytest

from modak.core import faults
from modak.core.errors import Refused
from modak.core.faults import Fault, InjectedFault
from modak.runtime.leader import Leader
from modak.tables.mirror import copy
from modak.tables.mirror.altered import was_altered
from modak.tables.mirror.reanchor import reanchor
from modak.tables.site import Site
from tests.mirror.test_heap_retention import retired
from tests.mirror.things import Things
from tests.mirror.world import Make

COLUMNS = "id bigint PRIMARY KEY, ts bigint NOT NULL, n int, d numeric(8,2)"
ROWS = "SELECT i, i, i, i FROM generate_series(1, 100) AS i"
ANEW = "a column was written anew"


def _traces(columns: dict[str, int], files: dict[str, int]) -> dict[str, dict[str, int]]:
    return {"columns": columns, "files": files}


def test_only_another_file_and_a_touched_column_together_tell_of_an_alteration() -> None:
    known = _traces({"1": 5, "2": 5}, {"10": 11})
    assert not was_altered(None, known)
    assert not was_altered(known, _traces({"1": 5, "2": 5}, {"10": 12}))
    assert not was_altered(known, _traces({"1": 5, "2": 6}, {"10": 11}))
    assert not was_altered(known, _traces({"1": 5, "2": 6}, {}))
    assert not was_altered(known, _traces({"1": 5, "3": 6}, {"10": 12}))
    assert was_altered(known, _traces({"1": 5, "2": 6}, {"10": 12}))
    assert was_altered(known, _traces({"1": 5, "2": 6}, {"10": 11, "20": 21}))


@pytest.mark.parametrize(
    "change",
    [
        "ALTER n TYPE bigint USING n * 100",
        "ALTER n TYPE int USING n * 1000",
        "ALTER d TYPE numeric(12,2) USING d + 1",
    ],
)
@pytest.mark.parametrize("looked", [True, False])
def test_values_that_were_written_anew_are_compared(make: Make, change: str, looked: bool) -> None:
    table = make(columns=COLUMNS, rows=ROWS)
    if looked:
        table.pump()
        assert table.cycle().noted == ()
    table.sql("UPDATE @ SET n = 7 WHERE id = 1", f"ALTER TABLE @ {change}", "UPDATE @ SET n = 8 WHERE id = 2")
    assert table.cycles() == [ANEW]
    assert table.is_same()


def test_another_text_of_the_same_values_is_compared(make: Make) -> None:
    table = make(
        columns="id bigint PRIMARY KEY, ts bigint NOT NULL, doc json",
        rows='SELECT i, i, \'{"b":1, "a":2}\' FROM generate_series(1, 20) AS i',
    )
    table.sql("ALTER TABLE @ ALTER doc TYPE jsonb", "UPDATE @ SET doc = '{}' WHERE id = 2")
    assert table.cycles() == [ANEW]
    assert [row["doc"] for row in table.lake()[:3]] == ['{"a": 2, "b": 1}', "{}", '{"a": 2, "b": 1}']


def test_a_type_that_was_changed_back_within_a_batch_leaves_nothing_behind(make: Make) -> None:
    table = make(columns=COLUMNS, rows=ROWS)
    table.sql(
        "UPDATE @ SET n = 7 WHERE id = 1",
        "ALTER TABLE @ ALTER n TYPE text USING 'n' || n",
        "UPDATE @ SET n = 'n8' WHERE id = 2",
        "ALTER TABLE @ ALTER n TYPE int USING substr(n, 2)::int",
        "UPDATE @ SET n = 9 WHERE id = 3",
    )
    table.cycles()
    assert table.is_same()


@pytest.mark.parametrize(
    "changes",
    [
        ("ALTER TABLE @ ADD COLUMN c int",),
        ("ALTER TABLE @ ADD COLUMN c int DEFAULT 5", "ALTER TABLE @ DROP COLUMN d"),
        ("ALTER TABLE @ RENAME COLUMN d TO e",),
        ("ALTER TABLE @ ALTER d TYPE numeric(12,2)",),
        ("VACUUM FULL @",),
        ("TRUNCATE @",),
    ],
)
def test_what_writes_no_value_anew_is_not_compared(make: Make, changes: tuple[str, ...]) -> None:
    table = make(columns=COLUMNS, rows=ROWS)
    table.sql(*changes, "INSERT INTO @ (id, ts) VALUES (1000, 1)")
    assert table.cycles() == []
    assert table.is_same()


def test_values_that_are_written_anew_while_an_interrupted_copy_waits_are_compared(
    site: Site, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy.cutting, "TASKS_PER_COMMIT", 0.01)
    things = Things.plain(site, 3000)
    things.sql("ALTER TABLE public.things ADD COLUMN n int")
    things.sql("UPDATE public.things SET n = id")
    monkeypatch.setattr(copy, "_waves", lambda runs, _: [[run] for run in runs])
    faults.arm(Fault("copy.committed"))
    with pytest.raises(InjectedFault):
        things.register(chunk_rows=100)
    faults.arm(None)
    things.sql("ALTER TABLE public.things ALTER n TYPE int USING n * 1000")
    things.register(chunk_rows=100)
    for _ in range(3):
        things.cycle(leader)
        things.sql("UPDATE public.things SET body = body || '!' WHERE id = 1")
        things.pump(leader)
    things.cycle(leader)
    assert things.lake() == things.heap()


VISITED = {"mirror.before_altered", "mirror.after_altered"}


@pytest.mark.parametrize("point", sorted(VISITED))
def test_after_a_crash_while_an_alteration_is_noted_it_is_compared(make: Make, point: str) -> None:
    table = make(columns=COLUMNS, rows=ROWS)
    table.sql("ALTER TABLE @ ALTER n TYPE int USING n * 1000")
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        table.cycle()
    faults.arm(None)
    table.cycles()
    assert table.is_same()


@pytest.fixture
def aged(site: Site, leader: Leader) -> Things:
    """Rows 0…299 have left the heap, 300…449 are there."""
    things = Things.ranged(site, 450, partitions=5)
    things.sql("ALTER TABLE public.things ADD COLUMN n int")
    things.sql("UPDATE public.things SET n = id")
    things.register(heap_retention="100")
    retired(things, leader)
    things.pump(leader)
    return things


def test_a_type_that_would_empty_what_left_the_heap_is_refused_until_it_is_changed_back(
    aged: Things, leader: Leader
) -> None:
    before = aged.lake()
    aged.sql("ALTER TABLE public.things ALTER n TYPE text USING 'n' || n")
    aged.sql("UPDATE public.things SET n = 'n5' WHERE id = 400")
    for _ in range(2):
        with pytest.raises(Refused) as refused:
            aged.pump(leader)
        assert refused.value.code == "evolve.type_changed"
    with pytest.raises(Refused):
        reanchor(aged.site, leader.epoch, aged.state.table)
    assert aged.lake() == before
    aged.sql("ALTER TABLE public.things ALTER n TYPE int USING substr(n, 2)::int")
    aged.sql("UPDATE public.things SET body = 'after' WHERE id = 401")
    for _ in range(2):
        aged.pump(leader)
        aged.cycle(leader)
    expected = {row for row in before if row[1] < 300} | set(aged.heap())
    assert (400, 400, "row 400", 5) in expected
    assert set(aged.lake()) == expected


def test_a_column_written_anew_is_compared_before_more_leaves_the_heap(aged: Things, leader: Leader) -> None:
    before = aged.lake()
    aged.sql("ALTER TABLE public.things ALTER n TYPE int USING n * 1000")
    rewritten = {row for row in aged.heap() if row[1] >= 300}
    # The next partition is due, and its comparison not yet.
    aged.add_partition(500)
    aged.sql("INSERT INTO public.things SELECT i, i, 'row ' || i, i FROM generate_series(500, 550) AS i")
    assert ANEW in aged.cycle(leader).noted
    for _ in range(4):
        aged.pump(leader)
        aged.cycle(leader)
        aged.sql("UPDATE public.things SET body = body || '!' WHERE id = 550")
    aged.pump(leader)
    assert aged.state.cutline.t == 400
    lake = set(aged.lake())
    assert {row for row in before if row[1] < 300} | rewritten <= lake
    assert set(aged.heap()) <= lake


@pytest.mark.spark
def test_rows_that_left_the_heap_get_a_default_that_differs_from_row_to_row(aged: Things, leader: Leader) -> None:
    aged.sql("ALTER TABLE public.things ADD COLUMN r int NOT NULL DEFAULT (1 + random() * 1000)::int")
    aged.sql("UPDATE public.things SET body = 'after' WHERE id = 401")
    for _ in range(3):
        aged.pump(leader)
        aged.cycle(leader)
    lake = aged.lake()
    assert len(lake) == 450
    assert all(row[4] is not None for row in lake)
    assert len({row[4] for row in lake if row[1] < 300}) > 50
    assert set(aged.heap()) <= set(lake)
