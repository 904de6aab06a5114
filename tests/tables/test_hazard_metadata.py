"""Metadata files under a pin stay, whoever commits; what falls out of the log goes, whoever pushed it out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modak.catalog import pins
from modak.lake.iceberg.log import OURS
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.storage.uri import local_path
from modak.tables.foreign import accept
from tests.tables import readers
from tests.tables.conftest import settings_for
from tests.tables.events import Events
from tests.tables.test_hazards_lake import json_files, small_commit

pytestmark = pytest.mark.spark

PRUNING = "write.metadata.delete-after-commit.enabled"
REMEMBERED = 3
COLD = [{"id": i, "ts": i, "body": f"row {i}"} for i in range(200)]


@pytest.fixture
def forgetful(fresh_database: Dsn, warehouse: str, spark_home: Path, spark: object) -> Iterator[Events]:
    """A tiered table whose log remembers only three older metadata files."""
    props = {"MODAK_LAKE_PROPS": f"iceberg.table.write.metadata.previous-versions-max={REMEMBERED}"}
    with open_site(settings_for(fresh_database, warehouse, spark_home, **props)) as site:
        _ = site.spark
        events = Events.create(site)
        events.register()
        yield events


def foreign_commits(events: Events, number: int) -> None:
    """Commits of somebody else, through Iceberg's own catalog."""
    table = java_table(events)
    for value in range(number):
        table.updateProperties().set("somebody", str(value)).commit()


def java_table(events: Events) -> Any:
    return events.site.lake._existing(events.site.reader.state(events.name).table.lake)


def properties(events: Events) -> dict[str, str]:
    lake = events.site.lake.load(events.site.reader.state(events.name).table.lake)
    assert lake is not None
    return dict(lake.properties)


@pytest.mark.parametrize("commits", [40, pytest.param(500, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
def test_a_pinned_read_by_metadata_file_works_after_many_foreign_commits(
    forgetful: Events, leader_of_forgetful: Leader, commits: int
) -> None:
    forgetful.tier(leader_of_forgetful)
    pin = pins.begin(forgetful.site.dsn, forgetful.name)
    name = pin.metadata_location.rpartition("/")[2]
    foreign_commits(forgetful, commits // 2)
    small_commit(forgetful, leader_of_forgetful, 1)
    assert len(json_files(forgetful)) == REMEMBERED + 2, "the log, the current one, and the pinned one"
    foreign_commits(forgetful, commits // 2)
    small_commit(forgetful, leader_of_forgetful, 2)
    left = json_files(forgetful)
    assert name in left
    assert len(left) == REMEMBERED + 2
    assert readers.static_rows(pin.metadata_location) == COLD
    assert readers.duckdb_rows(pin.metadata_location) == COLD
    with forgetful.site.connect() as conn:
        assert pins.end(conn, pin.pin_id)
    forgetful.tier(leader_of_forgetful)
    assert name not in json_files(forgetful)
    assert len(json_files(forgetful)) == REMEMBERED + 1
    assert forgetful.site.reader.unfinished_ops() == ()


@pytest.fixture
def leader_of_forgetful(forgetful: Events) -> Iterator[Leader]:
    with Leader.campaign(forgetful.site, 5) as leader:
        yield leader


def test_a_table_that_let_foreign_commits_prune_is_switched_over_by_our_next_commit(
    forgetful: Events, leader_of_forgetful: Leader
) -> None:
    forgetful.tier(leader_of_forgetful)
    # As an earlier version left a table: pruning by everybody, and no name of our latest commit.
    java_table(forgetful).updateProperties().set(PRUNING, "true").remove(OURS).commit()
    foreign_commits(forgetful, 6)
    small_commit(forgetful, leader_of_forgetful, 1)
    assert properties(forgetful)[PRUNING] == "false"
    foreign_commits(forgetful, 6)
    assert len(json_files(forgetful)) > REMEMBERED + 1, "foreign commits delete nothing any more"
    small_commit(forgetful, leader_of_forgetful, 2)
    assert len(json_files(forgetful)) == REMEMBERED + 1


def test_metadata_pushed_out_before_a_foreign_change_was_accepted_goes_too(
    forgetful: Events, leader_of_forgetful: Leader
) -> None:
    forgetful.tier(leader_of_forgetful)
    foreign_commits(forgetful, 6)
    forgetful.site.spark.sql("INSERT INTO modak.modak.public.events VALUES (9999, 5, 'foreign')")
    accept(forgetful.site, forgetful.name)
    assert len(json_files(forgetful)) > REMEMBERED + 1
    small_commit(forgetful, leader_of_forgetful, 1)
    assert len(json_files(forgetful)) == REMEMBERED + 1


def test_a_metadata_file_that_is_missing_from_the_chain_does_not_stop_a_commit(
    forgetful: Events, leader_of_forgetful: Leader
) -> None:
    forgetful.tier(leader_of_forgetful)
    foreign_commits(forgetful, 6)
    current = local_path(java_table(forgetful).operations().current().metadataFileLocation())
    assert current is not None
    for path in Path(current).parent.glob("*.metadata.json"):
        if path != Path(current):
            path.unlink()
    small_commit(forgetful, leader_of_forgetful, 1)
    assert forgetful.site.reader.unfinished_ops() == ()
    assert len(forgetful.lake()) == 200
