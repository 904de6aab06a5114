"""Compaction: many files become few, and no reader sees a difference."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from modak.core import faults
from modak.core.errors import ModakError
from modak.entities.clients import ObjectsClient
from modak.entities.compaction import compact, compact_schema
from modak.entities.config import CompactionConfig
from modak.entities.export import discard
from modak.entities.flushing import flush
from modak.entities.initial import init
from modak.entities.kernel import Kernel, newest, running
from modak.entities.lock import schema_lock
from modak.entities.manifest import listing_deltas
from modak.entities.plan import KeyRange
from modak.entities.reading import merges
from modak.entities.store import Crew
from modak.entities.verifying import verify
from modak.spark.predicate import All, Among, Compare, Null, Predicate, Some
from tests.entities.test_flush import at
from tests.entities.world import INVOICE, SCHEMA, World, changed, key, registry


def five_and_three(world: World) -> None:
    world.many(0, 5)
    init(world.store, SCHEMA)
    world.put(0, title="updated", tags=["new"])
    world.put(1, title="updated too")
    world.delete(2)
    flush(world.store)


def test_updates_and_deletes_are_merged_into_a_new_base_and_a_second_pass_does_nothing(either: World) -> None:
    world = either
    five_and_three(world)
    before = world.read()
    (report,) = compact(world.store)
    assert (report.error, report.rows, report.merged) == (None, 4, 2)
    assert world.manifest.delta == ()
    assert world.manifest.base_rows == 4
    assert world.read() == before
    assert world.titles() == {0: "updated", 1: "updated too", 3: "row 3", 4: "row 4"}
    # A cleared attribute stays cleared: whole rows win.
    assert before[key(0)]["qty"] is None
    world.check_objects()
    assert not compact(world.store)[0].changed


def test_a_store_whose_rows_are_all_deleted_has_a_base_without_rows(world: World) -> None:
    world.many(0, 3)
    flush(world.store)
    for number in range(3):
        world.delete(number)
    flush(world.store)
    (report,) = compact(world.store)
    assert (report.rows, report.files) == (0, 1)
    assert world.read() == {}
    world.check_objects()


def test_ranges_cover_every_key_whatever_their_number(world: World) -> None:
    world.configure(target_file_size_mb=0, batch_size=6)
    world.many(0, 30)
    init(world.store, SCHEMA)
    for number in range(0, 40, 3):
        world.put(number, title=f"again {number}")
    flush(world.store)
    before = world.read()
    world.compaction = CompactionConfig(max_parallel_files=4)
    (report,) = compact(world.store)
    assert report.files >= 4
    assert world.read() == before
    spans = sorted((entry.min_row_id, entry.max_row_id) for entry in world.manifest.base)
    assert all(low[1] < high[0] for low, high in pairwise(spans))


def test_few_deltas_are_left_alone_unless_one_is_large(world: World) -> None:
    world.many(0, 30)
    init(world.store, SCHEMA)
    world.put(0, title="x")
    flush(world.store)
    (report,) = compact(world.store)
    assert not report.changed
    assert "3.3 % of the base" in report.because
    manifest = world.manifest
    large = replace(manifest.delta[0], size_bytes=51 << 20)
    from modak.entities.plan import Rewrite, plan_compaction

    planned = plan_compaction(replace(manifest, delta=(large,)), CompactionConfig(), 1)
    assert isinstance(planned, Rewrite)


def test_large_deltas_beside_the_base_are_promoted_and_overlapping_ones_rewritten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.many(0, 5)
    init(world.store, SCHEMA)
    world.many(10, 5)
    flush(world.store)
    monkeypatch.setattr("modak.entities.plan.MIB", 1)
    (report,) = compact(world.store)
    assert (report.promoted, report.merged) == (1, 0)
    assert (len(world.manifest.base), world.manifest.delta) == (2, ())
    world.put(11, title="newer")
    flush(world.store)
    before = world.read()
    (report,) = compact(world.store)
    assert (report.promoted, report.merged) == (0, 3)
    assert world.read() == before
    assert world.titles()[11] == "newer"


def test_a_flush_in_the_middle_of_a_compaction_survives_it(world: World) -> None:
    five_and_three(world)

    def flush_without_lock() -> None:
        faults.watch(None)
        from modak.entities.flushing import _try_batch
        from modak.entities.tables import check

        class Held:
            def check(self) -> None: ...

        world.put(3, title="in between")
        with world.connect() as conn:
            _try_batch(world.store, check(conn, world.store.tables), world.schema, Held(), 10)  # type: ignore[arg-type]

    at("compaction.before_publish", flush_without_lock)
    (report,) = compact(world.store)
    assert report.merged == 2
    assert (len(world.manifest.base), len(world.manifest.delta), world.dirty()) == (1, 1, 0)
    assert world.titles() == {0: "updated", 1: "updated too", 3: "in between", 4: "row 4"}


def test_sources_that_left_the_store_meanwhile_make_a_compaction_begin_anew(world: World) -> None:
    five_and_three(world)

    def another() -> None:
        faults.watch(None)
        inner = world.store
        from modak.entities import compaction as module

        class Held:
            def check(self) -> None: ...

        module._compact(inner, world.schema, Held())  # type: ignore[arg-type]

    at("compaction.before_publish", another)
    (report,) = compact(world.store)
    assert report.error is None
    assert len(world.titles()) == 4
    world.check_objects()
    assert set(world.paths()) == world.manifest.paths | {each.path for each in world.manifest.removed}


class Ambiguous(ObjectsClient):
    """A store that loses the answer to a manifest write; `landed` tells whether it did it."""

    def __init__(self, world: World, landed: bool) -> None:
        super().__init__(world.objects)
        self.landed = landed

    def put_object(self, bucket: str, key: str, data: bytes, expected: Any) -> Any:
        if self.landed:
            super().put_object(bucket, key, data, expected)
        raise ModakError("storage.failed", "The connection broke.", retryable=True)


@pytest.mark.parametrize("landed", [True, False])
def test_a_swap_whose_answer_is_lost_keeps_every_file(world: World, landed: bool) -> None:
    five_and_three(world)
    before, files = world.read(), set(world.paths())
    world.client = Ambiguous(world, landed)
    (report,) = compact(world.store)
    if landed:
        assert report.error is None
        assert world.manifest.delta == ()
    else:
        assert report.error is not None
        assert report.error.code == "entities.manifest_unclear"
        assert len(set(world.paths()) - files) == 1
    assert files <= set(world.paths())
    assert world.read() == before


def test_a_write_that_the_client_repeated_is_known_as_our_own(world: World) -> None:
    class Repeating(ObjectsClient):
        def put_object(self, bucket: str, key: str, data: bytes, expected: Any) -> Any:
            super().put_object(bucket, key, data, expected)
            return super().put_object(bucket, key, data, expected)

    world.many(0, 3)
    world.client = Repeating(world.objects)
    assert flush(world.store)[0].error is None
    assert len(world.manifest.delta) == 1


def test_a_source_that_is_not_what_was_written_is_refused(world: World) -> None:
    five_and_three(world)
    data = bytearray(world.objects.get(world.manifest.base[0].path).data)
    data[-20] ^= 1
    world.objects.put(world.manifest.base[0].path, bytes(data))
    (report,) = compact(world.store)
    assert report.error is not None
    assert report.error.code == "entities.damaged"
    assert len(world.manifest.delta) == 1


def test_a_schema_that_somebody_else_works_on_is_skipped(world: World) -> None:
    five_and_three(world)
    with schema_lock(world.store.address, SCHEMA, "change_log"):
        assert compact_schema(world.store, world.schema).skipped


def test_files_from_before_a_change_of_the_registry_are_read_under_the_new_one(world: World) -> None:
    world.put(1, title="old", qty=5, amount="1.25", tags=["a"], paid="true")
    flush(world.store)
    world.registry = registry(
        changed(
            qty={"id": 4, "type": "bigint"},
            amount={"id": 3, "type": "numeric", "precision": 20, "scale": 4},
            tags=None,
            paid={"id": 60, "type": "text"},
            heading={"id": 1, "type": "text", "column": "text_01"},
            title=None,
            seen={"id": 8, "type": "list", "items": "datetime"},
            fresh={"id": 70, "type": "text"},
        )
    )
    row = world.read()[key(1)]
    assert "tags" not in row
    assert (row["qty"], str(row["amount"]), row["heading"], row["fresh"]) == (5, "1.2500", "old", None)
    # The same name with another number is another attribute.
    assert row["paid"] is None
    world.sql("UPDATE entity_main SET text_01 = 'touched' WHERE false")
    world.sql("INSERT INTO eav_data VALUES (7, %s, 70, '', 'now', NULL)", (key(1),))
    flush(world.store)
    compact(world.store)
    row = world.read()[key(1)]
    assert (row["qty"], row["heading"], row["fresh"]) == (5, "old", "now")


@pytest.mark.parametrize(
    ("name", "attribute"),
    [
        ("amount", {"id": 3, "type": "numeric", "precision": 12, "scale": 1}),
        ("amount", {"id": 3, "type": "integer"}),
        ("title", {"id": 1, "type": "uuid", "column": "uuid_01"}),
        ("tags", {"id": 5, "type": "text"}),
        ("qty", {"id": 4, "type": "text"}),
    ],
)
def test_a_retype_that_loses_values_is_refused_by_name(world: World, name: str, attribute: dict[str, Any]) -> None:
    world.put(1, title="t", amount="1.25", tags=["a"])
    flush(world.store)
    world.registry = registry(changed(**{name: attribute}))
    world.put(1, title="u")
    (report,) = flush(world.store)
    assert report.error is not None
    assert report.error.code == "entities.retyped"
    assert name in report.error.message


def test_what_is_missing_from_the_registry_for_a_while_is_there_again_afterwards(world: World) -> None:
    world.put(1, title="old", due=86_400_000, qty=5, amount="1.25", tags=["a", "b"], paid="true", seen=12)
    world.put(2, title="bare", tags=[])
    init(world.store, SCHEMA)
    world.put(1, title="newer", due=86_400_000, qty=6, amount="1.25", tags=["c"], paid="true", seen=12)
    flush(world.store)
    before = world.read()
    world.registry = registry(
        changed(due=None, qty=None, amount=None, tags=None, paid={"id": 60, "type": "text"}, seen=None)
    )
    for number in (3, 4):
        world.put(number, title="meanwhile")
        flush(world.store)
        (report,) = compact(world.store)
        assert (report.error, report.rows) == (None, number)
    assert set(world.read()[key(1)]) & {"due", "qty", "amount", "tags", "seen"} == set()
    assert world.read()[key(1)]["paid"] is None
    world.registry = registry()
    after = world.read()
    assert {each: after[each] for each in before} == before
    assert verify(world.store, SCHEMA).sound
    # Its place and its type are still known.
    world.registry = registry(changed(due={"id": 2, "type": "date", "column": "bigint_02"}))
    with pytest.raises(ModakError, match="was exported"):
        world.read()
    world.registry = registry(changed(qty={"id": 4, "type": "bigint"}, labels=INVOICE["attributes"]["tags"], tags=None))
    compact(world.store)
    assert (world.read()[key(1)]["qty"], world.read()[key(1)]["labels"]) == (6, ["c"])


def test_only_so_many_ranges_are_rewritten_at_the_same_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.configure(target_file_size_mb=0, batch_size=6)
    world.many(0, 30)
    init(world.store, SCHEMA)
    world.many(0, 10)
    flush(world.store)
    before, waves = world.read(), []

    def run(_: Crew, work: Any, items: Any, rows: int) -> list[Any]:
        waves.append(len(items))
        return [work(item) for item in items]

    monkeypatch.setattr(Crew, "run", run)
    # As many ranges as there is data for, of which two are under way.
    monkeypatch.setattr("modak.entities.plan.MIB", 1 << 10)
    world.compaction = CompactionConfig(max_parallel_files=2, target_base_size_mb=4)
    (report,) = compact(world.store)
    assert report.error is None
    assert (max(waves), len(waves) > 1) == (2, True)
    assert world.read() == before


def test_a_name_that_only_differs_in_case_from_a_former_one_is_refused(world: World) -> None:
    world.put(1, title="t")
    flush(world.store)
    world.registry = registry(changed(title=None, Title={"id": 90, "type": "text"}))
    world.put(1, title="u")
    (report,) = flush(world.store)
    assert report.error is not None
    assert "case is folded" in report.error.message


def test_the_order_of_listing_decides_not_the_stamps(world: World) -> None:
    world.put(1, title="first")
    flush(world.store)
    world.put(1, title="second")
    # A second flush from a machine whose clock is behind: the stamp would lose.
    flush(world.store)
    held = world.store.manifests.load(SCHEMA)
    first, second = held.manifest.delta
    assert first.seq < second.seq
    assert world.titles() == {1: "second"}
    world.store.manifests.save(held, lambda now: listing_deltas(replace(now, delta=(second,)), [replace(first, seq=0)]))
    assert world.titles() == {1: "first"}


def test_the_kernel_spills_beside_a_named_file_and_ends_in_time(world: World, tmp_path: Path) -> None:
    five_and_three(world)
    world.configure(duckdb_path=str(tmp_path / "kernel"), duck_threads=2, duck_mem_limit=256 << 20, query_timeout=60.0)
    assert compact(world.store)[0].merged == 2
    assert Kernel.of(replace(world.config, duck_mem_limit="4GB")).memory == "4GB"
    assert Kernel.of(replace(world.config, duck_mem_limit=0)).memory == "1GiB"
    assert not list(tmp_path.glob("kernel*"))
    with pytest.raises(ModakError, match="took longer than"), running(Kernel(timeout_seconds=0.05)) as duck:
        duck.execute("SELECT count(*) FROM range(100000) a, range(100000) b WHERE a.range % 7 = b.range % 5").fetchall()


def test_files_of_a_writer_that_describes_less_are_read_by_name_and_stamp(world: World) -> None:
    world.put(1, title="old", qty=1)
    world.put(2, title="kept", qty=2)
    flush(world.store)
    world.put(1, title="new", qty=3)
    flush(world.store)
    told = [{"path": entry.path, "level": entry.level} for entry in reversed(world.manifest.delta)]
    world.objects.put("entities/manifest/7.json", json.dumps({"schema_id": 7, "delta": told}).encode())
    assert world.titles() == {1: "new", 2: "kept"}
    assert compact(world.store)[0].rows == 2
    assert world.titles() == {1: "new", 2: "kept"}
    assert world.read()[key(1)]["qty"] == 3


def filtered(world: World, predicate: Predicate) -> set[str]:
    """The titles that a read would get from the files alone, with a filter pushed down to them."""
    merged = merges(world.store, world.manifest, world.schema.attributes, [KeyRange()], predicate=predicate)
    return {row["title"] for merge in merged for batch in newest(merge) for row in batch.to_pylist()}


@pytest.mark.parametrize("compacted", ["base and delta", "deltas", "base"])
def test_a_filter_is_applied_to_the_newest_version_only(world: World, compacted: str) -> None:
    world.many(0, 5)
    if compacted == "deltas":
        flush(world.store)
    else:
        init(world.store, SCHEMA)
    world.put(0, title="it's new", qty=9, amount="1.50", paid="true")
    world.delete(2)
    flush(world.store)
    if compacted == "base":
        compact(world.store)
    assert filtered(world, Compare("title", "=", "row 0")) == set()
    assert filtered(world, Compare("title", "=", "row 2")) == set()
    assert filtered(world, Compare("title", "=", "it's new")) == {"it's new"}
    assert filtered(world, Compare("qty", ">=", 4)) == {"it's new", "row 4"}
    assert filtered(world, Compare("amount", "<", Decimal("1.51"))) == {"it's new"}
    assert filtered(world, Compare("paid", "=", True)) == {"it's new"}
    assert filtered(world, All((Null("amount"), Among("qty", (1, 3))))) == {"row 1", "row 3"}
    assert filtered(world, Some((Compare("qty", "=", 1), Compare("title", "=", "row 3")))) == {"row 1", "row 3"}
    # What cannot be said holds nothing back.
    assert len(filtered(world, Compare("nothing", "=", 1))) == 4
    assert len(filtered(world, Compare("title", "<", "a"))) == 4


def test_files_that_are_listed_after_all_are_never_discarded(world: World) -> None:
    world.many(0, 3)
    flush(world.store)
    world.objects.put("entities/delta/7/stray.parquet", b"x")
    discard(world.store, SCHEMA, world.paths())
    assert set(world.paths()) == world.manifest.paths
