from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import psycopg
import pytest

from modak.core.errors import ModakError
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.support.proxy import FaultProxy


@pytest.fixture
def proxy(fresh_database: Dsn) -> Iterator[FaultProxy]:
    with FaultProxy(fresh_database.host, fresh_database.port) as made:
        yield made


def _through(proxy: FaultProxy, dsn: Dsn) -> Dsn:
    return replace(dsn, host="127.0.0.1", port=proxy.port)


def test_a_commit_whose_answer_is_swallowed_has_landed(proxy: FaultProxy, fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as direct:
        direct.execute("CREATE TABLE t (i int)")
        conn = connect(_through(proxy, fresh_database))
        conn.execute("INSERT INTO t VALUES (1)")
        proxy.swallow_answers_after(b"COMMIT")
        with pytest.raises(psycopg.OperationalError):
            conn.commit()
        assert proxy.swallowed.wait(5)
        assert direct.execute("SELECT count(*) FROM t").fetchone() == (1,)
        with connect(_through(proxy, fresh_database)) as again:
            assert again.execute("SELECT count(*) FROM t").fetchone() == (1,)


def test_a_cut_connection_rolls_back_and_the_next_one_works(proxy: FaultProxy, fresh_database: Dsn) -> None:
    conn = connect(_through(proxy, fresh_database))
    conn.execute("CREATE TABLE t (i int)")
    proxy.cut()
    with pytest.raises(psycopg.OperationalError):
        conn.commit()
    with connect(_through(proxy, fresh_database)) as again:
        assert again.execute("SELECT to_regclass('t')").fetchone() == (None,)


def test_nothing_is_behind_a_closed_proxy(proxy: FaultProxy, fresh_database: Dsn) -> None:
    proxy.close()
    with pytest.raises(ModakError) as refusal:
        connect(_through(proxy, fresh_database))
    assert refusal.value.code == "postgres.unreachable"
    assert refusal.value.retryable
