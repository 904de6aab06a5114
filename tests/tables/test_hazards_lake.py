"""Hazards of the lake's metadata: pins and their tags, pruned JSON, foreign snapshots, a catalog beside ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from modak.catalog import pins
from modak.core import faults
from modak.core.errors import ModakError, Refused
from modak.core.states import OpPhase
from modak.lake.changes import SetProperties
from modak.lake.model import pin_tag
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.storage.uri import local_path
from modak.tables import status
from modak.tables.foreign import accept
from modak.tables.tidy import finish_operations, tidy_landed
from modak.tables.upkeep import commit_aside, release_tags
from tests.tables import readers
from tests.tables.conftest import settings_for
from tests.tables.events import Events

pytestmark = pytest.mark.spark

COMPACT = (
    "CALL modak.system.rewrite_data_files(table => 'modak.modak.public.events', options => map('rewrite-all', 'true'))"
)
ROWS = {(i, i, f"row {i}") for i in range(251)}


def age(events: Events, leader: Leader) -> int | None:
    """Let the next partition move; returns the snapshot that the lake is at then."""
    at = events.sql("SELECT max(ts) FROM public.events")[0][0] // 100 * 100 + 100
    events.add_partition(at)
    events.sql(f"INSERT INTO public.events VALUES ({at + 50}, {at + 50}, 'newest')")
    assert events.tier(leader).moved_partitions
    return events.site.reader.state(events.name).cutline.snapshot_id


def tags(events: Events) -> dict[str, int]:
    lake = events.site.lake.load(events.site.reader.state(events.name).table.lake)
    assert lake is not None
    return dict(lake.tags)


def json_files(events: Events) -> set[str]:
    folder = local_path(events.site.reader.state(events.name).table.location)
    assert folder is not None
    return {path.name for path in Path(folder, "metadata").glob("*.metadata.json")}


def small_commit(events: Events, leader: Leader, number: int) -> None:
    """One commit of the usual way that changes nothing but a property."""
    site, writer = events.site, events.site.writer(leader.epoch)
    changes = [SetProperties({"note": str(number)})]
    commit_aside(site, writer, site.reader.state(events.name), "note", lambda _lake, _state: changes)
    finish_operations(site, writer, site.reader.state(events.name))


def test_a_neighbour_who_commits_between_the_look_at_the_lines_and_that_at_the_lake_makes_nobody_fail(
    events: Events, leader: Leader
) -> None:
    events.register()
    neighbours = iter([2])

    def commit(point: str) -> None:
        if point == "journal.after_phase" and next(neighbours, None):
            small_commit(events, leader, 2)

    faults.watch(commit)
    small_commit(events, leader, 1)
    faults.watch(None)
    first, second = events.site.reader.history(events.site.reader.state(events.name).table.table_id, 2)[::-1]
    assert {(first.attempt, first.phase), (second.attempt, second.phase)} == {(1, OpPhase.DONE), (2, OpPhase.DONE)}
    assert events.tier(leader).moved_partitions
    assert events.everything() == ROWS


def test_a_superseded_snapshot_is_tagged_only_while_a_pin_needs_it(events: Events, leader: Leader) -> None:
    events.register()
    events.tier(leader)
    unpinned = age(events, leader)
    assert tags(events) == {}
    pin = pins.begin(events.site.dsn, events.name)
    assert pin.snapshot_id == unpinned
    age(events, leader)
    assert tags(events) == {pin_tag(unpinned or 0): unpinned}
    age(events, leader)
    assert tags(events) == {pin_tag(unpinned or 0): unpinned}, "still pinned, and tagged once"
    with events.site.connect() as conn:
        assert pins.end(conn, pin.pin_id)
    age(events, leader)
    assert tags(events) == {}


def test_an_operation_whose_snapshot_was_expired_before_it_was_tidied_ends(
    events: Events, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    events.register()
    site, writer = events.site, events.site.writer(leader.epoch)
    faults.arm(faults.Fault("landing.committed"))
    with pytest.raises(faults.InjectedFault):
        events.tier(leader)
    faults.arm(None)
    (op,) = (op for op in site.reader.state(events.name).unfinished if op.kind != "register")

    def gone(*_: object) -> list[str]:
        raise ModakError("lake.file_missing", "The manifest list is gone.")

    monkeypatch.setattr(type(site.lake), "unreferenced", gone)
    with pytest.raises(ModakError, match="gone"):
        tidy_landed(site, writer, site.reader.state(events.name), op)
    tidy_landed(site, writer, site.reader.state(events.name), replace(op, cleanup={**op.cleanup, "snapshot": 1}))
    assert op.op_id not in {each.op_id for each in site.reader.state(events.name).unfinished}
    assert set(events.lake()) <= ROWS


def test_a_pin_taken_between_prepare_and_commit_gets_its_tag(events: Events, leader: Leader) -> None:
    events.register()
    events.tier(leader)
    before = events.site.reader.state(events.name).cutline.snapshot_id
    taken = []

    def pin(point: str) -> None:
        if point == "landing.prepared" and not taken:
            taken.append(pins.begin(events.site.dsn, events.name))

    faults.watch(pin)
    age(events, leader)
    assert taken[0].snapshot_id == before
    assert tags(events) == {pin_tag(before or 0): before}
    op = events.site.reader.history(events.site.reader.state(events.name).table.table_id, 1)[0]
    assert op.attempt == 2


def test_a_pin_that_is_not_committed_yet_keeps_its_tag_whatever_is_committed(events: Events, leader: Leader) -> None:
    events.register()
    events.tier(leader)
    before = events.site.reader.state(events.name).cutline.snapshot_id or 0
    with events.site.connect() as reader:
        reader.execute("SELECT modak_read_begin(%s::regclass)", (str(events.name),))
        for _ in range(3):
            age(events, leader)
            assert pin_tag(before) in tags(events)
        lapsed = pins.begin(events.site.dsn, events.name)
        age(events, leader)
        with events.site.connect() as conn:
            assert pins.end(conn, lapsed.pin_id)
        assert not release_tags(events.site, events.site.writer(leader.epoch), events.name)
        assert {pin_tag(before), pin_tag(lapsed.snapshot_id or 0)} <= tags(events).keys()
    assert pin_tag(before) in tags(events)
    age(events, leader)
    assert tags(events) == {pin_tag(before): before}


def test_a_lapsed_pin_loses_its_tag(events: Events, leader: Leader) -> None:
    events.register()
    events.tier(leader)
    pin = pins.begin(events.site.dsn, events.name, lifetime_seconds=600)
    age(events, leader)
    assert tags(events) == {pin_tag(pin.snapshot_id or 0): pin.snapshot_id}
    events.sql("UPDATE modak.read_pins SET expires_at = clock_timestamp()")
    age(events, leader)
    assert tags(events) == {}


@pytest.fixture
def forgetful(fresh_database: Dsn, warehouse: str, spark_home: Path, spark: object) -> Iterator[Events]:
    """A lake that remembers only three older metadata files."""
    props = {"MODAK_LAKE_PROPS": "iceberg.table.write.metadata.previous-versions-max=3"}
    with open_site(settings_for(fresh_database, warehouse, spark_home, **props)) as site:
        _ = site.spark
        yield Events.create(site)


@pytest.mark.parametrize("commits", [12, pytest.param(500, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
def test_a_pinned_read_by_metadata_file_works_after_many_commits(forgetful: Events, commits: int) -> None:
    with Leader.campaign(forgetful.site, 5) as leader:
        forgetful.register()
        forgetful.tier(leader)
        pin = pins.begin(forgetful.site.dsn, forgetful.name)
        name = pin.metadata_location.rpartition("/")[2]
        wanted = [{"id": key, "ts": ts, "body": body} for key, ts, body in sorted(ROWS) if ts < 200]
        for number in range(commits):
            small_commit(forgetful, leader, number)
        # The one that made the tag, and the one that pushed the pinned file out of the log: more commits leave no more.
        assert len(forgetful.site.reader.unfinished_ops()) <= 2
        age(forgetful, leader)
        left = json_files(forgetful)
        assert name in left
        assert len(left) == 5, "three older ones, the current one, and the pinned one"
        assert readers.static_rows(pin.metadata_location) == wanted
        assert readers.duckdb_rows(pin.metadata_location) == wanted
        path = local_path(pin.metadata_location)
        spark = forgetful.site.spark.read.format("iceberg").load(path)
        assert readers.plain(spark.toArrow()) == wanted
        with forgetful.site.connect() as conn:
            assert pins.end(conn, pin.pin_id)
        forgetful.tier(leader)
        assert len(json_files(forgetful) - {name}) == 4
        assert name not in json_files(forgetful)
    assert forgetful.site.reader.unfinished_ops() == ()


def test_a_foreign_change_of_rows_freezes_publication_until_it_is_accepted(events: Events, leader: Leader) -> None:
    events.register()
    events.tier(leader)
    before = events.site.reader.state(events.name).cutline
    events.site.spark.sql("INSERT INTO modak.modak.public.events VALUES (9999, 5, 'foreign')")
    events.add_partition(300)
    events.sql("INSERT INTO public.events VALUES (350, 350, 'newest')")
    with pytest.raises(Refused, match="may have changed rows") as refused:
        events.tier(leader)
    assert "modak-worker accept --table public.events" in refused.value.hint
    report = events.tier(leader)
    assert report.blocked is not None
    assert "foreign snapshot" in report.blocked
    assert events.site.reader.state(events.name).cutline == before
    (shown,) = status.collect(events.site)
    assert any("foreign snapshot" in problem for problem in shown.problems)
    assert "accepted" in accept(events.site, events.name)
    assert events.tier(leader).moved_partitions == ("events_200",)
    assert events.everything() == ROWS | {(9999, 5, "foreign"), (350, 350, "newest")}
    assert status.collect(events.site)[0].problems == ()


def test_a_foreign_compaction_is_taken_along(events: Events, leader: Leader) -> None:
    events.register()
    events.tier(leader)
    for at in (300, 400):
        events.add_partition(at)
        events.sql(f"INSERT INTO public.events VALUES ({at + 50}, {at + 50}, 'newest')")
        events.site.spark.sql(COMPACT)
        assert events.tier(leader).moved_partitions
    assert events.everything() == ROWS | {(350, 350, "newest"), (450, 450, "newest")}


def test_a_foreign_compaction_between_prepare_and_commit_is_prepared_again(events: Events, leader: Leader) -> None:
    events.register()
    events.tier(leader)
    events.add_partition(300)
    events.sql("INSERT INTO public.events VALUES (350, 350, 'newest')")
    done = []

    def compact(point: str) -> None:
        if point == "landing.prepared" and not done:
            done.append(point)
            events.site.spark.sql(COMPACT)

    faults.watch(compact)
    assert events.tier(leader).moved_partitions == ("events_200",)
    assert done
    assert events.everything() == ROWS | {(350, 350, "newest")}


def test_a_catalog_of_the_same_names_in_another_schema_does_not_confuse(
    fresh_database: Dsn, warehouse: str, spark_home: Path, spark: object
) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        for schema in ("public", "aaa"):
            conn.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
            conn.execute(f"CREATE TABLE {schema}.iceberg_tables (somebody text)")
            conn.execute(f"CREATE TABLE {schema}.iceberg_namespace_properties (else_s text)")
    with open_site(settings_for(fresh_database, warehouse, spark_home)) as site:
        _ = site.spark
        events = Events.create(site)
        with Leader.campaign(site, 5) as leader:
            events.register()
            events.tier(leader)
        assert events.everything() == ROWS
        assert len(readers.by_pyiceberg(site, events.name)) == 200
        assert events.sql("SELECT catalog_name, table_namespace, table_name FROM modak_iceberg.iceberg_tables") == [
            ("modak", "modak.public", "events")
        ]
        assert events.sql("SELECT count(*) FROM public.iceberg_tables, aaa.iceberg_tables") == [(0,)]
