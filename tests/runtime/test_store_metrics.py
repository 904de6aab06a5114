"""Entity and measurement stores in `/metrics` and on the errors page: what waits, how old it is, what was done."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from modak.core.errors import ModakError
from modak.entities.flushing import FlushReport
from modak.entities.store import EntityStore
from modak.postgres.dsn import Dsn
from modak.runtime import working
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.runtime.stores import serving
from modak.tables.site import Site
from tests.entities.world import SCHEMA, World
from tests.runtime.test_measurement_routes import leads, served, store
from tests.runtime.test_stores import of_entities, until

__all__ = ["leads", "served", "store"]


def of_a_store(text: str, name: str) -> dict[tuple[str, ...], float]:
    """Values by their labels, in the order of the labels' names."""
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_numbers_of_the_entity_store_follow_its_flushes(
    api: TestClient, fresh_database: Dsn, tmp_path: Path, leader: Leader
) -> None:
    settings = of_entities(
        fresh_database,
        tmp_path,
        MODAK_ENTITIES_MIN_RECORDS="1",
        MODAK_ENTITIES_FLUSH_INTERVAL_SECONDS="0.1",
        MODAK_LAKE_STATS_INTERVAL_SECONDS="0.1",
    )
    store = EntityStore.open(settings, fresh_database)
    world = World(fresh_database, store.objects)
    before = of_a_store(api.get("/metrics").text, "modak_entities_flushed_rows_total").get((str(SCHEMA),), 0.0)
    world.put(1, title="first")
    world.put(2, title="second")

    def shows(name: str, labels: tuple[str, ...], value: float) -> bool:
        return of_a_store(api.get("/metrics").text, name).get(labels) == value

    schema = str(SCHEMA)
    with open_site(settings) as site, serving(site, leader):
        until(lambda: shows("modak_entities_rows", ("delta", schema), 2.0))
        until(lambda: shows("modak_entities_dirty_rows", (schema,), 0.0))
        text = api.get("/metrics").text
        assert of_a_store(text, "modak_entities_flushed_rows_total")[(schema,)] == before + 2
        assert of_a_store(text, "modak_entities_flushed_bytes_total")[(schema,)] > 0
        assert of_a_store(text, "modak_entities_files")[("delta", schema)] >= 1
        assert of_a_store(text, "modak_entities_oldest_dirty_seconds")[(schema,)] == 0.0
        context: Any = api.app.state.context  # type: ignore[attr-defined]
        context.series.sample()
        assert api.get("/api/v1/series", params={"metric": "entities_dirty"}).json()[0]["points"][0][1] == 0.0
    text = api.get("/metrics").text
    assert of_a_store(text, "modak_entities_rows") == {}, "whoever does not lead shows no store"
    assert of_a_store(text, "modak_entities_flushed_rows_total")[(schema,)] == before + 2, "a counter stays"


def test_an_entity_schema_that_fails_is_shown_with_its_code(
    fresh_database: Dsn, tmp_path: Path, leader: Leader, monkeypatch: Any
) -> None:
    settings = of_entities(fresh_database, tmp_path, MODAK_ENTITIES_FLUSH_INTERVAL_SECONDS="0.1")
    failing = ModakError("storage.denied", "The bucket refuses the key.", hint="Check the key.")
    reports = [(FlushReport(SCHEMA, error=failing),), (FlushReport(SCHEMA),)]
    monkeypatch.setattr("modak.entities.flushing.flush", lambda _store: reports[0])

    def told() -> list[tuple[str, str, str]]:
        shown = working.shown()["failing"]
        return [(each["table"], each["code"], each["hint"]) for each in shown if each["kind"] == "entities-flush"]

    with open_site(settings) as site, serving(site, leader):
        until(lambda: told() == [(f"schema {SCHEMA}", "storage.denied", "Check the key.")])
        del reports[0]
        until(lambda: told() == [])


def test_numbers_of_the_measurement_store_follow_its_cycles(leads: TestClient, served: Site) -> None:
    def value(name: str, *labels: str) -> float | None:
        return of_a_store(leads.get("/metrics").text, name).get(labels)

    completed = value("modak_measurements_jobs_total", "completed") or 0.0
    rows = value("modak_measurements_compacted_rows_total") or 0.0
    until(lambda: value("modak_measurements_files", "db", "raw") == 5.0)
    assert value("modak_measurements_candidates", "db", "hourly") == 1.0
    assert (value("modak_measurements_oldest_candidate_seconds", "db") or 0.0) > 2 * 86400
    assert (value("modak_measurements_next_cycle_timestamp_seconds", "hourly") or 0.0) > time.time() - 60
    served.services["measurements"].scheduler.trigger_now()
    assert value("modak_measurements_jobs_total", "completed") == completed + 1
    assert value("modak_measurements_compacted_rows_total") == rows + 20
    assert (value("modak_measurements_cycle_seconds_total") or 0.0) > 0
    assert (value("modak_measurements_written_bytes_total") or 0.0) > 0
    assert value("modak_measurements_cycle_running") == 0.0
    until(lambda: value("modak_measurements_candidates", "db", "hourly") == 0.0)
    leads.app.state.context.series.sample()  # type: ignore[attr-defined]
    [series] = leads.get("/api/v1/series", params={"metric": "measurements_candidates"}).json()
    assert (series["name"], series["points"][-1][1]) == ("db", 0.0)


def test_a_cycle_that_fails_is_shown_and_the_next_one_comes(
    leads: TestClient, served: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = served.services["measurements"].scheduler

    def told() -> list[tuple[str, str]]:
        shown = working.shown()["failing"]
        return [(each["code"], each["message"]) for each in shown if each["kind"] == "measurements"]

    for failure, said in (
        (
            ModakError("storage.denied", "The bucket refuses the key."),
            [("storage.denied", "The bucket refuses the key.")],
        ),
        (OSError("no such device"), [("measurements.crashed", "OSError: no such device")]),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(scheduler._manager, "run_compaction_cycle_for_tiers", Raising(failure))
            scheduler._due = dict.fromkeys(scheduler._due, datetime.now(UTC) - timedelta(minutes=1))
            scheduler.tick()
            assert told() == said
            assert leads.get("/api/v1/measurements/status").json()["scheduler"]["last_error"]
            assert scheduler.is_running()
    scheduler._due = dict.fromkeys(scheduler._due, datetime.now(UTC) - timedelta(minutes=1))
    scheduler.tick()
    assert told() == []


class Raising:
    def __init__(self, failure: Exception) -> None:
        self._failure = failure

    def __call__(self, *_: object) -> int:
        raise self._failure
