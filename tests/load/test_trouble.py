"""Trouble that is not the batch's own: what was staged stays staged, and a full disk is no fault of the body."""

from __future__ import annotations

import errno
import gzip
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

import modak
from modak.catalog import loads, profiles
from modak.core import faults
from modak.core.errors import ModakError
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.runtime import hosting
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.foreign import accept
from modak.tables.ingest.run import IngestReport, Request, ingest
from modak.tables.load.adopt import sweep
from modak.tables.load.body import Spool
from modak.tables.retention.run import RetentionReport, retain
from modak.tables.site import Site
from tests.load.conftest import TOKEN, Api, adopted, serving
from tests.maintenance import foreign
from tests.maintenance.lake import Lake
from tests.support.proxy import FaultProxy
from tests.tables.conftest import settings_for
from tests.tables.events import Events


def _lines(*keys: int, body: str = "loaded") -> bytes:
    return "".join(json.dumps({"id": 1000 + key, "ts": key, "body": body}) + "\n" for key in keys).encode()


def _states(events: Events) -> list[Any]:
    return events.sql("SELECT label, state, error FROM modak.load_labels ORDER BY label")


class Once:
    """Does something the first time that a flow is at a point, and has what came of it."""

    def __init__(self, point: str, act: Any) -> None:
        self.came: Any = None
        self._point, self._act = point, act
        faults.watch(self)

    def __call__(self, reached: str) -> None:
        if reached == self._point:
            faults.watch(None)
            self.came = self._act()


@pytest.fixture(autouse=True)
def unwatched() -> Iterator[None]:
    yield
    faults.watch(None)


def test_staged_labels_wait_while_a_foreign_delete_holds_publication_up(
    api: Api, site: Site, leader: Leader, events: Events
) -> None:
    for number, label in enumerate(("one", "two")):
        assert api.post(_lines(*range(20 * number, 20 * number + 12)), label).json()["state"] == "staged"
    foreign.equality_delete(Lake(events, leader), [[1, 2]], accepted=False)
    with pytest.raises(ModakError) as held_up:
        adopted(site, leader, events)
    assert held_up.value.code == "lake.foreign_rows"
    assert adopted(site, leader, events).labels == 0
    assert _states(events) == [("one", "staged", None), ("two", "staged", None)]
    accept(site, events.name)
    assert adopted(site, leader, events).labels == 2
    assert _states(events) == [("one", "committed", None), ("two", "committed", None)]


def test_a_label_whose_own_keys_are_gone_fails_alone(api: Api, site: Site, leader: Leader, events: Events) -> None:
    for number, label in enumerate(("one", "two")):
        api.post(_lines(*range(20 * number, 20 * number + 12)), label)
    staged = events.sql("SELECT files -> 'keys' ->> 'uri' FROM modak.load_labels WHERE label = 'one'")
    Path(staged[0][0].removeprefix("file://")).unlink()
    assert adopted(site, leader, events).failed == ("one",)
    (one, two) = _states(events)
    assert (one[1], one[2].split(":")[0], two[1]) == ("failed", "load.missing", "committed")


def test_a_batch_that_was_staged_during_an_ingest_is_adopted_after_it(
    api: Api, site: Site, leader: Leader, events: Events, tmp_path: Path
) -> None:
    older = tmp_path / "older.jsonl"
    older.write_bytes(_lines(*range(12), body="older"))

    def load() -> Any:
        assert api.post(_lines(*range(12), body="newer"), "newer").json()["state"] == "staged"
        return adopted(site, leader, events)

    during = Once("ingest.keys_scanned", load)
    taken: IngestReport = ingest(site, Request(events.name, (str(older),), "jsonl"))
    assert (taken.rows, during.came.labels) == (12, 0)
    assert adopted(site, leader, events).labels == 1
    assert {row[2] for row in events.lake() if row[0] >= 1000} == {"newer"}


