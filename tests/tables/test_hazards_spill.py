"""The spill partition and the drop of a leaf: nobody waits, no row stays, history goes to the delta."""

from __future__ import annotations

import threading
import time

import psycopg
import pytest

from modak.core import faults
from modak.postgres.connect import connect
from modak.runtime.leader import Leader
from modak.tables.fold.run import fold
from modak.tables.registration.unregister import unregister
from modak.tables.site import Site
from tests.tables.events import Events

ROWS = {(i, i, f"row {i}") for i in range(251)}
PENDING = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'public.events'::regclass AND inhdetachpending"


class Bystander:
    """Somebody who reads and writes the hot part all the time and never waits for a lock for as long as half a second.

    `at` is where the rows go, if another part than the hot one is to be used.

    Our longest wait for a lock is 50 ms. Postgres itself counts, so that a crowded machine does not matter.
    """

    def __init__(self, events: Events, at: int = 240) -> None:
        self.events, self.at = events, at
        self.held_up: list[psycopg.Error] = []
        self.count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Bystander:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        with connect(self.events.site.dsn, autocommit=True) as conn:
            conn.execute("SET lock_timeout = '500ms'")
            while not self._stop.is_set():
                try:
                    conn.execute(f"SELECT count(*) FROM public.events WHERE ts >= {self.at // 100 * 100}")
                    conn.execute(f"INSERT INTO public.events VALUES ({20_000 + self.count}, {self.at}, 'meanwhile')")
                except psycopg.Error as error:
                    self.held_up.append(error)
                self.count += 1
                time.sleep(0.01)


@pytest.mark.parametrize(
    "query", ["SELECT count(*) FROM public.events", "SELECT count(*) FROM public.events WHERE ts >= 200"]
)
def test_while_a_long_reader_is_in_the_way_nobody_waits_and_no_row_is_out_of_reach(
    events: Events, leader: Leader, query: str
) -> None:
    """A detach that was begun would refuse every correction of the partition for as long as the reader stays."""
    events.register()
    with connect(events.site.dsn) as reader:
        reader.execute(query)  # type: ignore[arg-type]
        with Bystander(events) as bystander:
            report = events.tier(leader)
            again = events.tier(leader)
        assert (report.rows, report.dropped, again.dropped) == (200, (), ())
        assert bystander.count > 3
        assert not bystander.held_up
        assert events.sql(PENDING) == [(0,)]
        events.sql("SELECT modak_delete('public.events', '7', 7)")
        events.sql("UPDATE public.events SET body = 'corrected' WHERE ts = 8")
        reader.commit()
    assert events.tier(leader).dropped == ("events_0", "events_100")
    mine = {row for row in events.everything() if row[2] != "meanwhile"}
    assert mine == (ROWS - {(7, 7, "row 7"), (8, 8, "row 8")}) | {(8, 8, "corrected")}


@pytest.mark.parametrize("query", ["SELECT FROM public.bodies", "UPDATE public.bodies SET body = body WHERE id = 3"])
def test_a_long_transaction_on_a_table_that_ours_refers_to_is_in_the_way_too(
    events: Events, leader: Leader, query: str
) -> None:
    """To drop a leaf Postgres locks what its foreign keys refer to: begun, it would hang between detach and drop."""
    events.sql("CREATE TABLE public.bodies (id bigint PRIMARY KEY, body text)")
    events.sql("INSERT INTO public.bodies SELECT i, 'body' FROM generate_series(0, 300) AS i")
    events.sql("ALTER TABLE public.events ADD FOREIGN KEY (id) REFERENCES public.bodies")
    events.register()
    with connect(events.site.dsn) as reader:
        reader.execute(query)  # type: ignore[arg-type]
        report = events.tier(leader)
        assert (report.rows, report.dropped) == (200, ())
        assert events.sql(PENDING) == [(0,)]
        image = '{"id": 7, "ts": 7, "body": "corrected"}'
        assert events.sql(f"SELECT modak_upsert('public.events', '{image}')") == [("heap",)]
        reader.commit()
    assert events.tier(leader).dropped == ("events_0", "events_100")
    assert events.everything() == (ROWS - {(7, 7, "row 7")}) | {(7, 7, "corrected")}


