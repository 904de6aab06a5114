"""The pure parts of the pump: which column is which, and what is left of many events of a key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modak.core.errors import Refused
from modak.core.names import TableName
from modak.postgres.changes.relation import Relation, RelationColumn
from modak.postgres.model import PgType
from modak.tables.mirror.pump.definition import Attribute, align
from modak.tables.mirror.pump.fold import buckets, encode, fold, joined
from modak.tables.mirror.pump.plan import Pace

TABLE = TableName("public", "t")
INT, TEXT = 23, 25


def relation(*columns: tuple[str, int]) -> Relation:
    return Relation(
        1, TABLE, "full", tuple(RelationColumn(name, PgType("x", "scalar"), oid, -1, True) for name, oid in columns)
    )


def numbers(columns: list[tuple[str, int]], before: dict[int, str], now: list[Attribute], xid: int) -> tuple[int, ...]:
    return align(relation(*columns), before, now, xid, TABLE).numbers


def test_a_rename_keeps_the_number() -> None:
    now = [Attribute(1, "a", INT, 5), Attribute(2, "c", TEXT, 20)]
    assert numbers([("a", INT), ("b", TEXT)], {1: "a", 2: "b"}, now, 10) == (1, 2)
    assert numbers([("a", INT), ("c", TEXT)], {1: "a", 2: "b"}, now, 30) == (1, 2)


def test_a_column_added_again_under_its_name_is_told_by_the_transaction_that_dropped_it() -> None:
    now = [Attribute(1, "a", INT, 5), Attribute(2, None, 0, 20), Attribute(3, "b", TEXT, 21)]
    assert numbers([("a", INT), ("b", TEXT)], {1: "a", 2: "b"}, now, 10) == (1, 2)
    assert numbers([("a", INT), ("b", TEXT)], {1: "a", 2: "b"}, now, 30) == (1, 3)


def test_a_column_that_came_and_went_between_is_found() -> None:
    now = [Attribute(1, "a", INT, 5), Attribute(2, None, 0, 40), Attribute(3, "z", TEXT, 50)]
    assert numbers([("a", INT), ("mid", TEXT)], {1: "a"}, now, 30) == (1, 2)
    assert numbers([("a", INT), ("z", TEXT)], {1: "a", 2: "mid"}, now, 60) == (1, 3)


def test_names_that_change_places_are_told_by_their_order() -> None:
    now = [Attribute(1, "b", TEXT, 20), Attribute(2, "a", TEXT, 20)]
    assert numbers([("b", TEXT), ("a", TEXT)], {1: "a", 2: "b"}, now, 30) == (1, 2)


def test_transaction_numbers_go_round() -> None:
    now = [Attribute(1, "a", INT, 5), Attribute(2, None, 0, 2**32 - 5), Attribute(3, "b", TEXT, 2**32 - 4)]
    assert numbers([("a", INT), ("b", TEXT)], {1: "a", 2: "b"}, now, 10) == (1, 3)


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(Refused, match="a, b, c"):
        numbers([("a", INT), ("b", INT), ("c", INT)], {1: "a"}, [Attribute(1, "a", INT, 5)], 10)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_history_of_columns_is_read_back(data: Any) -> None:
    """Any sequence of adds, drops and renames, announced at any points of it."""
    live: dict[int, str] = {1: "a", 2: "b"}
    before = dict(live)
    catalog: dict[int, tuple[str | None, int]] = {1: ("a", 1), 2: ("b", 1)}
    announced: list[tuple[dict[int, str], int]] = []
    xid = 10
    for _ in range(data.draw(st.integers(1, 8))):
        step = data.draw(st.sampled_from(["add", "drop", "rename", "announce"]))
        xid += 1
        if step == "add":
            free = [name for name in "abcdef" if name not in live.values()]
            name = data.draw(st.sampled_from(free or ["zz"]))
            if name not in live.values():
                live[max(catalog) + 1] = name
                catalog[max(catalog) + 1] = (name, xid)
        elif step == "drop" and len(live) > 1:
            number = data.draw(st.sampled_from(sorted(live)[1:]))
            live.pop(number)
            catalog[number] = (None, xid)
        elif step == "rename":
            number = data.draw(st.sampled_from(sorted(live)))
            free = [name for name in "uvwxyz" if name not in live.values()]
            live[number] = data.draw(st.sampled_from(free))
            catalog[number] = (live[number], xid)
        elif step == "announce":
            announced.append((dict(live), xid))
    now = [Attribute(number, name, TEXT, touched) for number, (name, touched) in sorted(catalog.items())]
    for columns, at in announced:
        found = numbers([(columns[number], TEXT) for number in sorted(columns)], before, now, at)
        kept = {number for number in columns if catalog[number][0] is not None}
        # A column that is gone by now may have been any that is gone by now; nobody sees it any more.
        assert {number for number in found if catalog[number][0] is not None} == kept
        before = dict(zip(found, (columns[number] for number in sorted(columns)), strict=True))


def events(*rows: tuple[int, str, str | None]) -> pa.Table:
    """(key, +, -, =, image): plus an insert, minus a delete, equals an update."""
    kinds = [kind for _, kind, _ in rows]
    return pa.table(
        {
            "k0": pa.array([key for key, _, _ in rows], pa.int64()),
            "put": pa.array([kind != "-" for kind in kinds]),
            "fresh": pa.array([kind == "+" for kind in kinds]),
            "net": pa.array([{"+": 1, "-": -1, "=": 0}[kind] for kind in kinds], pa.int32()),
            "ends": pa.array([kind != "-" for kind in kinds]),
            "loose": pa.array([False] * len(rows)),
            "tier": pa.array([None if kind == "+" else key for key, kind, _ in rows], pa.int64()),
            "c2": pa.array([image for _, _, image in rows], pa.string()),
        }
    )


def test_first_and_last_of_a_key_are_kept() -> None:
    folded = fold(events((1, "+", "a"), (2, "=", "b"), (1, "=", "c"), (2, "-", None), (3, "-", None), (3, "+", "d")))
    assert folded.select(["k0", "fresh", "net", "ends", "c2"]).to_pylist() == [
        {"k0": 1, "fresh": True, "net": 1, "ends": True, "c2": "c"},
        {"k0": 2, "fresh": False, "net": -1, "ends": False, "c2": "b"},
        {"k0": 3, "fresh": False, "net": 0, "ends": True, "c2": "d"},
    ]


_ROWS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from("+-="), st.text("ab", max_size=2)), min_size=1, max_size=30
)


@settings(max_examples=200, deadline=None)
@given(_ROWS, st.integers(0, 30))
def test_folding_parts_gives_the_same_as_folding_everything(rows: list[Any], cut: int) -> None:
    some = [(key, kind, None if kind == "-" else image) for key, kind, image in rows]
    whole = fold(events(*some))
    parts = [fold(part) for part in (events(*some[:cut]), events(*some[cut:])) if len(part)]
    assert fold(joined(parts)).sort_by("k0").to_pylist() == whole.sort_by("k0").to_pylist()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=20), st.just("é" * 9)), min_size=1, max_size=50))
def test_a_bucket_depends_on_the_key_alone(keys: list[str]) -> None:
    table = pa.table({"k0": pa.array(keys)})
    where = dict(zip(keys, buckets(table, 7).tolist(), strict=True))
    again = buckets(pa.table({"k0": pa.array(keys[::-1])}), 7)
    assert again.tolist() == [where[key] for key in keys[::-1]]
    assert np.all((again >= 0) & (again < 7))


def test_rows_from_before_a_column_show_its_default() -> None:
    old = events((1, "+", "a"))
    new = events((2, "+", "b")).append_column("c3", pa.array([5], pa.int32()))
    assert joined([old, new], {3: pa.scalar(7, pa.int32())})["c3"].to_pylist() == [7, 5]
    assert joined([old, new])["c3"].to_pylist() == [None, 5]


def test_a_pump_that_is_behind_makes_fewer_and_larger_commits() -> None:
    pace = Pace(batch=100, flush_seconds=2.0)
    assert pace.is_full(100, 0.0)
    assert not pace.is_full(99, 100.0)
    slow = Pace(batch=100, flush_seconds=2.0, commit_seconds=3.0)
    assert not slow.is_full(100, 1.0)
    assert slow.is_full(100, 3.0)
    assert slow.is_full(500, 0.0)
    assert (slow.pause(1.0, 10), slow.pause(1.0, 100), pace.pause(0.5, 0)) == (2.0, 0.0, 1.5)


_INTEGERS = st.one_of(st.integers(-20, 20), st.integers(-(2**63), 2**63 - 1))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(_INTEGERS, _INTEGERS, st.sampled_from(["a", "b", ""])), max_size=60), st.integers(1, 3))
def test_rows_have_the_same_number_when_their_keys_are_the_same(rows: list[tuple[int, int, str]], width: int) -> None:
    kinds = (pa.int64(), pa.timestamp("us"), pa.string())
    columns = [pa.array([row[at] for row in rows], kinds[at]) for at in range(width)]
    codes, count = encode(columns)
    keys = [row[:width] for row in rows]
    assert count == len(set(keys))
    assert len({*zip(keys, codes.tolist(), strict=True)}) == count
    assert set(codes.tolist()) == set(range(count))
