"""What a seam read looks at, and what Postgres is told, decided without I/O."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from modak.catalog.pk import encode
from modak.catalog.records import Pin
from modak.postgres.model import PgColumn, PgType
from modak.tables.seam.plan import EVERYTHING, NOTHING, SeamPlan, Span, plan_seam
from modak.tables.seam.predicate import (
    All,
    Among,
    Compare,
    Null,
    Predicate,
    Some,
    either,
    every,
    one_of,
    span_of,
    text_literal,
    to_sql,
)
from modak.tables.seam.streams import key_texts

NOW = datetime(2024, 1, 1, tzinfo=UTC)
PIN = Pin(
    pin_id=1,
    table_id=1,
    snapshot_id=7,
    t=200,
    retention_line=100,
    metadata_location="m",
    created_at=NOW,
    expires_at=NOW,
    holder="me",
)


def test_everything_needs_all_parts_within_the_lines() -> None:
    cold = Span(100, 200)
    assert plan_seam(PIN) == SeamPlan(Span(200, None), cold, cold)


def test_a_query_above_the_cut_line_needs_the_heap_alone() -> None:
    assert plan_seam(PIN, Span(200, None)) == SeamPlan(Span(200, None), None, None)
    assert plan_seam(PIN, Span(250, 260)) == SeamPlan(Span(250, 260), None, None)


def test_a_query_below_the_cut_line_needs_no_heap() -> None:
    assert plan_seam(PIN, Span(None, 200)) == SeamPlan(None, Span(100, 200), Span(100, 200))
    assert plan_seam(PIN, Span(150, 151)) == SeamPlan(None, Span(150, 151), Span(150, 151))


def test_nothing_below_the_retention_line_is_looked_for() -> None:
    assert plan_seam(PIN, Span(None, 100)) == SeamPlan(None, None, None)
    assert plan_seam(replace(PIN, retention_line=None), Span(None, 100)).lake == Span(None, 100)


def test_without_a_lake_snapshot_the_heap_and_the_delta_remain() -> None:
    assert plan_seam(replace(PIN, snapshot_id=None)) == SeamPlan(Span(200, None), None, Span(100, 200))
    assert plan_seam(replace(PIN, t=None, snapshot_id=None)) == SeamPlan(EVERYTHING, None, None)


@pytest.mark.parametrize(
    ("predicate", "span"),
    [
        (Compare("ts", "=", 5), Span(5, 6)),
        (Compare("ts", "<", 5), Span(None, 5)),
        (Compare("ts", "<=", 5), Span(None, 6)),
        (Compare("ts", ">", 5), Span(6, None)),
        (Among("ts", (9, 3)), Span(3, 10)),
        (Null("ts"), NOTHING),
        (Null("ts", negated=True), EVERYTHING),
        (Compare("id", "=", 5), EVERYTHING),
        (All((Compare("ts", ">=", 5), Compare("id", "=", 1), Compare("ts", "<", 9))), Span(5, 9)),
        (Some((Compare("ts", "=", 5), Compare("ts", "=", 9))), Span(5, 10)),
        (Some((Compare("ts", "=", 5), Compare("id", "=", 9))), EVERYTHING),
        (All((Compare("ts", "=", 5), Compare("ts", "=", 9))), Span(9, 6)),
        (None, EVERYTHING),
    ],
)
def test_the_range_of_a_filter_on_the_tier_key(predicate: Predicate | None, span: Span) -> None:
    assert span_of(predicate, "ts") == span


def test_a_disjunction_with_an_unknown_side_says_nothing() -> None:
    known = Compare("id", "=", 1)
    assert either((known, None)) is None
    assert every((known, None)) == known


def test_the_values_to_which_a_filter_ties_a_key() -> None:
    assert one_of(All((Among("id", (1, 2)), Compare("id", "=", 1))), "id") == (1,)
    assert one_of(Some((Compare("id", "=", 1), Compare("ts", "=", 1))), "id") is None


def column(name: str, kind: str) -> PgColumn:
    return PgColumn(name, 1, PgType(kind, "scalar"), False, None, False, None, None, False, None)


COLUMNS = [
    column("n", "int8"),
    column("price", "numeric"),
    column('odd"name', "text"),
    column("d", "date"),
    column("at", "timestamptz"),
    column("u", "uuid"),
    column("ratio", "float8"),
    column("yes", "bool"),
    column("doc", "jsonb"),
]


@pytest.mark.parametrize(
    ("predicate", "sql"),
    [
        (Compare("n", ">=", -5), '"n" >= (-5)'),
        (Compare("price", "<", Decimal("1.50")), '"price" < (1.50)::numeric'),
        (Compare('odd"name', "=", "it's \\ x"), "\"odd\"\"name\" = E'it''s \\\\ x'::text"),
        (Compare('odd"name', "<", "a"), None),
        (Compare("d", ">", 0), "\"d\" > '1970-01-01'::date"),
        (Compare("d", ">", 2147483647), None),
        (Compare("at", "=", 1), "\"at\" = '1970-01-01 00:00:00.000001+00'::timestamptz"),
        (
            Compare("u", "=", "00000000-0000-0000-0000-00000000000a"),
            "\"u\" = '00000000-0000-0000-0000-00000000000a'::uuid",
        ),
        (Compare("u", "=", "00000000-0000-0000-0000-00000000000A"), None),
        (Compare("ratio", "=", 1), None),
        (Compare("yes", "=", True), '"yes" = true'),
        (Compare("doc", "=", "{}"), None),
        (Null("doc"), '"doc" IS NULL'),
        (Null("ratio", negated=True), '"ratio" IS NOT NULL'),
        (Among("n", (1, 2)), '"n" IN ((1), (2))'),
        (All((Compare("n", "=", 1), Compare("ratio", "=", 1))), '("n" = (1))'),
        (Some((Compare("n", "=", 1), Compare("ratio", "=", 1))), None),
        (Compare("gone", "=", 1), None),
        (Compare('odd"name', "=", "zero \x00 byte"), None),
    ],
)
def test_what_postgres_is_told(predicate: Predicate, sql: str | None) -> None:
    assert to_sql(predicate, COLUMNS) == sql


def test_a_text_cannot_end_its_literal() -> None:
    assert text_literal("\\'; DROP TABLE x; --") == "E'\\\\''; DROP TABLE x; --'"


def test_composite_keys_come_apart_a_column_at_a_time() -> None:
    import pyarrow as pa

    keys = [("a", "1"), ("b\\", "\x1f"), ("", "x\x1f\\y"), ("new\nline", "")]
    first, second = key_texts(pa.array([encode(key) for key in keys]), 2)
    assert list(zip(first.to_pylist(), second.to_pylist(), strict=True)) == keys
