"""Verify finds whatever differs between heap and lake, names it, and is silent about the rest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from modak.core import faults
from modak.core.names import TableName
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.fold.run import fold
from modak.tables.foreign import accept
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.site import Site
from modak.tables.verify.report import VerifyReport
from modak.tables.verify.run import Limits, verify
from tests.tables.conftest import settings_for
from tests.tables.events import Events
from tests.tables.test_seam import TRADES

pytestmark = pytest.mark.spark

LAKE = "modak.modak.public.events"


@pytest.fixture
def site(fresh_database: Dsn, warehouse: str, spark_home: Path, spark: object) -> Iterator[Site]:
    """Tiered partitions stay in the heap, so that both sides have their rows."""
    settings = settings_for(fresh_database, warehouse, spark_home, MODAK_RECLAIM_LAG=str(2**62))
    with open_site(settings) as opened:
        _ = opened.spark
        yield opened


@pytest.fixture
def both(events: Events, leader: Leader) -> Events:
    """Rows 0 to 199 in heap and lake, the rest only in the heap."""
    events.register()
    events.tier(leader)
    return events


def changed_by_hand(events: Events, *statements: str) -> None:
    """Somebody changes the lake with Spark, and an operator accepts it."""
    for statement in statements:
        events.site.spark.sql(statement)
    accept(events.site, events.name)


def told(report: VerifyReport) -> set[tuple[str, str, str | None, str | None, str | None]]:
    return {(d.kind, d.key, d.column, d.heap, d.lake) for d in report.differences}


def test_equal_sides_are_found_equal_and_counted_per_band(both: Events) -> None:
    report = verify(both.site, both.name)
    assert report.sound, report
    assert [(b.lower, b.upper, b.heap_rows, b.lake_rows, b.delta_rows) for b in report.bands if b.partition] == [
        ("0", "100", 100, 100, 0),
        ("100", "200", 100, 100, 0),
    ]
    assert report.compared_rows == 200
    assert both.site.reader.state(both.name).pins == ()


def test_corrections_that_wait_in_the_delta_are_laid_over_the_lake(both: Events) -> None:
    both.sql("UPDATE public.events SET body = 'corrected' WHERE id = 7")
    both.sql("DELETE FROM public.events WHERE id = 8")
    both.sql("INSERT INTO public.events VALUES (1000, 9, NULL)")
    both.sql("UPDATE public.events SET ts = 150 WHERE id = 10")
    report = verify(both.site, both.name)
    assert report.sound, report
    assert sum(band.delta_rows for band in report.bands) == 5


def test_columns_whose_names_are_used_again_are_compared_by_the_age_of_a_correction(
    events: Events, leader: Leader
) -> None:
    events.sql("ALTER TABLE public.events ADD COLUMN a text, ADD COLUMN b text, ADD COLUMN gone text")
    events.register()
    events.tier(leader)
    events.sql("UPDATE public.events SET body = 'before', a = 'a', b = 'b', gone = 'old' WHERE id = 1")
    for trade in TRADES:
        events.sql(f"ALTER TABLE public.events {trade}")
    events.sql("UPDATE public.events SET text = 'after', a = 'A', b = 'B', body = 'new', gone = 'new' WHERE id = 2")
    report = verify(events.site, events.name)
    assert report.sound, report
    assert report.compared_rows == 200
    fold(events.site, leader.epoch, events.name)
    report = verify(events.site, events.name)
    assert report.sound, report


def test_a_column_that_is_younger_than_a_correction_is_compared_by_what_its_default_shows(
    events: Events, leader: Leader
) -> None:
    register(events.site, RegisterRequest(events.name, ("id",), "ts", keep_heap=True))
    events.tier(leader)
    events.sql("UPDATE public.events SET body = 'before' WHERE id = 7")
    events.sql("ALTER TABLE public.events ADD COLUMN tags text[] NOT NULL DEFAULT '{a}'")
    events.sql("UPDATE public.events SET tags = '{b}' WHERE id = 8")
    events.add_partition(300)
    events.sql("INSERT INTO public.events VALUES (350, 350, 'new')")
    assert events.tier(leader).moved_partitions == ("events_200",)
    report = verify(events.site, events.name)
    assert report.sound, report
    assert report.left_out == ()
    # Now the same column has another name in the image that has it, too.
    events.sql("ALTER TABLE public.events RENAME COLUMN tags TO labels")
    report = verify(events.site, events.name)
    assert report.sound, report
    assert fold(events.site, leader.epoch, events.name).rows == 2
    report = verify(events.site, events.name)
    assert report.sound, report


def test_each_kind_of_damage_is_found_and_named(both: Events) -> None:
    changed_by_hand(
        both,
        f"UPDATE {LAKE} SET body = 'forged' WHERE id = 3",
        f"DELETE FROM {LAKE} WHERE id = 40",
        f"INSERT INTO {LAKE} VALUES (7777, 50, 'from nowhere')",
        f"INSERT INTO {LAKE} VALUES (120, 120, 'row 120')",
        f"UPDATE {LAKE} SET body = NULL WHERE id = 130",
    )
    report = verify(both.site, both.name)
    assert told(report) == {
        ("changed", "3", "body", "row 3", "forged"),
        ("missing", "40", None, None, None),
        ("extra", "7777", None, None, None),
        ("duplicated", "120", None, None, None),
        ("changed", "130", "body", "row 130", None),
    }
    assert (report.differing_rows, report.at_least, report.sound) == (5, False, False)
    assert report.findings == ()
    assert {band.lower for band in report.bands if band.differing} == {"0", "100"}


@pytest.mark.full
def test_values_swapped_between_rows_do_not_cancel(both: Events) -> None:
    changed_by_hand(both, f"UPDATE {LAKE} SET body = CASE id WHEN 5 THEN 'row 6' ELSE 'row 5' END WHERE id IN (5, 6)")
    report = verify(both.site, both.name)
    assert told(report) == {
        ("changed", "5", "body", "row 5", "row 6"),
        ("changed", "6", "body", "row 6", "row 5"),
    }


@pytest.mark.full
def test_a_heap_row_changed_without_the_trigger_is_found(both: Events) -> None:
    both.sql("SET session_replication_role = replica; UPDATE public.events_0 SET body = 'unseen' WHERE id = 1")
    both.sql(
        'ALTER TABLE public.events_0 DISABLE TRIGGER "!modak_capture";'
        " UPDATE public.events_0 SET body = 'unseen' WHERE id = 2"
    )
    assert told(verify(both.site, both.name)) == {("changed", "2", "body", "unseen", "row 2")}


def test_rows_beyond_the_cut_line_are_named(both: Events) -> None:
    changed_by_hand(both, f"INSERT INTO {LAKE} VALUES (500, 250, 'hot')")
    report = verify(both.site, both.name)
    (finding,) = report.findings
    assert finding.code == "lake.outside"
    assert "1 lake rows lie outside [–, 200), at tier keys 250" in finding.message
    assert not report.differing_rows


def test_where_the_heap_is_gone_a_duplicated_key_is_still_found(both: Events, leader: Leader) -> None:
    changed_by_hand(both, f"INSERT INTO {LAKE} VALUES (120, 120, 'another'), (121, 120, 'other key')")
    both.sql("ALTER TABLE public.events DETACH PARTITION public.events_0")
    both.sql("ALTER TABLE public.events DETACH PARTITION public.events_100")
    report = verify(both.site, both.name)
    assert [(d.kind, d.key, d.tier_key, d.copies) for d in report.differences] == [("duplicated", "120", "120", 2)]
    assert report.compared_rows == 0
    # What the delta says about a key stands in place of all its copies.
    table = both.site.reader.state(both.name).table.table_id
    both.sql(
        f"INSERT INTO modak.delta (table_id, pk, tier_key, op, payload) VALUES ({table}, '120', 120, 1,"
        """ '{"id": "120", "ts": "120", "body": "one"}')"""
    )
    assert verify(both.site, both.name).sound


def test_a_delta_row_that_cannot_be_read_is_named(both: Events) -> None:
    table = both.site.reader.state(both.name).table.table_id
    both.sql(
        "INSERT INTO modak.delta (table_id, pk, tier_key, op, payload) VALUES"
        f""" ({table}, '5', 5, 1, '{{"id": "five", "ts": "5", "body": "x"}}'),"""
        f""" ({table}, '6', 6, 1, '{{"id": "6", "ts": "6", "body": "row 6"}}'),"""
        f""" ({table}, '7', 7, 1, '{{"id": "70", "ts": "7", "body": "row 7"}}')"""
    )
    report = verify(both.site, both.name)
    assert {finding.code for finding in report.findings} == {"delta.unreadable", "delta.other_key"}
    assert all("key 5 " in f.message or "key 7 " in f.message for f in report.findings)


def test_damaged_files_are_named(both: Events) -> None:
    state = both.site.reader.state(both.name)
    assert state.cutline.snapshot_id is not None
    first, second = (
        Path(found.file.path.removeprefix("file://"))
        for found in both.site.lake.files(state.table.lake, state.cutline.snapshot_id)
    )
    first.unlink()
    second.write_bytes(second.read_bytes()[:-40])
    report = verify(both.site, both.name)
    assert [finding.code for finding in report.findings] == ["file.unreadable", "file.unreadable"]
    assert {str(first), str(second)} == {
        path for path in map(str, (first, second)) if any(path in f.message for f in report.findings)
    }
    assert report.differing_rows == 200


@pytest.mark.full
def test_since_and_sample_limit_the_work_to_some_bands(both: Events) -> None:
    changed_by_hand(both, f"DELETE FROM {LAKE} WHERE id IN (40, 120)")
    since = verify(both.site, both.name, Limits(since=100))
    assert told(since) == {("missing", "120", None, None, None)}
    middle = verify(both.site, both.name, Limits(since=50))
    assert {d.key for d in middle.differences} == {"120"}
    sampled = verify(both.site, both.name, Limits(sample=0.4))
    assert len(sampled.bands) == 1
    assert sampled.skipped_bands == 2


def test_a_repair_of_a_sample_is_looked_at_in_the_same_bands(both: Events) -> None:
    limits = Limits(sample=0.4)
    chosen = {tuple(band.lower for band in verify(both.site, both.name, limits).bands) for _ in range(6)}
    assert len(chosen) == 1
    assert len({Limits().seed for _ in range(6)}) > 1


def test_writers_at_work_raise_no_false_alarm(both: Events) -> None:
    stop = threading.Event()
    rounds = 0

    def write() -> None:
        nonlocal rounds
        with both.site.connect(autocommit=True) as conn:
            while not stop.is_set():
                rounds += 1
                conn.execute("UPDATE public.events SET body = body || '.' WHERE id = %s", (rounds % 200,))
                conn.execute("DELETE FROM public.events WHERE id = %s", (9000 + rounds - 5,))
                conn.execute("INSERT INTO public.events VALUES (%s, %s, 'late')", (9000 + rounds, rounds % 200))
                conn.execute("UPDATE public.events SET ts = (ts + 37) %% 200 WHERE id = %s", (rounds * 7 % 200,))

    writers = [threading.Thread(target=write) for _ in range(1)]
    for writer in writers:
        writer.start()
    try:
        reports = [verify(both.site, both.name) for _ in range(3)]
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert [report.differences for report in reports] == [(), (), ()]
    assert all(report.sound for report in reports)
    assert rounds > 20


def test_a_lost_pin_fails_the_verification_instead_of_trusting_it(both: Events) -> None:
    from modak.core.errors import Conflict
    from modak.tables.verify.point import Point

    with Point(both.site.dsn, both.name) as point:
        both.sql("DELETE FROM modak.read_pins")
        with pytest.raises(Conflict, match="lost on the way"):
            point.check()


def test_a_fold_after_the_pin_changes_nothing_for_the_verification(both: Events, leader: Leader) -> None:
    both.sql("UPDATE public.events SET body = 'corrected' WHERE id < 20")
    both.sql("DELETE FROM public.events WHERE id BETWEEN 20 AND 29")
    folded = []

    def fold_now(point: str) -> None:
        if point == "pins.after_begin" and not folded:
            folded.append(fold(both.site, leader.epoch, both.name))

    faults.watch(fold_now)
    during = verify(both.site, both.name)
    faults.watch(None)
    after = verify(both.site, both.name)
    assert during.sound, during
    assert after.sound, after
    assert [sum(band.lake_rows for band in report.bands) for report in (during, after)] == [200, 190]
    assert during.snapshot_id != after.snapshot_id


def test_rows_of_the_heap_that_no_read_shows_are_counted_by_partition(events: Events, leader: Leader) -> None:
    events.sql("CREATE TABLE public.before PARTITION OF public.events FOR VALUES FROM (MINVALUE) TO (-100)")
    events.sql("CREATE TABLE public.rest PARTITION OF public.events DEFAULT")
    events.register()
    events.tier(leader)
    assert verify(events.site, events.name).sound
    events.sql("SELECT modak_disable_transparent_writes('public.events')")
    events.sql("INSERT INTO public.events VALUES (1, -500, 'x'), (2, -400, 'x'), (3, -50, 'x'), (4, 5000, 'far ahead')")
    report = verify(events.site, events.name)
    (finding,) = report.findings
    assert finding.code == "heap.hidden"
    assert finding.message.startswith("1 rows of partition rest lie below the cut-line 200")
    # A partition with an upper bound below the cut-line is compared, as if it had been tiered.
    assert {(d.kind, d.key) for d in report.differences} == {("missing", "1"), ("missing", "2")}
    assert not report.sound
    # Attached again, it reaches from below the cut-line to above.
    events.sql("DELETE FROM public.events WHERE ts < 0")
    events.sql("DROP TABLE public.events_100, public.events_200")
    events.sql("CREATE TABLE public.across PARTITION OF public.events FOR VALUES FROM (150) TO (300)")
    events.sql("INSERT INTO public.events VALUES (9000, 160, 'hidden'), (9001, 250, 'hot')")
    (finding,) = verify(events.site, events.name).findings
    assert finding.message.startswith("1 rows of partition across lie below the cut-line 200")


def test_many_keys_that_are_twice_are_counted_up_to_a_bound_that_is_told(
    both: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed_by_hand(both, f"INSERT INTO {LAKE} SELECT * FROM {LAKE} WHERE id < 10")
    both.sql("ALTER TABLE public.events DETACH PARTITION public.events_0")
    report = verify(both.site, both.name)
    assert (report.differing_rows, report.at_least) == (10, False)
    monkeypatch.setattr("modak.tables.verify.run.MOST_TWICE", 4)
    report = verify(both.site, both.name)
    assert (report.differing_rows, report.at_least) == (4, True)


def test_an_empty_key_is_not_told_as_null(site: Site, leader: Leader) -> None:
    table = Events(site, TableName("public", "words"))
    table.sql("CREATE TABLE public.words (word text, ts bigint, n int, PRIMARY KEY (word, ts)) PARTITION BY RANGE (ts)")
    for lower in (0, 100):
        table.add_partition(lower)
    table.sql("INSERT INTO public.words VALUES ('', 1, 1), ('a', 2, 2), ('b', 150, 3)")
    register(site, RegisterRequest(table.name, ("word",), "ts"))
    table.tier(leader)
    changed_by_hand(table, "UPDATE modak.modak.public.words SET n = 7 WHERE ts = 1")
    (difference,) = verify(site, table.name).differences
    assert (difference.key, difference.tier_key, difference.heap, difference.lake) == ("''", "1", "1", "7")


def test_what_lies_below_the_retention_line_or_in_the_spill_is_named(both: Events) -> None:
    table = both.site.reader.state(both.name).table.table_id
    both.sql("UPDATE public.events SET body = 'corrected' WHERE id = 5")
    both.sql(
        "ALTER TABLE public.events_modak_spill DISABLE TRIGGER USER;"
        " INSERT INTO public.events_modak_spill VALUES (1, -5, 'stray')"
    )
    both.sql(f"UPDATE modak.cutline SET retention_line = 100 WHERE table_id = {table}")
    report = verify(both.site, both.name)
    assert {finding.code for finding in report.findings} == {"delta.below_retention", "lake.outside", "spill.rows"}
    assert "100 lake rows lie outside [100, 200)" in str(report.findings)
    assert [(band.lower, band.upper) for band in report.bands] == [("100", "200")]
