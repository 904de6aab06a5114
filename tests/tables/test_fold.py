"""Fold: what users corrected goes from the delta into the lake, once, whatever happens meanwhile."""

from __future__ import annotations

import threading
from math import inf
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import modak
from modak.catalog import pins
from modak.catalog.records import Pin
from modak.core import faults
from modak.core.errors import Conflict
from modak.runtime.leader import Leader
from modak.tables.fold.run import REPLANS, fold, plan
from modak.tables.site import Site
from tests.tables.corrections import Corrections
from tests.tables.events import Events
from tests.tables.invariants import Invariants
from tests.tables.readers import by_duckdb, by_pyiceberg, by_spark
from tests.tables.test_foreign_commits import once_at, rewrite, strays


@pytest.fixture
def cold(events: Events, leader: Leader) -> Corrections:
    """Rows 0…199 are in the lake only."""
    events.register()
    events.tier(leader)
    return Corrections(events)


@pytest.fixture
def truth(site: Site, warehouse: str) -> Invariants:
    return Invariants(site.dsn, warehouse)


def lake(events: Events) -> dict[tuple[int, int], str]:
    rows = events.lake()
    found = {(row[0], row[1]): row[2] for row in rows}
    assert len(found) == len(rows)
    return found


def pinned_delta(events: Events, pin: int) -> set[tuple[str, int]]:
    return {(row[0], row[1]) for row in events.sql(f"SELECT pk, tier_key FROM modak.modak_read_delta({pin})")}


def through_the_seam(site: Site) -> dict[int, tuple[list[str], float | None]]:
    """Tags and most, by id, below the cut-line."""
    frame = modak.read(site.spark, "public.events", ["id", "tags", "most"], "ts < 200", settings=site.settings)
    return {row["id"]: (row["tags"], row["most"]) for row in frame.collect()}


@pytest.mark.spark
def test_corrections_reach_the_lake_and_every_reader_sees_them(
    site: Site, events: Events, cold: Corrections, leader: Leader, truth: Invariants
) -> None:
    cold.upsert(5, 5, "corrected")
    cold.upsert(150, 150, "corrected too")
    cold.upsert(1000, 60, "new")
    cold.delete(7, 7)
    # A row that was moved by its owner: gone at the old tier key, there at the new one.
    cold.delete(20, 20)
    cold.upsert(20, 120, "moved")
    before = events.everything()
    report = fold(site, leader.epoch, events.name)
    assert (report.rows, report.upserts, report.replaced, report.left) == (6, 4, 4, 0)
    assert events.delta() == {}
    assert events.everything() == before
    rows = by_spark(site, events.name)
    assert {(row["id"], row["ts"], row["body"]) for row in rows} == {row for row in before if row[1] < 200}
    assert by_duckdb(site, events.name) == rows == by_pyiceberg(site, events.name)
    truth.check_files()
    truth.check_journal()
    assert plan(site, events.name) is None
    assert not fold(site, leader.epoch, events.name).changed

    # The same rows again: the vectors of the first fold are united with the new ones.
    cold.upsert(6, 6, "second")
    cold.upsert(5, 5, "again")
    cold.delete(1000, 60)
    report = fold(site, leader.epoch, events.name)
    assert (report.rows, report.upserts, report.replaced) == (3, 2, 3)
    assert lake(events)[5, 5] == "again"
    assert by_duckdb(site, events.name) == by_spark(site, events.name) == by_pyiceberg(site, events.name)
    assert len(lake(events)) == 199
    truth.check_files()


@pytest.mark.parametrize("driver_rows", [20_000, pytest.param(0, marks=pytest.mark.spark)])
def test_a_correction_made_in_the_middle_of_a_fold_survives_it(
    site: Site,
    events: Events,
    cold: Corrections,
    leader: Leader,
    monkeypatch: pytest.MonkeyPatch,
    driver_rows: int,
) -> None:
    monkeypatch.setattr("modak.tables.fold.plan.DRIVER_ROWS", driver_rows)
    for key in range(100):
        cold.upsert(key, key, "old")
    late: dict[str, threading.Thread] = {}

    def correct(point: str) -> None:
        if point in late or point.startswith("lease."):
            return
        key = len(late)
        late[point] = threading.Thread(target=cold.upsert, args=(key, key, f"at {point}"))
        late[point].start()
        # While the commit holds the row the writer waits for it; nobody else waits for anybody.
        late[point].join(0.3)

    faults.watch(correct)
    fold(site, leader.epoch, events.name)
    faults.watch(None)
    for thread in late.values():
        thread.join(30)
    assert len(late) > 15
    expected = {(key, key): "old" for key in range(100)} | {(n, n): f"at {point}" for n, point in enumerate(late)}
    seen = {(row[0], row[1]): row[2] for row in events.cold() if row[1] < 100}
    assert seen == expected
    fold(site, leader.epoch, events.name)
    assert events.delta() == {}
    assert {key: body for key, body in lake(events).items() if key[1] < 100} == expected


