"""Columns come and go while a table lives; rows that are already in the lake show what Postgres would show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from modak.core.errors import ModakError, Refused
from modak.runtime.leader import Leader
from tests.tables import readers
from tests.tables.events import Events

pytestmark = pytest.mark.spark

READERS: tuple[Callable[..., readers.Rows], ...] = (readers.by_spark, readers.by_pyiceberg, readers.by_duckdb)


def tiered_once(events: Events, leader: Leader) -> None:
    events.register()
    assert events.tier(leader).rows == 200


def tier_the_next(events: Events, leader: Leader) -> None:
    """Let the partition with 51 rows age."""
    at = events.sql("SELECT max(ts) FROM public.events")[0][0] // 100 * 100 + 100
    events.add_partition(at)
    events.sql(f"INSERT INTO public.events (id, ts, body) VALUES ({at + 50}, {at + 50}, 'newest')")
    assert events.tier(leader).moved_partitions


def column(events: Events, name: str) -> list[dict[int, Any]]:
    """The column by id, as each engine reads it."""
    return [{row["id"]: row[name] for row in read(events.site, events.name)} for read in READERS]


def test_old_lake_rows_show_a_constant_default_in_every_engine(events: Events, leader: Leader) -> None:
    tiered_once(events, leader)
    events.sql(
        "ALTER TABLE public.events ADD n int NOT NULL DEFAULT 7, ADD word text DEFAULT 'it''s',"
        " ADD yes boolean DEFAULT true, ADD price numeric(10, 2) DEFAULT 1.5,"
        " ADD at timestamptz DEFAULT '2024-01-01 01:00+01', ADD day date DEFAULT '2024-02-29', ADD nothing text"
    )
    events.sql("UPDATE public.events SET n = 8, word = NULL WHERE id = 210")
    tier_the_next(events, leader)
    heap = events.sql("SELECT n, word, yes, price, at, day, nothing FROM public.events WHERE ts >= 300")
    for read in READERS:
        rows = {row["id"]: row for row in read(events.site, events.name)}
        assert len(rows) == 251
        for key in (0, 199, 205):
            shown = tuple(rows[key][name] for name in ("n", "word", "yes", "price", "at", "day", "nothing"))
            assert [shown] == heap, read.__name__
        assert (rows[210]["n"], rows[210]["word"]) == (8, None), read.__name__


def test_old_lake_rows_show_the_moment_of_a_stable_default(events: Events, leader: Leader) -> None:
    tiered_once(events, leader)
    events.sql("ALTER TABLE public.events ADD seen timestamptz DEFAULT now()")
    ((moment,),) = events.sql("SELECT DISTINCT seen FROM public.events")
    tier_the_next(events, leader)
    for shown in column(events, "seen"):
        assert (shown[0], shown[199], shown[205]) == (moment, moment, moment)


def test_a_volatile_default_is_made_for_old_rows_and_new_rows_keep_theirs(events: Events, leader: Leader) -> None:
    tiered_once(events, leader)
    events.sql("ALTER TABLE public.events ADD chance float8 DEFAULT random()")
    kept = dict(events.sql("SELECT id, chance FROM public.events"))
    tier_the_next(events, leader)
    for shown in column(events, "chance"):
        assert len({shown[key] for key in range(200)}) > 190
        assert all(shown[key] == value for key, value in kept.items())


def test_a_default_set_later_does_not_reach_back(events: Events, leader: Leader) -> None:
    tiered_once(events, leader)
    events.sql("ALTER TABLE public.events ADD n int")
    events.sql("ALTER TABLE public.events ALTER n SET DEFAULT 5")
    events.sql("INSERT INTO public.events VALUES (260, 260, 'new')")
    tier_the_next(events, leader)
    for shown in column(events, "n"):
        assert (shown[0], shown[205], shown[260]) == (None, None, 5)


def test_a_default_that_was_changed_since_shows_its_first_value(events: Events, leader: Leader) -> None:
    tiered_once(events, leader)
    events.sql("ALTER TABLE public.events ADD n int DEFAULT 5")
    events.sql("ALTER TABLE public.events ALTER n SET DEFAULT 6")
    events.sql("INSERT INTO public.events VALUES (260, 260, 'new')")
    tier_the_next(events, leader)
    for shown in column(events, "n"):
        assert (shown[0], shown[205], shown[260]) == (5, 5, 6)


def test_a_default_survives_a_rewrite_of_all_partitions(events: Events, leader: Leader) -> None:
    """VACUUM FULL writes the default into the rows, and Postgres forgets that it was one."""
    tiered_once(events, leader)
    events.sql("ALTER TABLE public.events ADD n int DEFAULT 5")
    events.sql("VACUUM FULL public.events")
    tier_the_next(events, leader)
    for shown in column(events, "n"):
        assert (shown[0], shown[205]) == (5, 5)


def test_a_rename_is_a_rename_and_a_column_added_again_is_a_new_one(events: Events, leader: Leader) -> None:
    tiered_once(events, leader)
    events.sql("ALTER TABLE public.events RENAME body TO words")
    events.sql("ALTER TABLE public.events ADD extra int DEFAULT 1")
    at = 300
    events.add_partition(at)
    events.sql("INSERT INTO public.events (id, ts, words) VALUES (350, 350, 'newest')")
    assert events.tier(leader).moved_partitions == ("events_200",)
    events.sql("ALTER TABLE public.events DROP extra, ADD extra text DEFAULT 'again'")
    events.add_partition(400)
    events.sql("INSERT INTO public.events (id, ts, words) VALUES (450, 450, 'newest')")
    assert events.tier(leader).moved_partitions == ("events_300",)
    for read in READERS:
        rows = {row["id"]: row for row in read(events.site, events.name)}
        assert (rows[0]["words"], rows[0]["extra"]) == ("row 0", "again"), read.__name__
        assert (rows[350]["words"], rows[350]["extra"]) == ("newest", "again"), read.__name__
        assert "body" not in rows[0]


@pytest.mark.parametrize(
    ("renames", "names"),
    [
        (("b TO c", "a TO b"), {"b": "first", "c": "second"}),
        (("a TO spare", "b TO a", "spare TO b"), {"b": "first", "a": "second"}),
    ],
    ids=["a chain", "a swap"],
)
def test_columns_that_trade_their_names_keep_their_values(
    events: Events, leader: Leader, renames: tuple[str, ...], names: dict[str, str]
) -> None:
    events.sql("ALTER TABLE public.events ADD a text DEFAULT 'first', ADD b text DEFAULT 'second'")
    tiered_once(events, leader)
    for rename in renames:
        events.sql(f"ALTER TABLE public.events RENAME {rename}")
    tier_the_next(events, leader)
    for read in READERS:
        rows = {row["id"]: row for row in read(events.site, events.name)}
        assert {name: rows[0][name] for name in names} == names, read.__name__
        assert {name: rows[205][name] for name in names} == names, read.__name__


def test_wider_types_are_followed_and_others_are_refused_by_name(events: Events, leader: Leader) -> None:
    events.sql("ALTER TABLE public.events ADD n int DEFAULT 1, ADD price numeric(6, 2) DEFAULT 1.25")
    tiered_once(events, leader)
    events.sql("ALTER TABLE public.events ALTER n TYPE bigint, ALTER price TYPE numeric(12, 2)")
    events.sql("UPDATE public.events SET n = 5000000000 WHERE id = 205")
    tier_the_next(events, leader)
    for shown in column(events, "n"):
        assert (shown[0], shown[205]) == (1, 5_000_000_000)
    events.sql("ALTER TABLE public.events ALTER n TYPE text")
    events.add_partition(400)
    events.sql("INSERT INTO public.events (id, ts, body) VALUES (450, 450, 'newest')")
    with pytest.raises(Refused, match=r"n.* is string in Postgres now, but long in the lake") as refused:
        events.tier(leader)
    assert refused.value.hint
    assert events.sql("SELECT count(*) FROM public.events WHERE ts BETWEEN 300 AND 399") == [(1,)]


def failures(events: Events) -> list[tuple[str, str]]:
    return events.sql("SELECT kind, error FROM modak.op_log WHERE phase = 'failed' ORDER BY kind")


def test_a_change_of_columns_that_fails_is_told_as_failed(
    events: Events, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as something that a crash has cut off."""
    events.register()
    events.sql("ALTER TABLE public.events ADD COLUMN extra int")

    def broken(*_: object) -> None:
        raise ModakError("lake.broken", "The lake is broken.")

    monkeypatch.setattr("modak.tables.evolve.land", broken)
    with pytest.raises(ModakError, match="broken"):
        events.tier(leader)
    why = "lake.broken: The lake is broken."
    assert failures(events) == [("evolve", why), ("tier", why)]
    monkeypatch.undo()
    assert events.tier(leader).rows == 200


def test_a_back_fill_that_fails_is_told_as_failed(
    events: Events, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    events.register()
    events.tier(leader)
    events.sql("ALTER TABLE public.events ADD COLUMN tags text[] DEFAULT '{a}'")
    events.add_partition(300)
    events.sql("INSERT INTO public.events (id, ts) VALUES (301, 301)")

    def broken(*_: object) -> None:
        raise ModakError("spark.broken", "Spark is broken.")

    monkeypatch.setattr("modak.tables.backfill._rewrite", broken)
    with pytest.raises(ModakError, match="broken"):
        events.tier(leader)
    why = "spark.broken: Spark is broken."
    assert failures(events) == [("backfill", why), ("tier", why)]


def test_a_column_added_between_plan_and_export_is_not_missed(events: Events, leader: Leader) -> None:
    from modak.core import faults

    events.register()
    added: list[str] = []

    def add(point: str) -> None:
        if point == "seal.before_trigger" and not added:
            added.append(point)
            events.sql("ALTER TABLE public.events ADD n int DEFAULT 3")

    faults.watch(add)
    assert events.tier(leader).rows == 200
    for shown in column(events, "n"):
        assert set(shown.values()) == {3}
