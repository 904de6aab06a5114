"""What becomes of each source, decided without any I/O."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modak.core.axis import Axis
from modak.core.names import TableName
from modak.lake.iceberg.buckets import Bucket, one_bucket
from modak.lake.mapping import NAME_MAPPING, extended, file_names, misnamed
from modak.lake.model import LakeColumn, Layout
from modak.tables.ingest.inputs import Source
from modak.tables.ingest.plan import Facts, IngestPlan, Room, plan_ingest

ROOM = Room(Axis.INTEGER, 100, 1000, ((500, 600),))
TABLE = TableName("public", "events")


def _facts(name: str = "a", lower: int | None = 200, upper: int | None = 300, **more: Any) -> Facts:
    kind = more.pop("kind", "parquet")
    source = Source(f"file:///{name}", 10, "v1", kind, name)
    return Facts(source, more.pop("rows", 5), lower=lower, upper=upper, one_partition=more.pop("one", True), **more)


def _plan(*facts: Facts, known: set[tuple[str, str]] | None = None, rewrite: bool = False) -> IngestPlan:
    return plan_ingest(TABLE, ROOM, facts, known or set(), rewrite=rewrite)


def test_a_file_that_proves_everything_is_adopted() -> None:
    plan = _plan(_facts())
    assert ([one.source.shown for one in plan.adopt], plan.rewrite, plan.refusals) == (["a"], (), ())


@pytest.mark.parametrize(
    ("lower", "upper", "says"),
    [
        (900, 1000, "not below the cut-line 1000"),
        (99, 200, "below the retention line 100"),
        (450, 500, "a partition that the heap still has (500 to 600)"),
        (599, 700, "a partition that the heap still has"),
    ],
)
def test_one_file_outside_of_the_room_is_refused_also_with_rewrite(lower: int, upper: int, says: str) -> None:
    plan = _plan(_facts("good"), _facts("bad", lower, upper), rewrite=True)
    assert [one.source for one in plan.refusals] == ["bad"]
    assert says in plan.refusals[0].reason


@pytest.mark.parametrize(
    "rough",
    [_facts(one=False), _facts(lower=None, upper=None), _facts(rough=("column id is int32, the table's is long",))],
)
def test_what_cannot_be_adopted_is_rewritten_when_asked_for(rough: Facts) -> None:
    assert _plan(rough).refusals
    plan = _plan(rough, rewrite=True)
    assert (plan.refusals, len(plan.rewrite)) == ((), 1)
    assert plan.why["a"]


def test_json_lines_are_always_written() -> None:
    assert len(_plan(_facts(kind="jsonl", lower=None, upper=None, rows=0)).rewrite) == 1


def test_the_same_version_is_known_and_another_is_not() -> None:
    assert len(_plan(_facts(), known={("file:///a", "v1"), ("file:///a", "v2")}).known) == 1
    assert len(_plan(_facts(), known={("file:///a", "v0")}).adopt) == 1


def test_an_empty_file_brings_nothing() -> None:
    plan = _plan(_facts(rows=0))
    assert (plan.adopt, plan.rewrite, plan.refusals) == ((), (), ())


def test_a_name_mapping_grows_and_never_gives_a_name_away() -> None:
    columns = [LakeColumn("id", "long", True, 1), LakeColumn("tags", "list<string>", False, 2, 3)]
    first = extended({}, columns, ["id", "tags"])
    assert json.loads(first[NAME_MAPPING]) == [
        {"field-id": 1, "names": ["id"]},
        {"field-id": 2, "names": ["tags"], "fields": [{"field-id": 3, "names": ["element"]}]},
    ]
    assert extended(first, columns, ["id"]) == {}
    anew = [LakeColumn("id", "long", True, 1), LakeColumn("tags", "string", False, 7)]
    assert misnamed(first, anew, ["id", "tags"]) == ("tags",)
    assert file_names(first) == {1: ("id",), 2: ("tags",)}
    assert file_names({}) is None


def test_a_file_lies_in_one_bucket_or_in_none() -> None:
    layout = Layout("truncate", 100, "ts")
    assert one_bucket(-100, -1, "long", layout, ()) == Bucket(-100)
    assert one_bucket(-1, 0, "long", layout, ()) is None
    assert one_bucket(0, 10, "date", Layout("month", None, "d"), ()) == Bucket(0)
    assert one_bucket(5, 500, "long", Layout(None, None, "ts"), ()) == Bucket(None)
    assert one_bucket(5, 500, "long", Layout(None, None, "ts"), (100,)) is None
