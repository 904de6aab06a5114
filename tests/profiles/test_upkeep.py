"""Maintenance and erasure of a lake that lies on S3: the same passes, files and bounds as in a folder."""

from __future__ import annotations

import pytest

from modak.core import faults
from modak.runtime.leader import Leader
from modak.tables.maintenance.erase import erase_rows
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.site import Site
from modak.tables.tiering.run import tier
from tests.maintenance import foreign
from tests.maintenance.lake import Lake, did, meanwhile, original
from tests.profiles.test_life import lake_rows
from tests.tables.events import Events


@pytest.fixture
def remote_lake(s3_lake: Site, s3_leader: Leader) -> Lake:
    """`public.events` on S3, tiered: two bands of width 100, one file each."""
    events = Events.create(s3_lake)
    register(s3_lake, RegisterRequest(events.name, ("id",), "ts", profile="bucket"))
    tier(s3_lake, s3_leader.epoch, events.name)
    return Lake(events, s3_leader)


@pytest.mark.parametrize("engine", ["embedded", pytest.param("spark", marks=pytest.mark.spark)])
def test_every_pass_works_on_s3(remote_lake: Lake, engine: str) -> None:
    lake = remote_lake
    lake.engine = engine
    lake.policy(
        rewrite_min_input_files=2,
        manifest_rewrite_min_manifests=2,
        snapshot_retention_hours=0,
        snapshot_min_retained=1,
        orphan_sweep_enabled=True,
    )
    lake.delete(3)
    foreign.equality_delete(lake, [[4], [5]])
    for key in (6, 7):
        lake.add(key)
    rows = original(3, 4, 5) | {(10_006, 6, "added"), (10_007, 7, "added")}
    report = lake.maintain()
    assert did(report, "debt").counters["delete_files_dropped"] == 2
    assert did(report, "pack").changed
    assert did(report, "expiry").counters["files_deleted"] > 0
    assert lake_rows(lake.site, lake.events.name) == rows
    assert lake.table.snapshot_count == 1
    assert len(lake.files()) == 2
    there = {entry.uri for entry in lake.site.store.list(f"{lake.table.location}/data")}
    assert there == set(lake.site.lake.reachable(lake.table.identifier)), "nothing superfluous is left, nothing is gone"


@pytest.mark.spark
def test_rows_on_s3_are_erased_from_every_snapshot(remote_lake: Lake) -> None:
    lake = remote_lake
    lake.correct(3)
    done = erase_rows(lake.site, lake.leader.epoch, lake.events.name, "id = 3")
    assert (done.lake_rows, done.waiting, done.found) == (1, 0, 0)
    assert lake_rows(lake.site, lake.events.name) == original(3)


@pytest.mark.parametrize("engine", ["embedded", pytest.param("spark", marks=pytest.mark.spark)])
@pytest.mark.parametrize("gone", ["manifests", "lists", "before"])
def test_an_expiry_on_s3_passes_over_what_another_tool_has_removed_meanwhile(
    remote_lake: Lake, engine: str, gone: str
) -> None:
    lake = remote_lake
    lake.engine = engine
    lake.policy(snapshot_retention_hours=0, snapshot_min_retained=1)
    lake.correct(3)
    lake.correct(4)
    site = lake.site

    def another() -> None:
        (left,) = [op for op in site.reader.unfinished_ops() if op.kind == "expire"]
        before = left.cleanup["expired_from"]
        freed = site.lake.freed(lake.table.identifier, before)
        lists = [uri for uri in freed.metadata if "snap-" in uri]
        assert lists
        manifests = sorted({*freed.metadata} - {*lists})
        assert manifests
        site.store.delete({"manifests": manifests, "lists": lists, "before": [before]}[gone])

    acted = meanwhile("expiry.before_compare", another)
    assert did(lake.maintain(), "expiry").changed
    faults.watch(None)
    assert acted
    assert site.reader.unfinished_ops() == ()
    assert lake_rows(site, lake.events.name) == original(3, 4) | {(key, key, "corrected") for key in (3, 4)}
