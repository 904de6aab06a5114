"""A whole site on real parts for scenario tests: a fresh database, a warehouse of its own, Java, and Spark on request.

Small tables are tiered and folded without Spark. A test or module that reads through Spark, or moves enough rows to
need it, asks for the `spark` fixture or carries its mark.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modak import config
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.site import Site
from tests.tables.events import Events


def settings_for(dsn: Dsn, warehouse: str, home: Path, **more: str) -> Any:
    """Settings as a user would give them: by environment variables."""
    environ = {
        "MODAK_PG_URL": dsn.safe(),
        "MODAK_PG_PASSWORD": dsn.password,
        "MODAK_WAREHOUSE": warehouse,
        "MODAK_HOME": str(home),
        "MODAK_CYCLE_INTERVAL_SECONDS": "0.2",
        "MODAK_PREMAKE_PARTITIONS": "0",
        **more,
    }
    return config.load(environ)


@pytest.fixture
def site(
    fresh_database: Dsn,
    warehouse: str,
    spark_home: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Site]:
    needed = "spark" if request.node.get_closest_marker("spark") else "gateway"
    request.getfixturevalue(needed)
    if needed == "gateway":
        monkeypatch.setattr("modak.spark.session.start", _not_asked_for)
    with open_site(settings_for(fresh_database, warehouse, spark_home)) as opened:
        if needed == "spark":
            _ = opened.spark
        yield opened


def _not_asked_for(*_: object, **__: object) -> None:
    raise AssertionError("this test needs the mark `spark`")


@pytest.fixture
def leader(site: Site) -> Iterator[Leader]:
    with Leader.campaign(site, 5) as held:
        yield held


@pytest.fixture
def events(site: Site) -> Events:
    """public.events with three partitions of width 100 and rows 0…250, not registered."""
    return Events.create(site)


@pytest.fixture
def through_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a small table moves through Spark tasks."""
    monkeypatch.setattr("modak.tables.tiering.export.DRIVER_BYTES", 0)
