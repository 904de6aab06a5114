"""Locating rows by key: against a model that compares every row with every key."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modak.core import faults
from modak.core.faults import Fault, InjectedFault
from modak.lake.changes import Range
from modak.lake.decode import arrow_schema
from modak.lake.iceberg.files import FileWriter
from modak.lake.iceberg.locate import KeyWriter, Locator, look_up
from modak.lake.iceberg.vectors import read_vector, vector_uri, write_vector
from modak.lake.locate import KeyFile, LocatedFile, Lookup, plan_lookups
from modak.lake.match import KeySet
from modak.lake.model import DataFile, LakeColumn, LakeFile, LakeName, Layout

NAME = LakeName(("modak", "public"), "events")
MIDNIGHT = datetime.fromisoformat("1969-12-31T23:59:59.999999")
ODD = ["", "a", "b\\", "\\", "\x1f", "a\x1fb", "a\\\x1fb", "ä", "日本", "a" * 40]
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "long": st.sampled_from([0, 1, 2, 3, -1, 2**63 - 1, -(2**63), 10**12]),
    "int": st.integers(-5, 5),
    "string": st.sampled_from(ODD),
    "uuid": st.integers(0, 5).map(lambda n: UUID(int=n << 90 | n).bytes),
    "date": st.integers(-3, 3).map(lambda n: date(2024, 1, 1) + timedelta(days=n)),
    "timestamptz": st.integers(-3, 3).map(lambda n: datetime(2024, 1, 1, tzinfo=UTC) + timedelta(microseconds=n)),
    "timestamp": st.integers(-3, 3).map(
        lambda n: datetime.fromisoformat("1969-12-31T23:59:59.999999") + timedelta(days=n)
    ),
    "binary": st.binary(max_size=2),
    "decimal(10,2)": st.integers(-4, 4).map(lambda n: Decimal(n).scaleb(-2)),
    "boolean": st.booleans(),
}


class Lake:
    """The files of one snapshot."""

    def __init__(self, files: Sequence[LakeFile]) -> None:
        self.found = list(files)

    def files(
        self, name: LakeName, snapshot_id: int, *, column: str | None = None, rows: Range | None = None
    ) -> Iterator[LakeFile]:
        return iter(self.found)


def here(tasks: Sequence[Lookup]) -> list[tuple[LocatedFile, ...]]:
    return [look_up(task) for task in tasks]


def column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if isinstance(kind, pa.UuidType):
        return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))
    return pa.array(values, kind)


def batch(rows: Sequence[tuple[Any, ...]], columns: Sequence[LakeColumn]) -> pa.RecordBatch:
    schema = arrow_schema(columns)
    made = [column([row[at] for row in rows], field.type) for at, field in enumerate(schema)]
    return pa.RecordBatch.from_arrays(made, schema=schema)


def write(
    folder: str, rows: Sequence[tuple[Any, ...]], columns: Sequence[LakeColumn], gone: set[int], task: str
) -> LakeFile:
    with FileWriter(folder, columns, Layout(None, None, "t"), task=task, tier_key="t") as writer:
        writer.write(batch(rows, columns))
        (file,) = writer.close()
    keys = [row[-1] for row in rows]
    vectors = (write_vector(vector_uri(folder, task), gone, file),) if gone else ()
    return LakeFile(file, min(keys), max(keys), 1, vectors)


def write_keys(folder: str, rows: Sequence[tuple[Any, ...]], columns: Sequence[LakeColumn], task: str) -> KeyFile:
    with KeyWriter(f"{folder}/{task}.arrow", arrow_schema(columns), "t") as writer:
        writer.write(batch(rows, columns))
        return writer.close()


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[LakeColumn], list[list[Any]], list[set[int]], list[Any]]:
    kinds = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=3))
    columns = [LakeColumn(f"k{at}", kind, True, at + 1) for at, kind in enumerate(kinds)]
    columns.append(LakeColumn("t", "long", True, 9))
    row = st.tuples(*(VALUES[kind] for kind in kinds), st.integers(0, 4))
    files = draw(st.lists(st.lists(row, min_size=1, max_size=20), min_size=1, max_size=3))
    gone = [draw(st.sets(st.integers(0, len(rows) - 1))) for rows in files]
    stored = [one for rows in files for one in rows]
    keys = draw(st.lists(st.one_of(st.sampled_from(stored), row), min_size=1, max_size=25))
    return columns, files, gone, keys


@settings(max_examples=150, deadline=None)
@given(table=tables(), shares=st.integers(1, 3))
def test_exactly_the_rows_with_one_of_the_keys_are_found(table: Any, shares: int) -> None:
    columns, files, gone, keys = table
    with tempfile.TemporaryDirectory() as folder:
        found = [write(folder, rows, columns, gone[at], str(at)) for at, rows in enumerate(files)]
        parts = [keys[at::shares] for at in range(shares) if keys[at::shares]]
        written = [write_keys(folder, part, columns, f"keys-{at}") for at, part in enumerate(parts)]
        located = Locator(Lake(found), NAME, written, columns, "t", folder, here).at(1)
        results = {result.path: result for result in located.files}
        for at, rows in enumerate(files):
            expected = {n for n, row in enumerate(rows) if row in keys} - gone[at]
            result = results.get(found[at].file.path)
            assert (result.rows if result else 0) == len(expected)
            if expected:
                assert result is not None
                assert result.vector is not None
                assert set(read_vector(result.vector)) == expected | gone[at]
                assert result.replaced == found[at].vectors
            else:
                assert result is None or result.vector is None


def test_a_file_that_is_as_it_was_is_not_read_again(tmp_path: Path) -> None:
    columns = [LakeColumn("id", "long", True, 1), LakeColumn("t", "long", True, 2)]
    folder = f"file://{tmp_path}"
    files = [write(folder, [(n, at) for n in range(10)], columns, set(), str(at)) for at in range(3)]
    asked: list[str] = []

    def run(tasks: Sequence[Lookup]) -> list[tuple[LocatedFile, ...]]:
        asked.extend(found.file.path for task in tasks for found in task.files)
        return here(tasks)

    lake = Lake(files)
    locator = Locator(lake, NAME, [write_keys(folder, [(3, 0), (3, 1)], columns, "keys")], columns, "t", folder, run)
    first = locator.at(1)
    assert sorted(asked) == sorted(found.file.path for found in files[:2])
    asked.clear()
    # Somebody rewrites the second file and gives the first one a vector.
    lake.found[0] = write_vectored(lake.found[0], {5}, folder)
    lake.found[1] = write(folder, [(n, 1) for n in range(9, -1, -1)], columns, set(), "rewritten")
    second = locator.at(2)
    assert sorted(asked) == sorted(found.file.path for found in lake.found[:2])
    assert (first.rows, second.rows) == (2, 2)
    assert {v.data_file: set(read_vector(v)) for v in second.vectors} == {
        lake.found[0].file.path: {3, 5},
        lake.found[1].file.path: {6},
    }
    asked.clear()
    assert locator.at(3).files == second.files
    assert asked == []


def write_vectored(found: LakeFile, gone: set[int], folder: str) -> LakeFile:
    return LakeFile(found.file, found.lower, found.upper, 2, (write_vector(vector_uri(folder, "v"), gone, found.file),))


def test_nothing_is_found_without_keys_or_without_a_snapshot(tmp_path: Path) -> None:
    columns = [LakeColumn("t", "long", True, 2)]
    nothing = Locator(Lake([]), NAME, [], columns, "t", str(tmp_path), here)
    assert (nothing.at(1).files, nothing.at(None).files) == ((), ())


def test_tasks_get_similar_numbers_of_rows_and_only_the_keys_of_their_files() -> None:
    files = [LakeFile(DataFile("{}", rows, 1, f"f{at}"), at * 10, at * 10 + 9) for at, rows in enumerate([9, 5, 4, 8])]
    keys = [KeyFile("low", 3, 0, 9), KeyFile("high", 3, 12, 39)]
    one, other = plan_lookups(files, keys, (), "t", "folder", least_tasks=2)
    assert [[found.file.path for found in task.files] for task in (one, other)] == [["f0", "f1"], ["f2", "f3"]]
    assert (one.rows, other.rows) == (14, 12)
    assert [key.uri for key in one.keys] == ["low", "high"]
    assert [key.uri for key in other.keys] == ["high"]
    assert plan_lookups(files, [KeyFile("none", 1, 100, 200)], (), "t", "folder") == ()
    unknown = LakeFile(DataFile("{}", 1, 1, "unknown"))
    assert plan_lookups([unknown], keys, (), "t", "folder")[0].keys == tuple(keys)


@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1),
    others=st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))),
)
def test_sparse_integers_are_found_too(keys: list[int], others: list[int | None]) -> None:
    rows = [*others, *keys, None]
    found = KeySet([pa.array(keys, pa.int64())]).find([pa.array(rows, pa.int64())])
    assert found.tolist() == [at for at, row in enumerate(rows) if row in set(keys)]


_PAIRS = st.tuples(st.integers(0, 20), st.sampled_from(["", "a", "b", "é"]))


@given(keys=st.lists(_PAIRS, min_size=1), others=st.lists(st.one_of(st.just((None, None)), _PAIRS)))
def test_composite_keys_match_as_pairs_whether_or_not_one_column_tells_them_apart(
    keys: list[tuple[int, str]], others: list[tuple[int | None, str | None]]
) -> None:
    def columns(pairs: list[Any]) -> list[pa.Array]:
        return [pa.array([one for one, _ in pairs], pa.int32()), pa.array([other for _, other in pairs], pa.string())]

    for wanted in (keys, list({number: (number, text) for number, text in keys}.values())):
        rows = [*others, *keys]
        found = KeySet(columns(wanted)).find(columns(rows))
        assert found.tolist() == [at for at, row in enumerate(rows) if row in set(wanted)]


def test_not_a_number_is_a_key_beside_a_unique_one() -> None:
    keys = [pa.array([1, 2], pa.int64()), pa.array([float("nan"), 2.0])]
    rows = [pa.array([1, 1, 2, 2], pa.int64()), pa.array([float("nan"), 1.0, 2.0, None])]
    assert KeySet(keys).find(rows).tolist() == [0, 2]


@pytest.mark.parametrize("point", ["locate.before_keys", "locate.keys_written"])
def test_keys_cut_short_lie_in_their_operations_folder(tmp_path: Path, point: str) -> None:
    columns = [LakeColumn("t", "long", True, 2)]
    folder = tmp_path / "op-1"
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        write_keys(f"file://{folder}", [(1,)], columns, "keys")
    faults.arm(None)
    assert write_keys(f"file://{folder}", [(1,), (5,)], columns, "keys") == KeyFile(
        f"file://{folder}/keys.arrow", 2, 1, 5
    )
    assert [path.name for path in folder.iterdir()] == ["keys.arrow"]
