"""The streaming connection and the source that chooses it, on a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from modak.core import faults
from modak.core.errors import ModakError, Refused
from modak.core.faults import Fault, InjectedFault
from modak.postgres.changes.batch import Changes, Piece
from modak.postgres.changes.pgoutput import Decoder
from modak.postgres.changes.slot import SlotState, advance, slot_state, usable_slot
from modak.postgres.changes.source import ChangeSource, Limits, choose
from modak.postgres.changes.spool import Spools
from modak.postgres.changes.stream import ReplicationStream
from modak.postgres.changes.transactions import Transactions
from modak.postgres.changes.wire import Messages
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.postgres.changes.build import Followed, followed, headers, replay
from tests.support.proxy import FaultProxy

STATE = SlotState("s", "pgoutput", "d", None, 1000, 1000, "reserved", 5000, two_phase=False)


@pytest.fixture
def table(fresh_database: Dsn) -> Iterator[Followed]:
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute("CREATE TABLE t (k int PRIMARY KEY, v text)")
        # Small, so that transactions of some rows are streamed while they run.
        conn.execute(f'ALTER DATABASE "{fresh_database.dbname}" SET logical_decoding_work_mem = 64')
    with followed(fresh_database, "t", "t") as found:
        yield found


def run(table: Followed, *statements: str) -> None:
    with connect(table.dsn, autocommit=True) as conn:
        for statement in statements:
            conn.execute(statement)


def keys(pieces: list[Piece]) -> list[int]:
    return sorted(key for (key,) in replay(pieces, "t"))


def many(low: int, high: int) -> str:
    return f"INSERT INTO t SELECT i, repeat('x', 200) FROM generate_series({low}, {high}) i"


def test_large_transactions_are_streamed_without_what_was_undone(table: Followed, tmp_path: Path) -> None:
    run(
        table,
        f"BEGIN; {many(1, 1000)}; SAVEPOINT a; {many(1001, 2000)}; ROLLBACK TO a; {many(2001, 3000)}; SAVEPOINT b;"
        f" {many(3001, 4000)}; SAVEPOINT c; {many(4001, 5000)}; ROLLBACK TO c; RELEASE b; COMMIT",
        f"BEGIN; {many(6001, 8000)}; ROLLBACK",
        "INSERT INTO t VALUES (9000, 'small')",
    )
    points: list[str] = []
    faults.watch(points.append)
    pieces = table.streamed(tmp_path / "spool", binary=True, memory_bytes=100_000)
    assert "spool.written" in points
    assert keys(pieces) == [*range(1, 1001), *range(2001, 4001), 9000]
    assert headers(pieces) == headers(table.peeked(binary=True))
    assert not (tmp_path / "spool").exists()


def test_an_open_writer_does_not_hold_up_others_and_comes_when_it_commits(table: Followed, tmp_path: Path) -> None:
    with (
        connect(table.dsn) as slow,
        ReplicationStream(table.feed(binary=True), table.types(), tmp_path / "spool") as stream,
    ):
        slow.execute(many(1, 2000))
        run(table, "INSERT INTO t VALUES (5000, 'quick')")
        first = list(stream.read(table.upto(), 30.0))
        slow.execute(many(2001, 2100))
        slow.commit()
        second = list(stream.read(table.upto(), 30.0))
    assert keys(first) == [5000]
    assert keys(second) == list(range(1, 2101))


def test_what_is_confirmed_does_not_come_again_and_what_is_not_does(table: Followed, tmp_path: Path) -> None:
    run(table, "INSERT INTO t VALUES (1, 'a')")
    with ReplicationStream(table.feed(binary=True), table.types(), tmp_path / "spool") as stream:
        assert keys(list(stream.read(table.upto(), 30.0))) == [1]
        stream.confirm(2**63)
        safe = stream.safe_lsn
        run(table, "INSERT INTO t VALUES (2, 'b')")
        assert keys(list(stream.read(table.upto(), 30.0))) == [2]
    _settled(table)
    with connect(table.dsn, autocommit=True) as conn:
        assert usable_slot(conn, "t").confirmed_lsn == safe
    assert keys(table.streamed(tmp_path / "spool", binary=True)) == [2]


def test_an_idle_table_lets_the_server_forget_its_wal(table: Followed, tmp_path: Path) -> None:
    run(table, "CREATE TABLE other (k int)", "INSERT INTO other SELECT generate_series(1, 10000)")
    upto = table.upto()
    with ReplicationStream(table.feed(binary=True), table.types(), tmp_path / "spool") as stream:
        assert [item for piece in stream.read(upto, 30.0) for item in piece.items] == []
        assert stream.safe_lsn >= upto
        stream.confirm(upto)
    _settled(table)
    with connect(table.dsn, autocommit=True) as conn:
        assert usable_slot(conn, "t").confirmed_lsn == upto


def test_a_reader_that_stops_early_goes_on_where_it_stopped(table: Followed, tmp_path: Path) -> None:
    run(table, *(many(at, at + 99) for at in range(0, 2000, 100)))
    with ReplicationStream(table.feed(binary=True), table.types(), tmp_path / "s", batch_bytes=20_000) as stream:
        upto = table.upto()
        found = [next(iter(stream.read(upto, 30.0))) for _ in range(3)]
        assert stream.safe_lsn < upto
        found += stream.read(upto, 30.0)
    assert keys(found) == list(range(2000))


def test_a_lost_connection_can_be_tried_again_and_loses_nothing(table: Followed, tmp_path: Path) -> None:
    run(table, "INSERT INTO t VALUES (1, 'a')")
    with FaultProxy(table.dsn.host, table.dsn.port) as proxy:
        far = replace(table, dsn=replace(table.dsn, port=proxy.port))
        with ReplicationStream(far.feed(binary=True), table.types(), tmp_path / "spool") as stream:
            proxy.cut()
            run(table, "INSERT INTO t VALUES (2, 'b')")
            with pytest.raises(ModakError) as lost:
                list(stream.read(table.upto(), 5.0))
    assert lost.value.retryable
    _settled(table)
    assert keys(table.streamed(tmp_path / "spool", binary=True)) == [1, 2]


def test_a_slot_that_somebody_else_reads_is_busy(table: Followed, tmp_path: Path) -> None:
    with ReplicationStream(table.feed(binary=True), table.types(), tmp_path / "one"), pytest.raises(ModakError) as busy:
        ReplicationStream(table.feed(binary=True), table.types(), tmp_path / "two")
    assert busy.value.retryable
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("point", ["stream.confirming", "stream.confirmed"])
def test_a_crash_around_the_confirmation_loses_nothing(table: Followed, tmp_path: Path, point: str) -> None:
    run(table, "INSERT INTO t VALUES (1, 'a')")
    faults.arm(Fault(point))
    with ReplicationStream(table.feed(binary=True), table.types(), tmp_path / "spool") as stream:
        (piece,) = [piece for piece in stream.read(table.upto(), 30.0) if piece.items]
        applied = piece.frontier or 0
        with pytest.raises(InjectedFault):
            stream.confirm(applied)
    faults.arm(None)
    _settled(table)
    run(table, "INSERT INTO t VALUES (2, 'b')")
    assert keys(table.streamed(tmp_path / "spool", binary=True, after=applied)) == [2]


def test_prepared_transactions_come_when_they_are_committed(table: Followed, tmp_path: Path) -> None:
    run(
        table,
        "BEGIN; INSERT INTO t VALUES (1, 'kept'); PREPARE TRANSACTION 'modak one'",
        "BEGIN; INSERT INTO t VALUES (2, 'undone'); PREPARE TRANSACTION 'modak two'",
        "INSERT INTO t VALUES (3, 'between')",
        "ROLLBACK PREPARED 'modak two'",
    )
    assert keys(table.peeked(binary=True)) == [3]
    run(table, "COMMIT PREPARED 'modak one'")
    assert [row[1] for row in headers(table.peeked(binary=True))] == [0, 0]
    assert keys(table.peeked(binary=True)) == keys(table.streamed(tmp_path / "s", binary=True)) == [1, 3]


def test_a_slot_of_two_phases_gives_the_same_rows(table: Followed, tmp_path: Path) -> None:
    run(
        table,
        "SELECT pg_create_logical_replication_slot('two', 'pgoutput', twophase => true)",
        f"BEGIN; {many(1, 2000)}; PREPARE TRANSACTION 'modak large'",
        "BEGIN; INSERT INTO t VALUES (5000, 'small'); PREPARE TRANSACTION 'modak small'",
        "BEGIN; INSERT INTO t VALUES (6000, 'undone'); PREPARE TRANSACTION 'modak undone'",
        "INSERT INTO t VALUES (7000, 'between')",
        "ROLLBACK PREPARED 'modak undone'",
        "COMMIT PREPARED 'modak small'",
        "COMMIT PREPARED 'modak large'",
    )
    with connect(table.dsn) as conn:
        rows = conn.execute(
            "SELECT data FROM pg_logical_slot_peek_binary_changes('two', NULL, NULL, 'proto_version', '4',"
            " 'publication_names', 't', 'binary', 'true', 'streaming', 'on', 'two_phase', 'on')",
            binary=True,
        )
        messages = Messages.of_parts([row[0] for row in rows])
    assert {chr(kind) for kind in messages.kinds} >= set("SEpbPKr")
    reader = Transactions(Decoder(table.types()), Spools(tmp_path / "spool", 0))
    assert keys(list(reader.feed(messages))) == [*range(1, 2001), 5000, 7000]
    assert reader.held_lsn is None


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [300_000, pytest.param(5_000_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("way", ["peek", "stream"])
def test_a_large_transaction_takes_little_memory(table: Followed, tmp_path: Path, way: str, count: int) -> None:
    run(table, many(1, count))
    process = psutil.Process()
    limits = Limits(reread_bytes=-1 if way == "stream" else 1 << 40, memory_bytes=8 << 20)
    with ChangeSource(table.feed(binary=True), tmp_path / "spool", limits) as source:
        rows, peak, before = 0, 0, process.memory_info().rss
        for piece in source.read(0, 600.0):
            rows += piece.rows
            for item in piece.items:
                assert isinstance(item, Changes)
                assert item.new is not None
                item.new.batch()
            peak = max(peak, process.memory_info().rss - before)
        assert source.way == way
    assert rows == count
    assert peak < 100 << 20


@pytest.mark.parametrize(
    ("now", "reread", "largest", "chosen"),
    [
        ("peek", 0, 0, "peek"),
        ("peek", 101, 0, "stream"),
        ("peek", 100, 0, "peek"),
        ("peek", 0, 51, "stream"),
        ("stream", 51, 0, "stream"),
        ("stream", 50, 0, "peek"),
        ("stream", 0, 51, "stream"),
    ],
)
def test_streaming_is_for_open_writers_and_large_transactions(now: str, reread: int, largest: int, chosen: str) -> None:
    state = replace(STATE, confirmed_lsn=1000 + reread)
    assert choose(now, state, largest, Limits(reread_bytes=100, peek_messages=50)) == chosen  # type: ignore[arg-type]


def test_the_source_streams_while_a_writer_stays_open_and_peeks_again_afterwards(
    table: Followed, tmp_path: Path
) -> None:
    found: list[Piece] = []
    applied = 0
    ways = []

    def turn(source: ChangeSource) -> None:
        nonlocal applied
        for piece in source.read(applied, 30.0):
            found.append(piece)
            applied = max(applied, piece.frontier or 0)
        ways.append(source.way)
        source.confirm(source.safe_lsn)

    with (
        ChangeSource(table.feed(binary=True), tmp_path / "spool", Limits(reread_bytes=200_000)) as source,
        connect(table.dsn) as slow,
    ):
        slow.execute("INSERT INTO t VALUES (0, 'open')")
        for at in range(6):
            run(table, many(1 + at * 1000, 1000 + at * 1000), "SELECT pg_log_standby_snapshot()")
            turn(source)
        slow.commit()
        at = 6
        while ways[-1] == "stream" and at < 40:
            run(table, many(1 + at * 1000, 1000 + at * 1000), "SELECT pg_log_standby_snapshot()")
            turn(source)
            at += 1
    assert keys(found) == list(range(at * 1000 + 1))
    assert len(headers(found)) == at * 1000 + 1
    assert ways[0] == "peek"
    assert "stream" in ways
    assert ways[-1] == "peek"


def test_types_without_a_binary_reader_are_read_again_as_text(table: Followed, tmp_path: Path) -> None:
    run(table, "ALTER TABLE t ADD COLUMN i interval", "INSERT INTO t VALUES (1, 'a', '1 day')")
    for limits in (Limits(), Limits(reread_bytes=-1)):
        with ChangeSource(table.feed(binary=True), tmp_path / "spool", limits) as source:
            pieces = list(source.read(0, 30.0))
        assert replay(pieces, "t")[1,] == {"k": 1, "v": "a", "i": "P1D"}


@pytest.mark.parametrize("reread", [1 << 40, -1])
def test_what_was_given_before_such_a_type_appeared_is_not_given_twice(
    table: Followed, tmp_path: Path, reread: int
) -> None:
    run(table, "INSERT INTO t VALUES (1, 'a')", "ALTER TABLE t ADD COLUMN i interval")
    run(table, "INSERT INTO t VALUES (2, 'b', '1 day')")
    given: list[Piece] = []
    with ChangeSource(table.feed(binary=True), tmp_path / "s", Limits(reread_bytes=reread, batch_bytes=1)) as source:
        with pytest.raises(ModakError) as again:
            given.extend(source.read(0, 30.0))
        assert (again.value.code, again.value.retryable) == ("changes.needs_text", True)
        assert keys(list(source.read(0, 30.0))) == [1, 2]


def test_a_publication_that_is_lost_is_never_read_over(table: Followed, tmp_path: Path) -> None:
    with ChangeSource(table.feed(binary=True), tmp_path / "spool") as source:
        run(table, "INSERT INTO t VALUES (1, 'a')")
        assert keys(list(source.read(0, 30.0))) == [1]
        run(table, "DROP PUBLICATION t", "INSERT INTO t VALUES (2, 'unseen')", "CREATE PUBLICATION t FOR TABLE t")
        with pytest.raises(Refused) as lost:
            list(source.read(0, 30.0))
    assert lost.value.code == "changes.publication_lost"


@pytest.mark.parametrize("reread", [1 << 40, -1])
def test_after_a_reset_nothing_can_be_confirmed_that_was_not_given_again(
    table: Followed, tmp_path: Path, reread: int
) -> None:
    run(table, "INSERT INTO t VALUES (1, 'a')")
    with ChangeSource(table.feed(binary=True), tmp_path / "spool", Limits(reread_bytes=reread)) as source:
        assert keys(list(source.read(0, 30.0))) == [1]
        assert source.safe_lsn > 0
        source.reset()
        assert source.safe_lsn == 0
        source.confirm(2**62)
        assert keys(list(source.read(0, 30.0))) == [1]
        source.confirm(source.safe_lsn)
        run(table, "INSERT INTO t VALUES (2, 'b')")
        assert keys(list(source.read(0, 30.0))) == [2]


def test_a_source_lets_go_of_the_slot_when_it_is_closed(table: Followed, tmp_path: Path) -> None:
    with ChangeSource(table.feed(binary=True), tmp_path / "spool", Limits(reread_bytes=-1)) as source:
        list(source.read(0, 5.0))
    with connect(table.dsn, autocommit=True) as conn:
        state = slot_state(conn, "t")
        assert state is not None
        assert state.active_pid is None
        advance(conn, "t", table.upto())


def _settled(table: Followed) -> None:
    with connect(table.dsn, autocommit=True) as conn:
        for _ in range(200):
            state = slot_state(conn, table.name)
            if state is not None and state.active_pid is None:
                return
            threading.Event().wait(0.02)
    raise AssertionError("the slot is still held")
