"""A worker whose Spark is a real standalone cluster of two workers on loopback: a table's life, through its tasks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from modak.postgres.dsn import Dsn
from modak.runtime.opening import open_site
from tests.spark.test_cluster import master
from tests.tables.conftest import settings_for
from tests.tables.events import Events
from tests.tables.test_kill import ROWS, Place

__all__ = ["master"]

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture
def place(fresh_database: Dsn, warehouse: str, tmp_path: Path, master: str) -> Iterator[Place]:
    environ = {
        "MODAK_PG_URL": fresh_database.safe(),
        "MODAK_PG_PASSWORD": fresh_database.password,
        "MODAK_WAREHOUSE": warehouse,
        "MODAK_HOME": str(tmp_path / "home"),
        "MODAK_CYCLE_INTERVAL_SECONDS": "0.5",
        "MODAK_PREMAKE_PARTITIONS": "0",
        "MODAK_SPARK_MASTER": master,
        "MODAK_SPARK_CONF_SPARK_DRIVER_HOST": "127.0.0.1",
        "MODAK_SPARK_CONF_SPARK_EXECUTOR_MEMORY": "512m",
        "MODAK_SPARK_CONF_SPARK_CORES_MAX": "2",
    }
    made = Place(fresh_database, warehouse, tmp_path, environ)
    with open_site(settings_for(fresh_database, warehouse, tmp_path / "home")) as site:
        Events.create(site)
    try:
        yield made
    finally:
        made.clear_away()


def test_a_table_is_tiered_corrected_and_folded_through_the_cluster(place: Place) -> None:
    worker = place.start("daemon", "--register")
    place.until_tiered()
    place.truth.check(ROWS)
    place.truth.sql("INSERT INTO public.events VALUES (7, 7, 'late')")
    place.until_tiered()
    worker.process.send_signal(signal.SIGTERM)
    assert worker.ends() == 0