def test_rows_that_a_pinned_reader_needs_stay_until_its_pin_ends(
    site: Site, events: Events, cold: Corrections, leader: Leader, truth: Invariants
) -> None:
    cold.upsert(5, 5, "corrected")
    cold.delete(7, 7)
    before = pins.begin(site.dsn, events.name)
    fold(site, leader.epoch, events.name)
    after = pins.begin(site.dsn, events.name)
    assert pinned_delta(events, before.pin_id) == {("5", 5), ("7", 7)}
    assert pinned_delta(events, after.pin_id) == set()
    assert site.reader.delta_backlog(cold.table_id) == 0
    assert lake(events)[5, 5] == "corrected"

    # A tombstone whose row the lake has lost already still hides it from the older reader.
    cold.upsert(7, 7, "back")
    cold.delete(7, 7)
    assert fold(site, leader.epoch, events.name).rows == 1
    assert pinned_delta(events, before.pin_id) == {("5", 5), ("7", 7)}
    assert pinned_delta(events, after.pin_id) == set()

    with site.connect(autocommit=True) as conn:
        assert pins.end(conn, before.pin_id)
    assert fold(site, leader.epoch, events.name).swept == 2
    assert events.delta() == {}
    with site.connect(autocommit=True) as conn:
        assert pins.end(conn, after.pin_id)
    events.tier(leader)
    truth.check_journal()
    truth.check_files()


@pytest.mark.parametrize("named", [True, False])
def test_what_lies_beside_the_landed_files_goes_whether_or_not_the_journal_names_them(
    site: Site,
    events: Events,
    cold: Corrections,
    leader: Leader,
    truth: Invariants,
    monkeypatch: pytest.MonkeyPatch,
    named: bool,
) -> None:
    if not named:
        monkeypatch.setattr("modak.tables.fold.commit.MOST_KEPT", 0)
    cold.upsert(5, 5, "corrected")
    asked: list[str] = []
    files = type(site.lake).files

    def asking(*args: object, **more: object) -> object:
        asked.append("files")
        return files(*args, **more)  # type: ignore[arg-type]

    def leave_a_stray() -> None:
        (folder,) = {Path(path).parent for path in truth.files() if path.endswith("-keys.arrow")}
        (folder / "00000-00000-of-a-task-that-ran-twice.parquet").write_bytes(b"PAR1")
        monkeypatch.setattr(type(site.lake), "files", asking)

    once_at("landing.committed", leave_a_stray)
    fold(site, leader.epoch, events.name)
    faults.watch(None)
    monkeypatch.undo()
    assert bool(asked) is not named
    assert lake(events)[5, 5] == "corrected"
    assert strays(truth) == set()
    truth.check_files()