def test_an_ingest_that_begins_while_labels_are_adopted_makes_them_wait(
    api: Api, site: Site, leader: Leader, events: Events
) -> None:
    api.post(_lines(*range(12)), "waits")
    begun = "INSERT INTO modak.op_log (op_id, table_id, kind, phase) SELECT 'x', table_id, 'ingest', 'planned' FROM "
    Once("adopt.files_copied", lambda: events.sql(f"{begun} modak.tables"))
    with pytest.raises(ModakError, match="An ingest has begun"):
        adopted(site, leader, events)
    assert _states(events) == [("waits", "staged", None)]
    events.sql("DELETE FROM modak.op_log WHERE op_id = 'x'")
    assert adopted(site, leader, events).labels == 1


@pytest.fixture
def expiring(events: Events) -> Events:
    events.sql("UPDATE modak.tables SET lake_retention = 50")
    return events


def test_a_batch_whose_rows_expire_while_it_is_staged_is_asked_for_again_and_then_told_its_lines(
    api: Api, site: Site, leader: Leader, expiring: Events
) -> None:
    body = _lines(*range(90, 110))
    moving = Once("load.staged", lambda: retain(site, leader.epoch, expiring.name))
    answer = api.post(body, "late")
    assert isinstance(moving.came, RetentionReport)
    assert moving.came.moved_to == "100"
    assert (answer.status_code, answer.json()["error"], answer.headers["Retry-After"]) == (409, "load.lines_moved", "1")
    assert (_states(expiring), expiring.sql("SELECT * FROM modak.load_stages")) == ([], [])
    again = api.post(body, "late")
    assert (again.status_code, again.json()["rejected_rows"]) == (400, 10)
    assert again.json()["rows"][0] == {"line": 1, "reason": "tier key 90 is below the retention line 100"}


