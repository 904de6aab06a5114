"""Foreign tools that delete files, at their greediest, beside pinned readers and staged loads: nothing needed goes."""

from __future__ import annotations

import os
import threading

import pytest
from structlog.testing import capture_logs

from modak.catalog import pins
from modak.core import faults
from modak.core.errors import ModakError
from modak.lake.model import PUBLISHED_TAG, pin_tag
from modak.runtime.loads import adopt_all
from modak.runtime.maintaining import run
from modak.storage.uri import local_path
from modak.tables.maintenance.orphans import refuse_overlap
from modak.tables.maintenance.run import maintain
from tests.maintenance import foreign
from tests.maintenance.lake import Lake, did, original
from tests.tables import readers

COMPACT = (
    "CALL modak.system.rewrite_data_files(table => 'modak.modak.public.events', options => map('rewrite-all', 'true'))"
)


def shown(lake: Lake, metadata: str, snapshot: int | None = None) -> set[object]:
    return {tuple(row.values()) for row in readers.static_rows(metadata, snapshot)}


@pytest.mark.spark
def test_a_foreign_expiry_and_sweep_take_nothing_that_a_pinned_read_or_a_staged_load_needs(
    lake: Lake, warehouse: str
) -> None:
    pin = pins.begin(lake.site.dsn, lake.events.name)
    before = shown(lake, pin.metadata_location)
    lake.policy(rewrite_min_input_files=2)
    lake.correct(1, 2, 150)
    lake.add(3)
    lake.maintain()
    staged = lake.stage("l", 40, 140)
    assert not [path for path in staged if path.is_relative_to(local_path(lake.table.location) or "/nowhere")]
    lake.site.spark.sql(COMPACT).collect()
    foreign.grow_old(warehouse)
    foreign.expire_snapshots(lake.site)
    foreign.remove_orphan_files(lake.site)
    assert all(path.exists() for path in staged)
    assert shown(lake, pin.metadata_location) == before, "by the metadata file that the pin names"
    assert shown(lake, lake.table.metadata_location, pin.snapshot_id) == before, "by its snapshot in the present table"
    assert lake.rows() == original(1, 2, 150) | {
        (1, 1, "corrected"),
        (2, 2, "corrected"),
        (150, 150, "corrected"),
        (10_003, 3, "added"),
    }
    with lake.site.connect() as conn:
        assert pins.end(conn, pin.pin_id)


@pytest.mark.spark
def test_the_published_snapshot_survives_a_foreign_compaction_and_expiry_on_top_of_it(lake: Lake) -> None:
    lake.correct(1)
    published = lake.site.reader.state(lake.events.name).cutline
    assert lake.table.refs[PUBLISHED_TAG] == published.snapshot_id
    lake.site.spark.sql(COMPACT).collect()
    foreign.expire_snapshots(lake.site)
    assert published.snapshot_id in {each.id for each in lake.site.lake.snapshots(lake.table)}
    assert lake.rows() == original(1) | {(1, 1, "corrected")}
    assert shown(lake, published.metadata_location) == lake.rows()
    lake.policy(snapshot_retention_hours=0, snapshot_min_retained=1)
    lake.delete(2)
    lake.maintain()
    assert lake.table.refs[PUBLISHED_TAG] == lake.table.snapshot_id, "the tag follows S"
    assert lake.table.snapshot_count == 1


def test_tags_of_lapsed_pins_go_with_a_pass(lake: Lake) -> None:
    lake.policy(snapshot_retention_hours=0, snapshot_min_retained=1)
    pin = pins.begin(lake.site.dsn, lake.events.name)
    lake.correct(1)
    assert lake.table.tags == {pin_tag(pin.snapshot_id or 0): pin.snapshot_id}
    lake.events.sql("UPDATE modak.read_pins SET expires_at = clock_timestamp() - interval '1 second'")
    run(lake.site, lake.leader, lake.events.name, engine="embedded")
    run(lake.site, lake.leader, lake.events.name, engine="embedded")
    assert lake.table.tags == {}
    assert pin.snapshot_id not in {each.id for each in lake.site.lake.snapshots(lake.table)}
    assert lake.site.reader.unfinished_ops() == ()


def test_a_reader_who_pins_while_snapshots_are_about_to_expire_is_safe(lake: Lake) -> None:
    lake.policy(snapshot_retention_hours=0, snapshot_min_retained=1, rewrite_enabled=False)
    lake.correct(1)
    lake.correct(2)
    taken: list[pins.Pin] = []

    def pin(point: str) -> None:
        if point == "landing.prepared" and not taken:
            faults.watch(None)
            taken.append(pins.begin(lake.site.dsn, lake.events.name))

    faults.watch(pin)
    maintain(lake.site, lake.leader.epoch, lake.events.name, engine="embedded")
    faults.watch(None)
    (held,) = taken
    assert held.snapshot_id in {each.id for each in lake.site.lake.snapshots(lake.table)}
    assert len(shown(lake, held.metadata_location)) == 200


