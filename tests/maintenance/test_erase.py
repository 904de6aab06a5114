"""Rows that were erased are nowhere: not in the heap, the delta, the lake or any snapshot that is kept."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from modak.catalog import pins
from modak.catalog.records import OpRecord
from modak.core import faults
from modak.core.errors import ModakError, UsageError
from modak.core.faults import Fault, InjectedFault
from modak.core.names import TableName
from modak.core.underway import working
from modak.runtime import daemon
from modak.runtime.leader import Leader
from modak.runtime.maintaining import Maintainer
from modak.tables.maintenance import erasures, requests
from modak.tables.maintenance.condition import by_key, for_spark
from modak.tables.maintenance.erase import Erased, count, erase_rows
from modak.tables.maintenance.erase import _positions as positions
from modak.tables.maintenance.run import maintain
from modak.tables.maintenance.settling import beside, mark, on_its_way
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.repair import repair
from modak.tables.site import Site
from modak.tables.upkeep import trim_snapshots
from tests.cli.conftest import modak  # noqa: F401
from tests.maintenance.lake import Lake, original
from tests.maintenance.test_requests import environ
from tests.mirror.pumping import Mirrored
from tests.tables import readers
from tests.tables.corrections import Corrections
from tests.tables.events import Events

__all__ = ["environ"]

pytestmark = pytest.mark.spark

POINTS = (
    "erasures.before_begin",
    "erasures.after_begin",
    "erase.before_heap",
    "erase.after_heap",
    "erase.before_hide",
    "erase.after_hide",
    "erasures.before_erased",
    "erasures.after_erased",
    "erasures.before_finish",
    "erasures.after_finish",
)
ASKING = (
    "erasures.before_ask",
    "erasures.after_ask",
    "erasures.before_claim",
    "erasures.after_claim",
    "erasures.before_answer",
    "erasures.after_answer",
)
WITHDRAWING = ("erasures.before_withdraw", "erasures.after_withdraw")
VISITED = {*POINTS, *ASKING, *WITHDRAWING}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every point; all but one that is drawn only to the full run."""
    if "struck" in metafunc.fixturenames:
        drawn = random.Random(int(metafunc.config.getoption("randomly_seed", 0))).choice(POINTS)
        marks = {point: () if point == drawn else (pytest.mark.full,) for point in POINTS}
        metafunc.parametrize("struck", [pytest.param(point, marks=marks[point]) for point in POINTS])


def everywhere(lake: Lake) -> set[str]:
    """Every text that any file of the lake, any snapshot or the heap still shows."""
    found = {row[2] for row in lake.events.sql("SELECT * FROM public.events")}
    table = lake.table
    for each in lake.site.lake.snapshots(table):
        found |= {row["body"] for row in readers.static_rows(table.metadata_location, each.id)}
    import pyarrow.parquet as pq

    for entry in lake.site.store.list(f"{table.location}/data"):
        if entry.uri.endswith(".parquet"):
            found |= set(pq.read_table(entry.uri.removeprefix("file://")).column("body").to_pylist())
    found |= {str(image.get("body")) for image in lake.events.delta().values() if image is not None}
    return found


def test_rows_are_gone_from_every_file_and_snapshot(lake: Lake) -> None:
    lake.correct(3, body="secret")
    lake.correct(3, body="public again")
    lake.correct(120, body="secret")
    Corrections(lake.events).upsert(4, 4, "secret")
    lake.events.sql("UPDATE public.events SET body = 'secret' WHERE id = 230")
    assert "secret" in everywhere(lake)
    done = erase_rows(lake.site, lake.leader.epoch, lake.events.name, "body = 'secret'")
    assert (done.heap_rows, done.lake_rows, done.waiting, done.found) == (1, 2, 0, 0)
    assert done.files_rewritten >= 2
    assert done.snapshots_expired >= 3
    assert "secret" not in everywhere(lake)
    assert lake.rows() == original(3, 4, 120) | {(3, 3, "public again")}
    assert lake.events.sql("SELECT finished_at IS NOT NULL, digest ~ '^[0-9a-f]{64}$' FROM modak.erasures") == [
        (True, True)
    ]


