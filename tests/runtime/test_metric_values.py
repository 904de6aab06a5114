"""The numbers of `/metrics` beside what has really happened: rounds, loads, mirrors and lapsed pins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from modak.catalog import pins
from modak.postgres.changes import source
from modak.postgres.dsn import Dsn
from modak.runtime import daemon, metrics, mirrors
from modak.runtime.hosting import loads
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.runtime.schedule import Schedule
from modak.runtime.web.app import create_app
from modak.tables.mirror.pump import run as pumping
from tests.mirror.pumping import Mirrored
from tests.runtime.conftest import led
from tests.runtime.hosted import hosted, text_of, until
from tests.tables.conftest import settings_for
from tests.tables.events import Events

LOAD_TOKEN = "load-token-of-the-tests"

Read = Callable[..., float]


def value(text: str, name: str, **labels: str) -> float:
    """The one sample of that name with these labels; zero: there is none yet."""
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) <= 1, found
    return found[0] if found else 0.0


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reading of Postgres is kept."""
    monkeypatch.setattr(metrics, "KEPT_SECONDS", 0.0)


@pytest.fixture
def read(api: TestClient, fresh: None) -> Read:
    """Reads one number from the server as it is now."""
    return lambda name, **labels: value(api.get("/metrics").text, name, **labels)


def test_a_leader_counts_its_rounds_and_says_when_the_last_one_began(
    fresh_database: Dsn, warehouse: str, spark_home: Path, gateway: object
) -> None:
    rounds = "modak_cycle_duration_seconds_count"
    before = metrics.REGISTRY.get_sample_value(rounds) or 0.0
    began = time.time()
    with hosted(settings_for(fresh_database, warehouse, spark_home)) as address:
        until(lambda: value(text_of(address), rounds) > before)
        text = text_of(address)
        first = value(text, "modak_last_cycle_timestamp_seconds")
        assert began <= first <= time.time()
        assert value(text, "modak_cycle_duration_seconds_bucket", le="+Inf") == value(text, rounds)
        assert value(text, "modak_cycle_duration_seconds_sum") > 0.0
        until(lambda: value(text_of(address), "modak_last_cycle_timestamp_seconds") > first)


@pytest.fixture
def loading(
    fresh_database: Dsn, warehouse: str, spark_home: Path, gateway: object, fresh: None
) -> Iterator[TestClient]:
    """A leader's server with Stream Load over `public.events`, whose keys below 200 are in the lake."""
    settings = settings_for(fresh_database, warehouse, spark_home, MODAK_LOAD_TOKEN=LOAD_TOKEN)
    with open_site(settings) as site, Leader.campaign(site, 5) as leader:
        events = Events.create(site)
        events.register()
        events.tier(leader)
        context = led(site)
        with TestClient(create_app(context, loads(context)), base_url="http://127.0.0.1") as client:
            yield client


def load(client: TestClient, label: str, body: str) -> Any:
    headers = {"X-Modak-Token": LOAD_TOKEN, "X-Modak-Label": label}
    return client.post("/api/load/public.events", content=body, headers=headers)


def test_a_load_counts_once_with_the_paths_that_its_rows_took(loading: TestClient) -> None:
    def counted() -> dict[str, float]:
        text = loading.get("/metrics").text
        found = {
            path: value(text, "modak_load_rows_total", table="public.events", path=path)
            for path in ("hot", "delta", "spooled")
        }
        for state in ("committed", "staged"):
            found[state] = value(text, "modak_load_total", table="public.events", state=state)
        return found

    before = counted()
    rows = "".join(f'{{"id": {key}, "ts": {key}, "body": "loaded"}}\n' for key in (1, 2, 260))
    done = load(loading, "one", rows).json()
    assert (done["state"], done["hot_rows"], done["delta_rows"]) == ("committed", 1, 2)
    moved = {name: number - before[name] for name, number in counted().items()}
    assert moved == {"hot": 1, "delta": 2, "spooled": 0, "committed": 1, "staged": 0}
    assert load(loading, "one", rows).json()["replay"] is True
    assert load(loading, "two", "no row\n").status_code == 400
    assert {name: number - before[name] for name, number in counted().items()} == moved, "nothing else was taken in"


