"""What a verification plans, and that fingerprints tell apart what differs: pure, without any database."""

from __future__ import annotations

import math
import struct
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modak.core.names import TableName
from modak.lake.model import DataFile, LakeFile
from modak.postgres.model import Leaf
from modak.tables.verify import plan
from modak.tables.verify.compare import KINDS, find_differing, in_portions
from modak.tables.verify.fingerprint import BUCKETS, Prints, Tally, prints
from modak.tables.verify.overlay import Hidden
from modak.tables.verify.plan import Bands, plan_bands, plan_files, sample_bands
from modak.tables.verify.work import Answer, Window


def leaf(lower: int | None, upper: int | None) -> Leaf:
    return Leaf(1, "public", f"p_{lower}", lower, upper, False, 1, 1, 1, 1.0, False, "r", False)


def file(lower: int | None, upper: int | None, rows: int = 10) -> LakeFile:
    return LakeFile(DataFile("{}", rows, 1, f"file:///{lower}-{upper}-{rows}"), lower, upper)


def shown(bands: Bands) -> list[tuple[int | None, int, str | None]]:
    return [(band.lower, band.upper, band.leaf.name if band.leaf else None) for band in bands.chosen]


def test_bands_are_cut_at_the_bounds_of_all_partitions_below_the_cut_line() -> None:
    bands = plan_bands(300, None, [(0, 100), (100, 200), (200, 300), (300, 400)], [leaf(100, 200), leaf(200, 300)])
    assert shown(bands) == [(None, 0, None), (0, 100, None), (100, 200, "p_100"), (200, 300, "p_200")]
    assert [bands.at(key) for key in (-5, 0, 99, 100, 299, 300)] == [0, 1, 1, 2, 3, 4]


def test_bands_begin_at_the_retention_line() -> None:
    bands = plan_bands(300, 100, [(0, 100), (100, 200), (200, 300)], [])
    assert shown(bands) == [(100, 200, None), (200, 300, None)]
    assert [bands.at(key) for key in (99, 100, 299, 300)] == [-1, 0, 1, 2]


def test_since_cuts_the_band_that_it_lies_in_and_leaves_out_what_is_below() -> None:
    bands = plan_bands(200, None, [(0, 100), (100, 200)], [leaf(0, 100), leaf(100, 200)], since=50)
    assert shown(bands) == [(50, 100, "p_0"), (100, 200, "p_100")]


def test_a_table_without_a_cut_line_or_with_everything_expired_has_no_bands() -> None:
    assert plan_bands(None, None, [(0, 100)], []).bands == ()
    assert plan_bands(100, 100, [(0, 100)], []).bands == ()


@given(st.integers(1, 40), st.floats(0.01, 1), st.integers())
def test_a_sample_has_its_share_of_the_bands_and_one_at_least(count: int, fraction: float, seed: int) -> None:
    bands = plan_bands(count * 10, 0, [(at * 10, at * 10 + 10) for at in range(count)], [])
    kept = sample_bands(bands, fraction, seed).chosen
    assert len(kept) == max(1, round(count * fraction))


def test_files_of_compared_bands_are_read_whole_and_others_with_all_that_overlap_them() -> None:
    bands = plan_bands(300, None, [(0, 100), (100, 200), (200, 300)], [leaf(200, 300)])
    alone, other, both, compared = file(0, 50), file(50, 99), file(150, 250), file(210, 299)
    groups = plan_files([compared, both, other, alone], bands)
    assert [(group.files, group.whole_rows, group.of) for group in groups] == [
        (((compared, True), (both, True)), True, 0),
        (((alone, True), (other, True), (both, False)), False, 1),
    ]


def test_a_large_group_is_shared_out_by_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "GROUP_ROWS", 15)
    bands = plan_bands(100, None, [(0, 100)], [])
    groups = plan_files([file(0, 60), file(40, 99)], bands)
    assert [(group.residue, group.of, [counted for _, counted in group.files]) for group in groups] == [
        (0, 2, [True, True]),
        (1, 2, [False, False]),
    ]


def test_a_file_where_no_row_should_be_is_looked_at_unless_the_work_is_limited() -> None:
    bands = plan_bands(100, None, [(0, 100)], [leaf(0, 100)])
    assert len(plan_files([file(500, 600)], bands)) == 1
    assert plan_files([file(500, 600)], bands, everything=False) == []


@given(st.sets(st.integers(-50, 50), min_size=1), st.lists(st.integers(-60, 60), min_size=1), st.booleans())
def test_a_window_places_keys_as_all_bands_do(edges: set[int], keys: list[int], expired: bool) -> None:
    ordered = sorted(edges)
    pairs: list[tuple[int | None, int | None]] = [(edge, None) for edge in ordered]
    bands = plan_bands(60, ordered[0] if expired else None, pairs, [])
    window = Window.of(bands, min(keys), max(keys))
    assert window is not None
    placed = dict(zip(keys, window.place(np.array(keys)).tolist(), strict=True))
    for key in keys:
        there = bands.at(key)
        assert bool(window.outside(np.array([key]))[0]) == (not 0 <= there < len(bands.bands))
        if 0 <= there < len(bands.bands):
            assert placed[key] == there