def test_retention_waits_for_a_batch_that_is_about_to_be_staged(
    api: Api, site: Site, leader: Leader, expiring: Events
) -> None:
    moving = Once("load.before_commit", lambda: retain(site, leader.epoch, expiring.name))
    assert api.post(_lines(*range(90, 110)), "in-time").json()["state"] == "staged"
    assert moving.came.moved_to is None
    assert retain(site, leader.epoch, expiring.name).moved_to is None, "the staged label holds it"
    assert adopted(site, leader, expiring).labels == 1
    assert retain(site, leader.epoch, expiring.name).moved_to == "100"


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often the disk is full from now on, by the ending of the file that is written."""
    times: dict[str, int] = {}
    real = Spool.write

    def write(spool: Spool, piece: bytes) -> None:
        if times.get(spool.path.suffix, 0):
            times[spool.path.suffix] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        real(spool, piece)

    monkeypatch.setattr(Spool, "write", write)
    return times


@pytest.mark.parametrize("where", ["", ".plain"])
def test_a_full_disk_is_503_and_the_same_label_is_taken_later(
    api: Api, events: Events, full: dict[str, int], where: str
) -> None:
    body, packed = gzip.compress(_lines(210)), {"Content-Encoding": "gzip"}
    full[where] = 1
    answer = api.post(body, "full", headers=packed)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert (answer.json()["error"], answer.json()["hint"] != "") == ("load.no_space", True)
    assert answer.json()["message"] == "The worker cannot keep the batch on its disk: No space left on device."
    assert api.post(body, "full", headers=packed).json()["replay"] is False


def test_a_disk_that_is_full_of_keys_is_503_and_leaves_no_stage(
    api: Api, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    import duckdb

    def spill(*_: object, **__: object) -> int:
        raise duckdb.IOException("Could not write: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("modak.spark.duplicates.repeated", spill)
        answer = api.post(_lines(*range(12)), "full")
    assert (answer.status_code, answer.json()["error"]) == (503, "load.no_space")
    assert events.sql("SELECT * FROM modak.load_stages") == []
    assert api.post(_lines(*range(12)), "full").json()["state"] == "staged"


def test_the_python_client_comes_back_until_there_is_space(
    api: Api, events: Events, full: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("modak.runtime.loading.time", SimpleNamespace(sleep=slept.append))
    full[""] = 2
    answer = modak.load("public.events", _lines(210), label="patient", url=api.url, token=TOKEN)
    assert (answer["hot_rows"], answer["replay"], len(slept)) == (1, False, 2)


def test_a_postgres_that_goes_away_is_503_and_the_python_client_comes_back(
    fresh_database: Dsn,
    warehouse: str,
    spark_home: Path,
    site: Site,
    events: Events,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("modak.runtime.loading.time", SimpleNamespace(sleep=slept.append))
    with FaultProxy(fresh_database.host, fresh_database.port) as proxy:
        behind = replace(fresh_database, port=proxy.port)
        settings = settings_for(behind, warehouse, spark_home, MODAK_LOAD_TOKEN=TOKEN)
        with open_site(settings) as shaky, serving(shaky) as url:
            proxy.swallow_answers_after(b"folded_generation IS NULL")
            answer = modak.load("public.events", _lines(210), label="first", url=url, token=TOKEN)
            assert (answer["hot_rows"], answer["replay"], len(slept)) == (1, False, 1)
            proxy.close()
            gone = Api(url).post(_lines(211), "second")
            assert (gone.status_code, gone.headers["Retry-After"]) == (503, "1")
            assert {"error", "message", "hint"} == set(gone.json())
            with pytest.raises(ModakError) as given_up:
                modak.load("public.events", _lines(211), label="second", url=url, token=TOKEN, tries=3)
            assert (given_up.value.retryable, len(slept)) == (True, 3)


def test_a_staged_batch_whose_commit_is_not_acknowledged_keeps_its_files(
    fresh_database: Dsn, warehouse: str, spark_home: Path, site: Site, leader: Leader, events: Events
) -> None:
    with FaultProxy(fresh_database.host, fresh_database.port) as proxy:
        behind = replace(fresh_database, port=proxy.port)
        settings = settings_for(behind, warehouse, spark_home, MODAK_LOAD_TOKEN=TOKEN, MODAK_LOAD_SPOOL_THRESHOLD="10")
        with open_site(settings) as shaky, serving(shaky) as url:
            Once("load.before_commit", lambda: proxy.swallow_answers_after(b"COMMIT"))
            answer = modak.load("public.events", _lines(*range(12)), label="lost", url=url, token=TOKEN)
            assert proxy.swallowed.is_set()
    assert (answer["state"], answer["replay"]) == ("staged", True)
    assert adopted(site, leader, events).labels == 1
    assert {row[0] for row in events.lake() if row[0] >= 1000} == set(range(1000, 1012))


def test_one_closed_profile_does_not_keep_the_folders_of_others(
    api: Api, site: Site, events: Events, tmp_path: Path
) -> None:
    with site.connect() as conn:
        profiles.create(conn, "closed", (tmp_path / "closed").as_uri(), credentials="nobody")
    site.follow_profiles()
    root = site.root_of(site.reader.profile(None).profile_id)
    folders = {"closed": f"{(tmp_path / 'closed').as_uri()}/modak-staged/x", "open": f"{root}/modak-staged/y"}
    with site.connect() as conn:
        for name, folder in folders.items():
            Path(folder.removeprefix("file://")).mkdir(parents=True)
            Path(folder.removeprefix("file://"), "left.parquet").write_bytes(b"rows")
            loads.open_stage(conn, loads.Stage(name, None, "label", folder))
    with capture_logs() as logged:
        assert sweep(site, timedelta(0)) == 1
    assert [(event["event"], event["code"]) for event in logged] == [("load.not_swept", "config.no_credentials")]
    assert events.sql("SELECT stage_id FROM modak.load_stages") == [("closed",)]
    assert [Path(folder.removeprefix("file://")).exists() for folder in folders.values()] == [True, False]


def test_a_grace_that_is_no_number_holds_up_no_other_table(site: Site, events: Events, tmp_path: Path) -> None:
    events.sql('UPDATE modak.tables SET maintenance_policy = \'{"orphan_grace_hours": "soon"}\'')
    folder = tmp_path / "modak-staged" / "z"
    folder.mkdir(parents=True)
    with site.connect() as conn:
        table_id = site.reader.state(events.name).table.table_id
        loads.open_stage(conn, loads.Stage("odd", table_id, "label", folder.as_uri()))
        loads.open_stage(conn, loads.Stage("free", None, "label", (tmp_path / "elsewhere").as_uri()))
    with connect(site.dsn) as conn:
        assert {stage.stage_id for stage in loads.stages_over(conn, timedelta(0))} == {"odd", "free"}
        assert loads.stages_over(conn, timedelta(hours=1)) == []


def test_the_stage_of_a_load_that_takes_longer_than_the_grace_is_left_alone(
    api: Api, site: Site, leader: Leader, events: Events
) -> None:
    sweeping = Once("load.before_commit", lambda: sweep(site, timedelta(0)))
    assert api.post(_lines(*range(12)), "slow").json()["state"] == "staged"
    assert sweeping.came == 0
    assert adopted(site, leader, events).labels == 1


def test_a_stage_that_gets_its_label_while_it_is_looked_at_is_left_alone(
    api: Api, site: Site, leader: Leader, events: Events
) -> None:
    with connect(site.dsn) as conn:
        seen = Once("load.before_commit", lambda: loads.stages_over(conn, timedelta(0)))
        api.post(_lines(*range(12)), "fast")
        conn.rollback()
        (stage,) = seen.came
        assert not loads.is_over(conn, stage, timedelta(0))
    assert adopted(site, leader, events).labels == 1


def test_the_python_client_asks_the_worker_that_listens_here(
    api: Api, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, closed = api.url.rpartition(":")[2], "1"
    monkeypatch.setenv("MODAK_LOAD_TOKEN", TOKEN)
    monkeypatch.delenv("MODAK_HTTP_HOST", raising=False)
    for label, headless, console in (("headless", port, closed), ("console", closed, port), ("only", None, port)):
        monkeypatch.setenv("MODAK_CONSOLE_PORT", console)
        monkeypatch.delenv("MODAK_METRICS_PORT", raising=False)
        if headless is not None:
            monkeypatch.setenv("MODAK_METRICS_PORT", headless)
        assert modak.load("public.events", _lines(210), label=label, tries=1)["replay"] is False


def test_a_worker_without_a_port_says_that_it_takes_no_loads(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting.daemon, "run", lambda *_, **__: None)
    with capture_logs() as logged:
        hosting.host(site, stop=threading.Event())
    assert [event["log_level"] for event in logged if event["event"] == "load.not_served"] == ["warning"]


@pytest.mark.parametrize(("ratio", "bad"), [(1 / 30, 1), (0.00005, 0), (1.0, 30), (0, 0)])
def test_every_ratio_of_the_python_client_is_taken_as_it_is(api: Api, events: Events, ratio: float, bad: int) -> None:
    body = b"nonsense\n" * bad + _lines(*range(200, 230 - bad))
    answer = modak.load("public.events", body, url=api.url, token=TOKEN, max_error_ratio=ratio)
    assert (answer["rejected_rows"], answer["hot_rows"]) == (bad, 30 - bad)


def test_the_ratio_may_come_as_a_header(api: Api, events: Events) -> None:
    body = b"nonsense\n" + _lines(210)
    assert api.post(body, "some", headers={"X-Modak-Max-Error-Ratio": "0.4"}).status_code == 400
    assert api.post(body, "some", headers={"X-Modak-Max-Error-Ratio": "1e-1"}).json()["error"] == "load.max_error_ratio"
    assert api.post(body, "some", headers={"X-Modak-Max-Error-Ratio": "0.5"}).json()["rejected_rows"] == 1
