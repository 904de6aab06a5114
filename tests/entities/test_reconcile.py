"""Reconcile, gc and verify: what is wrong is found, and only what is surely dead is removed."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta

import pytest

from modak.core import faults
from modak.core.clock import FrozenClock
from modak.core.errors import Conflict, ModakError
from modak.core.faults import Fault, InjectedFault
from modak.entities.compaction import compact
from modak.entities.flushing import flush
from modak.entities.health import status
from modak.entities.initial import init
from modak.entities.lock import schema_lock
from modak.entities.reconciling import Reconciled, collect, look, reconcile
from modak.entities.verifying import verify
from tests.entities.test_flush import at
from tests.entities.world import SCHEMA, World, key


def orphan(world: World) -> str:
    """A delta that was copied and never listed; its row is deleted since, and that is compacted away."""
    world.many(0, 3)
    faults.arm(Fault("flush.before_publish"))
    with pytest.raises(InjectedFault):
        flush(world.store)
    faults.arm(None)
    (path,) = world.paths()
    flush(world.store)
    world.delete(1)
    flush(world.store)
    compact(world.store)
    return path


def test_a_store_in_order_has_no_differences(either: World) -> None:
    either.many(0, 3)
    flush(either.store)
    assert not reconcile(either.store, SCHEMA).found.any
    assert verify(either.store, SCHEMA).sound


def test_an_orphan_is_reported_and_repair_does_not_bring_dead_rows_back(world: World) -> None:
    path = orphan(world)
    assert reconcile(world.store, SCHEMA).found.delta_orphans == (path,)
    done = reconcile(world.store, SCHEMA, repair=True)
    assert done.repaired_rows == 3
    assert set(world.titles()) == {0, 2}
    flush(world.store)
    assert set(world.titles()) == {0, 2}
    assert not reconcile(world.store, SCHEMA).found.any


def test_gc_waits_for_the_grace_from_when_a_file_left_the_store(either: World) -> None:
    world = either
    clock = world.clock = FrozenClock()
    stray = orphan(world)
    removed = {each.path for each in world.manifest.removed}
    assert len(removed) == 2
    first = reconcile(world.store, SCHEMA, gc=True)
    assert (first.deleted, first.waiting) == (0, 3)
    clock.at += timedelta(minutes=14)
    assert reconcile(world.store, SCHEMA, gc=True).deleted == 0
    clock.at += timedelta(minutes=2)
    before = world.read()
    assert reconcile(world.store, SCHEMA, gc=True).deleted == 3
    assert set(world.paths()) == world.manifest.paths
    assert stray not in world.paths()
    assert world.read() == before
    assert world.manifest.removed == ()


def test_whoever_was_taken_for_dead_cannot_publish_its_files(world: World) -> None:
    world.many(0, 3)

    def collect() -> None:
        faults.watch(None)
        from modak.entities.reconciling import _collect

        class Held:
            def check(self) -> None: ...

        _collect(world.store, SCHEMA, Held(), 0)  # type: ignore[arg-type]

    at("flush.before_publish", collect)
    (report,) = flush(world.store)
    assert report.error is None
    world.check_objects()
    assert len(world.read()) == 3


def test_a_lost_file_is_reported_and_its_rows_are_exported_again(world: World) -> None:
    world.many(0, 5)
    init(world.store, SCHEMA)
    world.delete(1)
    world.put(2, title="newer")
    flush(world.store)
    lost = world.manifest.delta[0].path
    world.objects.delete([lost])
    with pytest.raises(Conflict, match="does not exist"):
        world.read()
    assert [entry.path for entry in reconcile(world.store, SCHEMA).found.missing] == [lost]
    done = reconcile(world.store, SCHEMA, repair=True)
    assert done.dropped == (lost,)
    expected = {0: "row 0", 2: "newer", 3: "row 3", 4: "row 4"}
    assert world.titles() == expected
    flush(world.store)
    assert world.dirty() == 0
    assert world.titles() == expected
    assert not look(world.store, SCHEMA).any


def test_repair_and_gc_need_the_lock(world: World) -> None:
    with schema_lock(world.store.address, SCHEMA, "change_log"):
        for flags in ({"repair": True}, {"gc": True}):
            with pytest.raises(Conflict):
                reconcile(world.store, SCHEMA, **flags)


def test_files_that_somebody_is_about_to_list_are_no_difference(world: World) -> None:
    world.many(0, 3)
    seen: list[Reconciled] = []
    at("flush.before_publish", lambda: seen.append(reconcile(world.store, SCHEMA)))
    flush(world.store)
    at("init.after_export", lambda: seen.append(reconcile(world.store, SCHEMA)))
    init(world.store, SCHEMA, replace_delta=True)
    faults.watch(None)
    assert [(each.busy, each.found.any, len(each.found.waiting)) for each in seen] == [(True, False, 1)] * 2
    done = reconcile(world.store, SCHEMA)
    assert (done.busy, done.found.any) == (False, False)


def test_the_manifest_of_a_first_init_is_not_lost_while_it_runs(world: World) -> None:
    world.many(0, 3)
    # As if they had been there before the triggers.
    world.sql("DELETE FROM change_log")
    seen: list[Reconciled] = []
    at("init.before_publish", lambda: seen.append(reconcile(world.store, SCHEMA)))
    init(world.store, SCHEMA)
    faults.watch(None)
    assert [(each.busy, each.found.any) for each in seen] == [(True, False)]
    assert not reconcile(world.store, SCHEMA).found.any


def test_what_was_listed_between_two_looks_is_no_difference(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    path = orphan(world)
    assert reconcile(world.store, SCHEMA).found.delta_orphans == (path,)

    def listed(*_: object) -> AbstractContextManager[object]:
        # The flush ends after the first look and before the lock is tried.
        world.objects.delete([path])
        return schema_lock(*_)  # type: ignore[arg-type]

    monkeypatch.setattr("modak.entities.reconciling.schema_lock", listed)
    done = reconcile(world.store, SCHEMA)
    assert (done.busy, done.found.any) == (False, False)


def test_a_lost_file_is_a_difference_also_while_somebody_works(world: World) -> None:
    world.many(0, 3)
    flush(world.store)
    (lost,) = world.paths()
    world.objects.put(f"entities/delta/{SCHEMA}/_tmp/half.parquet", b"half")
    world.objects.delete([lost])
    with schema_lock(world.store.address, SCHEMA, "change_log"):
        done = reconcile(world.store, SCHEMA)
    assert done.busy
    assert [entry.path for entry in done.found.missing] == [lost]
    assert done.found.leftovers == ()


def test_verify_names_the_attribute_that_differs(world: World) -> None:
    world.many(0, 10)
    init(world.store, SCHEMA)
    world.put(3, title="dirty")
    for name in ("insert", "update", "delete"):
        world.sql(f"ALTER TABLE eav_data DISABLE TRIGGER modak_entities_{name}")
        world.sql(f"ALTER TABLE entity_main DISABLE TRIGGER modak_entities_{name}")
    world.attribute(4, "qty", 99)
    world.delete(5)
    world.put(50, title="unseen")
    for name in ("insert", "update", "delete"):
        world.sql(f"ALTER TABLE eav_data ENABLE ALWAYS TRIGGER modak_entities_{name}")
        world.sql(f"ALTER TABLE entity_main ENABLE ALWAYS TRIGGER modak_entities_{name}")
    report = verify(world.store, SCHEMA)
    assert (report.compared, report.dirty, report.differing) == (9, 1, 3)
    found = {(each.kind, each.row_id, each.attribute, each.postgres, each.store) for each in report.differences}
    assert found == {
        ("changed", key(4), "qty", "99", "4"),
        ("extra in the store", key(5), "", "", ""),
        ("missing in the store", key(50), "", "", ""),
    }


def test_status_counts_both_sides(world: World) -> None:
    world.many(0, 5)
    init(world.store, SCHEMA)
    world.put(0, title="x")
    flush(world.store)
    world.put(1, title="y", qty=70_000)
    world.put(2, title="z")
    flush(world.store)
    world.put(3, title="dirty")
    (row,) = status(world.store)
    assert (row.name, row.dirty, row.quarantined) == ("invoice", 1, 1)
    assert (row.base_files, row.base_rows, row.delta_files, row.delta_rows) == (1, 5, 2, 2)
    assert row.oldest_seconds is not None


def test_a_repair_in_the_middle_of_a_read_hides_nothing(world: World) -> None:
    world.many(0, 3)
    flush(world.store)
    world.objects.delete(world.paths())
    at("read.rows_read", lambda: reconcile(world.store, SCHEMA, repair=True))
    assert len(world.read()) == 3


def test_a_listed_file_outside_the_prefix_is_not_lost(world: World) -> None:
    world.many(0, 3)
    flush(world.store)
    world.configure(s3_prefix="elsewhere", manifest_prefix="entities")
    assert not reconcile(world.store, SCHEMA).found.any
    world.many(3, 3)
    flush(world.store)
    assert not reconcile(world.store, SCHEMA).found.any
    assert len(world.read()) == 6


def test_an_orphan_that_cannot_be_read_keeps_no_other_from_repair(world: World) -> None:
    path = orphan(world)
    world.objects.put(f"entities/delta/{SCHEMA}/0-half.parquet", b"half")
    with pytest.raises(ModakError, match=r"0-half\.parquet is not listed and cannot be read"):
        reconcile(world.store, SCHEMA, repair=True)
    assert world.dirty() == 3
    assert path in {each.path for each in world.manifest.removed}


def test_gc_of_all_schemas_leaves_out_those_in_work(world: World) -> None:
    clock = world.clock = FrozenClock()
    world.many(0, 3)
    flush(world.store)
    compact(world.store)
    clock.at += timedelta(minutes=16)
    with schema_lock(world.store.address, SCHEMA, "change_log"):
        assert collect(world.store) == 0
    assert collect(world.store) == 1
    assert set(world.paths()) == world.manifest.paths
