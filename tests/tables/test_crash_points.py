"""A crash at every fault point of a table's life."""

from __future__ import annotations

import time
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from modak.core import faults
from modak.postgres.dsn import Dsn
from tests.tables.conftest import settings_for
from tests.tables.life import LIFE, World, live

pytestmark = pytest.mark.spark


@pytest.fixture
def world(fresh_database: Dsn, warehouse: str, spark_home: Path, spark: object) -> Iterator[World]:
    made = World(settings_for(fresh_database, warehouse, spark_home, MODAK_PREMAKE_PARTITIONS="1"), warehouse)
    yield made
    made.close()


def test_record(world: World) -> None:
    seen = []
    t=time.time()
    for act, ours in LIFE:
        here=[]
        faults.watch(here.append)
        t=time.time()
        act(world)
        faults.watch(None)
        t1=time.time()
        if act.__name__ not in ("grow","slip_a_write_past_the_trigger"):
            world.check()
        print(act.__name__, round(t1-t,2), "check", round(time.time()-t1,2), len(here))
        seen.append((act.__name__, here))
    json.dump(seen, open("/tmp/crash/seen.json","w"))
