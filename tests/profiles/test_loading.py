"""Stream Load and history on S3: staged and adopted in the store, and a key that is wrong is never told."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import structlog
from structlog.testing import capture_logs

from modak.catalog import profiles
from modak.core.errors import ModakError
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.storage import access, remote
from modak.storage.access import Key
from modak.tables.ingest.run import Request, ingest
from modak.tables.load.adopt import adopt, sweep
from modak.tables.load.run import LoadRequest, load
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.site import Site
from modak.tables.tiering.run import tier
from tests.profiles.conftest import SECRET
from tests.profiles.test_life import lake_rows
from tests.s3_fixtures import S3Server
from tests.tables.events import Events

BASE = {(i, i, f"row {i}") for i in range(200)}


@pytest.fixture
def events(s3_lake: Site, s3_leader: Leader) -> Events:
    made = Events.create(s3_lake)
    register(s3_lake, RegisterRequest(made.name, ("id",), "ts", profile="bucket"))
    tier(s3_lake, s3_leader.epoch, made.name)
    return made


def _root(site: Site) -> Key:
    return next(key for key in site.keys.values() if key.root.startswith("s3:"))


def test_a_large_cold_batch_is_staged_in_the_store_and_adopted_there(
    s3_lake: Site, s3_leader: Leader, events: Events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modak.tables.load.run._Load.threshold", 10)
    body = tmp_path / "body"
    new = {(1000 + at, 10 * at, "loaded") for at in range(20)} | {(5, 5, "five")}
    body.write_text("".join(json.dumps({"id": id_, "ts": ts, "body": text}) + "\n" for id_, ts, text in new))
    done = load(s3_lake, LoadRequest(events.name, "big", "jsonl"), body)
    assert (done.state, done.spooled_rows) == ("staged", 21)
    staged = f"{_root(s3_lake).root}/modak-staged"
    assert list(s3_lake.store.list(staged))
    assert adopt(s3_lake, s3_leader.epoch, events.name).labels == 1
    sweep(s3_lake)
    assert list(s3_lake.store.list(staged)) == []
    assert lake_rows(s3_lake, events.name) == {row for row in BASE if row[0] != 5} | new


def test_history_in_the_store_is_rewritten_where_it_must_be_and_lines_come_by_url(
    s3_lake: Site, events: Events, tmp_path: Path
) -> None:
    key = _root(s3_lake)
    outside = key.root.rpartition("/")[0]
    access.use([Key(outside, key.props)])
    wide, lines = tmp_path / "wide", tmp_path / "lines"
    pq.write_table(pa.table({"id": [1000, 1001], "ts": [10, 150], "body": ["a", "b"]}), wide)
    lines.write_text('{"id": 1002, "ts": 20, "body": "c"}\n')
    remote.upload(wide, f"{outside}/exports/wide.parquet")
    remote.upload(lines, f"{outside}/exports/lines.jsonl")
    given = (f"{outside}/exports/wide.parquet",)
    assert ingest(s3_lake, Request(events.name, given, "parquet", rewrite=True)).written_files == 2
    assert ingest(s3_lake, Request(events.name, (f"{outside}/exports/*.jsonl",), "jsonl")).rows == 1
    assert lake_rows(s3_lake, events.name) == BASE | {(1000, 10, "a"), (1001, 150, "b"), (1002, 20, "c")}


def test_trouble_with_a_store_is_told_without_the_key_in_error_log_and_journal(
    s3_lake: Site, s3_leader: Leader, events: Events, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modak.storage.retry.pause", lambda _: 0.0)
    with s3_lake.connect() as conn:
        profiles.create(conn, "gone", "s3://modak-no-such-bucket/lake", credentials="test")
    with capture_logs() as logs, open_site(s3_lake.settings) as other:
        other_table = Events.create(other, name="elsewhere")
        with pytest.raises(ModakError) as refused:
            register(other, RegisterRequest(other_table.name, ("id",), "ts", profile="gone"))
        structlog.get_logger().info("test.said", keys=other.keys, settings=other.settings, error=refused.value)
    told = "".join(traceback.format_exception(refused.value)) + refused.value.hint
    journal = repr(events.sql("SELECT o::text FROM modak.op_log o"))
    for text in (told, repr(logs), journal):
        assert text
        assert SECRET not in text
