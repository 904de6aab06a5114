"""Reading ahead from a copy of the slot gives what a peek gives, leaves the slot alone, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from modak.core.errors import ModakError
from modak.postgres.changes import ahead
from modak.postgres.changes.ahead import copy_name
from modak.postgres.changes.peek import Peek
from modak.postgres.changes.slot import usable_slot
from modak.postgres.changes.source import ChangeSource, Limits
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.postgres.changes.build import Followed, followed, headers, replay


@pytest.fixture
def table(fresh_database: Dsn) -> Followed:
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute("CREATE TABLE t (k int PRIMARY KEY, v text)")
    with followed(fresh_database, "t", "t") as found:
        return found


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "SLICE_MESSAGES", 100)


def _run(table: Followed, *statements: str) -> None:
    with connect(table.dsn, autocommit=True) as conn:
        for statement in statements:
            conn.execute(statement)


def _changes(table: Followed) -> None:
    _run(
        table,
        *(f"INSERT INTO t SELECT i, 'x' FROM generate_series({at}, {at + 39}) AS i" for at in range(0, 2000, 40)),
        "ALTER TABLE t ADD COLUMN more int DEFAULT 7",
        *(f"UPDATE t SET v = 'y', more = k WHERE k % 50 = {at}" for at in range(0, 50, 2)),
        "ALTER TABLE t DROP COLUMN more",
        *(f"DELETE FROM t WHERE k % 25 = {at}" for at in range(3)),
    )


def _slots(table: Followed) -> list[str]:
    with connect(table.dsn, autocommit=True) as conn:
        query = "SELECT slot_name::text FROM pg_replication_slots WHERE database = current_database()"
        return [name for (name,) in conn.execute(query)]


def _ahead(table: Followed, after: int = 0, most: int = 500_000, batch_bytes: int = 4096) -> Peek:
    feed = table.feed(binary=True)
    return Peek(feed, table.types(), table.upto(), after, most, batch_bytes, ahead=True, memory_bytes=1 << 14)


def test_slices_bring_the_same_changes_in_the_same_order_as_one_peek(table: Followed) -> None:
    _changes(table)
    whole, parts = table.peeked(binary=True), _ahead(table)
    pieces = list(parts)
    assert headers(pieces) == headers(whole)
    assert replay(pieces, "t") == replay(whole, "t")
    assert parts.exhausted
    assert parts.safe_lsn == parts.upto
    versions = [item.version for piece in pieces for item in piece.items if hasattr(item, "version")]
    assert max(versions) > 5, "it was not read in slices"


def test_the_slot_stays_where_it_is_and_the_copy_goes(table: Followed) -> None:
    with connect(table.dsn, autocommit=True) as conn:
        before = usable_slot(conn, table.name)
    _changes(table)
    list(_ahead(table))
    with connect(table.dsn, autocommit=True) as conn:
        after = usable_slot(conn, table.name)
    assert (before.restart_lsn, before.confirmed_lsn) == (after.restart_lsn, after.confirmed_lsn)
    assert _slots(table) == [table.name]


def test_whoever_has_enough_leaves_no_copy_and_no_thread(table: Followed) -> None:
    _changes(table)
    peek = _ahead(table)
    pieces = iter(peek)
    assert next(pieces).rows
    reading = peek._reading
    assert reading is not None
    peek.close()
    assert not reading._thread.is_alive()
    assert _slots(table) == [table.name]
    assert not peek.exhausted


def test_a_limit_ends_between_transactions_and_the_next_reading_goes_on_there(table: Followed) -> None:
    _changes(table)
    whole = headers(table.peeked(binary=True))
    seen, after, rounds = [], 0, 0
    while True:
        peek = _ahead(table, after, most=700)
        seen += headers(list(peek))
        rounds += 1
        if peek.exhausted:
            break
        after = peek.safe_lsn
        _run(table, f"SELECT pg_replication_slot_advance('{table.name}', '{after >> 32:X}/{after & 0xFFFFFFFF:X}')")
    assert seen == whole
    assert rounds > 2


def test_without_a_copy_it_is_an_ordinary_peek(table: Followed) -> None:
    _changes(table)
    _run(table, f"SELECT pg_copy_logical_replication_slot('{table.name}', '{copy_name(table.name)}')")
    try:
        peek = _ahead(table)
        assert headers(list(peek)) == headers(table.peeked(binary=True))
        assert peek.exhausted
    finally:
        _run(table, f"SELECT pg_drop_replication_slot('{copy_name(table.name)}')")


def test_a_failure_in_the_middle_reaches_the_reader(table: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    _changes(table)
    query = Peek._query

    def breaking(self: Peek, how: str, slot: str, most: int) -> str:
        asked = query(self, how, slot, most)  # type: ignore[arg-type]
        return asked if self.messages == 0 else f"{asked} WHERE 1 / 0 = 1"

    monkeypatch.setattr(Peek, "_query", breaking)
    with pytest.raises(ModakError):
        list(_ahead(table))
    assert _slots(table) == [table.name]


@pytest.mark.parametrize(("ahead_bytes", "reads_ahead"), [(0, True), (1 << 40, False)])
def test_the_source_reads_ahead_only_when_much_is_waiting(
    table: Followed, tmp_path: Path, ahead_bytes: int, reads_ahead: bool
) -> None:
    _changes(table)
    with ChangeSource(table.feed(binary=True), tmp_path / "spool", Limits(ahead_bytes=ahead_bytes)) as source:
        pieces, copied = [], False
        for piece in source.read(0, 60.0):
            pieces.append(piece)
            copied = copied or (source._peek is not None and source._peek._reading is not None)
        assert copied == reads_ahead
        assert headers(pieces) == headers(table.peeked(binary=True))
        source.confirm(source.safe_lsn)
        assert list(source.read(source.safe_lsn, 60.0)) == [] or not headers(list(source.read(source.safe_lsn, 60.0)))
