"""A store that throttles, fails, breaks off and loses answers: everything is tried again, nothing is torn or lost."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from modak.catalog import profiles
from modak.lake.iceberg.catalog import IcebergLake
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.storage import access, client, remote
from modak.storage.access import Key
from modak.storage.retry import LONGEST_PAUSE, TRIES, patiently, pause
from modak.storage.store import Store
from modak.tables.fold.run import fold
from modak.tables.load.adopt import adopt
from modak.tables.load.run import LoadRequest, load
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.site import Site
from modak.tables.tiering.run import tier
from tests.ingest.history import parquet, take
from tests.profiles.conftest import credentials
from tests.s3_fixtures import S3Server
from tests.support.store_proxy import FAULTS, StoreProxy
from tests.tables.conftest import settings_for
from tests.tables.events import Events


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(client.CLIENT, "read_timeout", timedelta(seconds=5))


def test_pauses_grow_and_are_never_the_same_for_all() -> None:
    for attempt in range(1, 12):
        longest = min(0.1 * 2 ** (attempt - 1), LONGEST_PAUSE)
        drawn = [pause(attempt) for _ in range(50)]
        assert all(longest / 2 <= one <= longest for one in drawn)
        assert len(set(drawn)) > 1


def test_only_what_may_pass_is_tried_again() -> None:
    from modak.core.errors import ModakError

    slept: list[float] = []
    tried: list[int] = []

    def fail(retryable: bool) -> None:
        tried.append(1)
        raise ModakError("storage.failed", "no", retryable=retryable)

    for retryable, times in ((False, 1), (True, TRIES)):
        tried.clear()
        with pytest.raises(ModakError):
            patiently(lambda retryable=retryable: fail(retryable), sleep=slept.append)  # type: ignore[misc]
        assert len(tried) == times
    assert len(slept) == TRIES - 1


@pytest.mark.parametrize("fault", FAULTS)
def test_files_go_up_and_come_down_whole_through_each_kind_of_trouble(
    s3_server: S3Server, tmp_path: Path, fault: str
) -> None:
    with StoreProxy(s3_server.endpoint, seed=1, rate=0.4, faults=(fault,)) as proxy:
        root = f"s3://{s3_server.new_bucket()}/r"
        props = {**s3_server.props, "s3.endpoint": proxy.endpoint}
        access.use([Key(root, props)])
        data = bytes(range(256)) * 4096
        (tmp_path / "up").write_bytes(data)
        for number in range(4):
            assert remote.upload(tmp_path / "up", f"{root}/{number}") == len(data)
            assert remote.read_range(f"{root}/{number}", 1000, 5000) == data[1000:6000]
            remote.copy(f"{root}/{number}", f"{root}/copy-{number}", remote.identity(f"{root}/{number}")[1])
            remote.fetch(f"{root}/copy-{number}", tmp_path / "down")
            assert (tmp_path / "down").read_bytes() == data
        store = Store.of(root, props)
        assert len({entry.uri for entry in store.list()}) == 8
        assert proxy.broken[fault]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_of_several_parts_goes_up_and_across_whole_through_each_kind_of_trouble(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(remote, "_PART", 5 << 20)
    data = random.Random(1).randbytes(11 << 20)
    (tmp_path / "up").write_bytes(data)
    with StoreProxy(s3_server.endpoint, seed=1, rate=0.4, faults=(fault,)) as proxy:
        props = {**s3_server.props, "s3.endpoint": proxy.endpoint}
        here, there = (f"s3://{s3_server.new_bucket()}/r" for _ in range(2))
        access.use([Key(here, props), Key(there, props)])
        assert remote.upload(tmp_path / "up", f"{here}/a") == len(data)
        version = remote.identity(f"{here}/a")[1]
        assert version.strip('"').endswith("-3"), "in three parts"
        remote.copy(f"{here}/a", f"{there}/a", version)
        for uri in (f"{here}/a", f"{there}/a"):
            remote.fetch(uri, tmp_path / "down")
            assert (tmp_path / "down").read_bytes() == data
        assert proxy.broken[fault]


def test_the_last_word_of_an_upload_in_parts_may_get_lost(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_PART", 5 << 20)
    data = random.Random(1).randbytes(11 << 20)
    (tmp_path / "up").write_bytes(data)
    last = "POST .*uploadId="
    with StoreProxy(s3_server.endpoint, seed=1, rate=1, faults=("lost_answer",), most=1, only=last) as proxy:
        here, there = (f"s3://{s3_server.new_bucket()}/r" for _ in range(2))
        props = {**s3_server.props, "s3.endpoint": proxy.endpoint}
        access.use([Key(here, props), Key(there, props)])
        assert remote.upload(tmp_path / "up", f"{here}/a") == len(data)
        proxy.most = 2
        remote.copy(f"{here}/a", f"{there}/a", remote.identity(f"{here}/a")[1])
        for uri in (f"{here}/a", f"{there}/a"):
            remote.fetch(uri, tmp_path / "down")
            assert (tmp_path / "down").read_bytes() == data
        assert proxy.broken["lost_answer"] == 2


def test_listings_and_deletes_go_on_when_answers_break_off(s3_server: S3Server) -> None:
    root = f"s3://{s3_server.new_bucket()}/r"
    straight = Store.of(root, s3_server.props)
    for number in range(1_500):
        straight.write(f"{root}/{number:05d}", b"x")
    with StoreProxy(s3_server.endpoint, seed=1, rate=0, faults=("half_answer",)) as proxy:
        store = Store.of(root, {**s3_server.props, "s3.endpoint": proxy.endpoint})
        proxy.rate, proxy.most = 1, 3
        names: list[str] = []
        for entry in store.list():
            names.append(entry.uri)
            if len(names) == 1_000:
                proxy.most = proxy.broken.total() + 3
        assert names == [f"{root}/{number:05d}" for number in range(1_500)], "each once"
        proxy.most = proxy.broken.total() + 3
        assert store.read(names[0]) == b"x"
        proxy.most = proxy.broken.total() + 3
        assert store.delete(names) == 1_500
        assert list(straight.list()) == []
        assert proxy.broken["half_answer"] >= 9


def test_a_store_that_does_not_answer_is_asked_again(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(client.CLIENT, "read_timeout", timedelta(seconds=1))
    with StoreProxy(s3_server.endpoint, seed=1, rate=1, faults=("stall",), most=2) as proxy:
        root = f"s3://{s3_server.new_bucket()}/r"
        access.use([Key(root, {**s3_server.props, "s3.endpoint": proxy.endpoint})])
        (tmp_path / "up").write_bytes(b"data")
        assert remote.upload(tmp_path / "up", f"{root}/a") == 4
        assert remote.read_range(f"{root}/a", 0, 4) == b"data"
        assert proxy.broken["stall"] == 2


@pytest.fixture
def shaky(
    fresh_database: Dsn, warehouse: str, spark_home: Path, s3_server: S3Server, s3_lake: Site
) -> Iterator[tuple[Site, StoreProxy]]:
    """A site whose profile `shaky` reaches the store through the proxy."""
    seed = random.randrange(2**32)
    with StoreProxy(s3_server.endpoint, seed=seed, rate=0.12) as proxy:
        environ = credentials(proxy.endpoint)
        with open_site(settings_for(fresh_database, warehouse, spark_home, **environ)) as site:
            with site.connect() as conn:
                profiles.create(conn, "shaky", f"s3://{s3_server.new_bucket()}/lake", credentials="test")
            yield site, proxy


def test_iceberg_reads_on_when_answers_break_off(shaky: tuple[Site, StoreProxy]) -> None:
    site, proxy = shaky
    proxy.rate = 0
    with Leader.campaign(site, 5) as leader:
        events = Events.create(site)
        register(site, RegisterRequest(events.name, ("id",), "ts", profile="shaky"))
        tier(site, leader.epoch, events.name)
        lake = site.lake.load(site.reader.state(events.name).table.lake)
        assert lake is not None
        assert lake.snapshot_id is not None
        name, snapshot = lake.identifier, lake.snapshot_id
        proxy.rate, proxy.faults = 1, ("half_answer",)

        def breaking_off() -> IcebergLake:
            proxy.most = proxy.broken.total() + 3
            return site.lake

        assert breaking_off().load(name) == lake
        assert sorted(found.file.rows for found in breaking_off().files(name, snapshot)) == [100, 100]
        assert len(breaking_off().partitions(name, snapshot)) == 2
        assert len(list(breaking_off().reachable(name))) == 2
        assert len(breaking_off().manifests(name, snapshot)[0]) == 1
        assert len(breaking_off().snapshots(lake)) == 1
        assert proxy.broken["half_answer"] == 18
        events.sql('SELECT modak_upsert(\'public.events\', \'{"id": 1, "ts": 1, "body": "new"}\')')
        breaking_off()
        assert fold(site, leader.epoch, events.name).replaced == 1


@pytest.mark.full
def test_no_ingest_or_staged_load_is_torn_or_lost_on_a_bad_day(
    shaky: tuple[Site, StoreProxy], s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modak.tables.load.run._Load.threshold", 10)
    site, proxy = shaky
    key = next(key for key in site.keys.values() if key.root.startswith("s3:"))
    outside = f"{key.root.rpartition('/')[0]}/exports"
    access.use([Key(outside.rpartition("/")[0], key.props)])
    with Leader.campaign(site, 5) as leader:
        events = Events.create(site)
        register(site, RegisterRequest(events.name, ("id",), "ts", profile="shaky"))
        rows: set[tuple[int, int, str]] = {(i, i, f"row {i}") for i in range(200)}
        tier(site, leader.epoch, events.name)
        for at in range(3):
            history = parquet(tmp_path / f"{at}.parquet", [(1000 + at, 10, "a"), (at, at, "history")])
            remote.upload(Path(history), f"{outside}/{at}.parquet")
            wide = parquet(tmp_path / f"wide-{at}.parquet", [(2000 + at, 10, "b"), (2010 + at, 150, "b")])
            done = take(site, events, f"{outside}/{at}.parquet", wide, rewrite=True)
            assert (done.adopted_files, done.replaced) == (1, 1)
            new = {(3000 + 100 * at + one, 9 * one, "loaded") for one in range(20)}
            body = tmp_path / f"{at}.jsonl"
            body.write_text("".join(json.dumps({"id": id_, "ts": ts, "body": text}) + "\n" for id_, ts, text in new))
            assert load(site, LoadRequest(events.name, f"label {at}", "jsonl"), body).state == "staged"
            assert adopt(site, leader.epoch, events.name).labels == 1
            rows = {row for row in rows if row[0] != at} | {(1000 + at, 10, "a"), (at, at, "history")} | new
            rows |= {(2000 + at, 10, "b"), (2010 + at, 150, "b")}
        assert _found(site, events, s3_server) == sorted(rows)
        assert sum(proxy.broken.values())


@pytest.mark.full
def test_no_commit_is_torn_or_lost_on_a_bad_day(shaky: tuple[Site, StoreProxy], s3_server: S3Server) -> None:
    site, proxy = shaky
    with Leader.campaign(site, 5) as leader:
        events = Events.create(site)
        register(site, RegisterRequest(events.name, ("id",), "ts", profile="shaky"))
        rows = {(i, i, f"row {i}") for i in range(200)}
        tier(site, leader.epoch, events.name)
        for number in range(3):
            events.sql(f'SELECT modak_upsert(\'public.events\', \'{{"id": {number}, "ts": {number}, "body": "new"}}\')')
            fold(site, leader.epoch, events.name)
            rows = {row for row in rows if row[0] != number} | {(number, number, "new")}
        assert _found(site, events, s3_server) == sorted(rows)
        assert sum(proxy.broken.values())


def _found(site: Site, events: Events, s3_server: S3Server) -> list[tuple[Any, ...]]:
    """The lake's rows as a reader finds them who reaches the store by a straight way."""
    from pyiceberg.table import StaticTable

    line = site.reader.state(events.name).cutline
    table = StaticTable.from_metadata(line.metadata_location, {**s3_server.props})
    return sorted(tuple(row.values()) for row in table.scan().to_arrow().to_pylist())