def test_a_reader_that_comes_in_mid_detach_holds_nobody_up_and_the_drop_resumes_with_finalize(
    events: Events, leader: Leader
) -> None:
    events.register()
    with connect(events.site.dsn) as reader:

        def read(point: str) -> None:
            if point == "reclaim.before_detach":
                reader.execute("SELECT count(*) FROM public.events")

        with Bystander(events) as bystander:
            faults.watch(read)
            report = events.tier(leader)
            faults.watch(None)
            again = events.tier(leader)
        assert (report.rows, report.dropped, again.dropped) == (200, (), ())
        assert bystander.count > 3
        assert not bystander.held_up
        assert events.sql(PENDING) == [(1,)]
        reader.commit()
    assert events.tier(leader).dropped == ("events_0", "events_100")
    assert events.sql(PENDING) == [(0,)]
    mine = {row for row in events.everything() if row[2] != "meanwhile"}
    assert mine == ROWS


def test_an_old_reader_sees_its_rows_until_it_ends(events: Events, leader: Leader) -> None:
    events.register()
    with connect(events.site.dsn) as reader:
        reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert reader.execute("SELECT count(*) FROM public.events").fetchone() == (251,)
        events.tier(leader)
        assert reader.execute("SELECT count(*) FROM public.events").fetchone() == (251,)


def test_history_goes_to_the_delta_and_the_spill_stays_empty(events: Events, leader: Leader) -> None:
    events.register()
    events.tier(leader)
    events.sql("INSERT INTO public.events VALUES (1000, 50, 'history'), (7, 7, 'corrected'), (1001, 220, 'hot')")
    events.sql("COPY public.events FROM PROGRAM 'printf \"1002\\t150\\tcopied\\n1003\\t199\\tcopied\\n\"'")
    assert events.sql("SELECT count(*) FROM ONLY public.events_modak_spill") == [(0,)]
    expected = (ROWS - {(7, 7, "row 7")}) | {
        (1000, 50, "history"),
        (7, 7, "corrected"),
        (1001, 220, "hot"),
        (1002, 150, "copied"),
        (1003, 199, "copied"),
    }
    assert events.everything() == expected
    assert not events.tier(leader).findings


def test_a_far_future_row_finds_no_partition_and_moves_nothing(events: Events, leader: Leader) -> None:
    events.register()
    events.tier(leader)
    with pytest.raises(psycopg.errors.CheckViolation, match="no partition"):
        events.sql("INSERT INTO public.events VALUES (1, 99999999, 'far away')")
    with pytest.raises(psycopg.errors.CheckViolation) as refused:
        events.sql("INSERT INTO public.events VALUES (1, -5, 'before history')")
    assert refused.value.diag.message_detail == "Its history begins at 0."
    assert not events.tier(leader).changed


def test_a_row_found_in_the_spill_is_an_alarm_and_is_kept(events: Events, leader: Leader) -> None:
    events.register()
    events.tier(leader)
    events.sql("ALTER TABLE public.events_modak_spill DISABLE TRIGGER ALL")
    events.sql("INSERT INTO public.events VALUES (1000, 50, 'stray')")
    events.add_partition(300)
    events.sql("INSERT INTO public.events VALUES (1001, 350, 'newest')")
    report = events.tier(leader)
    assert [finding.code for finding in report.findings] == ["spill.stray_rows"]
    assert report.moved_partitions == ("events_200",)
    assert events.sql("SELECT body FROM ONLY public.events_modak_spill") == [("stray",)]


def test_constraints_hold_for_rows_that_go_to_the_delta(site: Site, leader: Leader) -> None:
    events = Events.create(site)
    events.sql(
        "ALTER TABLE public.events ADD CHECK (body <> ''), ADD long_body text GENERATED ALWAYS AS (body || '!') STORED"
    )
    events.register()
    events.tier(leader)
    with pytest.raises(psycopg.errors.CheckViolation, match="body_check"):
        events.sql("INSERT INTO public.events VALUES (1000, 50, '')")
    with pytest.raises(psycopg.errors.NotNullViolation):
        events.sql("INSERT INTO public.events VALUES (NULL, 50, 'x')")
    events.sql("INSERT INTO public.events VALUES (1000, 50, 'x')")
    assert events.delta() == {("1000", 50): {"id": "1000", "ts": "50", "body": "x", "long_body": "x!"}}


