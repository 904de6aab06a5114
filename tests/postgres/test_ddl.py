from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from modak.core.errors import ModakError
from modak.postgres.connect import connect
from modak.postgres.ddl import attempt, attempt_outside, impatient
from modak.postgres.dsn import Dsn

Conn = psycopg.Connection[Any]


@pytest.fixture
def conn(fresh_database: Dsn) -> Iterator[Conn]:
    with connect(fresh_database) as opened:
        opened.execute("CREATE TABLE t (id int) PARTITION BY RANGE (id)")
        opened.execute("CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (10)")
        opened.commit()
        yield opened


def _columns(dsn: Dsn) -> list[str]:
    with connect(dsn) as conn:
        rows = conn.execute("SELECT attname FROM pg_attribute WHERE attrelid = 't'::regclass AND attnum > 0").fetchall()
    return [row[0] for row in rows]


def test_ddl_on_a_free_table_is_committed(conn: Conn, fresh_database: Dsn) -> None:
    assert attempt(conn, sql.SQL("ALTER TABLE t ADD COLUMN {} int").format(sql.Identifier("odd name")))
    assert _columns(fresh_database) == ["id", "odd name"]
    assert conn.execute("SHOW lock_timeout").fetchone() == ("0",)


def test_ddl_gives_up_within_milliseconds_and_lets_others_pass(conn: Conn, fresh_database: Dsn) -> None:
    with connect(fresh_database) as reader, connect(fresh_database) as other:
        reader.execute("SELECT * FROM t")
        other.execute("SET statement_timeout = '5s'")
        started = time.monotonic()
        assert not attempt(conn, ["ALTER TABLE t ADD COLUMN a int", "ALTER TABLE t ADD COLUMN b int"], lock_millis=50)
        assert time.monotonic() - started < 3
        other.execute("SELECT * FROM t")
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert _columns(fresh_database) == ["id"]
    assert attempt(conn, "ALTER TABLE t ADD COLUMN a int")


def test_several_statements_land_together_or_not_at_all(conn: Conn, fresh_database: Dsn) -> None:
    with pytest.raises(ModakError):
        attempt(conn, ["ALTER TABLE t ADD COLUMN a int", "ALTER TABLE nowhere ADD COLUMN b int"])
    assert _columns(fresh_database) == ["id"]


def test_an_error_that_is_not_about_locks_is_raised(conn: Conn) -> None:
    with pytest.raises(ModakError) as failure:
        attempt(conn, "ALTER TABLE nowhere ADD COLUMN a int")
    assert failure.value.code == "postgres.no_such_table"


def test_a_connection_in_the_middle_of_a_transaction_is_refused(conn: Conn) -> None:
    conn.execute("SELECT 1")
    with pytest.raises(ModakError) as refusal:
        attempt(conn, "ALTER TABLE t ADD COLUMN a int")
    assert refusal.value.code == "postgres.in_transaction"


def test_a_detach_that_meets_an_old_reader_gives_up_and_is_finished_later(conn: Conn, fresh_database: Dsn) -> None:
    with connect(fresh_database) as reader:
        reader.execute("SELECT * FROM t")
        assert not attempt_outside(conn, "ALTER TABLE t DETACH PARTITION t_1 CONCURRENTLY")
        pending = conn.execute("SELECT inhdetachpending FROM pg_inherits").fetchall()
        assert pending == [(True,)]
        conn.commit()
    assert attempt_outside(conn, "ALTER TABLE t DETACH PARTITION t_1 FINALIZE")
    assert conn.execute("SELECT count(*) FROM pg_inherits").fetchone() == (0,)
    assert conn.execute("SHOW lock_timeout").fetchone() == ("0",)
    assert not conn.autocommit


def test_an_impatient_transaction_takes_other_work_along(conn: Conn, fresh_database: Dsn) -> None:
    with impatient(conn, 50):
        conn.execute("INSERT INTO t VALUES (1)")
        conn.execute("ALTER TABLE t ADD COLUMN a int")
    with connect(fresh_database) as reader:
        reader.execute("SELECT * FROM t")
        with pytest.raises(ModakError) as refusal, impatient(conn, 50):
            conn.execute("INSERT INTO t VALUES (2); ALTER TABLE t ADD COLUMN b int")
    assert refusal.value.code == "postgres.busy"
    assert conn.execute("SELECT id FROM t").fetchall() == [(1,)]
