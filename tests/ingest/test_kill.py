"""kill -9 at every point of an ingest, a load and an adoption: what a restart finds is whole or nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.ingest.run import Request, ingest
from modak.tables.load.adopt import adopt, sweep
from modak.tables.load.run import LoadRequest, load
from modak.tables.repair import repair
from modak.tables.site import Site
from tests.ingest import test_crash as ingesting
from tests.load import test_crash as loading
from tests.tables.conftest import settings_for
from tests.tables.events import Events
from tests.tables.invariants import Invariants, Row

pytestmark = [pytest.mark.full, pytest.mark.timeout(3000)]

LOAD = {
    **dict.fromkeys(loading.LOADING, "load"),
    **dict.fromkeys(loading.ADOPTING, "adopt"),
    **dict.fromkeys(loading.SWEEPING, "sweep"),
}
INGEST = (*ingesting.POINTS, *ingesting.SHARED)
KILLED = (*INGEST, *LOAD, "adopt.failed")


def _killed(site: Site, point: str, *words: str) -> None:
    environ = {
        **os.environ,
        "MODAK_PG_URL": site.dsn.safe(),
        "MODAK_PG_PASSWORD": site.dsn.password,
        "MODAK_WAREHOUSE": site.settings.lake.warehouse,
        "MODAK_HOME": str(site.settings.home.path),
        "MODAK_LOAD_SPOOL_THRESHOLD": "10",
        "MODAK_LEASE_SECONDS": "2",
        "MODAK_CAMPAIGN_INTERVAL_SECONDS": "0.5",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.ingest.victim", point, *words], env=environ, timeout=300, check=False
    )
    assert done.returncode == -signal.SIGKILL, (point, done.returncode)


@pytest.fixture
def alive(fresh_database: object, warehouse: str, spark_home: Path, gateway: object) -> object:
    more = {
        "MODAK_LOAD_SPOOL_THRESHOLD": "10",
        "MODAK_LEASE_SECONDS": "2",
        "MODAK_CAMPAIGN_INTERVAL_SECONDS": "0.5",
    }
    with open_site(settings_for(fresh_database, warehouse, spark_home, **more)) as site:  # type: ignore[arg-type]
        events = Events.create(site)
        events.register()
        with Leader.campaign(site, 60) as leader:
            events.tier(leader)
        yield events


def test_an_ingest_that_is_killed_anywhere_happens_once(alive: Events, warehouse: str, tmp_path: Path) -> None:
    site, rows = alive.site, {(i, i, f"row {i}") for i in range(251)}
    truth = Invariants(site.dsn, warehouse)
    for number, point in enumerate(INGEST):
        base = 1000 + 10 * number
        whole: list[Row] = [(base, 10, point), (number, number, point)]
        wide: list[Row] = [(base + 2, 12, point), (base + 3, 150, point)]
        files = (
            ingesting._file(tmp_path / f"a{number}.parquet", whole),
            ingesting._file(tmp_path / f"b{number}.parquet", wide),
        )
        _killed(site, point, "ingest", *files)
        with Leader.campaign(site, 60) as leader:
            repair(site, leader.epoch)
        ingest(site, Request(alive.name, files, "parquet", rewrite=True))
        rows = {row for row in rows if row[0] != number} | set(whole) | set(wide)
        truth.check_journal()
        assert truth.everything() == rows, point
        truth.check_files()


def test_a_load_that_is_killed_anywhere_happens_once(alive: Events, warehouse: str, tmp_path: Path) -> None:
    site = alive.site
    rows: set[Row] = {(i, i, f"row {i}") for i in range(251)}
    truth = Invariants(site.dsn, warehouse)
    alive.sql("UPDATE modak.tables SET maintenance_policy = '{\"orphan_grace_hours\": 0}'")
    for number, (point, act) in enumerate(LOAD.items()):
        body, new = loading._body(tmp_path / "body", 1000 + 100 * number, point)
        label = f"label-{number}"
        if act == "load":
            _killed(site, point, "load", label, str(body))
        load(site, LoadRequest(alive.name, label, "jsonl"), body)
        if act == "adopt":
            _killed(site, point, "adopt")
        with Leader.campaign(site, 60) as leader:
            repair(site, leader.epoch)
            adopt(site, leader.epoch, alive.name)
        if act == "sweep":
            _killed(site, point, "sweep")
        sweep(site)
        rows |= new
        assert truth.everything() == rows, point
        truth.check_journal()
        truth.check_files()
    assert json.loads(json.dumps(alive.sql("SELECT DISTINCT state FROM modak.load_labels"))) == [["committed"]]


def test_a_poisoned_label_whose_failing_was_killed_stays_failed_and_harms_nobody(alive: Events, tmp_path: Path) -> None:
    site = alive.site
    body, new = loading._body(tmp_path / "body", 1000, "poisoned")
    load(site, LoadRequest(alive.name, "poisoned", "jsonl"), body)
    files = alive.sql("SELECT f ->> 'path' FROM modak.load_labels, jsonb_array_elements(files -> 'data') f")
    Path(files[0][0].removeprefix("file://")).unlink()
    _killed(site, "adopt.failed", "adopt")
    assert alive.sql("SELECT state FROM modak.load_labels") == [("failed",)]
    with Leader.campaign(site, 60) as leader:
        repair(site, leader.epoch)
        assert adopt(site, leader.epoch, alive.name).labels == 0
    # What was hot went to the heap when the load was accepted.
    hot = {row for row in new if row[1] >= 200}
    assert alive.everything() == {(i, i, f"row {i}") for i in range(251)} | hot