def test_metadata_under_a_pin_survives_passes_that_push_it_out_of_the_log(lake: Lake) -> None:
    java = lake.site.lake.java_table(lake.table.identifier)
    java.updateProperties().set("write.metadata.previous-versions-max", "2").commit()
    lake.correct(0)
    pin = pins.begin(lake.site.dsn, lake.events.name)
    for key in range(1, 6):
        lake.correct(key)
        lake.maintain()
    assert os.path.exists(local_path(pin.metadata_location) or "")
    assert len(shown(lake, pin.metadata_location)) == 200


def test_a_sweep_refuses_a_folder_that_overlaps_another_tables(lake: Lake) -> None:
    lake.policy(orphan_sweep_enabled=True)
    inside = f"{lake.table.location}/data/other/metadata/00000-x.metadata.json"
    lake.events.sql(
        f"INSERT INTO modak_iceberg.iceberg_tables VALUES ('modak', 'somebody', 'else', '{inside}', NULL, 'TABLE')"
    )
    report = maintain(lake.site, lake.leader.epoch, lake.events.name, engine="embedded")
    assert "maintenance.overlap" in (did(report, "orphans").error or "")
    lake.events.sql(
        "UPDATE modak_iceberg.iceberg_tables SET metadata_location = '/srv/metadata/0' WHERE table_name = 'else'"
    )
    refuse_overlap(lake.site, lake.site.reader.state(lake.events.name))
    above = (local_path(lake.table.location) or "").rsplit("/", 1)[0]
    lake.events.sql(
        f"UPDATE modak_iceberg.iceberg_tables SET metadata_location = '{above}/metadata/0' WHERE table_name = 'else'"
    )
    with pytest.raises(ModakError, match="overlaps"):
        refuse_overlap(lake.site, lake.site.reader.state(lake.events.name))


def test_a_sweep_leaves_the_files_of_an_operation_in_flight_alone(lake: Lake) -> None:
    lake.policy(orphan_sweep_enabled=True, rewrite_enabled=False)
    lake.delete(1)
    lake.correct(2)
    checked: list[int] = []

    def sweep(point: str) -> None:
        if point == "rewrite.after_tasks" and not checked:
            faults.watch(None)
            foreign.grow_old(local_path(lake.table.location) or "")
            lake.policy(orphan_sweep_enabled=True, delete_compaction_enabled=False, rewrite_enabled=False)
            other = threading.Thread(
                target=lambda: checked.append(
                    len(maintain(lake.site, lake.leader.epoch, lake.events.name, engine="embedded").failed)
                )
            )
            other.start()
            other.join()

    faults.watch(sweep)
    lake.maintain()
    faults.watch(None)
    assert checked == [0]
    assert lake.rows() == original(1, 2) | {(2, 2, "corrected")}


def test_a_pass_goes_over_staged_loads_and_files_of_failed_ones_go_even_when_maintenance_is_off(lake: Lake) -> None:
    lake.policy(rewrite_min_input_files=2, orphan_sweep_enabled=True)
    lake.correct(1, 2, 150)
    lake.add(3)
    failed, waits = lake.stage("failed", 40, 140), lake.stage("waits", 41, 141)
    lake.maintain()
    lake.events.sql("INSERT INTO modak.pauses (table_id) SELECT table_id FROM modak.tables")
    lake.events.sql(
        "UPDATE modak.load_labels SET state = 'failed', updated_at = clock_timestamp() WHERE label = 'failed'"
    )
    lake.policy(maintenance_enabled=False, orphan_grace_hours=1)
    lake.events.sql("UPDATE modak.load_stages SET created_at = created_at - interval '1 day'")
    adopt_all(lake.site, lake.leader)
    assert all(path.exists() for path in failed), "the grace begins with the failure"
    lake.events.sql("UPDATE modak.load_labels SET updated_at = updated_at - interval '2 hours'")
    with capture_logs() as logged:
        lake.maintain()
        adopt_all(lake.site, lake.leader)
    assert not [event for event in logged if event["log_level"] in ("warning", "error")]
    assert not [path for path in failed if path.exists()]
    assert all(path.exists() for path in waits)
    lake.events.sql("DELETE FROM modak.pauses")
    assert adopt_all(lake.site, lake.leader) == 1
    assert lake.rows() >= {(10_041, 41, "loaded"), (10_141, 141, "loaded"), (10_003, 3, "added")}
