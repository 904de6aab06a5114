"""Registry, manifest, plans and values, decided without I/O."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modak.core.errors import Conflict, ModakError, Refused
from modak.entities.config import CDCConfig, CompactionConfig
from modak.entities.evolution import keeps_values, with_former
from modak.entities.manifest import (
    Manifest,
    ManifestEntry,
    StoredAttribute,
    giving_up,
    listing_deltas,
    replacing_base,
    stored,
    swapping,
)
from modak.entities.plan import (
    KeyRange,
    Nothing,
    Promotion,
    Rewrite,
    as_row_id,
    init_rows,
    plan_compaction,
    plan_flush,
    plan_gc,
    ranges,
)
from modak.entities.registry import Attribute, load_registry, read_registry
from modak.entities.values import typed
from tests.entities.world import INVOICE, changed

IDS = st.integers(0, 2**128 - 1).map(as_row_id)


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"schema_id": 1}, "attributes"),
        ({"schema_id": -1, "attributes": {}}, "schema_id"),
        (changed(Title={"id": 9, "type": "text"}), "case is folded"),
        (changed(row_id={"id": 9, "type": "text"}), "case is folded"),
        (changed(x={"id": 3, "type": "text"}), "the id 3"),
        (changed(x={"id": 9, "type": "text", "column": "text_01"}), "the column text_01"),
        (changed(x={"id": 9, "type": "blob"}), "'blob' is not a type"),
        (changed(x={"id": 9, "type": "text", "column": "text_11"}), "no column 'text_11'"),
        (changed(x={"id": 9, "type": "uuid", "column": "smallint_01"}), "cannot hold a uuid"),
        (changed(x={"id": 9, "type": "bool", "column": "text_02", "encoding": "iso8601"}), "encoded as bool_text"),
        (changed(x={"id": 9, "type": "text", "encoding": "unix_ms"}), "belongs to a column"),
        (changed(x={"id": 9, "type": "text", "items": "text"}), "items"),
        (changed(x={"id": 9, "type": "numeric", "precision": 39}), "precision"),
        (changed(x={"id": 9, "type": "text", "colour": 1}), "'colour'"),
        (changed(**{" x": {"id": 9, "type": "text"}}), "not the name"),
        (changed(x={"id": 40_000, "type": "text"}), "id"),
    ],
)
def test_a_registry_that_cannot_be_meant_is_refused_by_name(described: Any, said: str) -> None:
    with pytest.raises(Refused, match=said):
        read_registry([described])


def test_a_registry_is_a_file_or_a_folder(tmp_path: Any) -> None:
    (tmp_path / "a.json").write_text(json.dumps(INVOICE))
    (tmp_path / "b.json").write_text(json.dumps({**INVOICE, "schema_id": 8, "name": "other"}))
    assert [each.schema_id for each in load_registry(tmp_path).schemas] == [7, 8]
    found = load_registry(tmp_path / "a.json")
    assert found.named("Invoice") == found.resolve(7)
    assert [each.name for each in found.resolve(7).attributes] == sorted(INVOICE["attributes"])
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(Refused, match="not JSON"):
        load_registry(tmp_path)
    with pytest.raises(Refused, match=r"none\.json"):
        load_registry(tmp_path / "none.json")


ENTRIES = st.builds(
    ManifestEntry,
    path=st.text(min_size=1),
    min_row_id=IDS,
    max_row_id=IDS,
    min_time_slot=st.integers(0, 10**6),
    size_bytes=st.integers(0, 10**12),
    level=st.sampled_from(["base", "delta"]),
    row_count=st.integers(0, 10**9),
    seq=st.integers(0, 100),
    attributes=st.dictionaries(st.text(), st.builds(StoredAttribute, st.integers(0, 99), st.text(), st.text())),
)


@given(st.builds(Manifest, schema_id=st.just(7), base=st.tuples(ENTRIES), delta=st.lists(ENTRIES).map(tuple)))
def test_a_manifest_reads_back_as_it_was_written(manifest: Manifest) -> None:
    assert Manifest.from_bytes(manifest.to_bytes(), 7, "m") == manifest


def test_a_manifest_of_the_seeds_own_form_is_read_and_a_foreign_one_refused() -> None:
    seed = {"schema_id": 7, "base": [{"path": "b", "min_row_id": "0", "level": "base"}], "delta": [{"path": "d"}]}
    manifest = Manifest.from_bytes(json.dumps(seed).encode(), 7, "m")
    assert (manifest.version, manifest.paths) == (0, {"b", "d"})
    assert "delta" not in json.loads(replace(manifest, delta=()).to_bytes())
    with pytest.raises(ModakError, match="that of schema 7, not of 8"):
        Manifest.from_bytes(json.dumps(seed).encode(), 8, "m")
    for damaged in (b"", b"[]", b'{"schema_id": 7, "base": [{}]}'):
        with pytest.raises(ModakError, match="cannot be read"):
            Manifest.from_bytes(damaged, 7, "m")


def entry(path: str, rows: int = 10, **more: Any) -> ManifestEntry:
    return ManifestEntry(path, row_count=rows, **{"min_row_id": as_row_id(0), "max_row_id": as_row_id(9), **more})


def test_changes_of_a_manifest_keep_the_order_of_versions() -> None:
    start = Manifest(7)
    one = listing_deltas(start, [entry("d1")]).next("a")
    two = listing_deltas(one, [entry("d2")]).next("b")
    assert [each.seq for each in two.delta] == [1, 2]
    assert (two.version, two.last_flush_seq, two.ops) == (2, 2, ("a", "b"))
    merged = swapping(two, ["d1", "d2"], [entry("b1", seq=2)], 5).next("c")
    assert (merged.last_flush_seq, [each.path for each in merged.base], merged.delta) == (2, ["b1"], ())
    assert [(each.path, each.removed_at) for each in merged.removed] == [("d1", 5), ("d2", 5)]
    with pytest.raises(Conflict, match="not listed any more"):
        swapping(merged, ["d1"], [], 6)
    again = replacing_base(merged, [entry("b2")], 7).next("d")
    assert (again.last_flush_seq, [each.path for each in again.base]) == (4, ["b2"])
    with pytest.raises(Conflict, match="taken for the leftovers"):
        listing_deltas(giving_up(again, ["d9"], 8), [entry("d9")])
    assert giving_up(again, ["b2", "d1"], 9) == again


def test_the_thresholds_of_a_flush() -> None:
    config = CDCConfig(min_records=10, max_age_ms=1000)
    assert not plan_flush(7, 0, 0, 5000, config).flush
    assert not plan_flush(7, 9, 4001, 5000, config).flush
    assert plan_flush(7, 10, 4999, 5000, config).flush
    assert plan_flush(7, 1, 4000, 5000, config).flush
    assert not plan_flush(7, 1, 9000, 5000, config).flush


def test_what_compaction_decides() -> None:
    config = CompactionConfig()
    base = entry("b", 100, level="base", seq=1)
    assert isinstance(plan_compaction(Manifest(7, (base,)), config, 2), Nothing)
    few = Manifest(7, (base,), (entry("d", 5, level="delta", seq=2),))
    assert isinstance(plan_compaction(few, config, 2), Nothing)
    assert isinstance(plan_compaction(replace(few, delta=(entry("d", 6),)), config, 2), Rewrite)
    assert isinstance(plan_compaction(Manifest(7, (), (entry("d", 1),)), config, 2), Rewrite)
    large = entry("d", 1, size_bytes=256 << 20)
    assert isinstance(plan_compaction(Manifest(7, (base,), (large,)), config, 2), Promotion)
    buried = replace(large, tombstones=1)
    assert isinstance(plan_compaction(Manifest(7, (base,), (buried,)), config, 2), Rewrite)


@given(st.lists(st.tuples(IDS, IDS).map(sorted), min_size=1, max_size=8), st.integers(1, 5), IDS)
def test_ranges_of_a_rewrite_meet_every_key_once(spans: list[list[str]], lanes: int, some: str) -> None:
    delta = tuple(
        entry(f"d{at}", 10, min_row_id=low, max_row_id=high, size_bytes=10) for at, (low, high) in enumerate(spans)
    )
    planned = plan_compaction(Manifest(7, (), delta), CompactionConfig(max_parallel_files=lanes), 1)
    assert isinstance(planned, Rewrite)
    holders = [
        part
        for part in planned.ranges
        if (part.lower is None or part.lower <= some) and (part.upper is None or some < part.upper)
    ]
    assert len(holders) == 1
    for each in delta:
        if each.min_row_id <= some <= each.max_row_id:
            assert holders[0].meets(each)


def test_ranges_have_open_ends_and_no_gaps() -> None:
    assert ranges([]) == (KeyRange(None, None),)
    assert ranges(["b", "a", "a"]) == (KeyRange(None, "a"), KeyRange("a", "b"), KeyRange("b", None))


def test_an_init_takes_batches_or_what_a_task_can_hold() -> None:
    assert init_rows(CDCConfig(target_file_size_mb=0, batch_size=7), 20, 2) == 7
    assert init_rows(CDCConfig(), 1_000_000, 2) == 500_000
    assert init_rows(CDCConfig(estimated_row_bytes=1 << 20), 1_000_000, 2) == 512
    assert init_rows(CDCConfig(), 100, 2) == 20_000


def test_gc_deletes_what_was_removed_long_ago_and_notices_the_rest() -> None:
    manifest = giving_up(Manifest(7, (entry("b"),)), ["old"], 0)
    manifest = giving_up(manifest, ["young"], 500)
    planned = plan_gc(manifest, ["b", "old", "young", "stray"], 1000, 600)
    assert (planned.delete, planned.notice, planned.waiting) == (("old",), ("stray",), ("young",))


@pytest.mark.parametrize(
    ("was", "now", "kept"),
    [
        ("smallint", "bigint", True),
        ("bigint", "integer", False),
        ("integer", "numeric(12,2)", True),
        ("integer", "numeric(11,2)", False),
        ("numeric(10,2)", "numeric(12,4)", True),
        ("numeric(10,2)", "numeric(10,4)", False),
        ("numeric(5,0)", "bigint", False),
        # The values stand in value_numeric, and texts are looked for in value_text.
        ("bigint", "text", False),
        ("smallint", "list<text>", False),
        # A text is as somebody wrote it, a UUID in lower case.
        ("uuid", "text", False),
        ("text", "bigint", False),
        # A day may be written without a time and an offset.
        ("date", "datetime", False),
        ("date", "list<datetime>", False),
        ("date", "list<date>", True),
        ("datetime", "date", False),
        ("text", "list<text>", True),
        ("list<smallint>", "list<bigint>", True),
        ("list<text>", "text", False),
        ("bool", "text", False),
    ],
)
def test_which_types_hold_the_values_of_others(was: str, now: str, kept: bool) -> None:
    assert keeps_values(was, now) is kept


def test_days_that_stand_as_milliseconds_may_become_moments() -> None:
    assert keeps_values("date", "datetime", "bigint_01/unix_ms")
    assert not keeps_values("date", "datetime", "text_01/iso8601")


def held(seq: int, **attributes: tuple[int, str]) -> ManifestEntry:
    return entry(f"f{seq}", seq=seq, attributes={name: StoredAttribute(*each) for name, each in attributes.items()})


def test_a_rewrite_carries_on_what_the_registry_does_not_describe() -> None:
    schema = read_registry([changed(paid={"id": 60, "type": "text"}, tags=None, qty=None)]).resolve(7)
    sources = [
        held(3, paid=(60, "text"), labels=(5, "list<text>"), qty=(4, "bigint"), cost=(9, "numeric(5,2)")),
        held(1, title=(1, "text"), paid=(6, "bool"), tags=(5, "text"), qty=(4, "smallint")),
    ]
    widened = with_former(schema, sources)
    assert [each for each in widened.attributes if each in schema.attributes] == list(schema.attributes)
    former = {each.name: (each.id, each.type_name) for each in widened.attributes if each not in schema.attributes}
    # The latest name and the widest type; a name that somebody else has now gives way.
    assert former == {
        "labels": (5, "list<text>"),
        "qty": (4, "bigint"),
        "cost": (9, "numeric(5,2)"),
        "~6": (6, "bool"),
    }
    assert stored(widened.attributes)["cost"] == StoredAttribute(9, "numeric(5,2)")
    assert [each.name for each in widened.attributes] == sorted(each.name for each in widened.attributes)
    assert with_former(widened, sources) == widened


def test_a_former_attribute_keeps_its_place_and_one_that_nobody_can_hold_is_refused() -> None:
    schema = read_registry([changed(due=None)]).resolve(7)
    before = stored(read_registry([INVOICE]).resolve(7).attributes)
    assert stored(with_former(schema, [entry("f", attributes=before)]).attributes) == before
    with pytest.raises(Refused, match="as smallint and as text"):
        with_former(schema, [held(1, odd=(90, "smallint")), held(2, odd=(90, "text"))])
    with pytest.raises(Refused, match="'odd' as 'blob'"):
        with_former(schema, [held(1, odd=(90, "blob"))])


def values(attribute: Attribute, raw: list[str | None]) -> list[Any]:
    """The values, with the word «unfit» for those that are marked so."""
    found, unfit = typed(attribute, pa.array(raw, pa.string()))
    marks = unfit.to_pylist() if unfit is not None else [False] * len(raw)
    return ["unfit" if mark else value for value, mark in zip(found.to_pylist(), marks, strict=True)]


@pytest.mark.parametrize(
    ("kind", "raw", "expected"),
    [
        ("smallint", ["5", "-32768", None], [5, -32768, None]),
        ("smallint", ["5.00", "1.5", "70000", "x", None, "007"], [5, "unfit", "unfit", "unfit", None, 7]),
        ("bigint", ["9223372036854775807", "9223372036854775808"], [2**63 - 1, "unfit"]),
        ("bigint", ["9" * 40, "1"], ["unfit", 1]),
        ("smallint", ["0x10", "5"], ["unfit", 5]),
        ("bigint", ["0xFFFFFFFFFFFFFFFF", "0X1", "", "-", "7"], [*["unfit"] * 4, 7]),
        ("datetime", ["0x10", "1e3"], ["unfit"] * 2),
        ("bool", ["true", "FALSE", "1", "0", "yes", None], [True, False, True, False, "unfit", None]),
        ("uuid", ["A" * 8 + "-0000-0000-0000-" + "0" * 12, "x"], ["a" * 8 + "-0000-0000-0000-" + "0" * 12, "unfit"]),
        ("datetime", ["5", "1970-01-01T00:00:01Z"], [5, 1000]),
        ("datetime", ["1970-01-01T01:00:00+01:00", "1970-01-01 00:00:00.5-00:30"], [0, 1_800_500]),
        ("datetime", ["1970-01-01T00:00:00", "1970-01-01", "2026-02-30T00:00:00Z"], ["unfit"] * 3),
        ("datetime", ["1969-12-31T23:59:59.999999Z", "1970-01-01T00:00Z"], [-1, 0]),
        ("date", ["1970-01-02", "1970-13-01", "1970-01-02T00:00:00Z"], [86_400_000, "unfit", 86_400_000]),
    ],
)
def test_texts_become_values_or_are_told(kind: str, raw: list[str | None], expected: list[Any]) -> None:
    assert values(Attribute("a", 1, kind), raw) == expected


def test_numerics_fit_in_all_their_digits_or_not_at_all() -> None:
    money = Attribute("a", 1, "numeric", precision=6, scale=2)
    raw = ["1.5", "1.50", "1.505", "9999.99", "10000", "NaN", "-0.10", "1.5000", None, "5.", "0001.5"]
    expected = [Decimal("1.50")] * 2 + ["unfit", Decimal("9999.99"), "unfit", "unfit", Decimal("-0.10")]
    assert values(money, raw) == [*expected, Decimal("1.50"), None, Decimal("5.00"), Decimal("1.50")]
    whole = Attribute("a", 1, "numeric", precision=3, scale=0)
    assert values(whole, ["999", "1000", "5.0", "0.5"]) == [Decimal(999), "unfit", Decimal(5), "unfit"]


def test_what_is_no_number_is_told_and_not_taken_for_zero() -> None:
    money = Attribute("a", 1, "numeric", precision=6, scale=2)
    assert values(money, ["", "-", "+", ".", "-.", "1e3", "0x10"]) == ["unfit"] * 7
    assert values(money, ["0.", ".0", "-0", "+.5", "+5", "000"]) == [*[Decimal(0)] * 3, Decimal("0.5"), 5, 0]
    # The same numbers one by one, and without company that needs a closer look.
    assert [values(money, [text]) for text in ("1e3", "+5", "")] == [["unfit"], [Decimal(5)], ["unfit"]]


@pytest.mark.parametrize("kind", ["date", "datetime"])
def test_a_text_in_a_column_of_iso_texts_is_never_a_number_of_milliseconds(kind: str) -> None:
    when = Attribute("a", 1, kind, column="text_01", encoding="iso8601")
    raw = ["20260101", "2026", "5", None, "1970-01-01T00:00:01Z"]
    assert values(when, raw) == ["unfit", "unfit", "unfit", None, 1000]
    assert values(when, raw[:2]) == ["unfit", "unfit"]


@st.composite
def numbers(draw: st.DrawFn) -> tuple[int, list[Decimal | None]]:
    """A scale, and numbers of up to 38 digits with no more places than that."""
    scale = draw(st.integers(0, 38))

    digits = st.integers(1, 38).flatmap(lambda count: st.integers(1 - 10**count, 10**count - 1))
    number = st.tuples(digits, st.integers(0, scale)).map(lambda each: Decimal(f"{each[0]}E-{each[1]}"))
    return scale, draw(st.lists(st.one_of(st.none(), number), max_size=20))


@given(numbers())
def test_a_number_that_fits_comes_out_as_itself(drawn: tuple[int, list[Decimal | None]]) -> None:
    scale, wanted = drawn
    wide = Attribute("a", 1, "numeric", precision=38, scale=scale)
    raw = [None if number is None else format(number, "f") for number in wanted]
    for number, value in zip(wanted, values(wide, raw), strict=True):
        whole = "" if number is None else format(number.copy_abs(), "f").partition(".")[0].lstrip("0")
        assert value == ("unfit" if len(whole) > 38 - scale else number)


def test_a_number_never_becomes_another_one_by_its_scale() -> None:
    wide = Attribute("a", 1, "numeric")
    assert values(wide, ["12345678901234567890123456789012345678", "1"]) == ["unfit", Decimal(1)]
    fits = "1234567890123456789012345678.0123456789"
    assert values(wide, [fits, fits + "000", "-" + fits]) == [Decimal(fits), Decimal(fits), Decimal("-" + fits)]
