"""Streamed and prepared transactions, made by hand: what lasts, in which order, and where it waits."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from modak.core import faults
from modak.core.errors import ModakError
from modak.core.faults import Fault, InjectedFault
from modak.postgres.changes.batch import Piece
from modak.postgres.changes.pgoutput import Decoder
from modak.postgres.changes.spool import Spools
from modak.postgres.changes.transactions import Transactions
from modak.postgres.changes.wire import Messages
from tests.postgres.changes.build import INT8, TEXT, begin, commit, insert, relation, replay, types

T = [("k", INT8), ("v", TEXT)]


def start(xid: int, first: bool = True) -> bytes:
    return b"S" + struct.pack(">IB", xid, first)


STOP = b"E"


def stream_commit(xid: int, commit_lsn: int, end_lsn: int) -> bytes:
    return b"c" + struct.pack(">IBQQq", xid, 0, commit_lsn, end_lsn, 0)


def abort(xid: int, sub: int) -> bytes:
    return b"A" + struct.pack(">II", xid, sub)


def begin_prepare(lsn: int, xid: int, gid: str) -> bytes:
    return b"b" + struct.pack(">QQqI", lsn, lsn + 1, 0, xid) + gid.encode() + b"\0"


def prepare(kind: str, lsn: int, xid: int, gid: str) -> bytes:
    return kind.encode() + struct.pack(">BQQqI", 0, lsn, lsn + 1, 0, xid) + gid.encode() + b"\0"


def rollback_prepared(lsn: int, xid: int, gid: str) -> bytes:
    return b"r" + struct.pack(">BQQqqI", 0, lsn, lsn + 1, 0, 0, xid) + gid.encode() + b"\0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def reader(folder: Path, memory_bytes: int = 1 << 20) -> Transactions:
    return Transactions(Decoder(types), Spools(folder, memory_bytes))


def fed(into: Transactions, *messages: bytes) -> list[Piece]:
    """One message at a time, which is the hardest way to cut."""
    return [piece for message in messages for piece in into.feed(Messages.of_parts([message]))]


def keys(pieces: list[Piece]) -> set[int]:
    return {key for (key,) in replay(pieces, "t")}


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_a_streamed_transaction_comes_at_its_commit_without_what_was_undone(folder: Path, memory_bytes: int) -> None:
    one = reader(folder, memory_bytes)
    waiting = fed(
        one,
        start(10),
        relation(1, "t", T, xid=10),
        insert(1, [1, "kept"], xid=10),
        insert(1, [2, "undone"], xid=11),
        STOP,
        abort(10, 11),
        start(10, first=False),
        insert(1, [3, "kept"], xid=12),
        STOP,
    )
    assert waiting == []
    assert len(list(folder.iterdir())) == (1 if memory_bytes == 0 else 0)
    between = fed(one, begin(50), relation(1, "t", T), insert(1, [9, "plain"]), commit(50, 60))
    assert keys(between) == {9}
    pieces = fed(one, stream_commit(10, 70, 80))
    assert keys(pieces) == {1, 3}
    assert pieces[-1].frontier == 80
    assert {lsn for piece in pieces for item in piece.items for lsn in item.header["end_lsn"].to_pylist()} == {80}  # type: ignore[union-attr]
    assert [
        position for piece in pieces for item in piece.items for position in item.header["position"].to_pylist()
    ] == [0, 1]  # type: ignore[union-attr]
    assert list(folder.iterdir()) == []


def test_announcements_of_an_undone_sub_transaction_still_count(folder: Path) -> None:
    pieces = fed(
        reader(folder),
        start(10),
        relation(1, "t", T, xid=11),
        insert(1, [1, "undone"], xid=11),
        insert(1, [2, "kept"], xid=10),
        STOP,
        abort(10, 11),
        stream_commit(10, 70, 80),
    )
    assert keys(pieces) == {2}


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_an_aborted_transaction_leaves_nothing(folder: Path, memory_bytes: int) -> None:
    one = reader(folder, memory_bytes)
    block = [start(10), relation(1, "t", T, xid=10), insert(1, [1, "x"], xid=10), STOP]
    assert fed(one, *block, abort(10, 10)) == []
    assert list(folder.iterdir()) == []
    assert fed(one, abort(99, 99)) == []


def test_two_streamed_transactions_come_in_the_order_of_their_commits(folder: Path) -> None:
    one = reader(folder, 0)
    fed(one, start(10), relation(1, "t", T, xid=10), insert(1, [1, "ten"], xid=10), STOP)
    fed(one, start(20), relation(1, "t", T, xid=20), insert(1, [2, "twenty"], xid=20), STOP)
    assert len(list(folder.iterdir())) == 2
    pieces = fed(one, stream_commit(20, 100, 110), stream_commit(10, 120, 130))
    assert [piece.frontier for piece in pieces if piece.frontier] == [110, 130]
    assert keys(pieces) == {1, 2}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_prepared_transaction_lasts_when_it_is_committed(folder: Path, streamed: bool) -> None:
    one = reader(folder)
    if streamed:
        block = [start(10), relation(1, "t", T, xid=10), insert(1, [1, "x"], xid=10), STOP, prepare("p", 40, 10, "g")]
    else:
        block = [begin_prepare(40, 10, "g"), relation(1, "t", T), insert(1, [1, "x"]), prepare("P", 40, 10, "g")]
    assert fed(one, *block) == []
    assert one.held_lsn == 40
    pieces = fed(one, prepare("K", 60, 10, "g"))
    assert keys(pieces) == {1}
    assert (pieces[-1].frontier, one.held_lsn) == (61, None)


def test_a_prepared_transaction_that_is_rolled_back_leaves_nothing(folder: Path) -> None:
    one = reader(folder, 0)
    fed(one, begin_prepare(40, 10, "g"), relation(1, "t", T), insert(1, [1, "x"]), prepare("P", 40, 10, "g"))
    assert len(list(folder.iterdir())) == 1
    assert fed(one, rollback_prepared(60, 10, "g")) == []
    assert one.held_lsn is None
    assert list(folder.iterdir()) == []


def test_a_commit_of_something_never_prepared_is_refused(folder: Path) -> None:
    with pytest.raises(ModakError, match="never sent"):
        fed(reader(folder), prepare("K", 60, 10, "g"))


def test_the_folder_is_private_and_what_a_crash_left_there_is_removed(folder: Path) -> None:
    folder.mkdir()
    (folder / "1.arrows").write_bytes(b"rows of somebody")
    one = reader(folder)
    assert list(folder.iterdir()) == []
    assert folder.stat().st_mode & 0o777 == 0o700
    one.spools.close()
    assert not folder.exists()


@pytest.mark.parametrize(
    "point",
    ["spool.clearing", "spool.cleared", "spool.writing", "spool.written", "spool.removing", "spool.removed"],
)
def test_after_a_crash_the_next_session_begins_with_an_empty_folder(folder: Path, point: str) -> None:
    def session() -> list[Piece]:
        one = reader(folder, 0)
        block = [start(10), relation(1, "t", T, xid=10), insert(1, [1, "x"], xid=10), STOP]
        return fed(one, *block, stream_commit(10, 70, 80))

    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        session()
    faults.arm(None)
    assert keys(session()) == {1}
    assert list(folder.iterdir()) == []


def test_a_full_disk_is_an_error_that_can_be_tried_again(folder: Path) -> None:
    one = reader(folder, 0)
    folder.rmdir()
    folder.write_text("not a folder")
    with pytest.raises(ModakError) as full:
        fed(one, start(10), relation(1, "t", T, xid=10), insert(1, [1, "x"], xid=10), STOP)
    assert (full.value.code, full.value.retryable) == ("changes.spool", True)
