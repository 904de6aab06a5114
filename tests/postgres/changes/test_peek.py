"""Peek and advance: the rules that keep a row from being lost or given twice (hazard 16)."""

from __future__ import annotations

import pytest

from modak.postgres.changes.peek import Peek
from modak.postgres.changes.slot import advance, usable_slot
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.postgres.changes.build import Followed, followed, headers, replay


@pytest.fixture
def table(fresh_database: Dsn) -> Followed:
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute("CREATE TABLE t (k int PRIMARY KEY, v text)")
    with followed(fresh_database, "t", "t") as found:
        return found


def _run(table: Followed, *statements: str) -> None:
    with connect(table.dsn, autocommit=True) as conn:
        for statement in statements:
            conn.execute(statement)


def _advance(table: Followed, lsn: int) -> None:
    with connect(table.dsn, autocommit=True) as conn:
        advance(conn, table.name, lsn)


def _peek(table: Followed, after: int = 0, most: int = 500_000, upto: int | None = None) -> Peek:
    return Peek(table.feed(binary=True), table.types(), upto or table.upto(), after, most)


def test_a_row_committed_between_the_peek_and_the_advance_is_not_lost(table: Followed) -> None:
    _run(table, "INSERT INTO t VALUES (1, 'a')")
    peek = _peek(table)
    first = list(peek)
    _run(table, "INSERT INTO t VALUES (2, 'late')")
    assert peek.exhausted
    assert peek.safe_lsn == peek.upto
    _advance(table, peek.safe_lsn)
    assert set(replay(first, "t")) == {(1,)}
    assert set(replay(_peek(table), "t")) == {(2,)}


def test_a_peek_sees_only_what_was_flushed_before_it(table: Followed) -> None:
    _run(table, "INSERT INTO t VALUES (1, 'a')")
    upto = table.upto()
    _run(table, "INSERT INTO t VALUES (2, 'b')")
    assert set(replay(_peek(table, upto=upto), "t")) == {(1,)}


def test_a_limited_peek_is_safe_up_to_the_last_transaction_given(table: Followed) -> None:
    _run(table, *(f"INSERT INTO t VALUES ({key}, 'x')" for key in range(50)))
    seen: list[int] = []
    for _ in range(60):
        peek = _peek(table, most=10)
        keys = [key for (key,) in replay(peek, "t")]
        seen += keys
        assert not keys or peek.safe_lsn
        _advance(table, peek.safe_lsn)
        if peek.exhausted:
            break
    assert seen == list(range(50))


def test_the_limit_stops_only_between_transactions(table: Followed) -> None:
    _run(table, "INSERT INTO t SELECT i, 'x' FROM generate_series(1, 3000) i", "INSERT INTO t VALUES (0, 'y')")
    peek = _peek(table, most=10)
    assert len(replay(peek, "t")) == 3000
    assert not peek.exhausted


def test_what_was_applied_but_not_confirmed_is_passed_over(table: Followed) -> None:
    _run(table, "INSERT INTO t VALUES (1, 'a')")
    frontier = _peek(table)
    done = [piece.frontier for piece in frontier][-1]
    assert done is not None
    _run(table, "INSERT INTO t VALUES (2, 'b')")
    again = list(_peek(table, after=done))
    assert [row[4] for row in headers(again)]
    assert set(replay(again, "t")) == {(2,)}


def test_transactions_whose_commits_follow_each_other_directly_are_told_apart(table: Followed) -> None:
    """The second commit record begins where the first ends: its position is the first one's end."""
    with connect(table.dsn) as one, connect(table.dsn) as two:
        one.execute("INSERT INTO t VALUES (1, 'one')")
        two.execute("INSERT INTO t VALUES (2, 'two')")
        one.commit()
        two.commit()
    found = headers(_peek(table))
    ends = [end for piece in _peek(table) for item in piece.items for end in item.header["end_lsn"].to_pylist()]  # type: ignore[union-attr]
    assert found[1][0] >= ends[0]
    assert set(replay(_peek(table, after=ends[0]), "t")) == {(2,)}
    assert replay(_peek(table, after=ends[1]), "t") == {}


def test_an_idle_table_lets_the_server_forget_its_wal(table: Followed) -> None:
    _run(table, "CREATE TABLE other (k int)", "INSERT INTO other SELECT generate_series(1, 10000)", "CHECKPOINT")
    before = usable_slot(connect(table.dsn, autocommit=True), "t")
    peek = _peek(table)
    assert list(peek) == []
    _advance(table, peek.safe_lsn)
    _run(table, "CHECKPOINT", "SELECT pg_log_standby_snapshot()")
    peek = _peek(table)
    assert list(peek) == []
    _advance(table, peek.safe_lsn)
    after = usable_slot(connect(table.dsn, autocommit=True), "t")
    assert after.confirmed_lsn == peek.upto
    assert (after.confirmed_lsn or 0) > (before.confirmed_lsn or 0)


def test_a_peek_that_is_abandoned_is_safe_only_as_far_as_it_was_given(table: Followed) -> None:
    _run(
        table,
        *(
            f"INSERT INTO t SELECT i, repeat('x', 500) FROM generate_series({at}, {at + 99}) i"
            for at in range(0, 2000, 100)
        ),
    )
    peek = Peek(table.feed(binary=True), table.types(), table.upto(), batch_bytes=100_000)
    pieces = iter(peek)
    first = next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert not peek.exhausted
    assert peek.safe_lsn == (first.frontier or 0)
    assert peek.safe_lsn < peek.upto
