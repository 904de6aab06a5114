"""A connection that was used before cannot be told from a new one, and a bad one is never handed out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import LiteralString

import psycopg
import pytest

from modak.postgres import pool
from modak.postgres.connect import SESSION, connect
from modak.postgres.dsn import Dsn
from modak.postgres.pool import MOST, Pool


@pytest.fixture
def kept(database: Dsn) -> Iterator[Pool]:
    opened = Pool(database)
    yield opened
    opened.close()


def pid(conn: psycopg.Connection[tuple[object, ...]]) -> int:
    return conn.info.backend_pid


def test_the_next_step_gets_the_same_session_and_nothing_of_the_last(kept: Pool, database: Dsn) -> None:
    with kept.connection() as conn:
        first = pid(conn)
        conn.read_only = False
        conn.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        conn.execute("SET TimeZone = 'Asia/Tokyo'")
        conn.execute("SET lock_timeout = '1ms'")
        conn.execute("SELECT pg_advisory_lock(7)")
        conn.execute("LISTEN something")
        conn.execute("CREATE TEMPORARY TABLE leftover (id int)")
        for _ in range(10):
            conn.execute("SELECT %s::int", (1,))
    with connect(database, autocommit=True) as other:
        assert other.execute("SELECT pg_try_advisory_lock(7)").fetchone() == (True,), "given up with the step"
    with kept.connection(autocommit=True) as conn:
        assert pid(conn) == first
        assert (conn.autocommit, conn.isolation_level, conn.read_only) == (True, None, None)
        shown = {name: conn.execute(f"SHOW {name}").fetchone() for name in SESSION}  # type: ignore[arg-type]
        assert shown["TimeZone"] == ("UTC",)
        assert conn.execute("SHOW lock_timeout").fetchone() == ("0",)
        assert conn.execute("SHOW default_transaction_isolation").fetchone() == ("read committed",)
        assert conn.execute("SELECT to_regclass('leftover'), count(*) FROM pg_listening_channels()").fetchone() == (
            None,
            0,
        )
        for _ in range(10):
            assert conn.execute("SELECT %s::int", (1,)).fetchone() == (1,)


def test_a_step_commits_at_its_end_and_an_exception_undoes_it(kept: Pool) -> None:
    with kept.connection(autocommit=True) as conn:
        conn.execute("CREATE TABLE steps (id int)")
    with kept.connection() as conn:
        conn.execute("INSERT INTO steps VALUES (1)")
    used: list[int] = []

    def fail(statement: LiteralString) -> None:
        with kept.connection() as conn:
            used.append(pid(conn))
            conn.execute("INSERT INTO steps VALUES (2)")
            conn.execute(statement)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail("SELECT 1")
    with pytest.raises(psycopg.errors.DivisionByZero):
        fail("SELECT 1 / 0")
    with kept.connection() as conn:
        assert conn.execute("SELECT * FROM steps").fetchall() == [(1,)]
        assert pid(conn) not in used, "what an exception has left is not used again"


def test_steps_at_the_same_time_have_connections_of_their_own(kept: Pool) -> None:
    together, found = threading.Barrier(8), set()

    def step() -> None:
        with kept.connection() as conn:
            together.wait(30)
            found.add(pid(conn))

    threads = [threading.Thread(target=step) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(kept._resting) == MOST, "and no more of them wait than that"


def test_a_connection_that_was_ended_meanwhile_is_replaced(kept: Pool, database: Dsn) -> None:
    with kept.connection() as one, kept.connection() as two:
        ended = {pid(one), pid(two)}
    with connect(database, autocommit=True) as other:
        for each in ended:
            other.execute("SELECT pg_terminate_backend(%s, 5000)", (each,))
    with kept.connection() as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)
        assert pid(conn) not in ended


def test_a_connection_that_rested_for_long_is_not_trusted(kept: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    with kept.connection() as conn:
        before = pid(conn)
    monkeypatch.setattr(pool, "REST_SECONDS", 0.0)
    with kept.connection() as conn:
        assert pid(conn) != before


def test_nothing_stays_open_after_the_close(kept: Pool) -> None:
    with kept.connection() as out:
        with kept.connection() as back:
            pass
        kept.close()
        assert back.closed
    assert out.closed


def test_a_step_may_close_its_connection_itself(kept: Pool) -> None:
    with kept.connection() as conn:
        conn.close()
    with kept.connection() as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)