def test_beside_a_default_partition_history_goes_to_the_delta_and_partitions_go(events: Events, leader: Leader) -> None:
    """With a DEFAULT partition Postgres cannot detach concurrently, and there is no spill."""
    events.sql("CREATE TABLE public.events_rest PARTITION OF public.events DEFAULT")
    assert events.register().transparent_writes
    report = events.tier(leader)
    assert report.dropped == ("events_0", "events_100")
    assert [finding.code for finding in report.findings] == ["grid.default"]
    events.sql("INSERT INTO public.events VALUES (1000, 50, 'history'), (7, 7, 'corrected'), (1001, 220, 'hot')")
    events.sql("COPY public.events FROM PROGRAM 'printf \"1002\\t150\\tcopied\\n1003\\t5000\\tahead\\n\"'")
    events.sql("UPDATE public.events SET ts = 199 WHERE id = 1001")
    assert events.sql("SELECT id FROM ONLY public.events_rest") == [(1003,)]
    expected = (ROWS - {(7, 7, "row 7")}) | {
        (1000, 50, "history"),
        (7, 7, "corrected"),
        (1001, 199, "hot"),
        (1002, 150, "copied"),
        (1003, 5000, "ahead"),
    }
    assert events.everything() == expected
    assert fold(events.site, leader.epoch, events.name).rows == 4
    assert events.everything() == expected


def test_no_partition_goes_while_its_history_would_stay_in_a_default_partition(events: Events, leader: Leader) -> None:
    events.register()
    events.sql("CREATE TABLE public.events_rest PARTITION OF public.events DEFAULT PARTITION BY RANGE (ts)")
    report = events.tier(leader)
    assert (report.rows, report.dropped) == (200, ())
    (finding,) = (finding for finding in report.findings if finding.code == "spill.astray")
    assert "no partition leaves the heap: Postgres: partition public.events_rest is in the way" in finding.message
    assert "Make the DEFAULT partition a plain table." in finding.message
    assert "SELECT modak_disable_transparent_writes('public.events')" in finding.message
    assert events.tier(leader).dropped == ()
    events.sql("DROP TABLE public.events_rest")
    assert events.tier(leader).dropped == ("events_0", "events_100")
    assert events.everything() == ROWS


def test_who_gives_transparent_writes_up_gets_partitions_dropped_beside_any_default_partition(
    events: Events, leader: Leader
) -> None:
    events.register()
    events.sql("CREATE TABLE public.events_rest PARTITION OF public.events DEFAULT PARTITION BY RANGE (ts)")
    assert events.tier(leader).dropped == ()
    events.sql("SELECT modak_disable_transparent_writes('public.events')")
    assert events.tier(leader).dropped == ("events_0", "events_100")


def test_a_registration_whose_default_partition_was_busy_drops_nothing_before_history_is_diverted(
    events: Events, leader: Leader
) -> None:
    events.sql("CREATE TABLE public.events_rest PARTITION OF public.events DEFAULT")
    with connect(events.site.dsn) as writer:
        writer.execute("INSERT INTO public.events VALUES (1003, 5000, 'ahead')")
        assert not events.register().transparent_writes
        report = events.tier(leader)
        assert report.dropped == ()
        assert "spill.astray" in {finding.code for finding in report.findings}
    report = events.tier(leader)
    assert report.dropped == ("events_0", "events_100")
    assert "spill.astray" not in {finding.code for finding in report.findings}
    events.sql("INSERT INTO public.events VALUES (1000, 50, 'history')")
    assert set(events.delta()) == {("1000", 50)}


def test_a_detach_is_not_begun_while_somebody_reads_the_default_partition_for_long(
    events: Events, leader: Leader
) -> None:
    events.sql("CREATE TABLE public.events_rest PARTITION OF public.events DEFAULT")
    events.register()
    points: list[str] = []
    with connect(events.site.dsn) as reader:
        reader.execute("SELECT count(*) FROM ONLY public.events_rest")
        faults.watch(points.append)
        assert events.tier(leader).dropped == ()
        faults.watch(None)
    assert "reclaim.before_detach" not in points
    assert events.tier(leader).dropped == ("events_0", "events_100")


def test_a_row_that_comes_between_the_drop_of_a_partition_and_the_end_of_the_pass_is_diverted_too(
    events: Events, leader: Leader
) -> None:
    """The DEFAULT partition that came later takes what the spill does not reach."""
    events.register()
    events.sql("CREATE TABLE public.events_rest PARTITION OF public.events DEFAULT")

    def write(point: str) -> None:
        if point == "reclaim.after_drop":
            events.sql("INSERT INTO public.events VALUES (1000, 50, 'between') ON CONFLICT DO NOTHING")
        elif point == "reclaim.before_drop":
            with pytest.raises(psycopg.errors.ObjectInUse, match="about to be dropped"):
                events.sql(
                    "INSERT INTO public.events VALUES (1001, (SELECT count(*) FROM modak.partitions"
                    " WHERE state = 'dropped') * 100 + 10, 'too early')"
                )

    faults.watch(write)
    assert events.tier(leader).dropped == ("events_0", "events_100")
    faults.watch(None)
    assert events.sql("SELECT count(*) FROM ONLY public.events_rest") == [(0,)]
    assert events.everything() == ROWS | {(1000, 50, "between")}
    assert not events.tier(leader).changed


