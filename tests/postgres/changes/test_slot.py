"""Slots, publications and replica identity on a real server, and what a crash in the middle of them leaves."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from modak.core import faults
from modak.core.errors import Conflict, ModakError, Refused
from modak.core.faults import Fault, InjectedFault
from modak.core.names import TableName
from modak.postgres.arrow import stream
from modak.postgres.changes.lsn import read_lsn, write_lsn
from modak.postgres.changes.publication import (
    create_publication,
    drop_publication,
    find_publications,
    not_full,
    write_default_identity,
    write_full_rows,
)
from modak.postgres.changes.slot import (
    SlotState,
    advance,
    created_slot,
    drop_slot,
    evict,
    replication_connection,
    slot_state,
    usable_slot,
    wal_history,
)
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.postgres.embedded import EmbeddedServer
from tests.postgres.changes.build import Followed, followed
from tests.support.role import least_privileged

ODD = TableName("public", 'odd "table"; DROP')


@pytest.mark.parametrize("text", ["0/0", "16/B374D848", "FFFFFFFF/FFFFFFFF"])
def test_positions_are_written_as_postgres_writes_them(text: str) -> None:
    assert write_lsn(read_lsn(text)) == text


def test_what_is_no_position_is_refused() -> None:
    with pytest.raises(ValueError, match="position"):
        read_lsn("16/B374D848; --")


def test_the_snapshot_of_a_new_slot_and_its_changes_are_all_rows_once(fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute("CREATE TABLE t (k int PRIMARY KEY); INSERT INTO t VALUES (1)")
        assert create_publication(conn, "one", [TableName("public", "t")])
        with created_slot(fresh_database, "one") as slot:
            conn.execute("INSERT INTO t VALUES (2)")
            with stream(fresh_database, "SELECT k FROM t", snapshot=slot.snapshot) as batches:
                before = [key for batch in batches for key in batch.column("k").to_pylist()]
        state = usable_slot(conn, "one")
    after = [
        key
        for piece in Followed(fresh_database, "one").peeked(binary=True)
        for item in piece.items
        for key in item.new.column(0).to_pylist()  # type: ignore[union-attr]
    ]
    assert (before, after) == ([1], [2])
    assert state.confirmed_lsn == slot.consistent_lsn
    assert (state.active_pid, state.lost, state.wal_status, state.plugin) == (None, False, "reserved", "pgoutput")
    assert 0 < state.reread_bytes < state.retained_bytes


@pytest.mark.parametrize(
    ("change", "lost"),
    [({}, False), ({"wal_status": "lost"}, True), ({"restart_lsn": None}, True), ({"confirmed_lsn": None}, True)],
)
def test_a_slot_without_its_wal_is_lost(change: dict[str, Any], lost: bool) -> None:
    state = SlotState("s", "pgoutput", "d", None, 100, 150, "reserved", 500, two_phase=False)
    assert (state.retained_bytes, state.reread_bytes) == (400, 50)
    assert replace(state, **change).lost is lost


def test_a_slot_is_made_once_and_dropped_once(fresh_database: Dsn) -> None:
    with created_slot(fresh_database, "once"):
        pass
    with pytest.raises(Conflict) as twice, created_slot(fresh_database, "once"):
        pass
    assert (twice.value.code, twice.value.retryable) == ("slot.exists", False)
    with connect(fresh_database, autocommit=True) as conn:
        assert drop_slot(conn, "once")
        assert not drop_slot(conn, "once")
        assert slot_state(conn, "once") is None
        with pytest.raises(Refused) as lost:
            usable_slot(conn, "once")
    assert lost.value.code == "slot.lost"


def test_a_name_that_no_slot_can_have_never_reaches_the_server(fresh_database: Dsn) -> None:
    with pytest.raises(Refused, match="cannot be the name"), created_slot(fresh_database, 'x"; DROP'):
        pass


def test_an_open_writer_is_waited_for_only_so_long_and_then_nothing_was_made(fresh_database: Dsn) -> None:
    with connect(fresh_database) as writer:
        writer.execute("CREATE TABLE t (k int)")
        with pytest.raises(ModakError) as busy, created_slot(fresh_database, "late", patience_seconds=0.5):
            pass
        assert (busy.value.code, busy.value.retryable) == ("postgres.busy", True)
    with connect(fresh_database, autocommit=True) as conn:
        assert slot_state(conn, "late") is None


_SLOW_DOOR = """
import socket, sys, threading, time
def forward(source, target):
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)
def serve(client, slow):
    time.sleep(slow)
    server = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    for pair in ((client, server), (server, client)):
        threading.Thread(target=forward, args=pair, daemon=True).start()
