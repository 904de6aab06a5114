"""Flush: dirty rows reach the store once, whatever happens on the way."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from io import BytesIO
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest

from modak.core import faults
from modak.core.clock import FrozenClock
from modak.core.errors import Refused
from modak.entities.flushing import flush
from modak.entities.lock import schema_lock
from modak.entities.registry import FIXED_COLUMNS
from tests.entities.world import INVOICE, SCHEMA, World, changed, key, registry


def test_rows_with_every_kind_of_attribute_come_out_as_they_went_in(either: World) -> None:
    world = either
    world.put(1, title="first", due=86_400_000, amount="12.5", qty=7, tags=["b", "a"], paid="true", seen=5)
    world.put(2, tags=[], seen="2026-01-31T01:00:00.123456+01:00", paid=0)
    world.put(3)
    world.attribute(3, "tags", "legacy")
    before = world.read()
    assert before[key(1)] | {"changed_at": 0} == {
        "schema_id": SCHEMA,
        "row_id": key(1),
        "changed_at": 0,
        "deleted_at": 0,
        "ltbase_created_at": 1,
        "ltbase_updated_at": 2,
        "ltbase_deleted_at": None,
        "title": "first",
        "due": 86_400_000,
        "amount": Decimal("12.50"),
        "qty": 7,
        "tags": ["b", "a"],
        "paid": True,
        "seen": 5,
    }
    assert before[key(2)]["tags"] == []
    assert before[key(2)]["seen"] == 1_769_817_600_123
    assert before[key(2)]["paid"] is False
    assert before[key(3)]["tags"] == ["legacy"]
    assert before[key(3)]["amount"] is None
    (report,) = flush(world.store)
    assert (report.error, report.rows, report.files, report.marked) == (None, 3, 1, 3)
    assert world.dirty() == 0
    assert world.read() == before
    (entry,) = world.manifest.delta
    assert (entry.row_count, entry.level, entry.seq) == (3, "delta", 1)
    assert entry.min_row_id == min(key(number) for number in (1, 2, 3))
    assert entry.min_time_slot == min(row["changed_at"] for row in before.values()) // 3_600_000
    world.check_objects()
    assert world.paths() == [entry.path]


def test_which_of_two_values_counts_is_decided_by_the_type(world: World) -> None:
    world.put(1)
    for attribute, index, text, number in (
        (4, "", "nine", 7),
        (5, "0", None, 5),
        (5, "1", "five", 5),
        (8, "", "1970-01-01T00:00:00.012Z", None),
    ):
        world.sql(
            "INSERT INTO eav_data VALUES (%s, %s, %s, %s, %s, %s)", (SCHEMA, key(1), attribute, index, text, number)
        )
    (row,) = world.read().values()
    assert (row["qty"], row["tags"], row["seen"]) == (7, [None, "five"], 12)
    # The same where all attributes are texts, and where none is.
    for kept in ({"tags"}, {"qty", "seen"}):
        gone = {name: None for name in INVOICE["attributes"] if name not in kept}
        world.registry = registry(changed(**gone))
        (narrow,) = world.read().values()
        assert {name: narrow[name] for name in kept} == {name: row[name] for name in kept}


def test_the_thresholds_decide(world: World) -> None:
    clock = world.clock = FrozenClock()
    world.configure(min_records=3, max_age_ms=60_000)
    world.many(0, 2)
    now = world.sql("SELECT max(changed_at) FROM change_log")[0][0]
    clock.at += timedelta(milliseconds=now - world.store.now_ms)
    (report,) = flush(world.store)
    assert report.decision is not None
    assert not report.decision.flush
    assert world.paths() == []
    world.many(2, 1)
    assert flush(world.store)[0].rows == 3
    world.many(3, 1)
    assert flush(world.store)[0].rows == 0
    # However long all this took, the row is as old as it may be now.
    changed = world.sql("SELECT max(changed_at) FROM change_log WHERE flushed_at = 0")[0][0]
    clock.at += timedelta(milliseconds=changed + 60_000 - world.store.now_ms)
    assert flush(world.store)[0].rows == 1


def test_a_dry_run_decides_and_changes_nothing(world: World) -> None:
    world.many(0, 3)
    (report,) = flush(world.store, dry_run=True)
    assert report.decision is not None
    assert report.decision.flush
    assert (world.dirty(), world.paths(), world.manifest.version) == (3, [], 0)


def test_a_schema_that_somebody_else_works_on_is_skipped(world: World) -> None:
    world.many(0, 3)
    with schema_lock(world.store.address, SCHEMA, "change_log") as lock:
        assert lock is not None
        (report,) = flush(world.store)
    assert report.skipped
    assert world.paths() == []
    assert flush(world.store)[0].rows == 3


def test_a_schema_without_description_aborts_before_anything_happens(world: World) -> None:
    world.many(0, 3)
    world.put(50, schema_id=9)
    with pytest.raises(Refused, match="no schema 9"):
        flush(world.store)
    assert (world.dirty(), world.paths()) == (3, [])


def test_a_batch_is_drained_in_chunks_until_nothing_is_left(world: World) -> None:
    world.configure(batch_size=10, max_batch_bytes=4 * 1024, estimated_row_bytes=1024)
    world.many(0, 25)
    (report,) = flush(world.store)
    assert (report.rows, report.files, world.dirty()) == (25, 3 + 3 + 2, 0)
    assert len(world.read()) == 25


def at(point: str, act: Any) -> None:
    """Do something the first time that a flow comes by a point."""
    done: list[str] = []

    def watch(reached: str) -> None:
        if reached == point and not done:
            done.append(point)
            act()

    faults.watch(watch)


@pytest.mark.parametrize(
    "point", ["flush.snapshot_taken", "flush.before_export", "flush.published", "flush.before_mark"]
)
def test_a_change_in_the_middle_of_a_flush_stays_dirty_and_is_seen_at_once(world: World, point: str) -> None:
    world.many(0, 3)
    at(point, lambda: world.put(1, title="changed"))
    flush(world.store)
    faults.watch(None)
    assert world.titles()[1] == "changed"
    flush(world.store)
    assert world.dirty() == 0
    assert world.titles() == {0: "row 0", 1: "changed", 2: "row 2"}


def test_a_change_that_is_stamped_early_and_committed_late_is_not_lost(world: World) -> None:
    world.many(0, 3)
    with psycopg.connect(world.dsn.conninfo()) as writer:
        writer.execute("UPDATE entity_main SET text_01 = 'late' WHERE ltbase_row_id = %s", (key(1),))
        at("flush.after_export", writer.commit)
        (report,) = flush(world.store)
        faults.watch(None)
    assert report.marked >= 2
    assert world.titles()[1] == "late"
    flush(world.store)
    assert world.dirty() == 0
    assert world.titles()[1] == "late"


def test_a_row_that_a_writer_holds_is_left_to_the_next_flush(world: World) -> None:
    world.many(0, 3)
    with psycopg.connect(world.dsn.conninfo()) as writer:
        at(
            "flush.before_mark",
            lambda: writer.execute("SELECT FROM change_log WHERE row_id = %s FOR UPDATE", (key(1),)),
        )
        (report,) = flush(world.store)
        faults.watch(None)
    assert report.marked == 2
    assert world.dirty() == 1


@pytest.mark.parametrize("how", ["delete", "bury"])
def test_a_delete_in_the_window_is_invisible_at_once(world: World, how: str) -> None:
    world.many(0, 3)
    at("flush.before_mark", lambda: getattr(world, how)(1))
    flush(world.store)
    faults.watch(None)
    assert set(world.titles()) == {0, 2}
    flush(world.store)
    assert world.dirty() == 0
    assert set(world.titles()) == {0, 2}
    assert world.manifest.delta[-1].tombstones == 1


def test_a_row_recreated_over_a_tombstone_from_a_fast_clock_wins(world: World) -> None:
    world.many(0, 1)
    flush(world.store)
    world.delete(0)
    world.sql("UPDATE change_log SET changed_at = changed_at + 3600000 WHERE flushed_at = 0")
    flush(world.store)
    assert world.read() == {}
    world.put(0, title="back")
    flush(world.store)
    assert world.dirty() == 0
    assert world.titles() == {0: "back"}
    stamps = world.sql("SELECT changed_at FROM change_log")
    assert len(stamps) == 1
    assert world.read()[key(0)]["changed_at"] == stamps[0][0] > world.store.now_ms + 3_000_000


def test_values_that_do_not_fit_put_their_row_aside_and_block_nobody(world: World) -> None:
    world.many(0, 2)
    world.put(10, title="too exact", qty="1.5")
    world.put(11, qty=70_000)
    world.put(12, seen="2026-01-01T00:00:00")
    world.put(13)
    world.attribute(13, "tags", "x", "0.1")
    world.put(14, tags=["a"])
    world.attribute(14, "tags", "y", "00")
    (report,) = flush(world.store)
    assert (report.rows, report.marked, len(report.unfit)) == (2, 2, 5)
    assert {each.row_id for each in report.unfit} == {key(number) for number in range(10, 15)}
    assert world.dirty() == 5
    (again,) = flush(world.store)
    assert again.decision is not None
    assert (again.decision.dirty, again.rows) == (0, 0)
    assert world.titles()[10] == "too exact"
    world.put(11, qty=70)
    assert flush(world.store)[0].marked == 1
    # Another registry gives the others another chance.
    world.registry = registry(changed(qty={"id": 4, "type": "numeric", "precision": 8, "scale": 1}))
    assert flush(world.store)[0].marked == 1
    assert world.read()[key(10)]["qty"] == Decimal("1.5")


@pytest.mark.parametrize("number", [4, -4, 0])
def test_an_index_does_not_fit_a_scalar_where_there_is_no_list_either(world: World, number: int) -> None:
    world.registry = registry(changed(tags=None, qty={"id": number, "type": "smallint"}))
    for row in (1, 2):
        world.put(row, title=f"row {row}")
        world.sql(
            "INSERT INTO eav_data VALUES (%s, %s, %s, %s, NULL, %s)", (SCHEMA, key(row), number, "0" * (row - 1), row)
        )
    (report,) = flush(world.store)
    assert [each.row_id for each in report.unfit] == [key(2)]
    assert (report.rows, world.read()[key(1)]["qty"]) == (1, 1)


def test_what_the_log_says_about_deletes_never_decides(world: World) -> None:
    world.many(0, 2)
    world.bury(1)
    world.sql("UPDATE change_log SET deleted_at = CASE WHEN row_id = %s THEN 5 END", (key(0),))
    assert set(world.titles()) == {0}
    flush(world.store)
    assert set(world.titles()) == {0}
    assert world.manifest.delta[0].tombstones == 1


def test_slots_of_a_row_only_grow_whatever_the_clock_does(world: World) -> None:
    clock = world.clock = FrozenClock()
    slots = []
    for turn in range(3):
        world.put(1, title=f"turn {turn}")
        flush(world.store)
        slots += [row[0] for row in world.sql("SELECT flushed_at FROM change_log")]
        clock.at -= timedelta(days=1)
    assert slots == [slots[0], slots[0] + 1, slots[0] + 2]


@pytest.mark.parametrize(("codec", "found"), [("zstd", "ZSTD"), ("snappy", "SNAPPY"), ("none", "UNCOMPRESSED")])
def test_files_have_the_fixed_columns_then_the_attributes_by_name(world: World, codec: str, found: str) -> None:
    world.configure(parquet_compression=codec)
    world.put(1, title="t", tags=["a"], amount="1.50")
    world.many(2, 3)
    world.delete(2)
    flush(world.store)
    file = pq.ParquetFile(BytesIO(world.objects.get(world.paths()[0]).data))
    assert file.schema_arrow.names == [*FIXED_COLUMNS, *sorted(INVOICE["attributes"])]
    assert {file.metadata.row_group(0).column(at).compression for at in range(file.metadata.num_columns)} == {found}
    rows = {row["row_id"]: row for row in file.read().to_pylist()}
    assert sorted(rows) == sorted(key(number) for number in (1, 2, 3, 4))
    assert [row["row_id"] for row in file.read().to_pylist()] == sorted(rows)
    assert rows[key(1)]["deleted_at"] == 0
    assert rows[key(2)]["deleted_at"] > 0
    assert {rows[key(2)][name] for name in INVOICE["attributes"]} == {None}
