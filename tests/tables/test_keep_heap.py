"""A table that keeps its heap: the lake follows every write below the cut-line, and nothing is ever dropped."""

from __future__ import annotations

import psycopg
import pytest

from modak.catalog import capture, pins
from modak.core import faults
from modak.core.axis import Axis
from modak.core.errors import Refused, UsageError
from modak.core.faults import Fault, InjectedFault
from modak.core.names import TableName
from modak.core.states import PartitionState
from modak.runtime.leader import Leader
from modak.tables import status
from modak.tables.fold.run import fold
from modak.tables.registration.register import Registered, register
from modak.tables.registration.request import RegisterRequest, check_flags
from modak.tables.registration.unregister import unregister
from modak.tables.status import collect
from modak.tables.tiering.plan import Partition, TableState, survey
from tests.tables.events import Events

ROWS = {(i, i, f"row {i}") for i in range(251)}
NAME = TableName("public", "events")


def keep_heap(events: Events) -> Registered:
    return register(events.site, RegisterRequest(events.name, ("id",), "ts", keep_heap=True))


@pytest.fixture
def kept(events: Events, leader: Leader) -> Events:
    """Two partitions are tiered and in the heap, the third is hot."""
    keep_heap(events)
    events.tier(leader)
    return events


def in_heap(events: Events) -> set[tuple[object, ...]]:
    """The whole heap, which is complete."""
    return set(events.sql(f"SELECT * FROM {events.name}"))


def watched(events: Events) -> set[str]:
    names = f"'{capture.TRIGGER}', '{capture.TRUNCATE_GUARD}'"
    found = events.sql(f"SELECT tgrelid::regclass::text FROM pg_trigger WHERE tgname IN ({names})")
    return {name for (name,) in found}


def states(events: Events) -> dict[str, PartitionState]:
    return {part.name: part.state for part in events.site.reader.state(events.name).partitions}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"mode": "mirrored"}, ["--keep-heap is for tiered tables only"]),
        ({"lake_retention": "100"}, ["--keep-heap and --lake-retention exclude each other"]),
        (
            {"mode": "mirrored", "lake_retention": "100"},
            [
                "--lake-retention is for tiered tables only",
                "--keep-heap is for tiered tables only",
                "--keep-heap and --lake-retention exclude each other",
            ],
        ),
        (
            {"heap_retention": "5", "chunk_rows": 7},
            ["--heap-retention is for mirrored", "--chunk-rows is for mirrored"],
        ),
    ],
)
def test_flags_that_contradict_are_refused_by_name_and_together(flags: dict[str, str], named: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        check_flags(RegisterRequest(NAME, ("id",), "ts", keep_heap=True, **flags))  # type: ignore[arg-type]
    assert all(what in refused.value.message for what in named)


@pytest.mark.parametrize("width", ["0", "00", "0d"])
def test_a_retention_without_a_width_is_refused(width: str) -> None:
    with pytest.raises(UsageError, match="needs a partition width"):
        check_flags(RegisterRequest(NAME, ("id",), "ts", lake_retention="9", partition_width=width))


def test_partitions_rest_at_tiered_and_only_they_are_watched(kept: Events, leader: Leader) -> None:
    for _ in range(2):
        report = kept.tier(leader)
        assert report.dropped == ()
        assert states(kept) == {
            "events_0": PartitionState.TIERED,
            "events_100": PartitionState.TIERED,
            "events_200": PartitionState.HOT,
        }
    assert watched(kept) == {"events_0", "events_100"}
    assert in_heap(kept) == kept.everything() == ROWS
    assert kept.snapshots() == 1
    assert not kept.site.reader.state(kept.name).unfinished
    with pytest.raises(Refused, match="--keep-heap is on, not off"):
        kept.register()
    assert keep_heap(kept).created is False
    assert [row.keep_heap for row in collect(kept.site)] == [True]


def test_plain_writes_below_the_cut_line_reach_the_delta_in_the_users_transaction_and_then_the_lake(
    kept: Events, leader: Leader
) -> None:
    kept.sql("UPDATE public.events SET body = 'corrected' WHERE id = 5")
    kept.sql("DELETE FROM public.events WHERE id = 6")
    kept.sql("INSERT INTO public.events VALUES (1000, 50, 'late')")
    assert set(kept.delta()) == {("5", 5), ("6", 6), ("1000", 50)}
    assert kept.everything() == in_heap(kept)
    with kept.site.connect() as conn:
        conn.execute("UPDATE public.events SET body = 'given up' WHERE id < 100")
        conn.rollback()
    assert len(kept.delta()) == 3
    kept.sql("UPDATE public.events SET ts = 205 WHERE id = 7")
    kept.sql("UPDATE public.events SET ts = 60 WHERE id = 240")
    kept.sql("UPDATE public.events SET ts = 150 WHERE id = 8")
    rows = kept.heap() | kept.cold()
    assert rows == in_heap(kept)
    assert sorted(row[:2] for row in rows if row[0] in (7, 8, 240)) == [(7, 205), (8, 150), (240, 60)]
    fold(kept.site, leader.epoch, kept.name)
    assert kept.delta() == {}
    assert kept.heap() | kept.cold() == in_heap(kept)


@pytest.mark.parametrize("table", ["events", "events_0"])
def test_a_truncate_is_refused(kept: Events, table: str) -> None:
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="cannot truncate"):
        kept.sql(f"TRUNCATE public.{table}")
    assert in_heap(kept) == kept.everything() == ROWS