with socket.create_server(("127.0.0.1", 0)) as door:
    print(door.getsockname()[1], flush=True)
    for number in range(2):
        threading.Thread(target=serve, args=(door.accept()[0], 2.0 * number), daemon=True).start()
    time.sleep(60)
"""
"""A server whose second connection, the request to cancel, is answered two seconds late."""


@contextmanager
def slow_to_cancel(dsn: Dsn) -> Iterator[Dsn]:
    command = [sys.executable, "-c", _SLOW_DOOR, str(dsn.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as door:
        assert door.stdout is not None
        try:
            yield replace(dsn, host="127.0.0.1", port=int(door.stdout.readline()))
        finally:
            door.kill()


def test_other_threads_go_on_while_the_server_is_slow_to_cancel(fresh_database: Dsn) -> None:
    over, longest = threading.Event(), 0.0

    def tick() -> None:
        nonlocal longest
        last = time.monotonic()
        while not over.wait(0.01):
            now = time.monotonic()
            last, longest = now, max(longest, now - last)

    with connect(fresh_database) as writer, slow_to_cancel(fresh_database) as slow:
        writer.execute("CREATE TABLE t (k int)")
        ticking = threading.Thread(target=tick)
        ticking.start()
        started = time.monotonic()
        with pytest.raises(ModakError), created_slot(slow, "late", patience_seconds=0.2):
            pass
        over.set()
        ticking.join()
    assert time.monotonic() - started > 2.0
    assert longest < 1.5


def test_advancing_backwards_changes_nothing(fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as conn, created_slot(fresh_database, "ahead") as slot:
        conn.execute("CREATE TABLE t (k int)")
        now = usable_slot(conn, "ahead").flush_lsn
        advance(conn, "ahead", now)
        assert usable_slot(conn, "ahead").confirmed_lsn == now
        advance(conn, "ahead", slot.consistent_lsn)
        assert usable_slot(conn, "ahead").confirmed_lsn == now


def test_a_zombie_that_holds_the_slot_is_evicted(fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute("CREATE TABLE t (k int PRIMARY KEY)")
        with followed(fresh_database, "held", "t") as table, replication_connection(fresh_database) as zombie:
            zombie.pgconn.exec_(
                b"START_REPLICATION SLOT held LOGICAL 0/0 (proto_version '1', publication_names 'held')"
            )
            state = slot_state(conn, "held")
            assert state is not None
            assert state.active_pid == zombie.info.backend_pid
            with pytest.raises(ModakError) as busy:
                table.peeked(binary=True)
            assert (busy.value.code, busy.value.retryable) == ("slot.held", True)
            assert evict(conn, "held") == zombie.info.backend_pid
            assert evict(conn, "held") is None
            assert table.peeked(binary=True) == []


def test_publications_give_what_was_named_to_them_whatever_it_is_called(fresh_database: Dsn) -> None:
    name = 'pub "x", y'
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute('CREATE TABLE "odd ""table""; DROP" (k int PRIMARY KEY, v text)')
        conn.execute("CREATE TABLE t (k int PRIMARY KEY)")
        assert find_publications(conn, [name]) == {}
        assert create_publication(conn, name, [ODD])
        relid = conn.execute('SELECT \'public."odd ""table""; DROP"\'::regclass::oid').fetchone()
        assert relid is not None
        found = find_publications(conn, [name, "another"])
        assert {each: (one.relids, one.whole) for each, one in found.items()} == {name: (relid, True)}
        with created_slot(fresh_database, "odd"):
            conn.execute('INSERT INTO "odd ""table""; DROP" VALUES (1, $$x$$)')
            conn.execute("INSERT INTO t VALUES (1)")
        (piece,) = _peeked_by(fresh_database, "odd", name)
        assert [item.relation.name for item in piece.items] == [ODD]  # type: ignore[union-attr]
        assert drop_publication(conn, name)
        assert drop_publication(conn, name)
        assert find_publications(conn, [name]) == {}


ALL = "insert, update, delete, truncate"


@pytest.mark.parametrize(
    ("tampering", "whole"),
    [
        (("DROP PUBLICATION p", "CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)"), None),
        (("ALTER PUBLICATION p DROP TABLE t", "ALTER PUBLICATION p ADD TABLE t"), True),
        (("ALTER PUBLICATION p SET TABLE t WHERE (k > 5)",), False),
        (("ALTER PUBLICATION p SET TABLE t (k)",), False),
        (("ALTER PUBLICATION p SET (publish = 'insert')",), False),
        (("ALTER PUBLICATION p SET (publish = 'insert')", f"ALTER PUBLICATION p SET (publish = '{ALL}')"), True),
        (("ALTER PUBLICATION p SET (publish_via_partition_root = false)",), False),
    ],
)
def test_a_publication_that_somebody_changed_has_another_mark(
    fresh_database: Dsn, tampering: tuple[str, ...], whole: bool | None
) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute("CREATE TABLE t (k int PRIMARY KEY, v text)")
        assert create_publication(conn, "p", [TableName("public", "t")])
        before = find_publications(conn, ["p"])["p"]
        assert find_publications(conn, ["p"])["p"] == before
        for statement in tampering:
            conn.execute(statement)
        after = find_publications(conn, ["p"])["p"]
    assert after.mark != before.mark
    assert whole is None or after.whole is whole


def _peeked_by(dsn: Dsn, slot: str, publication: str) -> list:  # type: ignore[type-arg]
    from modak.postgres.changes.peek import Feed, Peek

    table = Followed(dsn, slot)
    return list(Peek(Feed(dsn, slot, (publication,)), table.types(), table.upto()))


def test_partitions_come_under_their_parent_and_each_gets_its_identity(fresh_database: Dsn) -> None:
    parent, leaf = TableName("public", "p"), TableName("public", "p2")
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute("CREATE TABLE p (k int PRIMARY KEY, v text) PARTITION BY RANGE (k)")
        conn.execute("CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)")
        with followed(fresh_database, "parts", "p") as table:
            assert not_full(conn, parent) == ()
            conn.execute("CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20)")
            assert not_full(conn, parent) == (leaf,)
            with connect(fresh_database) as reader:
                reader.execute("SELECT FROM p2")
                assert write_full_rows(conn, parent) == (leaf,)
            assert write_full_rows(conn, parent) == ()
            conn.execute("INSERT INTO p VALUES (1, 'a'), (11, 'b'); UPDATE p SET k = 12 WHERE k = 1")
            pieces = table.peeked(binary=True)
        assert {item.relation.name for piece in pieces for item in piece.items} == {parent}  # type: ignore[union-attr]
        assert write_default_identity(conn, [parent, leaf]) == ()
        assert leaf in not_full(conn, parent)


@pytest.mark.parametrize(
    "point",
    [
        "slot.creating",
        "slot.created",
        "slot.advancing",
        "slot.advanced",
        "slot.evicting",
        "slot.evicted",
        "slot.dropping",
        "slot.dropped",
        "publication.creating",
        "publication.created",
        "publication.dropping",
        "publication.dropped",
        "identity.setting",
        "identity.set",
    ],
)
def test_after_a_crash_anywhere_the_same_calls_lead_to_the_same_end(fresh_database: Dsn, point: str) -> None:
    table = TableName("public", "t")

    def life() -> None:
        with connect(fresh_database, autocommit=True) as conn:
            if not find_publications(conn, ["life"]):
                assert create_publication(conn, "life", [table])
            assert write_full_rows(conn, table) == ()
            if slot_state(conn, "life") is None:
                with created_slot(fresh_database, "life"):
                    pass
            conn.execute("INSERT INTO t VALUES (1) ON CONFLICT DO NOTHING")
            evict(conn, "life")
            advance(conn, "life", usable_slot(conn, "life").flush_lsn)

    def end() -> None:
        with connect(fresh_database, autocommit=True) as conn:
            drop_slot(conn, "life")
            assert drop_publication(conn, "life")

    def whole() -> None:
        life()
        end()

    with connect(fresh_database, autocommit=True) as conn:
        conn.execute("CREATE TABLE t (k int PRIMARY KEY)")
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        whole()
    faults.arm(None)
    life()
    assert Followed(fresh_database, "life").peeked(binary=True) == []
    end()
    with connect(fresh_database, autocommit=True) as conn:
        assert (slot_state(conn, "life"), find_publications(conn, ["life"])) == (None, {})
        assert not_full(conn, table) == ()


def test_dropping_a_slot_that_is_read_is_busy_and_not_waited_for(fresh_database: Dsn) -> None:
    with (
        connect(fresh_database, autocommit=True) as conn,
        created_slot(fresh_database, "read"),
        replication_connection(fresh_database) as reader,
    ):
        conn.execute("CREATE PUBLICATION read")
        reader.pgconn.exec_(b"START_REPLICATION SLOT read LOGICAL 0/0 (proto_version '1', publication_names 'read')")
        begun = time.monotonic()
        with pytest.raises(ModakError) as busy:
            drop_slot(conn, "read")
        assert busy.value.retryable
        assert time.monotonic() - begun < 5


@pytest.mark.superuser
def test_a_history_that_a_server_keeps_to_itself_is_none(server: EmbeddedServer, fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        known = wal_history(conn)
        assert known is not None
        conn.execute("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
        assert wal_history(conn) == known
    with connect(least_privileged(server, fresh_database.dbname), autocommit=True) as conn:
        assert wal_history(conn) is None