ODD: list[tuple[pa.DataType, list[Any]]] = [
    (pa.string(), [None, "", "0", "NULL", "a", "a\x00", "x" * 100, "x" * 101]),
    (pa.binary(), [None, b"", b"\x00", b"\x00\x00", b"0"]),
    (pa.int64(), [None, 0, 1, -1, 2**63 - 1, -(2**63)]),
    (pa.int32(), [None, 0, 1, -1]),
    (pa.bool_(), [None, True, False]),
    (pa.float64(), [None, 0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324]),
    (pa.float32(), [None, 0.0, -0.0, math.nan, math.inf]),
    (pa.decimal128(38, 2), [None, Decimal("0.00"), Decimal("-0.01"), Decimal("0.01"), Decimal("9" * 36)]),
    (pa.list_(pa.int32()), [None, [], [None], [None, None], [0], [1, 2], [2, 1], [1, 2, None]]),
    (pa.list_(pa.string()), [None, [], [""], [None], ["a", "b"], ["ab"], ["b", "a"]]),
]


@pytest.mark.parametrize(("kind", "values"), ODD, ids=[str(kind) for kind, _ in ODD])
def test_every_two_different_values_have_different_fingerprints_wherever_they_stand(
    kind: pa.DataType, values: list[Any]
) -> None:
    array = pa.array(values, kind)
    found = prints([array])
    assert len(set(found.first.tolist())) == len(set(found.second.tolist())) == len(values)
    for at in range(len(values)):
        alone = prints([pa.array(values[at : at + 1], kind)])
        sliced = prints([array.slice(at, 1)])
        assert alone.first[0] == sliced.first[0] == found.first[at]


def test_every_nan_is_the_same_nan() -> None:
    odd = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000123))[0]
    first, second = prints([pa.array(np.array([math.nan, odd]))]).first.tolist()
    assert first == second


def test_columns_do_not_take_each_others_place() -> None:
    one, two = pa.array([1, 2, None]), pa.array([2, 1, 1])
    assert not (prints([one, two]).first == prints([two, one]).first).any()


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2)), max_size=40), st.randoms())
def test_tallies_are_equal_exactly_when_the_rows_are(rows: list[tuple[int, int]], random: Any) -> None:
    def tally(some: list[tuple[int, int]]) -> Tally:
        made = Tally()
        for part in (some[:7], some[7:]):
            if part:
                keys, values = (pa.array(column) for column in zip(*part, strict=True))
                made.add(0, prints([keys]), prints([keys, values]))
        return made

    shuffled = list(rows)
    random.shuffle(shuffled)
    assert list(tally(rows).differing(tally(shuffled), 0)) == []
    assert list(tally(rows).differing(tally([*rows, (7, 1)]), 0)) != []
    assert tally(rows).rows(0) == len(rows)


@given(
    st.dictionaries(st.integers(0, 30), st.integers(0, 2)),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), max_size=30),
)
def test_differing_keys_are_those_of_a_plain_comparison(heap: dict[int, int], cold: list[tuple[int, int]]) -> None:
    def answer(side: Any, rows: list[tuple[int, int]]) -> Answer:
        made = Answer(side)
        if rows:
            keys, values = (pa.array(column) for column in zip(*rows, strict=True))
            made.gathered.append((prints([keys]), prints([keys, values])))
        return made

    expected = {}
    for key in {*heap, *(key for key, _ in cold)}:
        there = [value for other, value in cold if other == key]
        if key not in heap and len(there) == 1:
            expected[key] = "extra"
        elif not there:
            expected[key] = "missing"
        elif len(there) > 1:
            expected[key] = "duplicated"
        elif there != [heap[key]]:
            expected[key] = "changed"
    found = find_differing([answer("heap", list(heap.items())), answer("cold", cold)])
    names = {int(prints([pa.array([key])]).first[0]): key for key in range(31)}
    kinds = {names[key]: KINDS[kind] for key, kind in zip(found.keys.tolist(), found.kinds.tolist(), strict=True)}
    assert kinds == expected


def test_the_delta_hides_exactly_its_keys() -> None:
    keys = prints([pa.array(range(100))])
    some = keys[np.arange(0, 100, 7)]
    order = np.argsort(some.first)
    hides = Hidden(some[order]).hides(keys)
    assert np.flatnonzero(hides).tolist() == list(range(0, 100, 7))
    assert not Hidden(Prints(*(np.zeros(0, np.uint64),) * 2)).hides(keys).any()


def test_differing_buckets_come_in_portions_that_fit() -> None:
    portions = in_portions([(0, 1, 60), (0, 2, 60), (1, 2, 30), (1, 3, 500)], most=100)
    assert portions == [{0: {1}}, {0: {2}, 1: {2}}, {1: {3}}]
    assert BUCKETS == 1024


def test_a_band_belongs_to_the_partition_that_covers_it() -> None:
    bands = plan_bands(200, None, [(0, 50), (50, 200)], [leaf(None, 100), leaf(100, 200)])
    assert [band.leaf for band in bands.bands] == [
        TableName("public", "p_None"),
        TableName("public", "p_None"),
        TableName("public", "p_None"),
        TableName("public", "p_100"),
    ]
