"""Real workers that follow a mirrored table one after the other, each ended by SIGKILL where the next point is.

A worker costs seconds, so whoever has made good what the one before left is put in danger itself, by SIGUSR1. The last
of them ends cleanly.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from itertools import count

import pytest

from modak.core.errors import ModakError
from modak.tables.mirror.names import slot_name
from tests.tables.invariants import Row
from tests.tables.readers import duckdb_rows
from tests.tables.test_kill import Place, Worker, until

Act = Callable[[], None]


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


def heap_of(place: Place) -> list[Row]:
    return sorted(place.truth.sql(f"SELECT * FROM {place.truth.name}"))


def lake_of(place: Place) -> list[Row]:
    return sorted(tuple(row.values()) for row in duckdb_rows(place.truth.state.cutline.metadata_location))


def slots(place: Place) -> list[str]:
    found = place.truth.sql("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()")
    return [name for (name,) in found]


def own_slot(place: Place) -> str:
    return slot_name(place.truth.state.table.table_id, place.truth.dsn.dbname)
