"""The first copy: chunks, commits, interruption and healing, in this process and in Spark tasks."""

from __future__ import annotations

import pytest

from modak.core import faults
from modak.core.errors import Conflict
from modak.core.faults import Fault, InjectedFault
from modak.postgres.changes.lsn import read_lsn
from modak.runtime.leader import Leader
from modak.tables.mirror import chunks as cutting
from modak.tables.mirror.chunks import Chunk, Key, Run, condition, group
from modak.tables.repair import repair
from modak.tables.site import Site
from modak.tables.tidy import copying_alone
from tests.mirror.things import Things


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk is a task, and every task a commit."""
    monkeypatch.setattr(cutting, "TASK_BYTES", 1)
    monkeypatch.setattr(cutting, "TASKS_PER_COMMIT", 1)


def interrupted(things: Things, after: int, **more: object) -> None:
    faults.arm(Fault("copy.before_tasks", after=after))
    with pytest.raises(InjectedFault):
        things.register(**more)
    faults.arm(None)


def test_neighbouring_chunks_share_a_task_and_gaps_part_them() -> None:
    pending = [Chunk(n, str(n), str(n + 1)) for n in (0, 1, 2, 5, 6, 9)]
    assert [[c.number for c in run.chunks] for run in group(pending, 10, 0, 4)] == [[0, 1, 2], [5, 6], [9]]
    large = [Chunk(n, None, None) for n in range(10)]
    assert [len(run.chunks) for run in group(large, 10, 10 * cutting.TASK_BYTES, 2)] == [1] * 10
    assert [len(run.chunks) for run in group(large, 10, 64 << 20, 4)] == [3, 3, 3, 1]
    assert group([], 10, 1, 1) == []


def test_the_condition_of_a_run_is_open_at_the_ends_of_the_table() -> None:
    key = Key(("a", "b c"), ("bigint", "text"))
    chunks = (Chunk(0, None, "1\x1fx"), Chunk(1, "1\x1fx", "2\x1fit's"))
    assert condition(key, Run(chunks)) == "(\"a\", \"b c\") <= ROW('2'::bigint, 'it''s'::text)"
    assert condition(Key(("a",), ("uuid",)), Run((Chunk(3, "q", None),))) == "\"a\" > 'q'::uuid"
    assert condition(key, Run((Chunk(0, None, None),))) == "true"


def test_many_chunks_are_one_commit_and_the_copy_has_no_deletes(site: Site) -> None:
    things = Things.plain(site, 1000)
    things.register(chunk_rows=50)
    assert len(things.chunks()) == 20
    assert things.snapshots() == 1
    state = things.state
    files = list(site.lake.files(state.table.lake, state.cutline.snapshot_id))
    assert not any(file.vectors for file in files)
    assert things.lake() == things.heap()


def test_a_large_table_lands_in_several_commits(site: Site, one_by_one: None) -> None:
    things = Things.plain(site, 100)
    things.register(chunk_rows=30)
    assert [chunk[4] for chunk in things.chunks()] == [30, 30, 30, 10]
    assert things.snapshots() == 4
    assert things.lake() == things.heap()


def test_an_empty_table_has_a_frontier_and_no_snapshot(site: Site, leader: Leader) -> None:
    things = Things.plain(site, 0)
    assert things.register().rows_copied == 0
    line = things.state.cutline
    assert line.frontier is not None
    assert line.snapshot_id is None
    things.fill(0, 3)
    things.pump(leader)
    assert things.lake() == things.heap()


def test_chunks_of_a_sampled_table_hold_every_row_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "EXACT_BYTES", 0)
    things = Things.ranged(site, 290)
    things.sql("INSERT INTO public.things SELECT i, i % 300, repeat('x', 100) FROM generate_series(1000, 10999) AS i")
    things.register(chunk_rows=500)
    chunks = things.chunks()
    assert 10 < len(chunks) < 40
    assert things.lake() == things.heap()


def test_an_interrupted_copy_goes_on_and_the_pump_heals_what_changed_in_between(
    site: Site, leader: Leader, one_by_one: None
) -> None:
    things = Things.plain(site, 100)
    interrupted(things, 2, chunk_rows=20)
    assert [chunk[3] for chunk in things.chunks()] == ["committed"] * 2 + ["planned"] * 3
    assert things.state.cutline.frontier is None
    assert site.reader.status()[0].copying
    begun = things.slot
    assert begun is not None
    # Copied and not yet copied keys, each inserted, updated, deleted and given another key.
    for low in (0, 60):
        things.sql(f"UPDATE public.things SET body = 'changed', ts = ts + 1000 WHERE id = {low + 1}")
        things.sql(f"DELETE FROM public.things WHERE id = {low + 2}")
        things.sql(f"UPDATE public.things SET id = {low + 500} WHERE id = {low + 3}")
        things.sql(f"DELETE FROM public.things WHERE id = {low + 4}")
        things.sql(f"INSERT INTO public.things VALUES ({low + 4}, 1, 'again')")
    things.fill(900, 905)
    repair(site, leader.epoch)
    again = things.register(chunk_rows=20)
    assert not again.created
    assert again.rows_copied is not None
    assert again.rows_copied < 80
    line = things.state.cutline
    assert read_lsn(line.frontier) == begun.confirmed_lsn
    assert line.heal_until is not None
    assert read_lsn(line.heal_until) > read_lsn(line.frontier)
    things.pump(leader)
    assert things.lake() == things.heap()


def test_changes_during_an_undisturbed_copy_come_once_and_need_no_healing(
    site: Site, leader: Leader, one_by_one: None
) -> None:
    things = Things.plain(site, 60)
    seen: list[str] = []

    def change(point: str) -> None:
        if point == "copy.before_tasks":
            seen.append(point)
            number = 1000 + len(seen)
            things.sql(f"INSERT INTO public.things VALUES ({number}, 5, 'during')")
            things.sql(f"UPDATE public.things SET body = body || '!' WHERE id IN (3, 30, {number})")
            things.sql("DELETE FROM public.things WHERE id = (SELECT max(id) FROM public.things WHERE id < 60)")

    faults.watch(change)
    things.register(chunk_rows=20)
    faults.watch(None)
    assert len(seen) == 3
    assert len(things.lake()) == 60
    assert things.state.cutline.heal_until is None
    things.pump(leader)
    assert things.lake() == things.heap()


def test_a_copy_whose_slot_was_lost_in_between_is_finished_by_a_diff(
    site: Site, leader: Leader, one_by_one: None
) -> None:
    things = Things.plain(site, 100)
    interrupted(things, 2, chunk_rows=20)
    things.sql("UPDATE public.things SET body = 'unseen' WHERE id IN (5, 95)")
    things.sql("DELETE FROM public.things WHERE id = 6")
    things.sql(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()"
    )
    done = things.register(chunk_rows=20)
    assert done.rows_copied == 61
    assert things.state.cutline.heal_until is None
    assert things.lake() == things.heap()
    things.fill(200, 210)
    things.pump(leader)
    assert things.lake() == things.heap()


def test_a_copy_whose_columns_changed_in_between_is_finished_by_a_diff(site: Site, one_by_one: None) -> None:
    things = Things.plain(site, 60)
    interrupted(things, 2, chunk_rows=20)
    things.sql("ALTER TABLE public.things ADD COLUMN colour text DEFAULT 'red'")
    things.sql("UPDATE public.things SET colour = 'blue' WHERE id IN (1, 51)")
    things.register(chunk_rows=20)
    assert things.lake() == things.heap()


def test_one_process_copies_at_a_time_and_the_daemon_lets_it(site: Site, leader: Leader, one_by_one: None) -> None:
    things = Things.plain(site, 40)
    interrupted(things, 1, chunk_rows=20)
    with copying_alone(site, things.state.table.table_id):
        with pytest.raises(Conflict, match="Another process copies"):
            things.register(chunk_rows=20)
        before = [op.op_id for op in site.reader.unfinished_ops() if op.kind == "copy"]
        repair(site, leader.epoch)
        assert [op.op_id for op in site.reader.unfinished_ops() if op.kind == "copy"] == before
        assert before
    repair(site, leader.epoch)
    assert site.reader.unfinished_ops() == ()
    things.register(chunk_rows=20)
    assert things.lake() == things.heap()


def test_rows_that_move_between_leaves_while_a_copy_is_interrupted_end_in_one_place(
    site: Site, leader: Leader, one_by_one: None
) -> None:
    things = Things.ranged(site, 250)
    interrupted(things, 1, chunk_rows=100)
    things.sql("UPDATE public.things SET ts = ts + 100 WHERE id IN (10, 110)")
    things.sql("UPDATE public.things SET ts = ts - 100 WHERE id IN (120, 220)")
    things.sql("UPDATE public.things SET ts = ts - 100 WHERE id = 220")
    things.register(chunk_rows=100)
    things.pump(leader)
    assert things.lake() == things.heap()


@pytest.mark.spark
def test_a_copy_runs_in_parallel_spark_tasks(site: Site, leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modak.tables.mirror.copy.DRIVER_BYTES", 0)
    monkeypatch.setattr(cutting, "TASK_BYTES", 256 << 10)
    things = Things.ranged(site, 290)
    things.sql("INSERT INTO public.things SELECT i, i % 300, repeat('x', 100) FROM generate_series(1000, 20000) AS i")
    things.register(chunk_rows=500, partition_width="100")
    assert things.snapshots() == 1
    files = list(site.lake.files(things.state.table.lake, things.state.cutline.snapshot_id))
    assert len({file.file.path.rpartition("/")[2][:7] for file in files}) > 3
    assert things.lake() == things.heap()
    things.sql("DELETE FROM public.things WHERE id % 3 = 0")
    things.pump(leader)
    assert things.lake() == things.heap()
