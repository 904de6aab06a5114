"""Real workers that follow a mirrored table, each ended by SIGKILL: the next catches up, and the lake equals the heap.

A worker costs seconds, so they follow one another: whoever has made good what the one before left is put in danger
itself, by SIGUSR1, and struck at the next point. The last of them ends cleanly.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import psycopg
import pytest

from modak.core.errors import ModakError
from modak.core.names import TableName
from modak.tables.mirror.names import publication_name, slot_name
from tests.tables.invariants import Row
from tests.tables.readers import duckdb_rows
from tests.tables.test_kill import Place, Worker, place, until

__all__ = ["place"]

pytestmark = [pytest.mark.timeout(1800), pytest.mark.full]

Act = Callable[[], None]

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
IDENTITY = ("identity.setting", "identity.set", "mirror.before_guard", "mirror.after_guard")
PUBLICATION = (
    "mirror.before_note",
    "mirror.after_note",
    "slot.evicting",
    "slot.evicted",
    "slot.dropping",
    "slot.dropped",
    "publication.creating",
    "publication.created",
    "mirror.before_mark",
    "mirror.after_mark",
)
ANEW = (
    "slot.creating",
    "slot.created",
    "reanchor.slot_made",
    "mend.before_write",
    "mend.after_write",
    "reanchor.before_commit",
    "mend.before_locate",
    "mend.after_locate",
    "reanchor.committed",
)
REPLACED = ("publication.dropping", "publication.dropped", "publication.creating", "publication.created")
DIFF = ("mirror.before_leaves", "mirror.after_leaves", "diff.before_commit", "diff.committed")
RETIRE = ("retire.before_seal", "retire.after_seal", "retire.before_advance", "retire.after_advance")
RESUMED = ("copy.before_heal", "copy.after_heal")
TO_MIRRORED = ("convert.before_switch", "convert.after_switch")
TO_TIERED = ("convert.before_empty", "convert.after_empty")
FAREWELL = (
    "slot.evicting",
    "slot.evicted",
    "slot.dropping",
    "slot.dropped",
    "publication.dropping",
    "publication.dropped",
    "mirror.before_unguard",
    "mirror.after_unguard",
    "mirror.before_restore",
    "mirror.after_restore",
)
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
    *IDENTITY,
    *PUBLICATION,
    *ANEW,
    *REPLACED,
    *DIFF,
    *RETIRE,
    "copy.committed",
    *RESUMED,
    *TO_MIRRORED,
    *TO_TIERED,
    "unregister.committed",
    *FAREWELL,
)
"""Every point at which a process dies here."""


@pytest.fixture
def mirrored(place: Place) -> Place:
    """`public.events`, copied and to be followed with short pauses."""
    place.environ["MODAK_MIRROR_FLUSH_MILLIS"] = "100"
    assert place.start("mirror").ends() == 0
    return place


@pytest.fixture
def change(place: Place) -> Act:
    """Rows come, change, move, get other keys and go."""
    steps = count(1)

    def make() -> None:
        name, first = place.truth.name, 1000 * next(steps)
        for statement in (
            f"INSERT INTO {name} SELECT {first} + i, i, 'new ' || i FROM generate_series(0, 49) AS i",
            f"UPDATE {name} SET body = body || '!', ts = (ts + 7) % 300 WHERE id % 3 = 0 AND id < 1000000",
            f"UPDATE {name} SET id = id + 1000000 WHERE id % 10 = 1 AND id < 1000000",
            f"DELETE FROM {name} WHERE id % 10 = 5",
        ):
            place.truth.sql(statement)

    return make


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


def test_after_a_kill_while_replica_identity_is_set_it_is_set_by_the_next(mirrored: Place, change: Act) -> None:
    def spoil() -> None:
        mirrored.truth.sql("ALTER TABLE public.events_0 REPLICA IDENTITY DEFAULT")
        mirrored.truth.sql('DROP TRIGGER IF EXISTS "!modak_truncate" ON public.events_0')
        change()

    succeed(mirrored, IDENTITY, spoil, change)
    assert mirrored.truth.sql("SELECT relreplident::text FROM pg_class WHERE relname = 'events_0'") == [("f",)]
    guards = "SELECT count(*) FROM pg_trigger WHERE tgname = '!modak_truncate' AND tgrelid = 'events_0'::regclass"
    assert mirrored.truth.sql(guards) == [(1,)]


def test_after_a_kill_while_a_lost_publication_is_made_again_nothing_is_missed(mirrored: Place, change: Act) -> None:
    def lose() -> None:
        mirrored.truth.sql(f"DROP PUBLICATION {publication(mirrored)}")
        change()

    succeed(mirrored, PUBLICATION, lose, change)


def test_after_a_kill_while_a_table_is_anchored_anew_it_is_anchored_again(mirrored: Place, change: Act) -> None:
    def lose() -> None:
        lose_slot(mirrored)
        change()

    succeed(mirrored, ANEW, lose, change)


def test_after_a_kill_while_a_publication_gets_its_table_again_nothing_is_missed(mirrored: Place, change: Act) -> None:
    mirrored.truth.sql("CREATE TABLE public.other (id bigint PRIMARY KEY)")

    def lose() -> None:
        mirrored.truth.sql(f"ALTER PUBLICATION {publication(mirrored)} SET TABLE public.other")
        change()

    succeed(mirrored, REPLACED, lose, change)


def test_after_a_kill_while_a_leaf_is_compared_the_next_worker_compares_it(mirrored: Place, change: Act) -> None:
    def swap() -> None:
        """Rows of a leaf come and go while it is no part of the table."""
        for statement in (
            "ALTER TABLE public.events DETACH PARTITION public.events_100",
            "DELETE FROM public.events_100 WHERE id % 7 = 0",
            "UPDATE public.events_100 SET body = 'apart' WHERE id % 7 = 1",
            "ALTER TABLE public.events ATTACH PARTITION public.events_100 FOR VALUES FROM (100) TO (200)",
        ):
            mirrored.truth.sql(statement)
        change()

    succeed(mirrored, DIFF, swap, change)
    assert mirrored.truth.sql("SELECT count(*) FROM modak.mirror_diffs") == [(0,)]


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


def test_after_a_kill_while_a_copy_is_taken_up_it_is_taken_up_again(place: Place, change: Act) -> None:
    place.environ["MODAK_MIRROR_FLUSH_MILLIS"] = "100"
    for point in ("copy.committed", *RESUMED):
        place.start("mirror", "--kill", point).dies()
        change()
    assert place.start("mirror").ends() == 0
    ends_well(place)


def test_after_a_kill_in_a_conversion_the_same_command_ends_it(place: Place, change: Act) -> None:
    place.environ["MODAK_MIRROR_FLUSH_MILLIS"] = "100"
    assert place.start("keep").ends() == 0
    tier(place)
    change()
    for point in TO_MIRRORED:
        place.start("to-mirrored", "--kill", point).dies()
        change()
    assert place.start("to-mirrored").ends() == 0
    change()
    ends_well(place)
    for point in TO_TIERED:
        place.start("to-tiered", "--kill", point).dies()
        change()
    tier(place)
    state = place.truth.state
    assert (state.table.mode, state.table.keep_heap) == ("tiered", True)
    assert slots(place) == []
    assert place.truth.reader.unfinished_ops() == ()
    assert place.truth.everything() == set(heap_of(place))


def test_after_kills_in_the_farewell_the_next_start_leaves_nothing(place: Place) -> None:
    assert place.start("mirror").ends() == 0
    place.start("unregister", "--kill", "unregister.committed").dies()
    for point in FAREWELL:
        place.start("repair", "--kill", point).dies()
    assert place.start("repair").ends() == 0
    place.truth.check_gone()
    assert slots(place) == []
    assert place.truth.sql("SELECT pubname FROM pg_publication") == []
    identities = "SELECT DISTINCT relreplident::text FROM pg_class WHERE relname ~ '^events(_[0-9]+)?$'"
    assert place.truth.sql(identities) == [("d",)]


def succeed(place: Place, points: Sequence[str], act: Act, meanwhile: Act, *arguments: str) -> None:
    """Worker after worker is struck while something is done to the table; the last lives."""
    for point in points:
        follow_until_struck(place, point, act, *arguments)
        meanwhile()
    ends_well(place, *arguments)


def ends_well(place: Place, *arguments: str) -> None:
    """A last worker catches up and ends cleanly; nothing is left over."""
    follow(place, "the last kill", *arguments).terminate()
    assert lake_of(place) == heap_of(place)
    assert place.truth.reader.unfinished_ops() == ()
    assert slots(place) == [own_slot(place)]
    place.truth.check_files()
    assert {each.name for each in place.home.glob("home/mirror/*/*")} <= {"keys"}


def follow_until_struck(place: Place, point: str, act: Act, *arguments: str) -> None:
    worker = follow(place, f"the kill before {point}", *arguments, "--kill", point, "--later")
    endanger(worker)
    act()
    worker.dies()
    # A comparison reads under a pin, which nobody renews any more: that its time is up is not waited for.
    place.truth.sql("UPDATE modak.read_pins SET expires_at = clock_timestamp()")


def follow(place: Place, after: str, *arguments: str) -> Worker:
    """A worker that has caught up with what was left."""
    worker = lead(place, *arguments)
    until(lambda: caught_up(place), f"the lake is not the heap after {after}", place.workers[-2:])
    return worker


def lead(place: Place, *arguments: str) -> Worker:
    """A worker that leads: from then on, none of our reads is taken for one of a leader that sleeps."""
    worker = place.start("daemon", "--light", *arguments)
    until(lambda: "leader.acquired" in worker.events(), "nobody leads", [worker])
    return worker


def caught_up(place: Place) -> bool:
    """Whether the lake has what the heap has, through the one slot, and nothing is under way."""
    try:
        if place.truth.reader.unfinished_ops() or slots(place) != [own_slot(place)]:
            return False
        return lake_of(place) == heap_of(place)
    except ModakError:
        # The catalog does not know the table by its name yet.
        return False


def endanger(worker: Worker) -> None:
    worker.process.send_signal(signal.SIGUSR1)
    until(lambda: "worker.armed" in worker.events(), "it is not in danger", [worker])


def codes(worker: Worker) -> set[str]:
    return {str(entry.get("code")) for entry in worker.said()}


def tier(place: Place) -> None:
    worker = lead(place)
    until(lambda: place.truth.state.cutline.t == 200 and not place.truth.state.unfinished, "it is not tiered", [worker])
    worker.terminate()


def heap_of(place: Place) -> list[Row]:
    return sorted(place.truth.sql(f"SELECT * FROM {place.truth.name}"))


def lake_of(place: Place) -> list[Row]:
    return sorted(tuple(row.values()) for row in duckdb_rows(place.truth.state.cutline.metadata_location))


def slots(place: Place) -> list[str]:
    found = place.truth.sql("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()")
    return [name for (name,) in found]


def own_slot(place: Place) -> str:
    return slot_name(place.truth.state.table.table_id, place.truth.dsn.dbname)


def publication(place: Place) -> str:
    return publication_name(place.truth.state.table.table_id)


def lose_slot(place: Place) -> None:
    """Drop the slot in a moment at which nobody reads from it."""

    def dropped() -> bool:
        try:
            place.truth.sql(f"SELECT pg_drop_replication_slot('{own_slot(place)}')")
        except psycopg.errors.ObjectInUse:
            return False
        return True

    until(dropped, "somebody holds the slot for ever")


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
