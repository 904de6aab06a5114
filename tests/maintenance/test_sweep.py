"""A sweep of orphans and a lake that is not what is published: nothing goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from modak.catalog import pins
from modak.core import faults
from modak.storage.uri import local_path
from tests.maintenance import foreign
from tests.maintenance.lake import Lake, did, meanwhile, original
from tests.maintenance.test_expiry import pointing_at, superfluous


@pytest.fixture(params=["embedded", pytest.param("spark", marks=pytest.mark.spark)])
def swept(lake: Lake, request: pytest.FixtureRequest) -> Iterator[Lake]:
    """The sweep is the only step, and every file is old enough for it."""
    lake.engine = request.param
    lake.policy(
        orphan_sweep_enabled=True,
        rewrite_enabled=False,
        delete_compaction_enabled=False,
        manifest_rewrite_enabled=False,
        snapshot_expiry_enabled=False,
    )
    foreign.grow_old(f"{local_path(lake.table.location)}/data")
    yield lake
    faults.watch(None)


@pytest.mark.parametrize("moment", [None, "orphans.after_listing"])
def test_while_the_lake_has_not_what_is_published_no_file_is_an_orphan(swept: Lake, moment: str | None) -> None:
    old = swept.table.metadata_location
    swept.correct(1)
    foreign.grow_old(f"{local_path(swept.table.location)}/data")
    there = set(swept.site.store.list(swept.table.location))
    with ExitStack() as by_hand:
        if moment is None:
            by_hand.enter_context(pointing_at(swept, old))
        else:
            meanwhile(moment, lambda: by_hand.enter_context(pointing_at(swept, old)))
        said = did(swept.maintain(), "orphans").skipped or ""
        assert set(swept.site.store.list(swept.table.location)) >= there
    assert "published or pinned are not in" in said
    assert superfluous(swept) == set()
    assert swept.rows() == original(1) | {(1, 1, "corrected")}


def test_while_the_lake_has_not_what_a_reader_has_pinned_no_file_is_an_orphan(swept: Lake) -> None:
    pins.begin(swept.site.dsn, swept.events.name)
    swept.events.sql("UPDATE modak.read_pins SET snapshot_id = 5")
    report = swept.maintain()
    assert "published or pinned are not in" in (did(report, "orphans").skipped or "")
    swept.events.sql("DELETE FROM modak.read_pins")
    assert did(swept.maintain(), "orphans").skipped == "nothing was found"
