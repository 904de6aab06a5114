"""Tables whose definition changes between their rows, and rows that Postgres sends in part only (hazards 17 and 18)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modak.postgres.changes.batch import Changes, Old, Piece, Truncation
from modak.postgres.changes.slot import advance
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.lake.every_type import mapped_columns, read_heap
from tests.postgres.changes.build import UNCHANGED, Followed, followed, headers, replay, rows_of, table_rows

LARGE = "repeat(md5(random()::text), 400)"


@pytest.fixture(params=["peek", "stream"])
def read(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Followed], list[Piece]]:
    if request.param == "peek":
        return lambda table: table.peeked(binary=True)
    return lambda table: table.streamed(tmp_path / "spool", binary=True)


def run(dsn: Dsn, *statements: str) -> None:
    with connect(dsn, autocommit=True) as conn:
        for statement in statements:
            conn.execute(statement)


def batches(pieces: list[Piece]) -> list[tuple[list[str], int, list[dict[str, Any]]]]:
    items = [item for piece in pieces for item in piece.items if isinstance(item, Changes)]
    return [
        ([column.name for column in item.relation.columns], item.version, rows_of(item.new) if item.new else [])
        for item in items
    ]


def test_columns_change_at_their_place_in_the_wal(fresh_database: Dsn, read: Callable[[Followed], list[Piece]]) -> None:
    run(fresh_database, "CREATE TABLE t (k int PRIMARY KEY, a int)")
    with followed(fresh_database, "t", "t") as table:
        run(
            fresh_database,
            "INSERT INTO t VALUES (1, 1)",
            "ALTER TABLE t ADD COLUMN b text DEFAULT 'd'",
            "INSERT INTO t VALUES (2, 2, 'two')",
            "ALTER TABLE t RENAME COLUMN a TO aa",
            "INSERT INTO t VALUES (3, 3, 'three')",
            "ALTER TABLE t ALTER COLUMN aa TYPE numeric(8,2)",
            "INSERT INTO t VALUES (4, 4.25, 'four')",
            "BEGIN; INSERT INTO t VALUES (5, 5, 'e'); ALTER TABLE t DROP COLUMN b; INSERT INTO t VALUES (6, 6); COMMIT",
        )
        found = batches(read(table))
    assert [(names, [row["k"] for row in rows]) for names, _, rows in found] == [
        (["k", "a"], [1]),
        (["k", "a", "b"], [2]),
        (["k", "aa", "b"], [3]),
        (["k", "aa", "b"], [4, 5]),
        (["k", "aa"], [6]),
    ]
    assert [str(rows[0].get("aa", rows[0].get("a"))) for _, _, rows in found] == ["1", "2", "3", "4.25", "6.00"]


def test_a_column_dropped_and_added_again_under_its_name_is_a_new_version(
    fresh_database: Dsn, read: Callable[[Followed], list[Piece]]
) -> None:
    run(fresh_database, "CREATE TABLE t (k int PRIMARY KEY, a int)")
    with followed(fresh_database, "t", "t") as table:
        run(
            fresh_database,
            "INSERT INTO t VALUES (1, 1)",
            "ALTER TABLE t DROP COLUMN a",
            "ALTER TABLE t ADD COLUMN a int",
            "INSERT INTO t VALUES (2, 2)",
        )
        found = batches(read(table))
    assert [(names, version) for names, version, _ in found] == [(["k", "a"], 1), (["k", "a"], 2)]


def test_changes_of_a_type_that_was_dropped_meanwhile_stay_text(fresh_database: Dsn) -> None:
    run(fresh_database, "CREATE TYPE mood AS ENUM ('sad', 'ok')", "CREATE TABLE t (k int PRIMARY KEY, m mood)")
    with followed(fresh_database, "t", "t") as table:
        run(
            fresh_database,
            "INSERT INTO t VALUES (1, 'ok')",
            "ALTER TABLE t ALTER m TYPE text USING m::text",
            "DROP TYPE mood",
            "INSERT INTO t VALUES (2, 'sad')",
        )
        found = batches(table.peeked(binary=False))
    assert [row["m"] for _, _, rows in found for row in rows] == ["ok", "sad"]


def test_domains_and_stored_generated_columns_come_as_what_they_are(fresh_database: Dsn) -> None:
    run(
        fresh_database,
        "CREATE DOMAIN price AS numeric(8, 3)",
        "CREATE TABLE t (k int PRIMARY KEY, p price, double numeric(9,3) GENERATED ALWAYS AS (p * 2) STORED)",
    )
    with followed(fresh_database, "t", "t") as table:
        run(fresh_database, "INSERT INTO t VALUES (1, 1.5)")
        pieces = table.peeked(binary=True)
        with connect(fresh_database) as conn:
            heap = read_heap(fresh_database, "t", mapped_columns(conn, "t"))
    assert replay(pieces, "t") == table_rows(heap)


@pytest.mark.parametrize("form", ["binary", "text"])
def test_toast_values_that_were_not_touched_are_in_the_old_row_or_marked(fresh_database: Dsn, form: str) -> None:
    run(
        fresh_database,
        "CREATE TABLE t (k int PRIMARY KEY, v text, n int)",
        "ALTER TABLE t ALTER v SET STORAGE EXTERNAL",
    )
    with followed(fresh_database, "t", "t") as table:
        run(
            fresh_database,
            f"INSERT INTO t SELECT i, {LARGE}, 0 FROM generate_series(1, 4) i",
            "UPDATE t SET n = 1",
            "ALTER TABLE t REPLICA IDENTITY DEFAULT",
            "UPDATE t SET n = 2",
            "UPDATE t SET k = 10 WHERE k = 1",
            "UPDATE t SET v = NULL WHERE k = 2",
            "DELETE FROM t WHERE k = 3",
        )
        pieces = table.peeked(binary=form == "binary")
        with connect(fresh_database) as conn:
            heap = read_heap(fresh_database, "t", mapped_columns(conn, "t"))
    assert replay(pieces, "t") == table_rows(heap)
    full, key_only = [
        [item for piece in pieces for item in piece.items if isinstance(item, Changes) and item.version == version]
        for version in (1, 2)
    ]
    updated = [(row, old) for item in full for row, old in zip(rows_of(item.new), rows_of(item.old), strict=True)][4:]  # type: ignore[arg-type]
    assert all(row["v"] is UNCHANGED and len(old["v"]) == 12_800 for row, old in updated)
    marks = [row["v"] for item in key_only for row in rows_of(item.new)]  # type: ignore[arg-type]
    assert marks == [UNCHANGED] * 5 + [None] * 2
    assert [kind for item in key_only for kind in item.header["old"].to_pylist()] == [
        *[Old.NOTHING] * 4,
        Old.KEY,
        Old.NOTHING,
        Old.KEY,
    ]


def test_one_truncate_empties_several_tables(fresh_database: Dsn, read: Callable[[Followed], list[Piece]]) -> None:
    run(
        fresh_database,
        "CREATE TABLE t (k int PRIMARY KEY)",
        "CREATE TABLE u (k int PRIMARY KEY REFERENCES t)",
        "CREATE TABLE w (k int PRIMARY KEY)",
    )
    with followed(fresh_database, "t", "t", "u", "w") as table:
        run(
            fresh_database,
            "INSERT INTO t VALUES (1), (2); INSERT INTO u VALUES (1); INSERT INTO w VALUES (1)",
            "BEGIN; INSERT INTO w VALUES (5); TRUNCATE t RESTART IDENTITY CASCADE; INSERT INTO t VALUES (3); COMMIT",
        )
        pieces = read(table)
    (cut,) = [item for piece in pieces for item in piece.items if isinstance(item, Truncation)]
    assert {relation.name.name for relation in cut.relations} == {"t", "u"}
    assert cut.restart_identity
    assert cut.position == 1
    contents = {name: set(replay(pieces, name)) for name in ("t", "u", "w")}
    assert contents == {"t": {(3,)}, "u": set(), "w": {(1,), (5,)}}


DDL = st.sampled_from(
    [
        "ALTER TABLE t ADD COLUMN IF NOT EXISTS a{n} {type}",
        "ALTER TABLE t ADD COLUMN IF NOT EXISTS a{n} {type} DEFAULT NULL",
        "ALTER TABLE t DROP COLUMN IF EXISTS a{n}",
        "ALTER TABLE t DROP COLUMN IF EXISTS a{n}; ALTER TABLE t ADD COLUMN a{n} {type}",
        (
            "ALTER TABLE t DROP COLUMN IF EXISTS b{n}; ALTER TABLE t ADD COLUMN b{n} {type};"
            " ALTER TABLE t RENAME COLUMN b{n} TO c{n}; ALTER TABLE t DROP COLUMN c{n}"
        ),
        "VACUUM t",
    ]
)
DML = st.sampled_from(
    [
        "INSERT INTO t (k) SELECT coalesce(max(k), 0) + 1 FROM t",
        "INSERT INTO t (k, v) SELECT coalesce(max(k), 0) + {n}, {large} FROM t",
        "UPDATE t SET n = {n} WHERE k % 2 = {n} % 2",
        "UPDATE t SET k = k + 1000 WHERE k = (SELECT max(k) FROM t WHERE k < 1000)",
        "DELETE FROM t WHERE k = (SELECT min(k) FROM t)",
        (
            "BEGIN; SAVEPOINT s; INSERT INTO t (k) SELECT coalesce(max(k), 0) + 1 FROM t;"
            " ALTER TABLE t ADD COLUMN gone int; ROLLBACK TO s; UPDATE t SET n = {n}; COMMIT"
        ),
        "BEGIN; UPDATE t SET n = -1; ROLLBACK",
        "TRUNCATE t",
    ]
)
TYPES = st.sampled_from(["int", "text", "numeric(10,2)", "timestamptz", "uuid", "jsonb", "int[]"])


@pytest.fixture(scope="module")
def living(database: Dsn) -> Followed:
    run(database, "CREATE TABLE t (k int PRIMARY KEY, v text, n int)", "ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    with followed(database, "living", "t") as table:
        return table


_REAL = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
STEPS = st.lists(st.tuples(st.one_of(DML, DML, DDL), st.integers(1, 3), TYPES), min_size=1, max_size=15)


def replay_ends_as_the_table(living: Followed, tmp_path: Path, steps: list[tuple[str, int, str]]) -> None:
    with connect(living.dsn, autocommit=True) as conn:
        conn.execute("TRUNCATE t")
        advance(conn, living.name, living.upto())
        for statement, n, kind in steps:
            conn.execute(statement.format(n=n, type=kind, large=LARGE))
        names = ["k", "v", "n"]
        heap = read_heap(living.dsn, "t", mapped_columns(conn, "t")).select(names)
    peeked = living.peeked(binary=True)
    streamed = living.streamed(tmp_path / "spool", binary=True)
    assert headers(peeked) == headers(streamed)
    for pieces in (peeked, streamed):
        rows = replay(pieces, "t")
        assert {key: {name: row[name] for name in names} for key, row in rows.items()} == table_rows(heap)


@_REAL
@given(STEPS)
def test_whatever_happens_to_a_table_its_replay_ends_as_the_table(
    living: Followed, tmp_path: Path, steps: list[tuple[str, int, str]]
) -> None:
    replay_ends_as_the_table(living, tmp_path, steps)


@pytest.mark.full
@pytest.mark.timeout(1800)
@settings(_REAL, max_examples=300)
@given(STEPS)
def test_whatever_happens_to_a_table_for_long(
    living: Followed, tmp_path: Path, steps: list[tuple[str, int, str]]
) -> None:
    replay_ends_as_the_table(living, tmp_path, steps)
