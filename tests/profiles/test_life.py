"""The whole life of a tiered table whose lake lies on S3, beside one in a folder, in one process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from modak.catalog import profiles
from modak.core.errors import Refused
from modak.core.names import TableName
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.runtime.reading import snapshot
from modak.storage import access
from modak.storage.access import Key
from modak.storage.store import Store
from modak.tables.fold.run import fold
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.registration.unregister import unregister
from modak.tables.retention.run import retain
from modak.tables.site import Site
from modak.tables.tiering.run import tier
from modak.tables.verify.run import verify
from tests.mirror.pumping import Mirrored
from tests.profiles.conftest import SECRET
from tests.s3_fixtures import S3Server
from tests.tables.conftest import settings_for, through_spark
from tests.tables.events import Events

__all__ = ["through_spark"]


def _on(site: Site, name: str, profile: str | None, **more: Any) -> Events:
    events = Events.create(site, name=name)
    register(site, RegisterRequest(events.name, ("id",), "ts", profile=profile, **more))
    return events


def commands() -> list[str]:
    """The command lines of this process and of all that it has started."""
    import psutil

    found = []
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        # Workers of Spark come and go.
        with contextlib.suppress(psutil.Error):
            found.append(" ".join(process.cmdline()))
    return found


def _files(site: Site, events: Events) -> list[str]:
    location = site.reader.state(events.name).table.location
    return [entry.uri for entry in site.store.list(location)]


def lake_rows(site: Site, name: TableName) -> set[tuple[Any, ...]]:
    """The lake as PyIceberg reads it, with the credentials that a user would give it."""
    from pyiceberg.table import StaticTable

    line = site.reader.state(name).cutline
    key = next(key for key in site.keys.values() if line.metadata_location.startswith(key.root))
    table = StaticTable.from_metadata(line.metadata_location, dict(key.props))
    return {tuple(row.values()) for row in table.scan().to_arrow().to_pylist()}


@pytest.mark.spark
def test_a_tiered_table_lives_on_s3_from_registration_to_its_end(
    s3_lake: Site, s3_leader: Leader, through_spark: None
) -> None:
    events = _on(s3_lake, "events", "bucket", lake_retention="100")
    beside = _on(s3_lake, "beside", None)
    for table in (events, beside):
        report = tier(s3_lake, s3_leader.epoch, table.name)
        assert report.rows == 200
    assert lake_rows(s3_lake, events.name) == {(i, i, f"row {i}") for i in range(200)}
    assert all(uri.startswith("s3://") for uri in _files(s3_lake, events))
    assert all(uri.startswith("file://") for uri in _files(s3_lake, beside))
    for table in (events, beside):
        table.sql(f'SELECT modak_upsert(\'public.{table.name.name}\', \'{{"id": 150, "ts": 150, "body": "new"}}\')')
        assert fold(s3_lake, s3_leader.epoch, table.name).replaced == 1
    rows = {(i, i, "new" if i == 150 else f"row {i}") for i in range(200)}
    assert lake_rows(s3_lake, events.name) == rows
    with snapshot(s3_lake.spark, settings=s3_lake.settings) as point:
        for table in (events, beside):
            assert {tuple(row) for row in point.read(str(table.name)).collect()} == rows | {
                (i, i, f"row {i}") for i in range(200, 251)
            }
    report = verify(s3_lake, events.name)
    assert (report.differing_rows, report.findings) == (0, ())
    assert retain(s3_lake, s3_leader.epoch, events.name).moved_to == "100"
    assert lake_rows(s3_lake, events.name) == {row for row in rows if row[1] >= 100}
    settings = s3_lake.spark.sparkContext.getConf().getAll() + list(s3_lake.spark.conf.getAll.items())
    assert not [pair for pair in settings if SECRET in str(pair)], "a page of Spark's UI would show it"
    assert not [command for command in commands() if SECRET in command], "ps would show it"
    location = s3_lake.reader.state(events.name).table.location
    unregister(s3_lake, events.name, drop_lake=True)
    assert list(s3_lake.store.list(location)) == []
    assert _files(s3_lake, beside)


def test_a_missing_credential_names_its_variable_and_other_profiles_go_on(
    fresh_database: Dsn, s3_lake: Site, s3_leader: Leader, warehouse: str
) -> None:
    on_s3, beside = _on(s3_lake, "events", "bucket"), _on(s3_lake, "beside", None)
    settings = settings_for(fresh_database, warehouse, s3_lake.settings.home.path)
    with open_site(settings) as without:
        with pytest.raises(Refused, match="MODAK_CREDENTIALS_TEST is not set"):
            tier(without, s3_leader.epoch, on_s3.name)
        assert tier(without, s3_leader.epoch, beside.name).rows == 200
        with pytest.raises(Refused, match="MODAK_CREDENTIALS_TEST"):
            _on(without, "third", "bucket")


def test_no_secret_is_in_the_catalog(s3_lake: Site, s3_leader: Leader) -> None:
    events = _on(s3_lake, "events", "bucket")
    tier(s3_lake, s3_leader.epoch, events.name)
    held = events.sql(
        "SELECT string_agg(t::text, ' ') FROM (SELECT row_to_json(p)::text FROM modak.storage_profiles p"
        " UNION ALL SELECT row_to_json(o)::text FROM modak.op_log o"
        " UNION ALL SELECT row_to_json(x)::text FROM modak.tables x) t"
    )[0][0]
    assert SECRET not in held
    assert SECRET not in repr(s3_lake.keys)
    root = next(key.root for key in s3_lake.keys.values() if key.root.startswith("s3:"))
    stored = Store.of(root, next(key.props for key in s3_lake.keys.values() if key.root == root))
    texts = [stored.read(entry.uri) for entry in stored.list() if entry.uri.endswith(".json")]
    assert texts
    assert not [text for text in texts if SECRET.encode() in text]


def test_one_daemon_serves_both_profiles_and_one_that_comes_later(
    fresh_database: Dsn, s3_lake: Site, s3_leader: Leader, s3_server: S3Server
) -> None:
    import threading

    from modak.runtime.daemon import cycle
    from modak.runtime.schedule import Schedule

    tables = [_on(s3_lake, "events", "bucket"), _on(s3_lake, "beside", None)]
    cycle(s3_lake, s3_leader, Schedule(), threading.Event())
    with open_site(s3_lake.settings) as other, other.connect() as conn:
        profiles.create(conn, "later", f"s3://{s3_server.new_bucket()}/w", credentials="test")
        conn.commit()
        tables.append(_on(other, "third", "later"))
    for _ in range(2):
        cycle(s3_lake, s3_leader, Schedule(), threading.Event())
    for table in tables:
        assert lake_rows(s3_lake, table.name) == {(i, i, f"row {i}") for i in range(200)}
    places = {s3_lake.reader.state(table.name).table.location.partition(":")[0] for table in tables}
    assert places == {"s3", "file"}


def test_files_of_the_profiles_store_are_adopted_by_url(s3_lake: Site, s3_leader: Leader, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from modak.storage import remote
    from modak.tables.ingest.run import Request, ingest

    events = _on(s3_lake, "events", "bucket")
    tier(s3_lake, s3_leader.epoch, events.name)
    key = next(key for key in s3_lake.keys.values() if key.root.startswith("s3:"))
    exports = f"{key.root.rpartition('/')[0]}/exports"
    for number in range(2):
        rows = {"id": [1000 + number], "ts": [10 + number], "body": ["x"]}
        pq.write_table(pa.table(rows), tmp_path / "file")
        access.use([Key(key.root.rpartition("/")[0], key.props)])
        remote.upload(tmp_path / "file", f"{exports}/part-{number}.parquet")
    assert ingest(s3_lake, Request(events.name, (f"{exports}/part-*.parquet",), "parquet")).adopted_files == 2
    assert len(ingest(s3_lake, Request(events.name, (f"{exports}/",), "parquet")).plan.known) == 2
    assert {(1000, 10, "x"), (1001, 11, "x")} <= lake_rows(s3_lake, events.name)


@pytest.mark.spark
def test_a_mirrored_table_is_copied_and_followed_on_s3(
    s3_lake: Site, s3_leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modak.tables.mirror.pump.plan.DRIVER_ROWS", 0)
    rows = "SELECT i, i, 'row ' || i FROM generate_series(1, 100) AS i"
    table = Mirrored.create(s3_lake, s3_leader.epoch, rows=rows, profile="bucket")
    table.sql(
        "INSERT INTO @ SELECT i, i, 'new ' || i FROM generate_series(101, 150) AS i",
        "UPDATE @ SET body = body || '!' WHERE id % 7 = 0",
        "DELETE FROM @ WHERE id % 10 = 0",
    )
    assert table.pump().changes == 50 + 21 + 15
    table.close()
    assert lake_rows(s3_lake, table.name) == {tuple(row.values()) for row in table.heap()}
