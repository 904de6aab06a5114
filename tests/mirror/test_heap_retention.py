"""Heap retention: old partitions leave the heap behind F, and the table reads and corrects like a tiered one."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modak.catalog import pins
from modak.core.states import PartitionState
from modak.runtime.leader import Leader
from modak.tables.ingest.run import Request, ingest
from modak.tables.load.run import LoadRequest, load
from modak.tables.mirror.reanchor import reanchor
from modak.tables.site import Site
from tests.mirror.things import Row, Things


@pytest.fixture
def things(site: Site) -> Things:
    """Rows 0…449 in five partitions, of which three lie more than 100 behind the highest."""
    made = Things.ranged(site, 450, partitions=5)
    made.register(heap_retention="100")
    return made


def states(things: Things) -> dict[str, str]:
    return {part.name: str(part.state) for part in things.state.partitions}


def seam(things: Things) -> set[Row]:
    """What a seam reader sees: the heap from T on, below it the lake with the delta laid over it."""
    line, table = things.state.cutline, things.state.table
    hot = set(things.sql(f"SELECT * FROM public.things WHERE ts >= {line.t}"))
    over = {
        (int(pk), key): payload
        for pk, key, payload in things.sql(
            f"SELECT pk, tier_key, payload FROM modak.delta WHERE table_id = {table.table_id} AND tier_key < {line.t}"
            " AND folded_into IS NULL"
        )
    }
    cold = {row for row in things.lake() if row[1] < line.t and (row[0], row[1]) not in over}
    images = {(int(d["id"]), int(d["ts"]), d["body"]) for d in over.values() if d is not None}
    return hot | cold | images


def retired(things: Things, leader: Leader) -> None:
    """Seal, pass, drop."""
    things.cycle(leader)
    things.pump(leader)
    things.cycle(leader)


def test_partitions_leave_the_heap_only_behind_the_frontier(things: Things, leader: Leader) -> None:
    rows = set(things.heap())
    first = things.cycle(leader)
    assert first.retired.sealed == ("things_0", "things_100", "things_200")
    assert (first.retired.passed, first.retired.dropped) == ((), ())
    assert first.retired.waiting is not None
    again = things.cycle(leader)
    assert not again.retired.changed
    assert things.state.cutline.t == 0
    things.pump(leader)
    second = things.cycle(leader)
    assert second.retired.passed == second.retired.dropped == ("things_0", "things_100", "things_200")
    assert things.state.cutline.t == 300
    assert len(things.heap()) == 150
    # The drop itself is no change of the table.
    things.pump(leader)
    assert set(things.lake()) == rows
    assert seam(things) == rows


def test_writes_to_a_sealed_partition_are_lost_in_no_step(things: Things, leader: Leader) -> None:
    things.cycle(leader)
    things.sql("UPDATE public.things SET body = 'sealed' WHERE id = 10")
    things.sql("DELETE FROM public.things WHERE id = 11")
    things.sql("INSERT INTO public.things VALUES (9000, 12, 'late')")
    things.sql("UPDATE public.things SET ts = 350 WHERE id = 13")
    expected = set(things.heap())
    things.pump(leader)
    # F has passed the seal, not what comes now.
    things.sql("UPDATE public.things SET body = 'later' WHERE id = 14")
    expected = (expected - {(14, 14, "row 14")}) | {(14, 14, "later")}
    assert things.cycle(leader).retired.dropped
    assert seam(things) == expected
    # Nothing folds before F has passed the drop: the WAL still has older images.
    assert things.sql("SELECT count(*) FROM modak.delta WHERE folded_into IS NULL")[0][0] == 5
    things.pump(leader)
    assert seam(things) == expected
    folded = things.cycle(leader).folded
    assert folded is not None
    assert folded.rows == 5
    assert seam(things) == set(things.lake()) == expected


def test_a_pin_keeps_the_heap_copy(things: Things, leader: Leader) -> None:
    things.cycle(leader)
    things.pump(leader)
    pin = pins.begin(things.site.dsn, things.name)
    report = things.cycle(leader)
    assert report.retired.passed
    assert report.retired.dropped == ()
    assert len(things.heap()) == 450
    with things.site.connect(autocommit=True) as conn:
        pins.end(conn, pin.pin_id)
    assert len(things.cycle(leader).retired.dropped) == 3


def test_what_has_left_the_heap_is_corrected_through_the_delta(things: Things, leader: Leader) -> None:
    rows = set(things.heap())
    retired(things, leader)
    things.pump(leader)
    things.sql("INSERT INTO public.things VALUES (9001, 50, 'through the spill')")
    things.sql('SELECT modak_upsert(\'public.things\', \'{"id": 20, "ts": 20, "body": "corrected"}\')')
    things.sql("SELECT modak_delete('public.things', '21', 21)")
    assert things.sql('SELECT modak_upsert(\'public.things\', \'{"id": 7000, "ts": 410, "body": "hot"}\')') == [
        ("heap",)
    ]
    gone = {(20, 20, "row 20"), (21, 21, "row 21")}
    expected = (rows - gone) | {(9001, 50, "through the spill"), (20, 20, "corrected"), (7000, 410, "hot")}
    assert seam(things) == expected
    things.pump(leader)
    things.cycle(leader)
    assert set(things.lake()) == seam(things) == expected
    assert things.sql("SELECT count(*) FROM modak.delta WHERE folded_into IS NULL") == [(0,)]


def test_no_partition_goes_while_its_history_would_stay_in_a_default_partition(things: Things, leader: Leader) -> None:
    things.cycle(leader)
    things.sql("CREATE TABLE public.things_rest PARTITION OF public.things DEFAULT PARTITION BY RANGE (ts)")
    things.pump(leader)
    report = things.cycle(leader).retired
    assert (len(report.passed), report.dropped) == (3, ())
    assert report.held is not None
    assert "partition public.things_rest is in the way" in report.held.message
    things.sql("DROP TABLE public.things_rest")
    assert len(things.cycle(leader).retired.dropped) == 3


def test_a_row_that_the_default_partition_had_before_stays_with_the_change_stream(site: Site, leader: Leader) -> None:
    things = Things.ranged(site, 450, partitions=5)
    things.sql("CREATE TABLE public.things_rest PARTITION OF public.things DEFAULT")
    things.register(heap_retention="100")
    things.sql("SELECT modak_disable_transparent_writes('public.things')")
    things.sql("INSERT INTO public.things VALUES (9000, -50, 'older than all')")
    retired(things, leader)
    upsert = "INSERT INTO public.things VALUES {} ON CONFLICT (id, ts) DO UPDATE SET body = excluded.body"
    things.sql(upsert.format("(9000, -50, 'changed'), (9001, 50, 'history')"))
    things.sql("UPDATE public.things SET body = 'changed again' WHERE id = 9000")
    expected = {(i, i, f"row {i}") for i in range(450)} | {(9000, -50, "changed again"), (9001, 50, "history")}
    things.pump(leader)
    things.cycle(leader)
    assert set(things.lake()) == seam(things) == expected


def test_truncate_is_refused(things: Things) -> None:
    for table in ("things", "things_0"):
        with pytest.raises(psycopg.Error, match="cannot truncate"):
            things.sql(f"TRUNCATE public.{table}")


def test_a_lost_slot_never_touches_what_was_retired(things: Things, leader: Leader) -> None:
    rows = set(things.heap())
    retired(things, leader)
    things.pump(leader)
    things.lose_slot()
    things.sql("UPDATE public.things SET body = 'unseen' WHERE id = 320")
    things.sql("SELECT modak_delete('public.things', '30', 30)")
    assert reanchor(things.site, leader.epoch, things.state.table) == 1
    expected = (rows - {(320, 320, "row 320"), (30, 30, "row 30")}) | {(320, 320, "unseen")}
    assert seam(things) == expected
    things.cycle(leader)
    assert set(things.lake()) == expected


def test_a_sealed_partition_whose_trigger_was_taken_away_is_sealed_again(things: Things, leader: Leader) -> None:
    things.cycle(leader)
    things.sql("UPDATE public.things SET body = 'seen' WHERE id = 40")
    things.sql('ALTER TABLE public.things_0 DISABLE TRIGGER "!modak_capture"')
    things.sql("UPDATE public.things SET body = 'unseen' WHERE id = 40")
    expected = set(things.heap())
    things.pump(leader)
    assert things.cycle(leader).retired.passed == ()
    assert "things_0" in things.cycle(leader).retired.sealed
    things.pump(leader)
    things.cycle(leader)
    assert "things_0" not in {part.name for part in things.state.living()}
    things.pump(leader)
    things.cycle(leader)
    assert set(things.lake()) == seam(things) == expected


def test_new_partitions_are_made_ahead_and_followed(things: Things, leader: Leader) -> None:
    things.add_partition(500)
    things.fill(500, 560)
    things.cycle(leader)
    things.pump(leader)
    things.cycle(leader)
    things.pump(leader)
    assert things.state.cutline.t == 400
    assert things.identities()["things_500"] == "f"
    assert len(things.lake()) == 510
    assert states(things)["things_300"] == str(PartitionState.DROPPED)


def test_unregistering_keeps_corrections_from_being_lost(things: Things, leader: Leader) -> None:
    from modak.core.errors import Refused

    retired(things, leader)
    things.sql("SELECT modak_delete('public.things', '30', 30)")
    with pytest.raises(Refused, match="correction"):
        things.unregister()
    things.unregister(discard_corrections=True)
    assert things.sql("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == [(0,)]


def test_history_and_loads_come_in_below_the_cut_line(things: Things, leader: Leader, tmp_path: Path) -> None:
    retired(things, leader)
    things.pump(leader)
    rows = {row for row in things.lake() if row[0] not in (5, 6)}
    history, body = tmp_path / "history.parquet", tmp_path / "body"
    pq.write_table(pa.table({"id": [5, 7000], "ts": [5, 50], "body": ["five", "new"]}), history)
    report = ingest(things.site, Request(things.name, (str(history),), "parquet"))
    assert (report.adopted_files, report.replaced) == (1, 1)
    body.write_text('{"id": 6, "ts": 6, "body": "six"}\n{"id": 8000, "ts": 420, "body": "hot"}\n')
    done = load(things.site, LoadRequest(things.name, "first", "jsonl"), body)
    assert (done.hot_rows, done.delta_rows) == (1, 1)
    things.pump(leader)
    things.cycle(leader)
    expected = rows | {(5, 5, "five"), (7000, 50, "new"), (6, 6, "six"), (8000, 420, "hot")}
    assert seam(things) == set(things.lake()) == expected


def test_a_correction_from_before_a_rename_keeps_its_value_whoever_follows_the_rename(
    things: Things, leader: Leader
) -> None:
    retired(things, leader)
    things.pump(leader)
    things.sql('SELECT modak_upsert(\'public.things\', \'{"id": 20, "ts": 20, "body": "corrected"}\')')
    things.sql("ALTER TABLE public.things RENAME body TO note")
    things.sql("UPDATE public.things SET note = 'hot' WHERE id = 420")
    things.pump(leader)
    assert things.cycle(leader).folded.rows == 1
    assert {(20, 20, "corrected"), (420, 420, "hot")} <= set(things.lake())