def test_a_detach_that_was_begun_is_ended_although_a_default_partition_has_come(events: Events, leader: Leader) -> None:
    """The spill stays as it is beside it: to attach a wider one, Postgres would read the whole DEFAULT partition."""
    events.register()
    with connect(events.site.dsn) as reader:

        def read(point: str) -> None:
            if point == "reclaim.before_detach":
                reader.execute("SELECT count(*) FROM public.events")

        faults.watch(read)
        assert events.tier(leader).dropped == ()
        faults.watch(None)
        assert events.sql(PENDING) == [(1,)]
        reader.commit()
    events.sql("CREATE TABLE public.events_rest PARTITION OF public.events DEFAULT")
    assert events.tier(leader).dropped == ("events_0", "events_100")
    assert events.sql("SELECT upper_bound FROM modak.spills") == [(0,)]
    events.sql("INSERT INTO public.events VALUES (1000, 50, 'history')")
    events.sql("DROP TABLE public.events_rest")
    events.tier(leader)
    assert events.sql("SELECT upper_bound FROM modak.spills") == [(200,)]
    events.sql("INSERT INTO public.events VALUES (1001, 150, 'history')")
    assert events.everything() == ROWS | {(1000, 50, "history"), (1001, 150, "history")}


def test_without_its_default_partition_a_table_gets_a_spill_again(events: Events, leader: Leader) -> None:
    events.sql("CREATE TABLE public.events_rest PARTITION OF public.events DEFAULT")
    events.register()
    events.tier(leader)
    events.sql("DROP TABLE public.events_rest")
    with pytest.raises(psycopg.errors.CheckViolation):
        events.sql("INSERT INTO public.events VALUES (1000, 50, 'history')")
    events.tier(leader)
    events.sql("INSERT INTO public.events VALUES (1000, 50, 'history')")
    assert events.everything() == ROWS | {(1000, 50, "history")}
    events.sql("SELECT modak_disable_transparent_writes('public.events')")
    events.sql("CREATE TABLE public.events_rest PARTITION OF public.events DEFAULT")
    report = events.tier(leader)
    (finding,) = report.findings
    assert "Let them go to the delta: SELECT modak_enable_transparent_writes('public.events')" in finding.message
    events.sql("INSERT INTO public.events VALUES (1001, 50, 'hidden')")
    assert events.sql("SELECT count(*) FROM ONLY public.events_rest") == [(1,)]
    # What verify counts as hidden goes where it belongs by writing it again.
    events.sql("SELECT modak_enable_transparent_writes('public.events')")
    events.sql(
        "WITH gone AS (DELETE FROM ONLY public.events_rest WHERE ts < 200 RETURNING *)"
        " INSERT INTO public.events SELECT * FROM gone"
    )
    assert events.everything() == ROWS | {(1000, 50, "history"), (1001, 50, "hidden")}
    unregister(events.site, events.name, discard_corrections=True)
    assert events.sql("SELECT count(*) FROM pg_trigger WHERE tgname LIKE '~modak_divert%'") == [(0,)]
    assert events.sql("SELECT count(*) FROM pg_class WHERE relname LIKE 'shadow%'") == [(0,)]


def test_a_leaf_that_hangs_between_detach_and_drop_keeps_its_range_from_the_spill(
    events: Events, leader: Leader
) -> None:
    """Else a second export of the leaf would replace what came in through the spill."""
    events.register()
    readers: list[psycopg.Connection[tuple[object, ...]]] = []

    def read(point: str) -> None:
        if point == "reclaim.before_drop" and not readers:
            readers.append(connect(events.site.dsn))
            readers[0].execute("SELECT count(*) FROM public.events_0")

    faults.watch(read)
    assert events.tier(leader).dropped == ()
    assert events.tier(leader).dropped == ()
    faults.watch(None)
    with pytest.raises(psycopg.errors.CheckViolation, match="no partition"):
        events.sql("INSERT INTO public.events VALUES (1000, 50, 'history')")
    readers[0].close()
    events.sql("VACUUM FULL public.events_0")
    assert events.tier(leader).dropped == ()
    assert events.tier(leader).dropped == ("events_0", "events_100")
    events.sql("INSERT INTO public.events VALUES (1000, 50, 'history')")
    assert events.everything() == ROWS | {(1000, 50, "history")}
