"""Random changes on a real server: replaying what was decoded gives the table, whatever the form and the source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modak.postgres.changes.columns import reads_binary
from modak.postgres.changes.slot import advance
from modak.postgres.connect import connect
from modak.postgres.describe import describe
from modak.postgres.dsn import Dsn
from tests.lake.every_type import COLUMNS, TYPES_SQL, create_sql, insert, mapped_columns, read_heap
from tests.postgres.changes.build import Followed, TableName, followed, headers, replay, table_rows

_REAL = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

ROW = st.tuples(*(st.one_of(st.none(), values) for _, values in COLUMNS.values()))
STEP = st.one_of(
    st.tuples(st.just("insert"), st.integers(1, 6), ROW),
    st.tuples(st.just("update"), st.integers(1, 6), ROW),
    st.tuples(st.just("touch"), st.integers(1, 6), st.just(())),
    st.tuples(st.just("move"), st.integers(1, 6), st.integers(7, 9)),
    st.tuples(st.just("delete"), st.integers(1, 9), st.just(())),
    st.tuples(st.just("truncate"), st.just(0), st.just(())),
)
DML = st.lists(st.tuples(STEP, st.sampled_from(["commit", "rollback", "go on", "go on"])), min_size=1, max_size=8)
NAMES = list(COLUMNS)


@pytest.fixture(scope="module")
def every(database: Dsn) -> Iterator[Followed]:
    """Every type, and the types that have a binary form here in a second table, both published."""
    with connect(database, autocommit=True) as conn:
        conn.execute(TYPES_SQL)
        conn.execute(create_sql("every"))
        conn.execute("ALTER TABLE every ALTER t SET STORAGE EXTERNAL, ALTER by SET STORAGE EXTERNAL")
        columns = describe(conn, TableName("public", "every")).columns
        chosen = ", ".join(column.name for column in columns if reads_binary(column.type))
        conn.execute(f"CREATE TABLE compact AS SELECT {chosen} FROM every")
        conn.execute("ALTER TABLE compact ADD PRIMARY KEY (k), ALTER t SET STORAGE EXTERNAL")
    with followed(database, "every", "every", "compact") as found:
        yield found


def change(conn: Any, steps: list[Any]) -> None:
    conn.execute("BEGIN")
    for (what, key, values), then in steps:
        match what:
            case "insert":
                conn.execute("DELETE FROM every WHERE k = %s", (key,))
                insert(conn, "every", [values], first=key)
            case "update":
                kinds = [kind for kind, _ in COLUMNS.values()]
                casts = ("%s::text[]::" if kind.endswith("[]") else "%s::text::" for kind in kinds)
                sets = ", ".join(f"{name} = {cast}{kind}" for name, cast, kind in zip(NAMES, casts, kinds, strict=True))
                conn.execute(f"UPDATE every SET {sets} WHERE k = %s", (*values, key))
            case "touch":
                conn.execute("UPDATE every SET i4 = coalesce(i4, 0) / 2 + 1 WHERE k = %s", (key,))
            case "move":
                conn.execute("DELETE FROM every WHERE k = %s", (values,))
                conn.execute("UPDATE every SET k = %s WHERE k = %s", (values, key))
            case "delete":
                conn.execute("DELETE FROM every WHERE k = %s", (key,))
            case "truncate":
                conn.execute("TRUNCATE every, compact")
        names = ", ".join(column.name for column in describe(conn, TableName("public", "compact")).columns)
        conn.execute("DELETE FROM compact WHERE k = %s", (key,))
        conn.execute(f"INSERT INTO compact ({names}) SELECT {names} FROM every WHERE k = %s", (key,))
        if then != "go on":
            conn.execute(then.upper())
            conn.execute("BEGIN")
    conn.execute("COMMIT")


def _begin_anew(conn: Any, every: Followed) -> None:
    conn.execute("TRUNCATE every, compact")
    advance(conn, every.name, every.upto())


def _heap(every: Followed, table: str) -> pa.Table:
    with connect(every.dsn) as conn:
        return read_heap(every.dsn, table, mapped_columns(conn, table, numeric="string"))


def replay_gives_the_table(every: Followed, steps: list[Any]) -> None:
    with connect(every.dsn, autocommit=True) as conn:
        conn.execute("ALTER PUBLICATION every SET TABLE every, compact")
        _begin_anew(conn, every)
        change(conn, steps)
    heap = _heap(every, "every")
    pieces = every.peeked(binary=False, batch_bytes=4096)
    assert replay(pieces, "every") == table_rows(heap)
    images = [item.new for piece in pieces for item in piece.items if getattr(item, "new", None)]
    named = [image for image in images if image.relation.name.name == "every"]
    assert all(
        [field.type for field in image.batch().schema] == [field.type for field in heap.schema] for image in named
    )


def all_ways_give_the_same(every: Followed, tmp_path: Path, steps: list[Any]) -> None:
    with connect(every.dsn, autocommit=True) as conn:
        conn.execute("ALTER PUBLICATION every SET TABLE compact")
        _begin_anew(conn, every)
        change(conn, steps)
    expected = table_rows(_heap(every, "compact"))
    ways = {
        (way, binary): every.peeked(binary=binary) if way == "peek" else every.streamed(tmp_path / "s", binary=binary)
        for way in ("peek", "stream")
        for binary in (True, False)
    }
    for pieces in ways.values():
        assert replay(pieces, "compact") == expected
        assert headers(pieces) == headers(ways["peek", True])


@_REAL
@given(DML)
def test_replaying_changes_of_every_type_gives_the_table(every: Followed, steps: list[Any]) -> None:
    replay_gives_the_table(every, steps)


@_REAL
@given(DML)
def test_peek_and_stream_binary_and_text_give_the_same(every: Followed, tmp_path: Path, steps: list[Any]) -> None:
    all_ways_give_the_same(every, tmp_path, steps)


@pytest.mark.full
@pytest.mark.timeout(1800)
@settings(_REAL, max_examples=200)
@given(DML)
def test_replaying_changes_of_every_type_for_long(every: Followed, tmp_path: Path, steps: list[Any]) -> None:
    replay_gives_the_table(every, steps)
    all_ways_give_the_same(every, tmp_path, steps)