def test_a_pinned_snapshot_defers_the_end_and_a_later_pass_finishes(lake: Lake) -> None:
    lake.policy(maintenance_enabled=False)
    pin = pins.begin(lake.site.dsn, lake.events.name)
    done = erase_rows(lake.site, lake.leader.epoch, lake.events.name, "id = 5")
    assert done.waiting >= 1
    assert len(readers.static_rows(pin.metadata_location)) == 200, "the reader still has what it pinned"
    assert lake.rows() == original(5)
    lake.maintain("spark")
    assert lake.events.sql("SELECT finished_at IS NULL FROM modak.erasures") == [(True,)]
    with lake.site.connect() as conn:
        assert pins.end(conn, pin.pin_id)
    lake.maintain("spark")
    assert lake.events.sql("SELECT finished_at IS NOT NULL FROM modak.erasures") == [(True,)]
    assert "row 5" not in everywhere(lake)


def test_a_crash_in_an_erasure_is_made_good_by_running_it_again(lake: Lake, struck: str) -> None:
    faults.arm(Fault(struck))
    with pytest.raises(InjectedFault):
        erase_rows(lake.site, lake.leader.epoch, lake.events.name, "id = 5 OR id = 220")
    faults.arm(None)
    repair(lake.site, lake.leader.epoch)
    done = erase_rows(lake.site, lake.leader.epoch, lake.events.name, "id = 5 OR id = 220")
    assert (done.waiting, done.found) == (0, 0)
    assert not {"row 5", "row 220"} & everywhere(lake)
    assert lake.rows() == original(5)
    assert lake.site.reader.unfinished_ops() == ()


def test_a_condition_that_cannot_be_read_changes_nothing(lake: Lake) -> None:
    for where in ("no_such_column = 1", "id = 5; DELETE FROM public.events", "id ="):
        with pytest.raises(UsageError, match="condition"):
            erase_rows(lake.site, lake.leader.epoch, lake.events.name, where)
    assert count(lake.site, lake.events.name, "id < 3 AND body LIKE 'row %'") == (0, 3)
    assert lake.rows() == original()


def test_a_key_names_one_row(lake: Lake) -> None:
    assert by_key(lake.site, lake.events.name, " 07") == by_key(lake.site, lake.events.name, {"id": "7"})
    assert count(lake.site, lake.events.name, by_key(lake.site, lake.events.name, "7")) == (0, 1)
    with pytest.raises(UsageError, match="The key of"):
        by_key(lake.site, lake.events.name, {"ts": "7"})
    with pytest.raises(UsageError, match="is no value of id"):
        by_key(lake.site, lake.events.name, "a'b")


KEY = {
    "user": r"a\b's",
    "Code": "0F0E0D0C-0B0A-0908-0706-050403020100",
    "raw": r"\xDEad",
    "day": "infinity",
    "at": "2024-05-01 02:00 +02",
    "local": "0044-03-15 12:00 BC",
    "price": "1.5",
    "flag": "yes",
    "short": "ab",
}


OTHERS = {"ab's", "postgres"}
WRITTEN = """ "user" = 'a\\b''s' AND "Code" = '0f0e0d0c-0b0a-0908-0706-050403020100' """


@pytest.mark.parametrize("where", [None, WRITTEN])
def test_a_row_is_found_in_heap_and_lake_however_its_values_and_columns_are_spelt(
    site: Site, leader: Leader, where: str | None
) -> None:
    events = Events(site, TableName("public", "keyed"))
    columns = ", ".join(f'"{column}"' for column in KEY)
    events.sql(
        'CREATE TABLE public.keyed ("user" text, "Code" uuid, raw bytea, day date, at timestamptz, local timestamp,'
        f" price numeric(10,2), flag boolean, short char(5), ts bigint, PRIMARY KEY ({columns}, ts))"
        " PARTITION BY RANGE (ts)"
    )
    for lower in (0, 100, 200):
        events.add_partition(lower)
    for ts in (5, 230):
        for user in (KEY["user"], *OTHERS):
            values = ", ".join("$$" + value + "$$" for value in {**KEY, "user": user}.values())
            events.sql(f"INSERT INTO public.keyed VALUES ({values}, {ts})")
    register(site, RegisterRequest(events.name, tuple(KEY), "ts"))
    events.tier(leader)
    done = erase_rows(site, leader.epoch, events.name, where or by_key(site, events.name, KEY))
    assert (done.heap_rows, done.lake_rows, done.waiting, done.found) == (1, 1, 0, 0)
    assert {row[0] for row in events.sql('SELECT "user" FROM public.keyed')} == OTHERS
    assert {row[0] for row in site.spark.sql("SELECT `user` FROM modak.modak.public.keyed").collect()} == OTHERS


