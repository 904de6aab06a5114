"""A worker killed in the middle of a retention: the next one goes on, and nothing expires twice or half."""

from __future__ import annotations

from pathlib import Path

import pytest

from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from tests.tables.conftest import settings_for
from tests.tables.events import Events
from tests.tables.invariants import EVENTS
from tests.tables.test_kill import Place, place, until
from tests.tables.test_retention import POINTS as KILLED

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

__all__ = ["place"]


@pytest.mark.parametrize("killed_in", KILLED)
def test_after_a_kill_in_a_retention_the_next_worker_goes_on(
    place: Place,
    warehouse: str,
    spark_home: Path,
    gateway: object,
    killed_in: str,
) -> None:
    with open_site(settings_for(place.truth.dsn, warehouse, spark_home)) as site:
        register(site, RegisterRequest(EVENTS, ("id",), "ts", lake_retention="50"))
        with Leader.campaign(site, 5) as leader:
            Events(site, EVENTS).tier(leader)
        Events(site, EVENTS).sql("INSERT INTO public.events VALUES (1000, 50, 'late')")
    # Nothing is left to tier, so the retention is the first to come by.
    place.start("daemon", "--kill", killed_in).dies()
    after = place.start("daemon", "--light")
    until(lambda: place.truth.state.cutline.retention_line == 100, "the line does not move", place.workers)
    until(lambda: not place.truth.reader.unfinished_ops(), "something is not tidied", place.workers)
    after.terminate()
    assert place.truth.everything() == {(i, i, f"row {i}") for i in range(100, 251)}
    assert place.truth.sql("SELECT count(*) FROM modak.delta") == [(0,)]
    place.truth.check_journal()
    place.truth.check_partitions()
    place.truth.check_files()
