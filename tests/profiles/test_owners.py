"""Two buckets with a key each, behind a store that lets only a bucket's own key in."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from modak.catalog import profiles
from modak.core.errors import ModakError
from modak.core.names import TableName
from modak.postgres.dsn import Dsn
from modak.runtime.daemon import cycle
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.runtime.reading import snapshot
from modak.runtime.schedule import Schedule
from modak.tables.fold.run import fold
from modak.tables.load.adopt import adopt
from modak.tables.load.run import LoadRequest, load
from modak.tables.maintenance.run import maintain
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.site import Site
from modak.tables.tiering.run import tier
from tests.profiles.test_life import commands, lake_rows
from tests.s3_fixtures import S3Server
from tests.support.store_proxy import StoreProxy
from tests.tables.conftest import settings_for, through_spark
from tests.tables.events import Events

__all__ = ["through_spark"]

KEYS = {"ada": "AKIDADA", "bob": "AKIDBOB"}
SECRETS = {"ada": "ada-keeps-this", "bob": "bob-keeps-that"}
ROWS = {(i, i, f"row {i}") for i in range(200)}
HOT = {(i, i, f"row {i}") for i in range(200, 251)}


@dataclass
class Owned:
    """Profiles `ada` and `bob` with credentials of the same names, and the store that tells them apart."""

    database: Dsn
    warehouse: str
    home: Path
    proxy: StoreProxy
    buckets: dict[str, str]

    @contextmanager
    def site(self, **keys: str | None) -> Iterator[Site]:
        """A worker that has the keys; some of them other than they should be, or (None) not there."""
        environ = {
            f"MODAK_CREDENTIALS_{name.upper()}": f"s3.endpoint={self.proxy.endpoint};s3.access-key-id={key}"
            f";s3.secret-access-key={SECRETS[name]};s3.retry.num-retries=1"
            for name, key in {**KEYS, **keys}.items()
            if key is not None
        }
        with open_site(settings_for(self.database, self.warehouse, self.home, **environ)) as opened:
            if opened.reader.profiles():
                _ = opened.keys
            yield opened

    def table(self, site: Site, name: str, profile: str | None) -> Events:
        events = Events.create(site, name=name)
        register(site, RegisterRequest(events.name, ("id",), "ts", profile=profile))
        return events

    def nobody_was_refused(self) -> None:
        assert not self.proxy.denied
        assert set(self.proxy.served) == {(self.buckets[name], KEYS[name]) for name in KEYS}


@pytest.fixture
def owned(fresh_database: Dsn, warehouse: str, spark_home: Path, s3_server: S3Server, s3_lake: Site) -> Iterator[Owned]:
    buckets = {name: s3_server.new_bucket() for name in KEYS}
    owners = {buckets[name]: key for name, key in KEYS.items()}
    with s3_lake.connect() as conn:
        for name, bucket in buckets.items():
            profiles.create(conn, name, f"s3://{bucket}/lake", credentials=name)
    with StoreProxy(s3_server.endpoint, seed=1, rate=0, owners=owners) as proxy:
        yield Owned(fresh_database, warehouse, spark_home, proxy, buckets)


def _correct(events: Events, key: int) -> None:
    events.sql(f'SELECT modak_upsert(\'{events.name}\', \'{{"id": {key}, "ts": {key}, "body": "new"}}\')')


def _corrected(*keys: int) -> set[tuple[Any, ...]]:
    return {(i, i, "new" if i in keys else f"row {i}") for i in range(200)}


@pytest.mark.full
@pytest.mark.spark
def test_tables_of_two_keys_live_in_one_daemon_and_no_key_is_told(
    owned: Owned, through_spark: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("modak.tables.fold.plan.DRIVER_ROWS", 0)
    with capture_logs() as logs, owned.site() as site, Leader.campaign(site, 5) as leader:
        _ = site.spark
        tables = [owned.table(site, name, name) for name in KEYS] + [owned.table(site, "beside", None)]
        cycle(site, leader, Schedule(), threading.Event())
        for table in tables:
            assert lake_rows(site, table.name) == ROWS
            _correct(table, 150)
        cycle(site, leader, Schedule(), threading.Event())
        for table in tables:
            assert lake_rows(site, table.name) == _corrected(150)
            assert not table.delta()
            _correct(table, 50)
            fold(site, leader.epoch, table.name)
        rows = _corrected(50, 150)
        with snapshot(site.spark, settings=site.settings) as point:
            frames = [point.read(str(table.name)) for table in tables]
            plans = [frame._jdf.queryExecution().toString() for frame in frames]
            for frame in frames:
                assert {tuple(row) for row in frame.collect()} == rows | HOT
            assert frames[0].join(frames[1], ["id", "ts", "body"]).count() == 251
        for table in tables:
            assert not maintain(site, leader.epoch, table.name, engine="spark").failed
            assert lake_rows(site, table.name) == rows
        owned.nobody_was_refused()
        context = site.spark.sparkContext
        properties = site.lake._gateway.jvm.java.lang.System.getProperties().toString()
        told = {
            "the log": repr(logs),
            "the terminal": repr(capfd.readouterr()),
            "the catalog": _catalog(tables[0]),
            "the process list": repr(commands()),
            "the Spark UI": repr([context.getConf().getAll(), site.spark.conf.getAll, properties, plans]),
        }
    for place, text in told.items():
        assert len(text) > 10, place
        assert not [name for name, secret in SECRETS.items() if secret in text], place


def _catalog(events: Events) -> str:
    """Every row of every table of ours, as text."""
    names = events.sql("SELECT schemaname, tablename FROM pg_tables WHERE schemaname IN ('modak', 'modak_iceberg')")
    assert len(names) > 10
    return repr([events.sql(f'SELECT t::text FROM "{schema}"."{name}" t') for schema, name in names])


@pytest.mark.full
@pytest.mark.spark
@pytest.mark.parametrize("tasks", [False, True])
def test_a_wrong_key_is_named_costs_nothing_and_work_goes_on_once_it_is_right(
    owned: Owned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: bool
) -> None:
    if tasks:
        monkeypatch.setattr("modak.tables.tiering.export.DRIVER_BYTES", 0)
        monkeypatch.setattr("modak.tables.fold.plan.DRIVER_ROWS", 0)
    monkeypatch.setattr("modak.tables.load.run._Load.threshold", 1)
    body = tmp_path / "body"
    body.write_text("".join(json.dumps({"id": 1000 + at, "ts": at, "body": "loaded"}) + "\n" for at in range(3)))
    loaded = {(1000 + at, at, "loaded") for at in range(3)}
    with owned.site() as site:
        tables = {name: owned.table(site, name, name) for name in KEYS}
    ada, bob = (tables[name].name for name in KEYS)
    with owned.site(bob="AKIDMALLORY") as site, Leader.campaign(site, 5) as leader:
        _ = site.spark
        _named(lambda: owned.table(site, "more", "bob"))
        _named(lambda: tier(site, leader.epoch, bob))
        assert tier(site, leader.epoch, ada).rows == 200
    with owned.site() as site, Leader.campaign(site, 5) as leader:
        _ = site.spark
        assert tier(site, leader.epoch, bob).rows == 200
        for table in tables.values():
            table.site = site
            _correct(table, 150)
    with owned.site(bob="AKIDMALLORY") as site, Leader.campaign(site, 5) as leader:
        _ = site.spark
        _named(lambda: fold(site, leader.epoch, bob))
        _named(lambda: load(site, LoadRequest(bob, "label", "jsonl"), body))
        _named(lambda: _read(site, bob))
        failed = maintain(site, leader.epoch, bob).failed
        assert [one.name for one in failed if _is_named(str(one.error))] == [one.name for one in failed] != []
        assert fold(site, leader.epoch, ada).replaced == 1
    assert {bucket for bucket, _ in owned.proxy.denied} == {owned.buckets["bob"]}
    with owned.site() as site, Leader.campaign(site, 5) as leader:
        _ = site.spark
        assert fold(site, leader.epoch, bob).replaced == 1
        assert load(site, LoadRequest(bob, "label", "jsonl"), body).state == "staged"
        assert adopt(site, leader.epoch, bob).labels == 1
        assert not maintain(site, leader.epoch, bob).failed
        assert _read(site, bob) == _corrected(150) | loaded | HOT
        assert lake_rows(site, ada) == _corrected(150)


@pytest.mark.full
def test_staged_loads_of_a_key_that_is_wrong_or_not_there_wait_for_the_right_one(
    owned: Owned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modak.tables.load.run._Load.threshold", 1)
    body = tmp_path / "body"
    with owned.site() as site, Leader.campaign(site, 5) as leader:
        table = owned.table(site, "bob", "bob")
        assert tier(site, leader.epoch, table.name).rows == 200
        for number, label in enumerate(("one", "two")):
            rows = [{"id": 1000 + at, "ts": at, "body": "loaded"} for at in range(3 * number, 3 * number + 3)]
            body.write_text("".join(json.dumps(row) + "\n" for row in rows))
            assert load(site, LoadRequest(table.name, label, "jsonl"), body).state == "staged"
    for key, code in (("AKIDMALLORY", "storage.denied"), (None, "config.no_credentials")):
        with owned.site(bob=key) as site, Leader.campaign(site, 5) as leader:
            with pytest.raises(ModakError) as refused:
                adopt(site, leader.epoch, table.name)
            table.site = site
            assert refused.value.code == code
            assert table.sql("SELECT state, error FROM modak.load_labels") == [("staged", None)] * 2
            assert site.reader.unfinished_ops() == ()
    with owned.site() as site, Leader.campaign(site, 5) as leader:
        table.site = site
        assert adopt(site, leader.epoch, table.name).labels == 2
        assert lake_rows(site, table.name) == ROWS | {(1000 + at, at, "loaded") for at in range(6)}


def _read(site: Site, name: TableName) -> set[tuple[Any, ...]]:
    with snapshot(site.spark, [str(name)], settings=site.settings) as point:
        return {tuple(row) for row in point.read(str(name)).collect()}


def _named(act: Any) -> None:
    with pytest.raises(ModakError) as caught:
        act()
    assert caught.value.code == "storage.denied"
    assert _is_named(caught.value.message)


def _is_named(text: str) -> bool:
    secret = [secret for secret in SECRETS.values() if secret in text]
    return "The key is that of the profile bob, from MODAK_CREDENTIALS_BOB." in text and not secret
