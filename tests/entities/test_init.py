"""Init: everything that Postgres has becomes a base, at once or not at all."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import psycopg
import pytest

from modak.core import faults
from modak.core.errors import Conflict, Refused
from modak.core.faults import Fault, InjectedFault
from modak.entities.config import CDCConfig
from modak.entities.flushing import flush
from modak.entities.health import status
from modak.entities.initial import init
from modak.entities.lock import schema_lock
from modak.entities.plan import KeyRange, init_lanes
from modak.entities.rows import Dirty, Lanes, Live, Source, rows_of
from modak.entities.snapshot import holding
from modak.entities.store import Crew
from modak.entities.tables import check
from modak.entities.verifying import verify
from tests.entities.test_flush import at
from tests.entities.world import SCHEMA, World, changed, key, registry


def test_rows_become_base_files_of_a_batch_each_and_again_as_many(either: World) -> None:
    world = either
    world.configure(target_file_size_mb=0, batch_size=7)
    world.many(0, 20)
    world.bury(19)
    before = world.read()
    report = init(world.store, SCHEMA)
    assert (report.rows, report.files, report.marked) == (19, 3, 20)
    assert [entry.row_count for entry in world.manifest.base] == [7, 7, 5]
    assert world.dirty() == 0
    seen = world.read()
    assert set(seen) == set(before) == {key(number) for number in range(19)}
    assert seen[key(3)]["title"] == "row 3"
    first = world.manifest.paths
    assert init(world.store, SCHEMA).files == 3
    assert not first & world.manifest.paths
    assert {each.path for each in world.manifest.removed} == first
    assert world.read() == seen
    for entry in world.manifest.base:
        assert entry.path.startswith(f"entities/base/{SCHEMA}/{entry.min_row_id}_{entry.max_row_id}_")
    world.check_objects()


def test_an_empty_schema_has_one_base_file_without_rows(world: World) -> None:
    report = init(world.store, SCHEMA)
    assert (report.rows, report.files) == (0, 1)
    assert world.read() == {}
    world.check_objects()


def test_files_roll_by_the_bytes_that_are_in_them(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.sql(
        "INSERT INTO entity_main (ltbase_schema_id, ltbase_row_id, text_01, ltbase_created_at, ltbase_updated_at)"
        " SELECT 7, gen_random_uuid(), string_agg(md5(i::text || j::text), ''), 1, 1"
        " FROM generate_series(1, 3000) i, generate_series(1, 30) j GROUP BY i"
    )
    monkeypatch.setattr("modak.entities.files.GROUP_ROWS", 500)
    world.configure(target_file_size_mb=1)
    report = init(world.store, SCHEMA)
    assert report.files == 2
    low, high = sorted(world.manifest.base, key=lambda entry: entry.min_row_id)
    assert low.max_row_id < high.min_row_id
    assert low.size_bytes < 1.5 * 2**20


def test_existing_deltas_are_replaced_only_when_asked_for(world: World) -> None:
    world.many(0, 3)
    flush(world.store)
    with pytest.raises(Refused, match="1 delta files"):
        init(world.store, SCHEMA)
    assert world.manifest.base == ()
    init(world.store, SCHEMA, replace_delta=True)
    assert (len(world.manifest.base), world.manifest.delta) == (1, ())
    assert len(world.read()) == 3


def test_a_lock_that_is_held_is_an_error(world: World) -> None:
    with schema_lock(world.store.address, SCHEMA, "change_log"), pytest.raises(Conflict, match="Somebody else"):
        init(world.store, SCHEMA)


@pytest.mark.parametrize("moment", ["before_export", "after_export", "published"])
def test_what_changes_in_the_middle_of_an_init_is_seen_and_stays_dirty(world: World, moment: str) -> None:
    world.many(0, 9)

    def change() -> None:
        world.delete(0)
        world.put(1, title="changed")
        world.put(100, title="new")

    at(f"init.{moment}", change)
    init(world.store, SCHEMA)
    faults.watch(None)
    assert world.dirty() == 3
    expected = {number: f"row {number}" for number in range(2, 9)} | {1: "changed", 100: "new"}
    assert world.titles() == expected
    flush(world.store)
    assert world.dirty() == 0
    assert world.titles() == expected


def test_a_change_of_a_subtransaction_that_is_committed_in_the_middle_of_an_init_stays_dirty(world: World) -> None:
    """The number of a subtransaction is not in the text of a snapshot, so it looks as if it had ended."""
    world.many(0, 3)
    world.put(5, qty=70_000)
    world.put(6, qty=70_000)
    with psycopg.connect(world.dsn.conninfo()) as writer:
        writer.execute("SELECT pg_current_xact_id()")
        with writer.transaction():
            writer.execute("UPDATE entity_main SET text_01 = 'late' WHERE ltbase_row_id = %s", (key(1),))
            writer.execute("UPDATE eav_data SET value_numeric = 7 WHERE row_id = %s", (key(5),))
        world.put(2, title="other")
        at("init.before_export", writer.commit)
        report = init(world.store, SCHEMA)
        faults.watch(None)
    assert (report.marked, len(report.unfit), world.dirty()) == (2, 2, 3)
    assert world.titles() == {0: "row 0", 1: "late", 2: "other", 5: None, 6: None}
    assert flush(world.store)[0].marked == 2
    assert world.dirty() == 1
    seen = world.read()
    assert (seen[key(1)]["title"], seen[key(5)]["qty"], seen[key(6)]["qty"]) == ("late", 7, None)


def test_dirty_rows_are_marked_in_pages_and_those_that_do_not_fit_are_left_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modak.entities.changelog.PAGE_ROWS", 2)
    world.many(0, 7)
    world.put(7, qty=70_000)
    world.put(8, qty=70_000)
    # As if it had been there before the log.
    world.sql("DELETE FROM change_log WHERE row_id = %s", (key(8),))
    report = init(world.store, SCHEMA)
    assert (report.rows, report.marked, len(report.unfit), world.dirty()) == (7, 7, 2, 2)
    assert flush(world.store)[0].rows == 0
    assert len(world.read()) == 9
    (row,) = status(world.store)
    assert row.quarantined == 2


def test_an_interrupted_init_leaves_nothing_visible(world: World) -> None:
    world.many(0, 9)
    faults.arm(Fault("init.before_publish"))
    with pytest.raises(InjectedFault):
        init(world.store, SCHEMA)
    faults.arm(None)
    assert (world.manifest.version, world.dirty()) == (0, 9)
    init(world.store, SCHEMA)
    assert len(world.read()) == 9


def test_rows_that_do_not_fit_are_left_to_postgres(world: World) -> None:
    world.many(0, 3)
    world.put(5, title="odd", qty=70_000)
    flush(world.store)
    report = init(world.store, SCHEMA, replace_delta=True)
    assert (report.rows, len(report.unfit), world.dirty()) == (3, 1, 1)
    assert world.titles()[5] == "odd"


def test_more_attributes_than_memory_may_hold_are_pivoted_in_halves(world: World) -> None:
    world.many(0, 40)
    world.put(41, title="heavy", tags=["x" * 100] * 50)
    with world.connect() as conn:
        installed = check(conn, world.store.tables)
    with holding(world.store, installed) as snapshot:
        source = Source(world.store.address, snapshot.id, world.store.tables, world.schema)
        (whole,) = rows_of(source, Live(KeyRange()))
        parts = list(rows_of(source, Live(KeyRange()), limit=2_000))
    assert len(parts) > 3
    assert [row for part in parts for row in part.table.to_pylist()] == whole.table.to_pylist()


def spread_over_pages(world: World) -> int:
    """Entities and attributes on several pages of their tables, not in the same order; how many entities."""
    world.sql(
        "INSERT INTO entity_main (ltbase_schema_id, ltbase_row_id, text_01, ltbase_created_at, ltbase_updated_at)"
        " SELECT 7, md5(i::text)::uuid, 'row ' || i, 1, i FROM generate_series(1, 500) i"
    )
    world.sql(
        "INSERT INTO eav_data SELECT 7, md5(i::text)::uuid, 4, '', NULL, mod(i, 100) FROM generate_series(1, 500, 2) i"
    )
    world.sql(
        "INSERT INTO eav_data SELECT 7, md5(i::text)::uuid, 5, n::text, 'tag ' || n, NULL"
        " FROM generate_series(500, 1, -1) i, generate_series(0, mod(i, 3)) n"
    )
    return 500


@pytest.mark.parametrize("pages", [0, 2, 5, 4_000])
def test_tables_read_in_lanes_give_the_same_rows(world: World, pages: int) -> None:
    spread_over_pages(world)
    with world.connect() as conn:
        installed = check(conn, world.store.tables)
    with holding(world.store, installed) as snapshot:
        source = Source(world.store.address, snapshot.id, world.store.tables, world.schema)
        (whole,) = rows_of(source, Live(KeyRange()))
        (lanes,) = rows_of(replace(source, lanes=Lanes(3, pages, pages)), Live(KeyRange()))
        halves = list(rows_of(replace(source, lanes=Lanes(3, pages, pages)), Live(KeyRange()), limit=4_000))
    assert lanes.table.to_pylist() == whole.table.to_pylist()
    assert len(halves) > 1
    assert [row for part in halves for row in part.table.to_pylist()] == whole.table.to_pylist()


def test_an_init_of_one_task_writes_a_file_for_each_lane(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    count = spread_over_pages(world)
    monkeypatch.setattr("modak.entities.initial.init_lanes", lambda *_: 3)
    monkeypatch.setattr(Crew, "threads", 3)
    world.crew = Crew(driver_rows=0)
    report = init(world.store, SCHEMA)
    assert (report.rows, report.files) == (count, 3)
    entries = sorted(world.manifest.base, key=lambda entry: entry.min_row_id)
    assert all(before.max_row_id < after.min_row_id for before, after in pairwise(entries))
    assert len(world.read()) == count
    assert verify(world.store, SCHEMA).sound
    # Where one lane fails, no file of the others stays.
    left = set(world.paths())
    faults.arm(Fault("entities.uploaded", after=1))
    with pytest.raises(InjectedFault):
        init(world.store, SCHEMA, replace_delta=True)
    faults.arm(None)
    assert set(world.paths()) == left


def test_when_one_task_reads_alone() -> None:
    config = CDCConfig()
    assert init_lanes(config, 1_000_000, 2) == 2
    assert init_lanes(config, 1_100_000, 2) == 1
    assert init_lanes(config, 30_000, 2) == 1
    assert init_lanes(replace(config, target_file_size_mb=0), 1_000_000, 2) == 1


def test_a_rebound_attribute_needs_an_init(world: World) -> None:
    world.put(1, title="t", qty=5)
    flush(world.store)
    world.registry = registry(changed(qty={"id": 4, "type": "smallint", "column": "smallint_01"}))
    world.sql("UPDATE entity_main SET smallint_01 = 6")
    (report,) = flush(world.store)
    assert report.error is not None
    assert report.error.code == "entities.rebound"
    init(world.store, SCHEMA, replace_delta=True)
    assert world.read()[key(1)]["qty"] == 6


def test_ranges_from_a_sample_hold_every_row_whatever_it_shows(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modak.entities.initial.SAMPLE_ROWS", 3)
    # Five rows are as many as a task may take.
    world.configure(estimated_row_bytes=100 << 20)
    world.many(0, 40)
    assert init(world.store, SCHEMA).rows == 40
    assert len(world.read()) == 40
    world.sql(
        "INSERT INTO entity_main (ltbase_schema_id, ltbase_row_id, ltbase_created_at, ltbase_updated_at)"
        " SELECT 7, gen_random_uuid(), 1, 1 FROM generate_series(1, 20000)"
    )
    # Some twenty pages of the sample, of which surely one holds rows, and four tasks.
    monkeypatch.setattr("modak.entities.initial.SAMPLE_ROWS", 1_500)
    world.configure(estimated_row_bytes=100 << 10)
    assert init(world.store, SCHEMA).files > 1
    assert len(world.read()) == 20_040


def test_rows_with_more_text_than_memory_may_hold_come_in_halves_too(world: World) -> None:
    world.sql(
        "INSERT INTO entity_main (ltbase_schema_id, ltbase_row_id, text_01, ltbase_created_at, ltbase_updated_at)"
        " SELECT 7, gen_random_uuid(), repeat('x', 1000), 1, 1 FROM generate_series(1, 100)"
    )
    with world.connect() as conn:
        installed = check(conn, world.store.tables)
    with holding(world.store, installed) as snapshot:
        source = Source(world.store.address, snapshot.id, world.store.tables, world.schema)
        for keys in (Live(KeyRange()), Dirty(KeyRange())):
            parts = list(rows_of(source, keys, limit=20_000))
            assert len(parts) > 3
            assert sum(part.table.num_rows for part in parts) == 100


def test_a_row_that_is_mended_in_the_middle_of_an_init_is_not_put_aside(world: World) -> None:
    world.put(1, qty=70_000)
    world.put(2, qty=70_000)
    at("init.before_quarantine", lambda: world.put(1, title="mended", qty=7))
    report = init(world.store, SCHEMA)
    faults.watch(None)
    assert (len(report.unfit), world.dirty()) == (2, 2)
    assert flush(world.store)[0].marked == 1
    assert world.dirty() == 1
    assert world.read()[key(1)]["qty"] == 7
