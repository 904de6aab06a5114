"""A pass in a process of its own, without Spark, killed at every point: the repair undoes or finishes it.

One table lives through all kills, with new debt each time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from modak.runtime.leader import Leader
from tests.catalog.test_kill_aside import Place
from tests.maintenance.lake import Lake
from tests.maintenance.test_crash import IN_A_PASS, LATE, Life, life

__all__ = ["life"]

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

KILLED = (*IN_A_PASS, *LATE)


@pytest.fixture
def place(lake: Lake) -> Place:
    site = lake.site
    return Place(
        {
            "MODAK_PG_URL": site.dsn.safe(),
            "MODAK_PG_PASSWORD": site.dsn.password,
            "MODAK_WAREHOUSE": site.settings.lake.warehouse,
            "MODAK_HOME": str(site.settings.home.path),
            "MODAK_LEASE_SECONDS": "2",
            "MODAK_CAMPAIGN_INTERVAL_SECONDS": "1",
        }
    )


@contextlib.contextmanager
def another_leads(lake: Lake) -> Iterator[None]:
    """This process leads no longer, and again afterwards."""
    lake.leader.__exit__(None, None, None)
    yield
    lake.leader = Leader.campaign(lake.site, 60).__enter__()


def _killed(life: Life, place: Place, point: str, act: str, on: object) -> None:
    with another_leads(life.lake):
        place.dies(point, act, on)
    life.lake.recover()
    assert life.lake.site.reader.unfinished_ops() == ()
    life.check_rows()
    life.lake.maintain()
    life.check()


def test_a_pass_that_is_killed_anywhere_is_made_good_by_the_next_start(life: Life, place: Place) -> None:
    for point in IN_A_PASS:
        print(point)
        life.wear()
        _killed(life, place, point, "maintain", life.lake.events.name)


def test_a_pass_that_is_killed_while_late_deletes_are_carried_over_is_made_good(life: Life, place: Place) -> None:
    for point in LATE:
        life.wear()
        key = min(key for key in life.rows if key < 100)
        del life.rows[key]
        _killed(life, place, point, "maintain-late", key)
