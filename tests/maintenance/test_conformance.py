"""One suite for both engines: whoever executes the plan, the lake looks the same afterwards."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from modak.catalog import pins
from modak.catalog.journal import Journal
from modak.core import faults
from modak.core.ids import new_op_id
from modak.lake.iceberg.rewrite import ROW_ID, SEQUENCE
from modak.lake.iceberg.scan import scan_file
from modak.storage.uri import local_path
from modak.tables.maintenance.run import MaintenanceReport
from tests.maintenance import foreign
from tests.maintenance.lake import Lake, did, meanwhile, original
from tests.tables import readers

IN_THE_GATE = (
    "test_debt_is_removed_and_rows_stay_deleted_for_every_reader",
    "test_expiry_keeps_what_the_policy_says_and_deletes_the_rest",
    "test_an_orphan_goes_and_everything_that_is_needed_stays",
    "test_foreign_equality_deletes_are_applied_and_dropped",
    "test_a_sweep_spares_what_others_begin_and_land_beside_its_listing",
    "test_a_sweep_finds_more_than_it_deletes_at_a_time",
    "test_an_expiry_frees_more_than_it_deletes_at_a_time",
)
"""What Spark does by other means than the driver; the rest of the suite it passes in the full run."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test for every engine."""
    if "engine" in metafunc.fixturenames:
        marks = [pytest.mark.spark, *([] if metafunc.function.__name__ in IN_THE_GATE else [pytest.mark.full])]
        metafunc.parametrize("engine", ["embedded", pytest.param("spark", marks=marks)])


@pytest.fixture
def worn(lake: Lake, engine: str) -> Lake:
    lake.engine = engine
    return lake


