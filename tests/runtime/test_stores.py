"""What the daemon does beside the tables: entity and measurement stores, only while it leads."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from modak import config
from modak.core.clock import FrozenClock
from modak.core.errors import UsageError
from modak.entities.config import from_settings
from modak.entities.flushing import flush
from modak.entities.lock import schema_lock
from modak.entities.store import EntityStore
from modak.measurements.completion import CompactedOutput, CompletionManifest, CompletionState, write_completion
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.runtime.stores import Repeating, completion_folder, serving
from tests.entities.world import INVOICE, SCHEMA, World, changed

PATIENCE = 60.0


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def environment(dsn: Dsn, home: Path, **more: str) -> dict[str, str]:
    return {
        "MODAK_PG_URL": dsn.safe(),
        "MODAK_PG_PASSWORD": dsn.password,
        "MODAK_HOME": str(home),
        "MODAK_WAREHOUSE": str(home / "warehouse"),
        **more,
    }


def of_entities(dsn: Dsn, home: Path, **more: str) -> config.Settings:
    """Settings with the registry of the tests, which lies in the home folder."""
    described = home / "registry.json"
    described.write_text(json.dumps(INVOICE))
    return config.load(
        environment(dsn, home, MODAK_ENTITIES_ENABLED="true", MODAK_ENTITIES_REGISTRY=str(described), **more)
    )


def test_dirty_entities_are_flushed_while_we_lead(fresh_database: Dsn, tmp_path: Path) -> None:
    settings = of_entities(
        fresh_database, tmp_path, MODAK_ENTITIES_MIN_RECORDS="1", MODAK_ENTITIES_FLUSH_INTERVAL_SECONDS="0.1"
    )
    described = tmp_path / "registry.json"
    store = EntityStore.open(settings, fresh_database)
    world = World(fresh_database, store.objects)
    world.put(1, title="first")
    with open_site(settings) as site, Leader.campaign(site, 5) as leader, serving(site, leader):
        until(lambda: len(store.manifests.load(SCHEMA).manifest.entries) == 1)
        world.put(2, title="second")
        until(lambda: len(store.manifests.load(SCHEMA).manifest.entries) == 2)
        # The registry is read at every turn: a broken one is told, a new attribute is taken up.
        described.write_text("{")
        described.write_text(json.dumps(changed(colour={"id": 90, "type": "text"})))

        def taken_up() -> bool:
            world.put(3, title="third")
            return "colour" in store.manifests.load(SCHEMA).manifest.entries[-1].attributes

        until(taken_up)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("modak-entities")]


def test_entities_are_compacted_and_collected_while_we_lead(fresh_database: Dsn, tmp_path: Path) -> None:
    settings = of_entities(
        fresh_database,
        tmp_path,
        MODAK_ENTITIES_FLUSH_INTERVAL_SECONDS="3600",
        MODAK_ENTITIES_COMPACT_INTERVAL_SECONDS="0.1",
    )
    store = EntityStore.open(settings, fresh_database)
    world = World(fresh_database, store.objects)
    world.many(0, 3)
    flush(world.store)
    with open_site(settings) as site, Leader.campaign(site, 5) as leader:
        # Somebody else works on the schema: its turn comes later, and nothing fails.
        with schema_lock(world.store.address, SCHEMA, "change_log"), capture_logs() as said, serving(site, leader):
            until(lambda: any(each["event"] == "entities.collection_skipped" for each in said))
        assert len(world.manifest.delta) == 1
        clock = FrozenClock(datetime.now(UTC))
        with serving(replace(site, clock=clock), leader):
            until(lambda: len(world.manifest.base) == 1)
            clock.at += timedelta(minutes=20)
            until(lambda: set(world.paths()) == world.manifest.paths)
    assert len(world.read()) == 3


def test_compactions_come_as_often_as_their_configuration_says(
    fresh_database: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = of_entities(fresh_database, tmp_path)
    World(fresh_database, EntityStore.open(settings, fresh_database).objects)
    capture, compaction = from_settings(settings.entities)
    often = replace(compaction, run_interval=0.05)
    monkeypatch.setattr("modak.entities.config.from_settings", lambda _: (capture, often))
    with open_site(settings) as site, Leader.campaign(site, 5) as leader, capture_logs() as said, serving(site, leader):
        until(lambda: [each["event"] for each in said].count("entities.collected") > 2)


def test_what_measurement_jobs_did_reaches_the_catalog_while_we_lead(fresh_database: Dsn, tmp_path: Path) -> None:
    settings = config.load(
        environment(
            fresh_database,
            tmp_path,
            MODAK_MEASUREMENTS_ENABLED="true",
            MODAK_MEASUREMENTS_ROOT=str(tmp_path / "store"),
            MODAK_MEASUREMENTS_TEMP_DIRECTORY=str(tmp_path / "temp"),
            MODAK_MEASUREMENTS_ISOLATION="process",
        )
    )
    now = datetime(2026, 11, 1, tzinfo=UTC)
    output = CompactedOutput("prod/cpu/2026/11/01/00/out.parquet", "0" * 64, 10, "prod", "cpu", now, "hourly", now)
    done = CompletionManifest(
        job_id="job-1",
        database="prod",
        measurement="cpu",
        partition_path="prod/cpu/2026/11/01/00",
        tier="hourly",
        state=CompletionState.OUTPUT_WRITTEN,
        outputs=(output,),
        deleted_sources=(),
        created_at=now,
        updated_at=now,
    )
    with open_site(settings) as site, Leader.campaign(site, 5) as leader, serving(site, leader):
        assert "measurements-scheduler" in {thread.name for thread in threading.enumerate()}
        write_completion(completion_folder(settings), done)

        def known() -> bool:
            with connect(fresh_database) as conn:
                return bool(conn.execute("SELECT 1 FROM modak.measurement_files").fetchall())

        until(known)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("measurements-")]


def test_a_failure_is_told_and_tried_again() -> None:
    tries: list[int] = []

    def act() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise UsageError("a.code", "It failed.")
        if len(tries) == 2:
            raise ValueError("It crashed.")

    with Repeating("test", 0.01, act):
        until(lambda: len(tries) >= 3)
    ended = len(tries)
    time.sleep(0.05)
    assert len(tries) == ended