def test_a_leaf_that_was_not_watched_is_exported_again_while_a_reader_keeps_what_it_had(
    kept: Events, leader: Leader
) -> None:
    kept.sql("UPDATE public.events SET body = 'seen' WHERE id = 11")
    pin = pins.begin(kept.site.dsn, kept.name)
    kept.sql(f'ALTER TABLE public.events_0 DISABLE TRIGGER "{capture.TRIGGER}"')
    kept.sql("UPDATE public.events SET body = 'unseen' WHERE id = 10")
    kept.sql("VACUUM FULL public.events_100")
    kept.tier(leader)
    unfolded = {key for key, _ in visible_delta(kept)}
    assert kept.site.reader.delta_backlog(kept.site.reader.state(kept.name).table.table_id) == 0
    assert unfolded == {"11"}, "the pinned reader still finds its correction"
    folded = kept.sql("SELECT count(*) FROM modak.delta WHERE folded_generation IS NOT NULL")
    assert folded == [(1,)]
    assert {row for row in kept.lake() if row[0] in (10, 11)} == {(10, 10, "unseen"), (11, 11, "seen")}
    assert kept.snapshots() == 3
    with kept.site.connect(autocommit=True) as conn:
        assert capture.broken(conn, pin.table_id) == {}
        assert pins.end(conn, pin.pin_id)
    kept.tier(leader)
    assert kept.snapshots() == 3
    assert set(kept.lake()) | kept.heap() == in_heap(kept)


def visible_delta(events: Events) -> list[tuple[str, int]]:
    ((query,),) = events.sql(
        "SELECT format('SELECT pk, tier_key FROM modak.modak_read_delta(%s)', pin_id) FROM modak.read_pins"
    )
    return [(pk, key) for pk, key in events.sql(query)]


@pytest.mark.parametrize("point", ["seal.after_trigger", "export.after_tasks", "landing.prepared"])
def test_a_crash_before_the_second_export_has_landed_does_not_make_the_leaf_count_as_watched(
    kept: Events, leader: Leader, point: str
) -> None:
    kept.sql(f'DROP TRIGGER "{capture.TRIGGER}" ON public.events_0')
    kept.sql("UPDATE public.events SET body = 'unseen' WHERE id = 10")
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        kept.tier(leader)
    faults.arm(None)
    kept.tier(leader)
    assert kept.everything() == in_heap(kept)
    assert (10, 10, "unseen") in kept.everything()