@pytest.mark.spark
def test_spark_tasks_do_the_same_as_the_driver(
    site: Site, events: Events, cold: Corrections, leader: Leader, truth: Invariants, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modak.tables.fold.plan.DRIVER_ROWS", 10)
    monkeypatch.setattr("modak.tables.fold.survey.MARKS", 500_000)
    for key in range(0, 150, 2):
        cold.upsert(key, key, "corrected")
    for key in range(1, 150, 10):
        cold.delete(key, key)
    before = events.everything()
    with capture_logs() as logged:
        report = fold(site, leader.epoch, events.name)
    assert {entry["step"] for entry in logged if entry["event"] == "fold.progress"} == {"write", "locate"}
    assert (report.rows, report.replaced) == (90, 90)
    assert events.everything() == before
    assert events.delta() == {}
    truth.check_files()


@pytest.mark.spark
@pytest.mark.parametrize("soon", [0, 1_000_000])
def test_a_reader_who_pins_while_delta_rows_are_being_removed_keeps_them(
    site: Site, events: Events, cold: Corrections, leader: Leader, monkeypatch: pytest.MonkeyPatch, soon: int
) -> None:
    monkeypatch.setattr("modak.tables.fold.plan.DRIVER_ROWS", 0)
    monkeypatch.setattr("modak.tables.fold.commit.SOON_ROWS", soon)
    cold.upsert(5, 5, "corrected")
    cold.delete(7, 7)
    pinned: list[Pin] = []
    once_at("landing.prepared", lambda: pinned.append(pins.begin(site.dsn, events.name)))
    assert fold(site, leader.epoch, events.name).rows == 2
    faults.watch(None)
    assert pinned_delta(events, pinned[0].pin_id) == {("5", 5), ("7", 7)}
    assert site.reader.delta_backlog(cold.table_id) == 0
    assert lake(events)[5, 5] == "corrected"
    with site.connect(autocommit=True) as conn:
        assert pins.end(conn, pinned[0].pin_id)


@pytest.mark.spark
@pytest.mark.parametrize(
    "at",
    [
        pytest.param("fold.after_locate", marks=pytest.mark.full),
        pytest.param("landing.before_prepare", marks=pytest.mark.full),
        "landing.prepared",
    ],
)
def test_a_foreign_compaction_in_mid_fold_loses_nothing(
    site: Site, events: Events, cold: Corrections, leader: Leader, truth: Invariants, at: str
) -> None:
    cold.upsert(5, 5, "corrected")
    cold.delete(7, 7)
    before = events.everything()
    once_at(at, lambda: rewrite(site))
    report = fold(site, leader.epoch, events.name)
    faults.watch(None)
    assert report.replaced == 2
    assert events.everything() == before
    assert events.delta() == {}
    assert by_duckdb(site, events.name) == by_pyiceberg(site, events.name)
    assert strays(truth) == set()


def test_columns_that_were_renamed_swapped_added_or_dropped_meanwhile_are_followed(
    site: Site, events: Events, cold: Corrections, leader: Leader
) -> None:
    events.sql("ALTER TABLE public.events ADD COLUMN a text, ADD COLUMN b text, ADD COLUMN gone text")
    events.add_partition(300)
    events.sql("INSERT INTO public.events VALUES (350, 350, 'x', 'a', 'b', 'g')")
    events.tier(leader)
    cold.upsert(1, 1, "before", a="a", b="b", gone="old")
    events.sql("ALTER TABLE public.events RENAME COLUMN body TO text")
    with site.connect() as conn:
        for change in ("a TO c", "b TO a", "c TO b"):
            conn.execute(f"ALTER TABLE public.events RENAME COLUMN {change}".encode())
    events.sql("ALTER TABLE public.events DROP COLUMN gone")
    events.sql("ALTER TABLE public.events ADD COLUMN gone text, ADD COLUMN colour text DEFAULT 'red'")
    cold.record("2", 2, {"id": "2", "ts": "2", "text": "after", "a": "A", "b": "B", "gone": "new", "colour": None})
    fold(site, leader.epoch, events.name)
    rows = {row["id"]: row for row in by_duckdb(site, events.name) if row["id"] in (1, 2, 3)}
    wanted = ("text", "a", "b", "gone", "colour")
    assert [rows[1][name] for name in wanted] == ["before", "b", "a", None, "red"]
    assert [rows[2][name] for name in wanted] == ["after", "A", "B", "new", None]
    assert [rows[3][name] for name in wanted] == ["row 3", None, None, None, "red"]


@pytest.mark.parametrize(
    ("change", "name", "others"),
    [
        ("RENAME COLUMN body TO text", "text", {2: "row 2", 3: "before"}),
        ("ADD COLUMN text text DEFAULT 'from the start'", "text", {2: "from the start", 3: "from the start"}),
    ],
    ids=["renamed", "added"],
)
def test_a_column_that_comes_after_the_fold_has_looked_keeps_its_corrections(
    site: Site,
    events: Events,
    cold: Corrections,
    leader: Leader,
    truth: Invariants,
    change: str,
    name: str,
    others: dict[int, str],
) -> None:
    # Around the row that is to come, because a batch ends at its last row.
    cold.upsert(0, 0, "first")
    cold.upsert(3, 3, "before")

    def correct() -> None:
        events.sql(f"ALTER TABLE public.events {change}")
        events.sql(f"""SELECT modak_upsert('public.events', '{{"id": 1, "ts": 1, "{name}": "after"}}')""")

    once_at("journal.after_begin", correct)
    fold(site, leader.epoch, events.name)
    faults.watch(None)
    fold(site, leader.epoch, events.name)
    assert events.delta() == {}
    rows = {row["id"]: row[name] for row in by_duckdb(site, events.name)}
    assert {key: rows[key] for key in (1, 2, 3)} == {1: "after", **others}
    truth.check_files()
    truth.check_journal()


def test_columns_that_never_rest_end_the_fold_after_some_tries_and_lose_nothing(
    site: Site, events: Events, cold: Corrections, leader: Leader, truth: Invariants
) -> None:
    cold.upsert(5, 5, "corrected")
    added: list[str] = []

    def add(point: str) -> None:
        if point == "fold.snapshot_taken":
            added.append(f"column_{len(added)}")
            events.sql(f"ALTER TABLE public.events ADD COLUMN {added[-1]} text")

    faults.watch(add)
    with pytest.raises(Conflict) as conflict:
        fold(site, leader.epoch, events.name)
    faults.watch(None)
    assert (conflict.value.code, conflict.value.retryable) == ("fold.columns_changed", True)
    assert len(added) == REPLANS
    assert set(events.delta()) == {("5", 5)}
    truth.check_journal()
    assert fold(site, leader.epoch, events.name).rows == 1
    assert lake(events)[5, 5] == "corrected"
    truth.check_files()


@pytest.mark.spark
def test_a_column_whose_default_differs_from_row_to_row_reaches_files_that_carry_vectors(
    site: Site, events: Events, cold: Corrections, leader: Leader, truth: Invariants
) -> None:
    cold.upsert(5, 5, "corrected")
    cold.delete(7, 7)
    fold(site, leader.epoch, events.name)
    events.sql("ALTER TABLE public.events ADD COLUMN mark uuid DEFAULT gen_random_uuid()")
    cold.delete(8, 8)
    fold(site, leader.epoch, events.name)
    rows = by_spark(site, events.name)
    assert {row["id"] for row in rows} == set(range(200)) - {7, 8}
    assert len({row["mark"] for row in rows} - {None}) == 198
    assert rows == by_duckdb(site, events.name) == by_pyiceberg(site, events.name)
    truth.check_files()


@pytest.mark.spark
def test_a_correction_from_before_a_column_shows_a_default_that_no_initial_default_can_say(
    site: Site, events: Events, cold: Corrections, leader: Leader, truth: Invariants
) -> None:
    events.sql("""SELECT modak_upsert('public.events', '{"id": 5, "ts": 5, "body": "before"}')""")
    new = "ADD COLUMN tags text[] NOT NULL DEFAULT '{a}', ADD COLUMN most float8 DEFAULT 'infinity'"
    events.sql(f"ALTER TABLE public.events {new}")
    events.sql("""SELECT modak_upsert('public.events', '{"id": 6, "ts": 6, "body": "after", "tags": ["b"]}')""")
    cold.record("7", 7, {"id": "7", "ts": "7", "body": "null", "tags": "{}", "most": None})
    seen = through_the_seam(site)
    wanted = {4: (["a"], inf), 5: (["a"], inf), 6: (["b"], inf), 7: ([], None)}
    assert {key: seen[key] for key in wanted} == wanted
    assert fold(site, leader.epoch, events.name).rows == 3
    assert through_the_seam(site) == seen
    assert {
        row["id"]: (row["tags"], row["most"]) for row in by_duckdb(site, events.name) if row["id"] in wanted
    } == wanted
    assert by_duckdb(site, events.name) == by_pyiceberg(site, events.name)
    truth.check_files()


def test_a_table_of_wide_bands_stays_unpartitioned_and_is_folded_too(
    site: Site, leader: Leader, warehouse: str
) -> None:
    width = 3_000_000_000
    events = Events.create(site, partitions=0, last=-1)
    for at in range(3):
        events.add_partition(at * width, width)
    events.sql(f"INSERT INTO public.events SELECT i, i * {width} / 100, 'row ' || i FROM generate_series(0, 250) AS i")
    events.register()
    events.tier(leader)
    cold = Corrections(events)
    cold.upsert(5, 5 * width // 100, "corrected")
    cold.upsert(150, 150 * width // 100, "corrected")
    cold.delete(99, 99 * width // 100)
    before = events.everything()
    report = fold(site, leader.epoch, events.name)
    assert (report.replaced, report.files) == (3, 2)
    assert events.everything() == before
    assert events.delta() == {}
    Invariants(site.dsn, warehouse).check_files()
