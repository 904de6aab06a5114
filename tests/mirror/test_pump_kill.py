"""Workers that are killed while they pump: the next catches up from the frontier, and the lake equals the heap."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from modak.core.names import TableName
from tests.mirror.succession import (
    Act,
    change,
    endanger,
    ends_well,
    follow,
    follow_until_struck,
    lake_of,
    lead,
    mirrored,
    own_slot,
    slots,
    succeed,
)
from tests.tables.test_kill import Place, Worker, place, until

__all__ = ["change", "mirrored", "place"]

pytestmark = [pytest.mark.timeout(1800), pytest.mark.full]

FLUSH = (
    "pump.before_write",
    "pump.before_find",
    "pump.found",
    "pump.written",
    "pump.before_commit",
    "pump.committed",
    "pump.before_confirm",
    "pump.confirmed",
    "keycache.writing",
    "keycache.written",
    "slot.advancing",
    "slot.advanced",
)
TASKS = ("pump.before_rows", "pump.rows_kept")
IN_A_TASK = ("pump.task_read", "pump.task_written")
SPILL = ("pump.spilling", "pump.spilled", "pump.cleared")
SPILLED = "pump.clearing"
NOTHING = ("pump.before_frontier", "pump.frontier_moved")
RENAME = ("pump.before_rename", "pump.renamed")
GUARD = ("pump.before_giving_up", "pump.gave_up")
STREAM = (
    "spool.clearing",
    "spool.cleared",
    "spool.writing",
    "spool.written",
    "spool.removing",
    "spool.removed",
    "stream.confirming",
    "stream.confirmed",
)
RETIRE = ("retire.before_seal", "retire.after_seal", "retire.before_advance", "retire.after_advance")
KILLED = (
    *FLUSH,
    *TASKS,
    *IN_A_TASK,
    *SPILL,
    SPILLED,
    *NOTHING,
    *RENAME,
    *GUARD,
    *STREAM,
    *RETIRE,
)
"""Every point at which a process dies here."""


def test_after_a_kill_in_a_flush_the_next_worker_reads_again_from_the_frontier(mirrored: Place, change: Act) -> None:
    succeed(mirrored, FLUSH, change, change)


def test_after_a_kill_while_a_large_transaction_is_on_disk_it_is_read_again(mirrored: Place, change: Act) -> None:
    little = {"MODAK_MIRROR_BATCH": "20", "MODAK_MIRROR_MAX_BUFFERED_ROWS": "100"}
    mirrored.environ |= little
    succeed(mirrored, SPILL, lambda: many(mirrored), change)
    follow_until_struck(mirrored, SPILLED, lambda: many(mirrored))
    assert [*mirrored.home.glob("home/mirror/*/*/*.arrow")] != [*mirrored.home.glob("home/mirror/*/keys/*.arrow")]
    for name in little:
        del mirrored.environ[name]
    # What lies on the disk goes with the next worker, large transaction or not.
    ends_well(mirrored)


def test_after_a_kill_while_the_frontier_moves_alone_nothing_is_missed(mirrored: Place, change: Act) -> None:
    def nothing() -> None:
        mirrored.truth.sql("INSERT INTO public.events VALUES (-1, 1, ''); DELETE FROM public.events WHERE id = -1")

    succeed(mirrored, NOTHING, nothing, change)


def test_after_a_kill_while_a_name_is_followed_the_next_worker_follows_it(mirrored: Place, change: Act) -> None:
    names = count(1)

    def rename() -> None:
        old = mirrored.truth.name
        new = TableName("public", f"events_of_{next(names)}")
        mirrored.truth.sql(f"ALTER TABLE {old} RENAME TO {new.name}")
        mirrored.truth = replace(mirrored.truth, name=new)

    succeed(mirrored, RENAME, rename, change)


def test_after_a_kill_while_a_slot_is_given_up_the_table_is_anchored_anew(mirrored: Place, change: Act) -> None:
    mirrored.environ |= {"MODAK_SLOT_POLICY": "reanchor", "MODAK_SLOT_WARN_BYTES": str(8 << 20)}
    succeed(mirrored, GUARD, lambda: write_wal(mirrored), change)


def test_after_a_kill_while_a_slot_is_given_up_a_table_to_be_paused_is_paused(mirrored: Place, change: Act) -> None:
    mirrored.environ |= {"MODAK_SLOT_POLICY": "pause", "MODAK_SLOT_WARN_BYTES": str(8 << 20)}
    follow_until_struck(mirrored, "pump.gave_up", lambda: write_wal(mirrored))
    change()
    ((before,),) = mirrored.truth.sql("SELECT clock_timestamp()")
    after = mirrored.start("daemon", "--light")
    told = f"SELECT paused FROM modak.mirror_health WHERE checked_at > '{before}'"
    until(lambda: bool(mirrored.truth.sql(told)), "nobody tells", [after])
    ((paused,),) = mirrored.truth.sql(told)
    after.terminate()
    assert "was given up" in paused
    assert slots(mirrored) == []
    mirrored.environ["MODAK_SLOT_POLICY"] = "warn"
    ends_well(mirrored)


def test_after_a_kill_in_a_stream_what_waited_on_disk_comes_again(mirrored: Place, change: Act) -> None:
    mirrored.truth.sql(f'ALTER DATABASE "{mirrored.truth.dsn.dbname}" SET logical_decoding_work_mem = 64')

    def stream() -> None:
        mirrored.truth.sql(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
            f" WHERE slot_name = '{own_slot(mirrored)}' AND active_pid IS NOT NULL"
        )
        many(mirrored)

    succeed(mirrored, STREAM, stream, change, "--streaming")


def test_after_a_kill_while_a_large_batch_is_handed_to_tasks_it_is_written_again(mirrored: Place, change: Act) -> None:
    for point in (*TASKS, *IN_A_TASK):
        worker = follow(mirrored, "a kill", "--large-batches", "--kill", point, "--later")
        endanger(worker)
        change()
        if point in IN_A_TASK:
            # There it is the task's own process that dies; the worker is struck while it makes up its mind.
            until(lambda told=worker: "spark.task_failed" in codes(told), "no task has died", [worker])
            worker.process.kill()
        worker.dies()
    ends_well(mirrored)


def test_after_a_kill_while_a_partition_ages_no_row_is_lost_and_none_comes_back(place: Place) -> None:
    place.environ["MODAK_MIRROR_FLUSH_MILLIS"] = "100"
    for low in range(300, 900, 100):
        bounds = f"FOR VALUES FROM ({low}) TO ({low + 100})"
        place.truth.sql(f"CREATE TABLE public.events_{low} PARTITION OF public.events {bounds}")
    assert place.start("retain").ends() == 0
    rows = {row[0]: row for row in place.truth.sql("SELECT * FROM public.events")}
    high = 250

    def aged() -> bool:
        line = place.truth.state.cutline
        left = place.truth.sql(f"SELECT 1 FROM public.events WHERE ts < {line.t}")
        folded = not place.truth.sql("SELECT 1 FROM modak.delta")
        ended = folded and not left and place.truth.reader.unfinished_ops() == ()
        return ended and line.t == high // 100 * 100 - 100 and lake_of(place) == sorted(rows.values())

    for point in (*RETIRE, None):
        danger = ("--kill", point, "--later") if point else ()
        worker = lead(place, *danger)
        until(aged, f"no partition has left the heap before {point}", [worker])
        if point is None:
            worker.terminate()
            break
        endanger(worker)
        high += 100
        rows[high] = (high, high, "high")
        place.truth.sql(f"INSERT INTO public.events VALUES ({high}, {high}, 'high')")
        worker.dies()
        for row in place.truth.sql(
            f"UPDATE public.events SET body = body || '!' WHERE ts >= {high - 250} AND id % 10 = 5 RETURNING *"
        ):
            rows[row[0]] = row
    assert lake_of(place) == sorted(rows.values())
    assert slots(place) == [own_slot(place)]
    place.truth.check_files()


def codes(worker: Worker) -> set[str]:
    return {str(entry.get("code")) for entry in worker.said()}


def many(place: Place) -> None:
    """One transaction of some thousand rows, which replaces that of the last time."""
    place.truth.sql(
        "DELETE FROM public.events WHERE id < 0; INSERT INTO public.events"
        " SELECT -i, i % 300, repeat('x', 100) || clock_timestamp() FROM generate_series(1, 2000) AS i;"
        " UPDATE public.events SET body = body || '?' WHERE id % 2 = 0"
    )


def write_wal(place: Place) -> None:
    place.truth.sql(
        "SELECT count(pg_logical_emit_message(true, 'test', repeat('x', 1 << 20))) FROM generate_series(1, 12)"
    )