def test_a_mirror_shows_its_lag_its_flushes_and_its_slot(
    read: Read, api: TestClient, events: Events, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pumping, "IDLE_SECONDS", 0.0)
    # A pump that peeks holds its slot for moments only, one that streams from turn to turn.
    monkeypatch.setattr(source, "choose", lambda *_: "stream")
    mirrored = Mirrored.create(events.site, leader.epoch)
    with closing(mirrored):
        slot = mirrored.sql("SELECT slot_name FROM pg_replication_slots WHERE slot_name LIKE 'modak%'")[0][0]
        assert read("modak_slot_active", slot=slot) == 0.0
        flushes = read("modak_mirror_flushes_total", table="public.things")
        while mirrored.pump().changes:
            pass
        assert read("modak_slot_active", slot=slot) == 1.0
        rested = read("modak_mirror_lag_bytes", table="public.things")
        mirrored.sql("INSERT INTO @ SELECT i, i, repeat('x', 500) FROM generate_series(1, 1000) AS i")
        behind = read("modak_mirror_lag_bytes", table="public.things")
        assert behind >= rested + 500_000
        assert read("modak_slot_retained_wal_bytes", slot=slot) >= 500_000
        assert read("modak_mirror_flushes_total", table="public.things") == flushes
        while mirrored.pump().changes:
            pass
        assert mirrored.is_same()
        assert read("modak_mirror_flushes_total", table="public.things") == flushes + 1
        assert read("modak_mirror_lag_bytes", table="public.things") < behind
    until(lambda: read("modak_slot_active", slot=slot) == 0.0)
    mirrored.remove()
    assert slot not in api.get("/metrics").text


def test_a_pump_that_peeks_is_known_to_live_though_nobody_holds_its_slot(
    read: Read, events: Events, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "choose", lambda *_: "peek")
    mirrored = Mirrored.create(events.site, leader.epoch)
    slot = mirrored.sql("SELECT slot_name FROM pg_replication_slots WHERE slot_name LIKE 'modak%'")[0][0]
    with mirrors.serving(events.site, leader):
        until(lambda: mirrored.sql("SELECT 1 FROM modak.mirror_health"))
        told = mirrored.sql("SELECT checked_at FROM modak.mirror_health")
        until(lambda: mirrored.sql("SELECT checked_at FROM modak.mirror_health") > told)
        assert read("modak_slot_active", slot=slot) == 0.0
        silent = read("modak_mirror_silent_seconds", table="public.things")
        assert 0.0 < silent < 10.0
    later = read("modak_mirror_silent_seconds", table="public.things")
    time.sleep(0.5)
    assert read("modak_mirror_silent_seconds", table="public.things") >= later + 0.5
    mirrored.remove()


def test_pins_that_lapsed_long_ago_are_removed_and_counted(read: Read, events: Events, leader: Leader) -> None:
    events.register()
    lapsed, alive = (pins.begin(events.site.dsn, events.name) for _ in range(2))
    events.sql(f"UPDATE modak.read_pins SET expires_at = now() - interval '1 hour' WHERE pin_id = {lapsed.pin_id}")
    before = read("modak_expired_pins_deleted_total")
    daemon.cycle(events.site, leader, Schedule(), threading.Event())
    assert read("modak_expired_pins_deleted_total") == before + 1
    assert read("modak_read_pins", table="public.events") == 1.0
    assert events.sql("SELECT pin_id FROM modak.read_pins") == [(alive.pin_id,)]
    daemon.cycle(events.site, leader, Schedule(), threading.Event())
    assert read("modak_expired_pins_deleted_total") == before + 1