def test_a_value_that_is_too_long_for_its_column_is_no_other_shorter_value(site: Site, leader: Leader) -> None:
    events = Events(site, TableName("public", "short"))
    events.sql("CREATE TABLE public.short (id varchar(3), ts bigint, PRIMARY KEY (id, ts)) PARTITION BY RANGE (ts)")
    events.add_partition(0)
    events.add_partition(100)
    events.sql("INSERT INTO public.short VALUES ('abc', 5), ('abc', 130)")
    events.register()
    assert count(site, events.name, by_key(site, events.name, "abcd")) == (0, 0)
    assert count(site, events.name, by_key(site, events.name, "abc"))[0] == 2


def test_quotes_mean_to_spark_what_they_mean_to_postgres() -> None:
    assert for_spark("""  "a`b" = 'it''s' AND c = 'x\\y' AND "d""e" = '"' """) == (
        """  `a``b` = 'it\\'s' AND c = 'x\\\\y' AND `d"e` = '"' """
    )


def test_the_command_counts_erases_and_shows_evidence(lake: Lake, modak: Any, environ: dict[str, str]) -> None:  # noqa: F811
    lake.leader.__exit__(None, None, None)
    dry = modak("erase", "--table", "public.events", "--pk", "7", "--dry-run", **environ)
    assert dry.exit_code == 0, dry.output
    assert "0 rows of the heap and 1 of the lake would be erased." in dry.stdout
    done = modak("erase", "--table", "public.events", "--pk", "7", "--local", **environ)
    assert done.exit_code == 0, done.output
    assert "1 of the lake; 1 file rewritten" in done.stdout
    assert "found 0 matching rows" in done.stdout


@pytest.mark.parametrize(
    ("done", "exits", "says"),
    [
        (Erased(1, 1, 1, 1, 0, snapshots_scanned=2), 0, "found 0 matching rows"),
        (Erased(1, 1, 1, 1, 3), 1, "Readers still hold 3 older snapshots"),
        (Erased(1, 1, 1, 1, 0, snapshots_scanned=2, freeing=1), 1, "are still stored"),
        (Erased(1, 1, 1, 1, 0, snapshots_scanned=2, found=2), 1, "2 rows still match"),
    ],
)
def test_the_command_fails_unless_its_evidence_is_complete(
    lake: Lake,
    modak: Any,  # noqa: F811
    environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    done: Erased,
    exits: int,
    says: str,
) -> None:
    lake.leader.__exit__(None, None, None)
    monkeypatch.setattr("modak.tables.maintenance.erase.erase_rows", lambda *_: done)
    ended = modak("erase", "--table", "public.events", "--pk", "7", "--local", **environ)
    assert ended.exit_code == exits
    assert says in ended.stdout + ended.stderr


@pytest.fixture
def led(lake: Lake) -> Iterator[Lake]:
    """A worker leads and works on the table."""
    lake.leader.__exit__(None, None, None)
    stop = threading.Event()
    thread = threading.Thread(target=daemon.run, args=(lake.site,), kwargs={"stop": stop})
    thread.start()
    deadline = time.monotonic() + 60
    while requests.leader(lake.site) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    yield lake
    stop.set()
    thread.join()


def test_a_worker_that_leads_erases_beside_its_other_work(led: Lake, modak: Any, environ: dict[str, str]) -> None:  # noqa: F811
    Corrections(led.events).upsert(4, 4, "secret")
    led.events.sql("UPDATE public.events SET body = 'secret' WHERE id = 230")
    refused = modak("erase", "--table", "public.events", "--where", "no_such = 1", **environ)
    assert refused.exit_code == 2
    done = modak("erase", "--table", "public.events", "--where", "body = 'secret'", **environ)
    assert done.exit_code == 0, done.output
    assert "erased 1 row of the heap, 1 of the lake" in done.stdout
    assert "found 0 matching rows" in done.stdout
    assert "secret" not in everywhere(led)
    assert led.rows() == original(4)
    by_its_key = modak("erase", "--table", "public.events", "--pk", "9", **environ)
    assert by_its_key.exit_code == 0, by_its_key.output
    assert led.rows() == original(4, 9)
    kept = led.events.sql("SELECT condition, error, finished_at IS NOT NULL FROM modak.erasures")
    assert kept == [(None, None, True)] * 2, "the condition is forgotten"


