"""Lake rows expire: the line moves by whole files, never under a reader, never past what is still to come."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from structlog.testing import capture_logs

from modak.catalog import pins
from modak.catalog.records import Pin
from modak.core import faults
from modak.core.errors import Refused
from modak.core.faults import Fault, InjectedFault
from modak.core.names import TableName
from modak.runtime import daemon
from modak.runtime.leader import Leader
from modak.runtime.schedule import Schedule
from modak.tables import status
from modak.tables.fold.run import fold
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.registration.unregister import unregister
from modak.tables.repair import repair
from modak.tables.retention.plan import RETENTION_LINE
from modak.tables.retention.run import RetentionReport, retain
from modak.tables.site import Site
from tests.tables import readers
from tests.tables.corrections import Corrections
from tests.tables.events import Events
from tests.tables.invariants import Invariants

ROWS = {(i, i, f"row {i}") for i in range(251)}
POINTS = (
    "catalog.after_commit",
    "catalog.after_step",
    "catalog.before_commit",
    "catalog.before_step",
    "journal.after_begin",
    "journal.after_phase",
    "journal.before_begin",
    "journal.before_phase",
    "lake.manifests_written",
    "lake.metadata_written",
    "lake.prepare_started",
    "landing.before_prepare",
    "landing.committed",
    "landing.prepared",
)
"""Every point that a retention comes by."""
VISITED = set(POINTS)
SAMPLE = 3


def expiring(events: Events, retention: str = "50") -> Events:
    register(events.site, RegisterRequest(events.name, ("id",), "ts", lake_retention=retention))
    return events


@pytest.fixture
def cold(events: Events, leader: Leader) -> Events:
    """All below 200 is only in the lake, and below 100 is due."""
    expiring(events).tier(leader)
    return events


def expire(events: Events, leader: Leader) -> RetentionReport:
    return retain(events.site, leader.epoch, events.name)


def line(events: Events) -> int | None:
    return events.site.reader.state(events.name).cutline.retention_line


def properties(events: Events) -> dict[str, str]:
    lake = events.site.lake.load(events.site.reader.state(events.name).table.lake)
    assert lake is not None
    return dict(lake.properties)


def promised(pin: Pin) -> int:
    """How many rows a reader of this pin finds in the lake, by the metadata file alone."""
    assert pin.t is not None
    low = pin.retention_line or 0
    rows = readers.static_rows(pin.metadata_location)
    assert all(row["ts"] >= low for row in rows), "expired rows are gone from what a later reader sees"
    assert len(rows) == pin.t - low
    return len(rows)


def test_a_fold_whose_rows_expire_meanwhile_brings_none_of_them_back(cold: Events, leader: Leader) -> None:
    Corrections(cold).upsert(5, 5, "corrected")
    Corrections(cold).upsert(7, 7, "corrected")
    once_at("fold.after_write", lambda: cold.sql("UPDATE modak.cutline SET retention_line = 100"))
    with capture_logs() as logged:
        assert not fold(cold.site, leader.epoch, cold.name).changed
    faults.watch(None)
    assert [entry["because"] for entry in logged if entry["event"] == "fold.again"] == ["fold.lines_moved"]
    assert {row[2] for row in cold.lake() if row[0] in (5, 7)} == {"row 5", "row 7"}
    assert not cold.site.reader.state(cold.name).unfinished


def test_the_line_moves_and_all_below_it_goes(cold: Events, leader: Leader, warehouse: str) -> None:
    cold.sql("INSERT INTO public.events VALUES (1000, 50, 'late'), (1001, 99, 'late'), (1002, 100, 'stays')")
    cold.sql("INSERT INTO public.events VALUES (1000, 50, 'later')")
    report = expire(cold, leader)
    assert (report.moved_to, report.doomed.files, report.doomed.rows) == ("100", 1, 100)
    assert {row[0] for row in cold.lake()} == set(range(100, 200))
    assert set(cold.delta()) == {("1002", 100)}
    assert cold.everything() == {row for row in ROWS if row[1] >= 100} | {(1002, 100, "stays")}
    assert cold.sql("SELECT retention_line FROM modak.status") == [(100,)]
    assert status.collect(cold.site)[0].retention_line == "100"
    assert properties(cold)[RETENTION_LINE] == "100"
    assert not cold.site.reader.state(cold.name).unfinished
    snapshots = cold.snapshots()
    assert expire(cold, leader) == RetentionReport(cold.name, waiting="no row of the lake is old enough")
    assert cold.snapshots() == snapshots
    Invariants(cold.site.dsn, warehouse).check_files()
    with pytest.raises(psycopg.errors.CheckViolation, match="below the retention line 100"):
        cold.sql("INSERT INTO public.events VALUES (1003, 99, 'too late')")
    with pytest.raises(Refused, match="would be lost"):
        unregister(cold.site, cold.name)
    unregister(cold.site, cold.name, discard_corrections=True)
    register(cold.site, RegisterRequest(cold.name, ("id",), "ts"))
    assert line(cold) == 100, "what has expired stays so under a new registration"


def test_the_daemon_moves_it_each_cycle_and_says_so(events: Events, leader: Leader) -> None:
    expiring(events)
    with capture_logs() as logged:
        daemon.cycle(events.site, leader, Schedule(), threading.Event())
    said = [entry for entry in logged if entry["event"].startswith("retention.")]
    assert [entry["event"] for entry in said] == ["retention.planned", "retention.committed"]
    assert said[1]["line"] == "100"
    assert line(events) == 100


def test_a_pin_and_a_staged_load_defer_it(cold: Events, leader: Leader) -> None:
    pin = pins.begin(cold.site.dsn, cold.name)
    with capture_logs() as logged:
        assert expire(cold, leader).waiting == expire(cold, leader).waiting == "a reader holds a pin"
    assert [entry["event"] for entry in logged] == ["retention.deferred"], "said once"
    assert line(cold) is None
    assert promised(pin) == 200
    with cold.site.connect() as conn:
        assert pins.end(conn, pin.pin_id)
    stage(cold, "staged")
    assert expire(cold, leader).waiting == "a staged load waits for its adoption"
    cold.sql("UPDATE modak.load_labels SET state = 'committed'")
    assert expire(cold, leader).moved_to == "100"


def stage(events: Events, state: str) -> None:
    table = events.site.reader.state(events.name).table.table_id
    events.sql(
        "INSERT INTO modak.load_labels (table_id, label, state, lower_bound, upper_bound)"
        f" VALUES ({table}, 'load', '{state}', 70, 90)"
    )


def once_at(point: str, act: Callable[[], None]) -> None:
    done: list[str] = []

    def watcher(reached: str) -> None:
        if reached == point and not done:
            done.append(reached)
            act()

    faults.watch(watcher)


def test_what_comes_between_plan_and_commit_defers_it_without_a_trace(
    cold: Events, leader: Leader, warehouse: str
) -> None:
    once_at("landing.prepared", lambda: stage(cold, "staging"))
    assert expire(cold, leader).waiting == "a heap partition or a staged load has come into the range"
    cold.sql("DELETE FROM modak.load_labels")
    taken: list[Pin] = []
    once_at("landing.prepared", lambda: taken.append(pins.begin(cold.site.dsn, cold.name)))
    assert expire(cold, leader).waiting == "a reader holds a pin"
    assert promised(taken[0]) == 200
    assert line(cold) is None
    assert cold.snapshots() == 1
    assert cold.site.reader.unfinished_ops() == ()
    assert status.collect(cold.site)[0].problems == ()
    Invariants(cold.site.dsn, warehouse).check_files()


def test_a_reader_that_comes_during_the_commit_waits_and_sees_the_new_line(cold: Events, leader: Leader) -> None:
    with ThreadPoolExecutor(1) as pool:
        coming = []
        once_at("catalog.before_commit", lambda: coming.append(pool.submit(pins.begin, cold.site.dsn, cold.name)))
        assert expire(cold, leader).moved_to == "100"
        pin = coming[0].result(30)
    assert pin.retention_line == 100
    assert promised(pin) == 100


@pytest.mark.full
@pytest.mark.timeout(900)
def test_readers_in_a_loop_get_all_that_they_were_promised(events: Events, leader: Leader) -> None:
    expiring(events)
    stop = threading.Event()
    read: list[int] = []

    def reader() -> None:
        while not stop.is_set():
            pin = pins.begin(events.site.dsn, events.name)
            if pin.snapshot_id is not None:
                read.append(promised(pin))
            with events.site.connect() as conn:
                assert pins.end(conn, pin.pin_id)
            stop.wait(0.05)

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(reader) for _ in range(2)]
        try:
            for lower in range(300, 1100, 100):
                events.add_partition(lower)
                events.sql(
                    f"INSERT INTO public.events SELECT i, i, '' FROM generate_series({lower - 49}, {lower + 50}) i"
                )
                events.tier(leader)
                for _ in range(20):
                    if expire(events, leader).moved_to is not None:
                        break
        finally:
            stop.set()
        for each in running:
            each.result(60)
    assert len(read) > 10
    assert line(events) is not None


def test_a_write_that_ends_after_the_line_has_passed_it_is_removed_in_the_next_cycle(
    cold: Events, leader: Leader
) -> None:
    with cold.site.connect() as conn:
        conn.execute("INSERT INTO public.events VALUES (1000, 50, 'begun before')")
        assert expire(cold, leader).moved_to == "100"
        conn.commit()
    assert set(cold.delta()) == {("1000", 50)}
    pin = pins.begin(cold.site.dsn, cold.name)
    assert cold.sql(f"SELECT * FROM modak.modak_read_delta({pin.pin_id})") == []
    expire(cold, leader)
    assert cold.delta() == {}


def test_without_a_file_below_it_the_line_moves_all_the_same(site: Site, leader: Leader) -> None:
    events = Events.create(site, last=-1)
    events.sql("INSERT INTO public.events VALUES (250, 250, 'newest')")
    expiring(events).tier(leader)
    snapshots = events.snapshots()
    assert expire(events, leader).moved_to == "100"
    assert events.snapshots() == snapshots
    assert properties(events)[RETENTION_LINE] == "100"


@pytest.mark.spark
def test_files_that_somebody_merged_over_the_bound_lower_the_line_to_whole_files(site: Site, leader: Leader) -> None:
    events = Events.create(site, partitions=0, last=-1)
    for lower in (50, 150, 250):
        events.add_partition(lower)
    events.sql("INSERT INTO public.events SELECT i, i, 'row ' || i FROM generate_series(50, 300) AS i")
    expiring(events, "60").tier(leader)
    site.spark.sql(
        "CALL modak.system.rewrite_data_files(table => 'modak.modak.public.events',"
        " options => map('rewrite-all', 'true'))"
    ).collect()
    assert expire(events, leader).moved_to == "100"
    assert {row[0] for row in events.lake()} == set(range(100, 250))
    assert expire(events, leader).waiting == "a lake file reaches over every bound that is due"


def test_months_expire_whole(site: Site, leader: Leader) -> None:
    name = TableName("public", "logs")
    events = Events(site, name)
    events.sql("CREATE TABLE public.logs (id bigint, at timestamptz, PRIMARY KEY (id, at)) PARTITION BY RANGE (at)")
    for month in range(1, 5):
        events.sql(
            f"CREATE TABLE public.logs_{month} PARTITION OF public.logs"
            f" FOR VALUES FROM ('2025-0{month}-01+00') TO ('2025-0{month + 1}-01+00')"
        )
    events.sql(
        "INSERT INTO public.logs SELECT i, timestamptz '2025-01-01+00' + i * interval '1 day'"
        " FROM generate_series(0, 95) AS i"
    )
    register(site, RegisterRequest(name, ("id",), "at", lake_retention="45d"))
    events.tier(leader)
    assert expire(events, leader).moved_to == "2025-02-01 00:00:00+00"
    assert {row[0] for row in events.lake()} == set(range(31, 90))


@pytest.fixture
def drawn(request: pytest.FixtureRequest) -> tuple[str, ...]:
    seed = int(request.config.getoption("randomly_seed", 0))
    print(f"the sample was drawn with --randomly-seed={seed}")
    return tuple(random.Random(seed).sample(POINTS, SAMPLE))


def test_the_points_are_all_that_a_retention_comes_by(cold: Events, leader: Leader) -> None:
    passed: set[str] = set()
    faults.watch(passed.add)
    expire(cold, leader)
    faults.watch(None)
    assert {point for point in passed if not point.startswith("lease.")} == VISITED


def test_after_a_crash_the_next_start_goes_on(
    site: Site, leader: Leader, warehouse: str, drawn: tuple[str, ...]
) -> None:
    _crash_at(drawn, site, leader, warehouse)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_after_a_crash_at_any_point_and_any_time_of_coming_by_the_next_start_goes_on(
    site: Site, leader: Leader, warehouse: str
) -> None:
    _crash_at(POINTS, site, leader, warehouse, times=4)


def _crash_at(points: tuple[str, ...], site: Site, leader: Leader, warehouse: str, times: int = 1) -> None:
    """One band of the lake expires for every crash; nothing moves in between but the line."""
    crashes = [Fault(point, after=after) for point in points for after in range(times)]
    t = 100 * len(crashes) + 100
    events = expiring(Events.create(site, len(crashes) + 2, last=-1))
    events.sql(f"INSERT INTO public.events SELECT i, i, 'at ' || i FROM generate_series(0, {t}, 50) AS i")
    events.tier(leader)
    truth = Invariants(site.dsn, warehouse)
    for number, fault in enumerate(crashes, start=1):
        events.sql(f"UPDATE modak.tables SET lake_retention = {t - 100 * number}")
        events.sql(f"INSERT INTO public.events VALUES (-1, {100 * number - 1}, 'late')")
        faults.arm(fault)
        try:
            expire(events, leader)
            assert fault.after, "every point is come by at least once"
        except InjectedFault:
            faults.arm(None)
            repair(site, leader.epoch)
            expire(events, leader)
        faults.arm(None)
        assert line(events) == 100 * number, fault
        assert events.delta() == {}, fault
        assert truth.everything() == {(i, i, f"at {i}") for i in range(100 * number, t + 1, 50)}, fault
        truth.check_journal()
        truth.check_files()
