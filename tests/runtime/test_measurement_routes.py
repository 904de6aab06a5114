"""The measurement endpoints of a daemon that serves a store: what they show, and who may start a cycle when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from modak import config
from modak.measurements.layout import Place
from modak.measurements.windows import Level, window_of
from modak.postgres.dsn import Dsn
from modak.runtime import working
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.runtime.stores import serving
from modak.runtime.web.app import create_app
from modak.storage.objects import Objects
from modak.tables.site import Site
from tests.measurements.support import Inside, fill
from tests.runtime.conftest import led
from tests.runtime.test_stores import environment, until

HOUR = (datetime.now(UTC) - timedelta(days=3)).replace(minute=0, second=0, microsecond=0)
STORE = "/api/v1/measurements"


@pytest.fixture
def store(tmp_path: Path) -> Objects:
    """Two hours of one database, of which the first has enough files for a merge."""
    objects = Objects.of(str(tmp_path / "store"))
    fill(objects, files=4, hour=HOUR)
    fill(objects, files=1, hour=HOUR + timedelta(hours=1))
    return objects


@pytest.fixture
def served(fresh_database: Dsn, tmp_path: Path, store: Objects) -> Iterator[Site]:
    settings = config.load(
        environment(
            fresh_database,
            tmp_path,
            MODAK_MEASUREMENTS_ENABLED="true",
            MODAK_MEASUREMENTS_ROOT=str(tmp_path / "store"),
            MODAK_MEASUREMENTS_TEMP_DIRECTORY=str(tmp_path / "temp"),
            MODAK_MEASUREMENTS_ISOLATION="process",
            MODAK_MEASUREMENTS_HOURLY_MIN_FILES="3",
            MODAK_MEASUREMENTS_DAILY_ENABLED="false",
            MODAK_LAKE_STATS_INTERVAL_SECONDS="0.2",
        )
    )
    with open_site(settings) as site:
        yield site


@pytest.fixture
def leads(served: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """The API of the leader; its jobs run in this process."""
    monkeypatch.setattr("modak.measurements.opening.runner_of", lambda _settings: Inside())
    with Leader.campaign(served, 5) as leader, serving(served, leader), asking(served) as client:
        yield client


def asking(site: Site) -> TestClient:
    return TestClient(create_app(led(site)), base_url="http://127.0.0.1", raise_server_exceptions=False)


def test_the_store_is_shown_and_a_cycle_can_be_started(leads: TestClient) -> None:
    status = leads.get(f"{STORE}/status").json()
    [seen] = status["store"]["measurements"]
    assert (seen["database"], seen["measurement"]) == ("db", "cpu")
    assert sum(seen["files"].values()) == 5
    assert seen["candidates"]["hourly"] == 1
    assert status["scheduler"]["schedules"] == {"hourly": "5 * * * *"}
    assert status["scheduler"]["gated"] is False
    folder = Place("db", "cpu", window_of(Level.HOUR, HOUR)).folder
    [due] = leads.get(f"{STORE}/candidates").json()
    assert (due["partition"], due["tier"], due["files"]) == (folder, "hourly", 4)
    assert leads.get(f"{STORE}/candidates", params={"database": "other"}).json() == []
    assert leads.get(f"{STORE}/history").json() == []
    assert leads.get(f"{STORE}/jobs").json() == []

    answer = leads.post(f"{STORE}/trigger", json={"database": "db"})
    assert (answer.status_code, answer.json()) == (202, {"started": True, "database": "db"})
    until(lambda: bool(leads.get(f"{STORE}/history").json()))
    [cycle] = leads.get(f"{STORE}/history").json()
    [job] = cycle["jobs"]
    assert (job["partition"], job["files"], job["rows_in"], job["rows_out"], job["error"]) == (folder, 4, 20, 20, "")
    manager = leads.get(f"{STORE}/stats").json()["manager"]
    assert (manager["total_jobs_completed"], manager["total_files_compacted"]) == (1, 4)
    # The merged inputs wait for their clean-up until no reader can need them.
    [held] = leads.get(f"{STORE}/jobs").json()
    assert (held["status"], held["inputs"], held["outputs"]) == ("committed", 4, 1)
    assert leads.get(f"{STORE}/jobs", params={"database": "other"}).json() == []
    assert leads.get(f"{STORE}/candidates").json() == []
    watcher = leads.get("/api/v1/cluster/status").json()["completion_watcher"]
    assert watcher["running"] == 1


def test_a_cycle_that_runs_keeps_the_next_away(leads: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    began, may_end = threading.Event(), threading.Event()

    def slow(_self: Any, orders: Any) -> Any:
        began.set()
        assert may_end.wait(60)
        return inside(_self, orders)

    inside: Callable[..., Any] = Inside.run
    monkeypatch.setattr(Inside, "run", slow)
    try:
        assert leads.post(f"{STORE}/trigger").status_code == 202
        assert began.wait(60)
        answer = leads.post(f"{STORE}/trigger")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "measurements.cycle_running")
        assert leads.get(f"{STORE}/status").json()["scheduler"]["cycle_running"] is True
        assert "measurements" in {each["kind"] for each in working.shown()["running"]}
    finally:
        may_end.set()
    until(lambda: bool(leads.get(f"{STORE}/history").json()))


def test_names_that_no_database_can_have_are_refused(leads: TestClient) -> None:
    for name in ("../db", "_state", "a*b", ".hidden"):
        for answer in (
            leads.post(f"{STORE}/trigger", json={"database": name}),
            leads.get(f"{STORE}/candidates", params={"database": name}),
            leads.get(f"{STORE}/jobs", params={"database": name}),
        ):
            assert answer.status_code == 400, name
            assert answer.json()["error"]["code"] == "measurements.name"


def test_a_standby_shows_the_store_and_starts_nothing(served: Site) -> None:
    with asking(served) as standby:
        assert len(standby.get(f"{STORE}/candidates").json()) == 1
        status = standby.get(f"{STORE}/status").json()
        assert status["store"]["measurements"]
        assert status["scheduler"] is None
        assert standby.get(f"{STORE}/stats").json()["manager"] is None
        answer = standby.post(f"{STORE}/trigger")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "measurements.gated")


def test_a_leader_that_has_lost_its_lease_starts_nothing(served: Site) -> None:
    with Leader.campaign(served, 5) as leader, serving(served, leader), asking(served) as client:
        leader.resign()
        answer = client.post(f"{STORE}/trigger")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "measurements.gated")