def test_six_small_files_in_two_bands_become_two(worn: Lake) -> None:
    worn.policy(rewrite_min_input_files=4)
    worn.add(1, 101)
    worn.add(2, 102)
    assert len(worn.files()) == 6
    before, snapshots = worn.rows(), worn.table.snapshot_count
    read = sum(file.file.bytes for file in worn.files())
    report = worn.maintain()
    assert did(report, "pack").counters["files_before"] == 6
    assert did(report, "pack").counters["files_after"] == 2
    assert len(worn.files()) == 2
    assert worn.table.snapshot_count == snapshots + 1, "both bands in one commit"
    journaled = _journaled(worn, report)["pack"]
    assert journaled["bytes_before"] == read
    assert journaled["bytes_after"] == sum(file.file.bytes for file in worn.files())
    assert journaled["seconds"] > 0
    assert worn.rows() == before
    assert Counter(file.lower // 100 for file in worn.files() if file.lower is not None) == {0: 1, 1: 1}
    assert did(worn.maintain(), "pack").skipped, "what is packed is not packed again"


def test_the_steps_of_a_pass_run_in_their_order(worn: Lake) -> None:
    worn.policy(
        rewrite_min_input_files=2,
        manifest_rewrite_min_manifests=2,
        snapshot_retention_hours=0,
        snapshot_min_retained=1,
        orphan_sweep_enabled=True,
    )
    worn.add(1, 101)
    worn.add(2, 102)
    worn.delete(3)
    stranded = Path(local_path(worn.table.location) or "", "data", "stranded.parquet")
    stranded.write_bytes(b"rows of a crash")
    os.utime(stranded, (1, 1))
    report = worn.maintain()
    assert [one.name for one in report.passes if one.changed] == ["debt", "pack", "manifests", "expiry", "orphans"]
    assert list(_journaled(worn, report))
    assert all("seconds" in what for what in _journaled(worn, report).values())
    kinds = worn.events.sql(
        "SELECT kind FROM modak.op_log WHERE kind ~ '^(rewrite|expire|orphans)' ORDER BY started_at, op_id"
    )
    assert kinds == [("rewrite-debt",), ("rewrite-pack",), ("rewrite-manifests",), ("expire",), ("orphans",)]


def test_debt_is_removed_and_rows_stay_deleted_for_every_reader(worn: Lake) -> None:
    worn.policy(rewrite_enabled=False)
    worn.delete(3, 103)
    worn.correct(5, 150)
    before = worn.rows()
    assert sum(file.deletes for file in worn.files()) == 2
    counters = did(worn.maintain(), "debt").counters
    assert (counters["deletes_before"], counters["deletes_after"]) == (2, 0)
    assert counters["rows_before"] - counters["rows_after"] == 4
    assert not [file for file in worn.files() if file.deletes]
    assert worn.rows() == before == original(3, 103, 5, 150) | {(5, 5, "corrected"), (150, 150, "corrected")}
    shown = {tuple(row.values()) for row in readers.by_pyiceberg(worn.site, worn.events.name)}
    assert shown == before == {tuple(row.values()) for row in readers.by_duckdb(worn.site, worn.events.name)}


def test_a_rewrite_keeps_the_ids_and_last_changes_of_rows(worn: Lake) -> None:
    worn.policy(rewrite_min_input_files=2)
    worn.correct(7)
    worn.add(1)
    lineage = _lineage(worn)
    worn.maintain()
    assert len(worn.files()) == 2
    assert _lineage(worn) == lineage
    worn.delete(8)
    worn.maintain()
    del lineage[8]
    assert _lineage(worn) == lineage, "ids that a file carries itself are kept too"


def test_small_files_under_deletes_are_left_to_the_debt_pass(worn: Lake) -> None:
    worn.policy(rewrite_min_input_files=2, delete_compaction_enabled=False)
    worn.add(1)
    worn.add(2)
    worn.delete(10)
    worn.maintain()
    assert sorted((file.file.rows, file.deletes) for file in worn.files()) == [(2, 0), (100, 0), (100, 1)]
    worn.policy(rewrite_min_input_files=2)
    assert did(worn.maintain(), "debt").changed
    assert sorted((file.file.rows, file.deletes) for file in worn.files()) == [(100, 0), (101, 0)]


def test_foreign_equality_deletes_are_applied_and_dropped(worn: Lake) -> None:
    worn.policy(rewrite_enabled=False)
    foreign.equality_delete(worn, [[3, 4], [5]])
    worn.add(6, body="later than the deletes")
    foreign.equality_delete(worn, [[120]], band=100)
    foreign.equality_delete(worn, [[10_006_000]])
    before = original(3, 4, 5, 120) | {(10_006, 6, "later than the deletes")}
    assert _equality(worn) == 4
    counters = did(worn.maintain(), "debt").counters
    assert counters["delete_files_dropped"] == 4
    assert _equality(worn) == 0
    assert worn.rows() == before
    assert {tuple(row.values()) for row in readers.by_pyiceberg(worn.site, worn.events.name)} == before
    assert did(worn.maintain(), "debt").skipped


def test_equality_deletes_that_hit_nothing_are_dropped_without_a_rewrite(worn: Lake) -> None:
    foreign.equality_delete(worn, [[-77]])
    if not worn.files()[0].foreign_deletes:
        files = {file.file.path for file in worn.files()}
        worn.maintain()
        assert {file.file.path for file in worn.files()} == files
    else:
        worn.maintain()
    assert _equality(worn) == 0
    assert worn.rows() == original()


def test_manifests_are_folded_and_the_new_state_is_published(worn: Lake) -> None:
    worn.policy(manifest_rewrite_min_manifests=4, rewrite_enabled=False)
    for key in range(4):
        worn.add(key, 100 + key)
    before = worn.rows()
    counters = did(worn.maintain(), "manifests").counters
    assert counters["manifests_before"] >= 4
    assert counters["manifests_after"] == 1
    table = worn.table
    assert table.snapshot_id is not None
    assert len(worn.site.lake.manifests(table.identifier, table.snapshot_id)[0]) == 1
    assert worn.site.reader.state(worn.events.name).cutline.snapshot_id == table.snapshot_id
    assert worn.rows() == before


def test_a_partition_that_came_after_they_were_listed_is_in_nobodys_way(
    worn: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    worn.policy(manifest_rewrite_min_manifests=4, rewrite_enabled=False)
    for key in range(4):
        worn.add(key, 100 + key)
    before = worn.rows()
    listed = worn.site.lake.partitions
    monkeypatch.setattr(type(worn.site.lake), "partitions", lambda _, *where: sorted(listed(*where))[:1])
    assert did(worn.maintain(), "manifests").counters["manifests_after"] == 2
    assert worn.rows() == before


def test_expiry_keeps_what_the_policy_says_and_deletes_the_rest(worn: Lake) -> None:
    worn.policy(snapshot_retention_hours=0, snapshot_min_retained=2, rewrite_enabled=False)
    for key in range(5):
        worn.correct(key)
    counters = did(worn.maintain(), "expiry").counters
    assert worn.table.snapshot_count == 2
    assert counters["snapshots"] == 5
    assert counters["files_deleted"] > 0
    assert len(worn.rows()) == 200
    _nothing_superfluous(worn)


def test_a_pinned_snapshot_and_everything_since_stays(worn: Lake) -> None:
    worn.policy(snapshot_retention_hours=0, snapshot_min_retained=1)
    worn.correct(1)
    pin = pins.begin(worn.site.dsn, worn.events.name)
    worn.correct(2)
    worn.delete(3)
    before = {tuple(row.values()) for row in readers.static_rows(pin.metadata_location)}
    worn.maintain()
    kept = {each.id for each in worn.site.lake.snapshots(worn.table)}
    assert pin.snapshot_id in kept
    assert len(kept) == 4, "the pinned one, two corrections and the rewrite"
    for read in (readers.static_rows, readers.duckdb_rows):
        assert {tuple(row.values()) for row in read(pin.metadata_location)} == before
    with worn.site.connect() as conn:
        assert pins.end(conn, pin.pin_id)
    worn.maintain()
    assert worn.table.snapshot_count == 1
    assert worn.table.tags == {}
    _nothing_superfluous(worn)


def test_an_orphan_goes_and_everything_that_is_needed_stays(worn: Lake) -> None:
    worn.policy(orphan_sweep_enabled=True)
    data = Path(local_path(worn.table.location) or "", "data")
    (data / "stranded").mkdir()
    orphans = [data / "stranded" / name for name in ("a.parquet", "b.parquet")]
    for path in orphans:
        path.write_bytes(b"rows of a crash")
    staged, keys = data / "staged-by-mistake.parquet", data / "keys-by-mistake.arrow"
    for path, place in zip((staged, keys), ("{data,0,path}", "{keys,uri}"), strict=True):
        path.write_bytes(b"a load")
        label = f"by mistake {path.suffix}"
        worn.stage(label, 40)
        worn.events.sql(
            f"UPDATE modak.load_labels SET files = jsonb_set(files, '{place}', to_jsonb('{path.as_uri()}'::text))"
            f" WHERE label = '{label}'"
        )
    assert did(worn.maintain(), "orphans").skipped == "nothing was found", "too young"
    foreign.grow_old(str(data))
    young = data / "stranded" / "young.parquet"
    young.write_bytes(b"being written")
    counters = did(worn.maintain(), "orphans").counters
    assert counters["files_deleted"] == 2
    assert not any(path.exists() for path in orphans)
    assert staged.exists()
    assert keys.exists()
    assert young.exists()
    assert worn.rows() == original()


@pytest.mark.parametrize("moment", ["orphans.before_listing", "orphans.after_listing"])
def test_a_sweep_spares_what_others_begin_and_land_beside_its_listing(worn: Lake, moment: str) -> None:
    worn.policy(orphan_sweep_enabled=True, rewrite_enabled=False)
    site, data = worn.site, Path(local_path(worn.table.location) or "", "data")
    writer, op_id = site.writer(worn.leader.epoch), new_op_id(site.clock)
    linked = data / f"op-{op_id}" / "stage" / "part.parquet"
    # What the table has is old enough to be listed.
    foreign.grow_old(str(data))

    def others() -> None:
        worn.add(5)
        Journal(writer).begin(op_id, site.reader.state(worn.events.name).table.table_id, "adopt", {}, [])
        linked.parent.mkdir(parents=True)
        linked.write_bytes(b"rows of a load")
        foreign.grow_old(str(data))

    acted = meanwhile(moment, others)
    assert did(worn.maintain(), "orphans").skipped == "nothing was found"
    faults.watch(None)
    assert acted
    assert linked.exists()
    assert worn.rows() == original() | {(10_005, 5, "added")}


def test_a_sweep_finds_more_than_it_deletes_at_a_time(worn: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    worn.policy(orphan_sweep_enabled=True)
    for module, name in (("comparing", "AT_ONCE"), ("engine", "LISTED_AT_ONCE"), ("orphans", "BATCH")):
        monkeypatch.setattr(f"modak.tables.maintenance.{module}.{name}", 7)
    data = Path(local_path(worn.table.location) or "", "data")
    for folder in ("stranded", "ts_trunc=100"):
        (data / folder).mkdir()
        for number in range(20):
            (data / folder / f"{number}.parquet").write_bytes(b"left")
    foreign.grow_old(str(data))
    counters = did(worn.maintain(), "orphans").counters
    assert (counters["files_deleted"], counters["bytes_deleted"]) == (40, 160)
    sizes = worn.events.sql("SELECT (counters->>'files_deleted')::int FROM modak.op_log WHERE kind = 'orphans'")
    assert max(size for (size,) in sizes) <= 7
    assert sum(size for (size,) in sizes) == 40
    _nothing_superfluous(worn)
    assert worn.rows() == original()


def test_an_expiry_frees_more_than_it_deletes_at_a_time(worn: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    worn.policy(snapshot_retention_hours=0, snapshot_min_retained=1, rewrite_min_input_files=2)
    for module in ("maintenance.comparing.AT_ONCE", "maintenance.freeing.BATCH"):
        monkeypatch.setattr(f"modak.tables.{module}", 2)
    monkeypatch.setattr("modak.lake.iceberg.reaching.AT_ONCE", 3)
    for key in range(4):
        worn.correct(key, 100 + key)
    deleted: list[int] = []
    watched = type(worn.site.store).delete
    monkeypatch.setattr(
        type(worn.site.store), "delete", lambda self, uris: deleted.append(len(uris)) or watched(self, uris)
    )
    before = worn.rows()
    counters = did(worn.maintain(), "expiry").counters
    assert counters["files_deleted"] == sum(deleted[-1:]) + sum(size for size in deleted[:-1] if size <= 2)
    assert sum(size == 2 for size in deleted) > 3
    assert worn.rows() == before
    _nothing_superfluous(worn)


@pytest.mark.parametrize("key", ["rewrite_sort_columns", "rewrite_zorder_columns"])
def test_rewritten_files_are_sorted_as_the_policy_says(worn: Lake, key: str) -> None:
    worn.policy(rewrite_min_input_files=2, **{key: "body,ts" if key == "rewrite_sort_columns" else "body"})
    worn.add(1, body="zz")
    worn.add(2, body="aa")
    before, lineage = worn.rows(), _lineage(worn)
    worn.maintain()
    assert worn.rows() == before
    assert _lineage(worn) == lineage
    (band,) = [file for file in worn.files() if (file.upper or 0) < 100]
    columns = [column for column in worn.table.schema if column.name == "body"]
    bodies = [body for batch in scan_file(band.file.path, columns) for body in batch.column(0).to_pylist()]
    heads = bodies if key == "rewrite_sort_columns" else [body[:1] for body in bodies]
    assert heads == sorted(heads)


def test_more_than_one_commit_may_hold_follows_in_further_ones(worn: Lake) -> None:
    worn.policy(rewrite_min_input_files=2, rewrite_max_input_files=3)
    for key in range(6):
        worn.add(key)
    before, snapshots = worn.rows(), worn.table.snapshot_count
    worn.maintain()
    assert worn.rows() == before
    assert len(worn.files()) < 8
    assert worn.table.snapshot_count > snapshots + 1


def _journaled(lake: Lake, report: MaintenanceReport) -> Any:
    op = lake.site.reader.op(report.op_id)  # type: ignore[arg-type]
    assert op is not None
    return op.counters


def _lineage(lake: Lake) -> dict[int, tuple[int, int]]:
    """Row → (row id, last change), read off the files as an Iceberg reader does it."""
    import json

    found: dict[int, tuple[int, int]] = {}
    columns = [*(column for column in lake.table.schema if column.name == "id"), ROW_ID, SEQUENCE]
    for each in lake.files():
        first = json.loads(each.file.json)["first-row-id"]
        from modak.lake.iceberg.rewrite import deleted_in

        batches: Any = scan_file(each.file.path, columns, deleted=deleted_in(each.vectors), with_positions=True)
        for batch in batches:
            for key, own, changed, place in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                found[key] = (first + place if own is None else own, changed or each.sequence_number or 0)
    return found


def _equality(lake: Lake) -> int:
    table = lake.table
    assert table.snapshot_id is not None
    return len(list(lake.site.lake.equality_deletes(table.identifier, table.snapshot_id)))


def _nothing_superfluous(lake: Lake) -> None:
    """Every data file below the table's folder is reached by a snapshot."""
    there = {entry.uri for entry in lake.site.store.list(f"{lake.table.location}/data")}
    assert there == set(lake.site.lake.reachable(lake.table.identifier))
