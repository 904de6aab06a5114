"""The plan is data: what is due, what is not and why, and what no step may touch."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modak import config
from modak.core.names import TableName
from modak.lake.iceberg.equality import applicable
from modak.lake.model import DataFile, LakeFile, Snapshot, Vector
from modak.lake.policy import keys_of
from modak.lake.rewrite import Bin, DeletedKeys
from modak.tables.maintenance.manifests import clusters
from modak.tables.maintenance.observe import Candidates
from modak.tables.maintenance.plan import (
    PASSES,
    Bounds,
    ExpiryStep,
    ManifestStep,
    Observed,
    RewriteStep,
    expirable,
    plan_maintenance,
)
from modak.tables.maintenance.policy import resolve
from modak.tables.maintenance.rewriting import shares

EVENTS = TableName("public", "events")
HOUR = 3_600_000
MB = 1 << 20


def policy(**values: Any) -> Any:
    return resolve(config.load({}), values)


def file(path: str, size: int = MB, partition: object = 0, *, deletes: int = 0, lower: int = 0, rows: int = 100) -> Any:
    entry = json.dumps({"spec-id": 0, "partition": [partition], "file-path": path})
    vectors = tuple(Vector("{}", 10, 50, f"{path}.puffin", path) for _ in range(min(deletes, 1)))
    return LakeFile(DataFile(entry, rows, size, path), lower, lower, 1, vectors, foreign_deletes=deletes - len(vectors))


def snapshot(number: int, hours_old: float = 0.0) -> Snapshot:
    return Snapshot(1000 + number, 999 + number, number, round(100 * 24 * HOUR - hours_old * HOUR), "append", {})


def seen(**more: Any) -> Observed:
    return Observed(EVENTS, 1, now_millis=100 * 24 * HOUR, **more)


def paths(step: Any) -> list[list[str]]:
    assert isinstance(step, RewriteStep)
    return [[found.file.path for found in one.files] for one in step.bins]


def test_small_files_are_joined_partition_by_partition() -> None:
    small = tuple(file(f"{p}-{n}", partition=p, lower=n) for n in range(3) for p in (0, 100))
    plan = plan_maintenance(seen(small=small), policy(rewrite_min_input_files=6))
    assert paths(plan.steps["pack"]) == [["0-0", "0-1", "0-2"], ["100-0", "100-1", "100-2"]]
    assert (plan.bytes_read, plan.bytes_written) == (6 * MB, 6 * MB)
    assert (
        "must have gathered" in plan_maintenance(seen(small=small), policy(rewrite_min_input_files=7)).skipped["pack"]
    )


def test_a_bin_is_no_larger_than_the_target_and_a_file_alone_stays() -> None:
    small = (file("a", 60 * MB), file("b", 60 * MB, lower=1), file("c", 60 * MB, lower=2), file("d", 5 * MB, 100))
    plan = plan_maintenance(seen(small=small), policy(rewrite_min_input_files=2))
    assert paths(plan.steps["pack"]) == [["a", "b"]]


def test_files_of_an_unpartitioned_table_are_not_joined_across_postgres_bounds() -> None:
    small = tuple(file(f"f{n}", partition=None, lower=n) for n in (1, 99, 100, 150))
    plan = plan_maintenance(seen(small=small, cut=(100, 200)), policy(rewrite_min_input_files=2))
    assert paths(plan.steps["pack"]) == [["f1", "f99"], ["f100", "f150"]]


def test_debt_waits_for_as_many_deletes_as_the_policy_says() -> None:
    files = (file("one", deletes=1), file("three", deletes=3))
    assert paths(plan_maintenance(seen(under_deletes=files), policy()).steps["debt"]) == [["one", "three"]]
    later = plan_maintenance(seen(under_deletes=files), policy(delete_compaction_min_deletes=2))
    assert paths(later.steps["debt"]) == [["three"]]
    assert isinstance(later.steps["debt"], RewriteStep)
    assert later.steps["debt"].bytes_written == round(MB * 0.9)


@pytest.mark.parametrize(
    ("switch", "name"),
    [
        ("delete_compaction_enabled", "debt"),
        ("rewrite_enabled", "pack"),
        ("manifest_rewrite_enabled", "manifests"),
        ("snapshot_expiry_enabled", "expiry"),
        ("orphan_sweep_enabled", "orphans"),
        ("maintenance_enabled", "debt"),
        ("maintenance_enabled", "orphans"),
    ],
)
def test_a_pass_that_is_off_stays_off_and_says_so(switch: str, name: Any) -> None:
    world = seen(
        under_deletes=(file("a", deletes=1),),
        small=tuple(file(f"s{n}") for n in range(9)),
        data_manifests=(1,) * 200,
        snapshots=tuple(snapshot(n, 90 - n) for n in range(20)),
    )
    on = policy(orphan_sweep_enabled=True)
    assert set(plan_maintenance(world, on).steps) == {"debt", "pack", "manifests", "expiry", "orphans"}
    off = plan_maintenance(world, policy(**{"orphan_sweep_enabled": True, switch: False}))
    assert off.skipped[name] == f"{switch} is false"


def test_the_sweep_of_orphans_is_opt_in() -> None:
    assert plan_maintenance(seen(), policy()).skipped["orphans"] == "orphan_sweep_enabled is false"


def test_nothing_happens_to_a_table_that_a_foreign_snapshot_has_frozen() -> None:
    plan = plan_maintenance(seen(blocked="frozen", under_deletes=(file("a", deletes=1),)), policy())
    assert plan.steps == {}


def test_manifests_are_folded_from_the_number_that_the_policy_says() -> None:
    assert "manifests" in plan_maintenance(seen(data_manifests=(5,) * 99), policy()).skipped
    assert plan_maintenance(seen(data_manifests=(5,) * 100), policy()).steps["manifests"] == ManifestStep(100, 500, 25)


def test_clusters_follow_the_order_of_partitions() -> None:
    found = clusters([f"PartitionData{{ts_trunc={n}}}" for n in (1000, 200, 90, -5)], 2)
    assert [found[f"PartitionData{{ts_trunc={n}}}"] for n in (-5, 90, 200, 1000)] == ["000000"] * 2 + ["000001"] * 2


AGED = tuple(snapshot(n, 40 - n) for n in range(1, 11))


def test_old_snapshots_expire_but_never_the_newest() -> None:
    kept = policy(snapshot_retention_hours=24, snapshot_min_retained=3)
    assert expirable(seen(snapshots=AGED), kept) == (1001, 1002, 1003, 1004, 1005, 1006, 1007)
    assert expirable(seen(snapshots=AGED), policy(snapshot_retention_hours=36)) == (1001, 1002, 1003)
    plan = plan_maintenance(seen(snapshots=AGED), kept)
    assert isinstance(plan.steps["expiry"], ExpiryStep)


def test_nothing_from_the_oldest_pin_on_expires() -> None:
    bounds = Bounds(pinned=frozenset({1004}), horizon=4)
    assert expirable(seen(snapshots=AGED, bounds=bounds), policy()) == (1001, 1002, 1003)
    everything = Bounds(pinned=frozenset({1001}), horizon=1)
    assert expirable(seen(snapshots=AGED, bounds=everything), policy(snapshot_max_count=5)) == ()


def test_the_number_of_snapshots_is_bounded_whatever_their_age() -> None:
    young = tuple(snapshot(n) for n in range(1, 11))
    assert expirable(seen(snapshots=young), policy(snapshot_max_count=6)) == (1001, 1002, 1003, 1004)
    kept = Bounds(kept=frozenset({1001, 1003}))
    assert expirable(seen(snapshots=young, bounds=kept), policy(snapshot_max_count=6)) == (1002, 1004)


def test_what_an_operation_in_flight_may_read_stays() -> None:
    since = Bounds(in_flight_since=round(100 * 24 * HOUR - 37.5 * HOUR))
    assert expirable(seen(snapshots=AGED, bounds=since), policy()) == (1001,)


def test_an_erasure_expires_older_snapshots_at_once_but_not_pinned_ones() -> None:
    young = tuple(snapshot(n) for n in range(1, 7))
    off = policy(snapshot_expiry_enabled=False, delete_compaction_enabled=False, delete_compaction_min_deletes=9)
    world = seen(snapshots=young, erase_below=5, under_deletes=(file("a", deletes=1),))
    plan = plan_maintenance(world, off)
    assert plan.steps["expiry"] == ExpiryStep((1001, 1002, 1003, 1004))
    assert "debt" in plan.steps
    held = seen(snapshots=young, erase_below=5, bounds=Bounds(pinned=frozenset({1003}), horizon=3))
    assert plan_maintenance(held, off).steps["expiry"] == ExpiryStep((1001, 1002))


ENVIRON = (
    *(
        (f"MODAK_{key}_ENABLED", "false", name)
        for key, name in (
            ("MAINTENANCE", "debt"),
            ("REWRITE", "pack"),
            ("DELETE_COMPACTION", "debt"),
            ("MANIFEST_REWRITE", "manifests"),
            ("SNAPSHOT_EXPIRY", "expiry"),
        )
    ),
    ("MODAK_REWRITE_TARGET_BYTES", str(2 * MB), "pack"),
    ("MODAK_REWRITE_MIN_INPUT_FILES", "11", "pack"),
    ("MODAK_SNAPSHOT_RETENTION_HOURS", "36", "expiry"),
    ("MODAK_SNAPSHOT_MIN_RETAINED", "8", "expiry"),
    ("MODAK_ORPHAN_SWEEP_ENABLED", "true", "orphans"),
)


@pytest.mark.parametrize(("variable", "value", "name"), ENVIRON)
def test_every_default_of_the_fleet_reaches_the_plan(variable: str, value: str, name: Any) -> None:
    world = seen(
        under_deletes=(file("d", deletes=1),),
        small=tuple(file(f"s{n}", lower=n) for n in range(10)),
        data_manifests=(5,) * 100,
        snapshots=AGED,
    )
    usual = plan_maintenance(world, policy())
    assert {*usual.steps, "orphans"} == set(PASSES)
    assert plan_maintenance(world, resolve(config.load({variable: value}), {})).steps.get(name) != usual.steps.get(name)


def test_no_default_of_the_fleet_is_forgotten() -> None:
    known = {f"MODAK_{key.name.upper()}" for key in keys_of("iceberg").values() if key.setting is not None}
    assert {variable for variable, _, _ in ENVIRON} == known


def test_a_task_gets_the_deleted_keys_of_its_partitions_only() -> None:
    def keys(spec: int, *partition: int) -> DeletedKeys:
        return DeletedKeys(spec, partition, not partition, (), (), 1)

    deleted = (keys(0, 0), keys(0, 100), keys(1, 100), keys(1))
    files = [file("a", partition=100), file("b", partition=200)]
    assert applicable(deleted, files) == (keys(0, 100), keys(1))


def test_bins_are_shared_out_in_their_order() -> None:
    bins = [Bin((file(str(n), size),)) for n, size in enumerate([4 * MB, MB, MB, MB, MB])]
    assert [len(share) for share in shares(bins, 2)] == [1, 4]
    assert [len(share) for share in shares(bins, 1)] == [5]
    assert len(shares([Bin((file(str(n), 200 * MB),)) for n in range(9)], 1)) > 4, "a task reads only so much"


def test_one_small_file_in_each_of_many_partitions_does_not_hide_those_that_can_be_joined() -> None:
    files = [*(file(f"alone {n}", partition=n) for n in range(5)), file("a", partition=9), file("b", partition=9)]
    first = Candidates(2, 10 * MB)
    for each in files:
        first.take(each)
    assert first.more_small
    again = first.crowded()
    for each in files:
        again.take(each)
    assert [each.file.path for each in again.small] == ["a", "b"]
    assert not again.more_small


def test_files_with_too_few_deletes_do_not_hide_those_that_are_due() -> None:
    found = Candidates(2, 10 * MB, least_deletes=2)
    for each in (*(file(f"one {n}", deletes=1) for n in range(5)), file("due", deletes=2)):
        found.take(each)
    assert [each.file.path for each in found.under_deletes] == ["due"]
    assert not found.more_under_deletes
    assert not found.small, "what is under deletes is not for the bin-pack"
