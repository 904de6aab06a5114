"""One site for a whole module of pump tests; every test makes a table of its own in it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.site import Site
from tests.mirror.pumping import Mirrored
from tests.tables.conftest import settings_for

Make = Callable[..., Mirrored]


@pytest.fixture(scope="module")
def ground(
    database: Dsn, tmp_path_factory: pytest.TempPathFactory, spark_home: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Site, Leader]]:
    request.getfixturevalue("gateway")
    warehouse = tmp_path_factory.mktemp("warehouse")
    settings = settings_for(database, str(warehouse), spark_home, MODAK_CYCLE_INTERVAL_SECONDS="0.05")
    with open_site(settings) as site, Leader.campaign(site, 5) as leader:
        yield site, leader


@pytest.fixture
def make(ground: tuple[Site, Leader]) -> Iterator[Make]:
    """Make a mirrored table: `make(columns=…, rows=…)`; its name is new each time."""
    site, leader = ground
    made: list[Mirrored] = []

    def create(**options: Any) -> Mirrored:
        table = Mirrored.create(site, leader.epoch, name=f"t_{secrets.token_hex(4)}", **options)
        made.append(table)
        return table

    yield create
    for table in made:
        table.remove()