def test_a_worker_finishes_an_erasure_soon_after_its_last_reader(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modak.runtime.maintaining.ERASING_SECONDS", 0.0)
    pin = pins.begin(lake.site.dsn, lake.events.name)
    erasures.ask(lake.site, lake.events.name, "id = 5")
    worker = Maintainer(lake.site, lake.leader, lambda: False)
    worker.turn()
    assert lake.events.sql("SELECT finished_at IS NULL, outcome ->> 'waiting' <> '0' FROM modak.erasures") == [
        (True, True)
    ]
    with lake.site.connect() as conn:
        assert pins.end(conn, pin.pin_id)
    worker.turn()
    assert lake.events.sql("SELECT finished_at IS NOT NULL FROM modak.erasures") == [(True,)]
    assert "row 5" not in everywhere(lake)


def test_snapshots_that_neighbours_commit_before_the_rewrite_go_too(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.policy(rewrite_enabled=False)
    folded: list[int] = []

    def after_a_fold(*given: Any) -> Any:
        if not folded:
            folded.append(7)
            lake.correct(*folded)
        return maintain(*given)

    monkeypatch.setattr("modak.tables.maintenance.erase.maintain", after_a_fold)
    done = erase_rows(lake.site, lake.leader.epoch, lake.events.name, "id = 5")
    assert (done.waiting, done.found) == (0, 0)
    assert "row 5" not in everywhere(lake), "the snapshot of the fold would keep the file"
    assert lake.rows() == original(5, 7) | {(7, 7, "corrected")}


def put_off(lake: Lake) -> OpRecord:
    """An expiry that has landed, and whose files are still there."""
    lake.correct(20)
    lake.policy(snapshot_retention_hours=0, snapshot_min_retained=1, snapshot_max_count=1)
    assert trim_snapshots(lake.site, lake.site.writer(lake.leader.epoch), lake.events.name)
    (left,) = erasures.freeing(lake.site, lake.site.reader.state(lake.events.name).table.table_id)
    return left


def has_ended(lake: Lake) -> bool:
    return lake.events.sql("SELECT bool_and(finished_at IS NOT NULL) FROM modak.erasures") == [(True,)]


def test_while_a_neighbour_still_deletes_files_of_older_snapshots_the_evidence_is_not_complete(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modak.tables.maintenance.settling.FREEING_SECONDS", 1.0)
    left = put_off(lake)
    with working(left.op_id):
        done = erase_rows(lake.site, lake.leader.epoch, lake.events.name, "id = 5")
    assert (done.waiting, done.found, done.freeing) == (0, 0, 1)
    assert not has_ended(lake)
    again = erase_rows(lake.site, lake.leader.epoch, lake.events.name, "id = 5")
    assert (again.waiting, again.found, again.freeing) == (0, 0, 0)
    assert has_ended(lake)
    assert "row 5" not in everywhere(lake)


def test_an_erasure_deletes_what_a_neighbour_has_put_off_meanwhile(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    left = put_off(lake)

    def beside_the_neighbour(*given: Any) -> Any:
        with working(left.op_id):
            return maintain(*given)

    monkeypatch.setattr("modak.tables.maintenance.erase.maintain", beside_the_neighbour)
    done = erase_rows(lake.site, lake.leader.epoch, lake.events.name, "id = 5")
    assert (done.waiting, done.found, done.freeing) == (0, 0, 0)
    assert has_ended(lake)
    assert "row 5" not in everywhere(lake)


def test_the_positions_of_one_file_are_held_at_a_time(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modak.tables.maintenance.erase.AT_ONCE", 7)
    seen: list[str] = []

    def one_by_one(found: Any) -> Iterator[Any]:
        for path, places in positions(found):
            seen.append("read")
            yield path, places

    monkeypatch.setattr("modak.tables.maintenance.erase._positions", one_by_one)
    faults.watch(lambda point: seen.append("written") if point == "vectors.durable" else None)
    done = erase_rows(lake.site, lake.leader.epoch, lake.events.name, "id % 10 < 9")
    faults.watch(None)
    assert seen == ["read", "written"] * 2
    assert (done.lake_rows, done.waiting, done.found) == (180, 0, 0)
    assert lake.rows() == {(i, i, f"row {i}") for i in range(9, 200, 10)}


def test_an_erasure_waits_for_what_could_still_bring_rows(lake: Lake) -> None:
    site, name = lake.site, lake.events.name
    assert on_its_way(site, name, mark(site)) is None
    Corrections(lake.events).upsert(4, 4, "secret")
    since = mark(site)
    assert on_its_way(site, name, since) == "corrections"
    lake.fold()
    Corrections(lake.events).upsert(5, 5, "written later")
    assert on_its_way(site, name, since) is None
    lake.events.sql(
        "INSERT INTO modak.load_labels (table_id, label, state) SELECT table_id, 'l', 'staged' FROM modak.tables"
    )
    assert on_its_way(site, name, mark(site)) == "staged loads"
    lake.events.sql("DELETE FROM modak.load_labels")
    lake.events.sql(
        "INSERT INTO modak.op_log (op_id, table_id, kind, phase) SELECT 'x', table_id, 'ingest', 'planned'"
        " FROM modak.tables"
    )
    assert on_its_way(site, name, mark(site)) == "an operation (ingest) under way"
    lake.events.sql("INSERT INTO modak.pauses (table_id, paused_by) SELECT table_id, 'me' FROM modak.tables")
    with pytest.raises(ModakError, match="do not come to an end"):
        beside(lambda: False)(site, lake.leader.epoch, name, mark(site))


def test_rows_that_a_mirrors_pump_has_not_read_are_erased_too(lake: Lake) -> None:
    table = Mirrored.create(lake.site, lake.leader.epoch, rows="SELECT i, i, 'row ' || i FROM generate_series(1, 50) i")
    table.sql("INSERT INTO @ VALUES (51, 51, 'secret')", "UPDATE @ SET body = 'secret' WHERE id = 7")
    table.sql("UPDATE @ SET body = 'public again' WHERE id = 51")
    done = erase_rows(lake.site, lake.leader.epoch, table.name, "body = 'secret'")
    assert (done.heap_rows, done.waiting, done.found) == (1, 0, 0)
    table.pump()
    assert table.is_same()
    state = lake.site.reader.state(table.name)
    for snapshot in lake.site.lake.snapshots(lake.site.lake.load(state.table.lake)):  # type: ignore[arg-type]
        bodies = {row["body"] for row in readers.static_rows(state.cutline.metadata_location, snapshot.id)}
        assert "secret" not in bodies
    table.close()


@pytest.mark.parametrize("point", ASKING)
def test_a_crash_leaves_an_erasure_that_the_next_leader_takes_up(lake: Lake, point: str) -> None:
    def asked_and_answered(leader: Leader, *conditions: str) -> None:
        for condition in conditions:
            erasures.ask(lake.site, lake.events.name, condition)
        writer = lake.site.writer(leader.epoch)
        while (asked := erasures.claim(writer)) is not None:
            assert asked.condition == "id = 5"
            erasures.answer(writer, asked.erasure_id, {"waiting": 0}, None)

    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        asked_and_answered(lake.leader, "id = 5")
    faults.arm(None)
    lake.leader.__exit__(None, None, None)
    with Leader.campaign(lake.site, 5) as successor:
        asked_and_answered(successor)
    left = lake.events.sql("SELECT condition, answered_at IS NOT NULL FROM modak.erasures")
    assert left == ([] if point == "erasures.before_ask" else [(None, True)])


@pytest.mark.parametrize("point", WITHDRAWING)
def test_an_erasure_is_withdrawn_as_long_as_nobody_has_begun_it(lake: Lake, point: str) -> None:
    asked = erasures.ask(lake.site, lake.events.name, "id = 5")
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        erasures.withdraw(lake.site, asked)
    faults.arm(None)
    assert erasures.withdraw(lake.site, asked) == (point == WITHDRAWING[0])
    writer = lake.site.writer(lake.leader.epoch)
    assert erasures.claim(writer) is None
    begun = erasures.ask(lake.site, lake.events.name, "id = 6")
    assert erasures.claim(writer) is not None
    assert not erasures.withdraw(lake.site, begun)
