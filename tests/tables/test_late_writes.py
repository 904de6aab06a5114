"""No late write is lost: rows written into partitions on their way out end up in the lake, the delta or the heap."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

import psycopg
import pytest

from modak.core import faults
from modak.core.clock import FrozenClock
from modak.core.errors import ModakError
from modak.core.states import PartitionState
from modak.runtime.leader import Leader
from modak.tables.site import Site
from tests.tables.events import Events
from tests.tables.shadow import Conn, Shadowed
from tests.tables.test_hazards_spill import Bystander

NO_PARTITION = psycopg.errors.CheckViolation
"""What a user gets while a range has left the heap and the spill has not taken it over yet."""
COLLIDED = (
    psycopg.errors.UniqueViolation,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
)
"""What users do to each other on a partitioned table without our help."""
ROLES = 10
ROUNDS = 130


def seeded(site: Site) -> Shadowed:
    """Three partitions in which every round of writes finds rows of its own: id = role * 1000 + round."""
    events = Events.create(site, last=-1)
    home = {5: 200, 9: 100}
    for role in range(ROLES):
        at = home.get(role, 0)
        events.sql(
            f"INSERT INTO public.events SELECT {role} * 1000 + n, {at} + n % 90, 'seed'"
            f" FROM generate_series(0, {ROUNDS}) n"
        )
    return Shadowed.of(events)


class Writer:
    """One user who does everything a user can do to a partition, each thing in a transaction of its own."""

    def __init__(self, shadowed: Shadowed) -> None:
        self.shadowed = shadowed
        self.refused = 0

    def round(self, n: int) -> None:
        both, ts = self.shadowed, n % 90
        fresh = 100_000 + n * 100
        note = f"SET body = 'round {n}'"
        with both.session() as conn:
            self._do(conn, lambda: both.insert(conn, [(fresh, ts, "new"), (fresh + 1, 100 + ts, "new")]))
            self._do(conn, lambda: both.insert(conn, [(fresh + 2, 200 + ts % 50, "new and hot")]))
            self._do(conn, lambda: both.copy(conn, [(fresh + 10 + i, (i * 40) % 200, f"copied {i}") for i in range(6)]))
            self._do(conn, lambda: both.change(conn, note, n, ts))
            self._do(conn, lambda: both.change(conn, "DELETE", 1000 + n, ts))
            self._do(conn, lambda: both.change(conn, "SET ts = 200 + ts % 50, body = 'sealed to hot'", 2000 + n, ts))
            self._do(conn, lambda: both.change(conn, "SET ts = ts + 100, body = 'sealed to sealed'", 3000 + n, ts))
            self._do(conn, lambda: both.change(conn, "SET ts = ts + 9, body = 'within'", 4000 + n, ts))
            self._do(conn, lambda: both.change(conn, "SET ts = ts - 200, body = 'hot to sealed'", 5000 + n, 200 + ts))
            self._do(conn, lambda: both.change(conn, "SET id = id + 500000", 6000 + n, ts))
            self._do(conn, lambda: self._there_and_back(conn, n, ts))
            self._do(conn, lambda: self._gone_and_again(conn, n, ts))
            if n:
                # Once more, what an earlier round has written: its delta row may be purged right now.
                self._do(conn, lambda: both.change(conn, note, n - 1, (n - 1) % 90))
                self._do(conn, lambda: both.change(conn, "DELETE", fresh - 100, (n - 1) % 90))

    def _there_and_back(self, conn: Conn, n: int, ts: int) -> None:
        if self.shadowed.change(conn, "SET ts = 200 + ts % 50", 7000 + n, ts):
            self.shadowed.change(conn, f"SET ts = {ts}, body = 'was away'", 7000 + n, 200 + ts % 50)

    def _gone_and_again(self, conn: Conn, n: int, ts: int) -> None:
        if self.shadowed.change(conn, "DELETE", 8000 + n, ts):
            self.shadowed.insert(conn, [(8000 + n, ts, "again")])

    def _do(self, conn: Conn, write: Callable[[], object]) -> None:
        try:
            write()
            conn.commit()
        except NO_PARTITION:
            conn.rollback()
            self.refused += 1


class AtEveryPoint:
    """Watches the flow and writes at each point; a writer that our own lock holds up goes on beside the flow."""

    def __init__(self, writer: Writer, pool: ThreadPoolExecutor) -> None:
        self.writer, self.pool = writer, pool
        self.points: list[str] = []
        self.rounds: list[Future[None]] = []
        self.thread = threading.get_ident()

    def __call__(self, point: str) -> None:
        if threading.get_ident() != self.thread or len(self.rounds) >= ROUNDS:
            return
        self.points.append(point)
        future = self.pool.submit(self.writer.round, len(self.rounds))
        self.rounds.append(future)
        wait_for([future], timeout=0.5)

    def finish(self) -> None:
        for future in self.rounds:
            future.result(timeout=60)


def test_writes_at_every_point_of_a_pass_survive(site: Site, leader: Leader) -> None:
    both = seeded(site)
    both.events.register()
    with ThreadPoolExecutor(4) as pool:
        watcher = AtEveryPoint(Writer(both), pool)
        faults.watch(watcher)
        report = both.events.tier(leader)
        faults.watch(None)
        watcher.finish()
    assert report.moved_partitions == ("events_0", "events_100")
    assert {
        "seal.before_trigger",
        "seal.after_trigger",
        "export.snapshot_taken",
        "export.before_tasks",
        "export.after_tasks",
        "landing.before_prepare",
        "lake.metadata_written",
        "catalog.before_commit",
        "catalog.after_commit",
        "landing.committed",
        "reclaim.before_detach",
    } <= set(watcher.points)
    assert len(watcher.rounds) < ROUNDS, "the seed has rows for fewer rounds than the pass has points"
    both.verify()
    while both.events.tier(leader).changed:
        both.verify()
    assert both.events.sql("SELECT count(*) FROM public.events WHERE ts < 200") == [(0,)]


def test_writes_at_every_point_of_the_drop_survive(site: Site, leader: Leader) -> None:
    both = seeded(site)
    both.events.register()
    (pin,) = both.events.sql("SELECT pin_id FROM modak_read_begin('public.events')")
    both.events.tier(leader)
    both.events.sql(f"SELECT modak_read_end({pin[0]})")
    with ThreadPoolExecutor(4) as pool:
        watcher = AtEveryPoint(Writer(both), pool)
        faults.watch(watcher)
        while both.events.tier(leader).changed:
            pass
        faults.watch(None)
        watcher.finish()
    assert {
        "reclaim.before_detach",
        "reclaim.after_detach",
        "reclaim.before_drop",
        "reclaim.after_drop",
        "spill.before_widen",
        "spill.after_widen",
    } <= set(watcher.points)
    both.verify()
    # All is in its place again: history goes to the delta, and nothing is refused.
    after = Writer(both)
    after.round(ROUNDS)
    assert after.refused == 0
    both.verify()


def test_a_transaction_open_across_the_whole_export_is_not_lost(events: Events, leader: Leader) -> None:
    both = Shadowed.of(events)
    events.register()
    opened = []

    def open_one(point: str) -> None:
        if point == "seal.after_trigger" and len(opened) < 2:
            conn = psycopg.connect(events.site.dsn.conninfo())
            both.insert(conn, [(1000 + len(opened), 5, "open")])
            both.change(conn, "SET body = 'open'", 7 + len(opened), 7 + len(opened))
            opened.append(conn)
        elif point == "landing.committed":
            for conn in opened:
                conn.commit()
                conn.close()

    faults.watch(open_one)
    report = events.tier(leader)
    faults.watch(None)
    assert len(opened) == 2
    assert report.rows == 200, "rows of open transactions are not in the export"
    assert len(events.delta()) == 4
    both.verify()


@pytest.mark.parametrize(
    ("ts", "sealed"),
    [
        pytest.param(7, set(), id="in the first leaf"),
        pytest.param(107, {"events_0"}, id="in the second leaf", marks=pytest.mark.full),
    ],
)
def test_a_transaction_open_since_before_the_seal_holds_up_the_pass_and_nobody_else(
    events: Events, leader: Leader, ts: int, sealed: set[str]
) -> None:
    both = Shadowed.of(events)
    events.register()
    # The pauses between two tries pass at once; the lock itself is waited for by Postgres' clock.
    events.site.clock = FrozenClock(events.site.clock.now())
    with both.session() as writer:
        both.insert(writer, [(1000, ts, "open")])
        both.change(writer, "SET body = 'open'", ts + 1, ts + 1)
        with Bystander(events, at=ts) as bystander, pytest.raises(ModakError) as busy:
            events.tier(leader)
        assert (busy.value.code, busy.value.retryable) == ("postgres.busy", True)
        assert "an open transaction of somebody else may be in the way" in busy.value.hint
        assert bystander.count > 3
        assert not bystander.held_up
        state = events.site.reader.state(events.name)
        assert (state.cutline.t, state.cutline.snapshot_id, state.unfinished) == (0, None, ())
        assert {part.name for part in state.partitions if part.state is PartitionState.SEALING} == sealed
        both.insert_model(writer, [(20_000 + n, ts, "meanwhile") for n in range(bystander.count)])
        writer.commit()
    report = events.tier(leader)
    assert report.moved_partitions == report.dropped == ("events_0", "events_100")
    assert report.rows == 201 + bystander.count
    assert {(1000, ts, "open"), (ts + 1, ts + 1, "open")} <= set(events.lake())
    assert events.delta() == {}
    both.verify()


def test_a_late_write_that_rolls_back_leaves_nothing(events: Events, leader: Leader) -> None:
    both = Shadowed.of(events)
    events.register()

    def change_his_mind(point: str) -> None:
        if point == "export.snapshot_taken":
            with both.session() as conn:
                both.insert(conn, [(1000, 5, "never")])
                conn.execute("SAVEPOINT half")
                both.change(conn, "DELETE", 7, 7)
                conn.execute("ROLLBACK TO half")
                both.change(conn, "SET body = 'kept'", 9, 9)
                conn.rollback()

    faults.watch(change_his_mind)
    events.tier(leader)
    assert events.delta() == {}
    both.verify()


def test_what_the_export_saw_is_not_kept_in_the_delta(events: Events, leader: Leader) -> None:
    """The writes between seal and snapshot are in the files, so the one transaction purges their images."""
    both = Shadowed.of(events)
    events.register()
    done = []

    def write(point: str) -> None:
        if point == "seal.after_trigger" and not done:
            with both.session() as conn:
                both.insert(conn, [(1000, 5, "in the files")])
                both.change(conn, "DELETE", 3, 3)
                conn.commit()
            done.append(events.sql("SELECT count(*) FROM modak.delta"))

    faults.watch(write)
    report = events.tier(leader)
    assert done == [[(2,)]]
    assert report.rows == 200
    assert events.delta() == {}
    both.verify()


def test_a_users_trigger_that_changes_the_row_again_ends_in_the_last_image(events: Events, leader: Leader) -> None:
    events.sql("""
        CREATE FUNCTION public.sign() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF pg_trigger_depth() = 1 THEN
                EXECUTE format('UPDATE public.%I SET body = body || %L WHERE id = $1 AND ts = $2',
                    TG_ARGV[0], ' signed') USING NEW.id, NEW.ts;
            END IF;
            RETURN NULL;
        END $$
    """)
    both = Shadowed.of(events)
    for table in ("events", "model"):
        events.sql(
            f"CREATE TRIGGER a_sign AFTER INSERT OR UPDATE ON public.{table}"
            f" FOR EACH ROW EXECUTE FUNCTION public.sign('{table}')"
        )
    events.register()
    events.sql("SELECT modak_read_begin('public.events')")
    rounds = []

    def write(point: str) -> None:
        if point in ("seal.after_trigger", "export.after_tasks", "landing.committed"):
            n = len(rounds)
            rounds.append(point)
            with both.session() as conn:
                both.insert(conn, [(1000 + n, 5, "new"), (2000 + n, 150, "new")])
                both.change(conn, "SET body = 'changed'", 10 + n, 10 + n)
                both.change(conn, "SET ts = ts + 100", 20 + n, 20 + n)
                both.change(conn, "SET ts = ts - 100", 220 + n, 220 + n)
                both.copy(conn, [(3000 + n, 50, "copied"), (4000 + n, 199, "copied")])
                conn.commit()

    faults.watch(write)
    events.tier(leader)
    faults.watch(None)
    write("landing.committed")
    both.verify()
    assert (1000, 5, "new signed") in events.cold()
    assert all(image is None or image["body"].endswith(("signed", "row")) for image in events.delta().values())


class Crowd:
    """Writers of every habit, each with a seed of its own so that a failure can be replayed."""

    def __init__(self, both: Shadowed, seed: int) -> None:
        self.both, self.seed = both, seed
        self.stop = threading.Event()
        self.trouble: list[BaseException] = []
        self.written = 0

    def run(self, number: int) -> None:
        dice = random.Random(self.seed * 1000 + number)
        try:
            with self.both.session() as conn:
                while not self.stop.is_set():
                    try:
                        self._transaction(conn, dice, number)
                        conn.commit()
                        self.written += 1
                    except (NO_PARTITION, *COLLIDED):
                        conn.rollback()
                    time.sleep(dice.uniform(0, 0.03))
        except BaseException as error:
            self.trouble.append(error)

    def _transaction(self, conn: Conn, dice: random.Random, number: int) -> None:
        for _ in range(dice.choice((1, 1, 2, 4))):
            self._write(conn, dice, number)
        if dice.random() < 0.05:
            time.sleep(dice.uniform(0.5, 1.0))
        if dice.random() < 0.1:
            raise NO_PARTITION("a user who changes their mind")

    def _write(self, conn: Conn, dice: random.Random, number: int) -> None:
        key, ts = dice.randrange(0, 700), dice.randrange(0, 700)
        text = f"by {number}: {dice.random()}"
        match dice.choice(("insert", "insert", "copy", "set", "set", "delete", "move", "key")):
            case "insert":
                self.both.insert(conn, [(dice.randrange(10_000), ts, text)])
            case "copy":
                self.both.copy(conn, [(dice.randrange(10_000, 90_000), dice.randrange(700), text) for _ in range(8)])
            case "set":
                self.both.change(conn, f"SET body = '{text}'", key, key)
            case "delete":
                self.both.change(conn, "DELETE", key, key)
            case "move":
                self.both.change(conn, f"SET ts = {ts}", key, key)
            case "key":
                self.both.change(conn, f"SET id = {dice.randrange(100_000, 900_000)}", key, key)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
def test_a_crowd_of_writers_over_several_passes_loses_nothing(site: Site, leader: Leader, seed: int) -> None:
    events = Events.create(site, partitions=7, last=699)
    both = Shadowed.of(events)
    events.register()
    crowd = Crowd(both, seed)
    threads = [threading.Thread(target=crowd.run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        for passed in range(3):
            # The frontier moves on; random rows up to 700 age with it.
            events.add_partition(700 + passed * 100)
            with both.session() as conn:
                both.insert(conn, [(950_000 + passed, 700 + passed * 100 + 50, "frontier")])
                conn.commit()
            events.tier(leader)
    finally:
        crowd.stop.set()
        for thread in threads:
            thread.join(timeout=30)
    assert crowd.trouble == []
    assert crowd.written > 20
    both.verify()
    while events.tier(leader).changed:
        pass
    both.verify()
    assert events.site.reader.state(events.name).cutline.t >= 700