def test_the_same_holds_for_a_leaf_that_is_to_be_dropped(events: Events, leader: Leader) -> None:
    events.register()
    pin = pins.begin(events.site.dsn, events.name)
    events.tier(leader)
    with events.site.connect(autocommit=True) as conn:
        assert pins.end(conn, pin.pin_id)
    events.sql(f'ALTER TABLE public.events_0 DISABLE TRIGGER "{capture.TRIGGER}"')
    events.sql("UPDATE public.events SET body = 'unseen' WHERE id = 10")
    faults.arm(Fault("seal.after_trigger"))
    with pytest.raises(InjectedFault):
        events.tier(leader)
    faults.arm(None)
    for _ in range(3):
        events.tier(leader)
    assert (10, 10, "unseen") in events.lake()


@pytest.mark.spark
def test_columns_and_partitions_that_come_later_are_followed(kept: Events, leader: Leader) -> None:
    kept.sql("ALTER TABLE public.events ADD COLUMN colour text DEFAULT 'red'")
    kept.add_partition(300)
    kept.sql("INSERT INTO public.events VALUES (350, 350, 'new', 'blue')")
    assert kept.tier(leader).moved_partitions == ("events_200",)
    kept.sql("ALTER TABLE public.events ADD COLUMN mark double precision DEFAULT random()")
    kept.tier(leader)
    kept.tier(leader)
    assert set(kept.lake()) == {row for row in in_heap(kept) if int(str(row[1])) < 300}
    assert watched(kept) == {"events_0", "events_100", "events_200"}


def test_a_tiered_partition_that_its_owner_takes_away_is_a_finding_and_the_lake_keeps_its_rows(
    kept: Events, leader: Leader
) -> None:
    kept.sql("ALTER TABLE public.events DETACH PARTITION public.events_0")
    (finding,) = kept.tier(leader).findings
    assert (finding.code, finding.partition) == ("keep_heap.detached", "events_0")
    kept.sql("ALTER TABLE public.events ATTACH PARTITION public.events_0 FOR VALUES FROM (0) TO (100)")
    assert kept.tier(leader).findings == ()
    kept.sql("DROP TABLE public.events_0")
    (finding,) = kept.tier(leader).findings
    assert finding.code == "keep_heap.dropped"
    assert "from 0 to 100" in finding.message
    assert finding.message in status.collect(kept.site)[0].problems
    assert states(kept)["events_0"] is PartitionState.DROPPED
    kept.tier(leader)
    assert kept.everything() == ROWS
    kept.sql("INSERT INTO public.events VALUES (1000, 50, 'history')")
    assert kept.everything() == ROWS | {(1000, 50, "history")}


def test_rows_older_than_the_first_partition_are_refused_as_ever(kept: Events) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        kept.sql("INSERT INTO public.events VALUES (1000, -5, 'before everything')")


def test_other_tables_may_refer_to_it_and_it_leaves_without_a_trace(events: Events, leader: Leader) -> None:
    events.sql(
        "CREATE TABLE public.notes (id bigint, ts bigint, FOREIGN KEY (id, ts) REFERENCES public.events (id, ts))"
    )
    with pytest.raises(Refused, match="--keep-heap"):
        events.register()
    keep_heap(events)
    events.sql("INSERT INTO public.notes VALUES (5, 5), (220, 220)")
    events.tier(leader)
    assert watched(events) == {"events_0", "events_100"}
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        events.sql("DELETE FROM public.events WHERE id = 5")
    events.sql("UPDATE public.events SET body = 'corrected' WHERE id = 5")
    assert events.everything() == in_heap(events)
    events.sql("ALTER TABLE public.events DETACH PARTITION public.events_100")
    events.sql("DROP TABLE public.events_100")
    events.tier(leader)
    # The spill has not grown, because the leaf below it is still there.
    assert events.sql("SELECT upper_bound FROM modak.spills") == [(0,)]
    unregister(events.site, events.name)
    assert watched(events) == set()
    assert (
        events.sql(
            "SELECT relname FROM pg_class WHERE relname LIKE '%modak%' AND relkind = 'r' AND relname LIKE 'events%'"
        )
        == []
    )
    assert len(in_heap(events)) == 151


def test_a_partition_that_was_never_there_is_no_finding() -> None:
    kept = (Partition("a", 0, 100, PartitionState.TIERED), Partition("b", 100, 200))
    state = TableState(NAME, Axis.INTEGER, 100, 150, kept, keep_heap=True)
    assert survey(state) == ()
