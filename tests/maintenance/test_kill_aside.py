"""A pass in a process of its own, without Spark, killed at every point: the repair undoes or finishes it.

One table lives through all kills, with new debt each time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from modak.runtime.leader import Leader
from modak.tables.maintenance.loads import clean_failed_loads
from modak.tables.repair import repair
from tests.catalog.test_kill_aside import Place
from tests.maintenance.lake import Lake
from tests.maintenance.test_crash import IN_A_PASS, LATE, Life, life

__all__ = ["life"]

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

LOADS = ("loads.before_delete", "loads.after_delete")
KILLED = (*IN_A_PASS, *LATE, *LOADS)


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
    repair(life.lake.site, life.lake.leader.epoch)
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


@pytest.mark.parametrize("point", LOADS)
def test_the_files_of_a_failed_load_go_though_the_first_who_deleted_was_killed(
    lake: Lake, place: Place, warehouse: str, point: str
) -> None:
    staged = Path(warehouse, ".staging", "failed", "part.parquet")
    staged.parent.mkdir(parents=True)
    staged.write_bytes(b"rows")
    lake.policy(maintenance_enabled=False, orphan_grace_hours=1)
    lake.events.sql(
        "INSERT INTO modak.load_labels (table_id, label, state, files, updated_at) SELECT table_id, 'l', 'failed',"
        f" '[{{\"uri\": \"{staged.as_uri()}\"}}]', now() - interval '1 day' FROM modak.tables"
    )
    with another_leads(lake):
        place.dies(point, "clean-loads")
    assert staged.exists() == (point == "loads.before_delete")
    writer = lake.site.writer(lake.leader.epoch)
    clean_failed_loads(lake.site, writer)
    assert not staged.exists()
    assert clean_failed_loads(lake.site, writer) == 0
