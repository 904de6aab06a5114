from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psycopg
import pytest

from modak.core.errors import Conflict, ModakError
from modak.core.names import TableName
from modak.postgres.arrow import stream
from modak.postgres.connect import connect
from modak.postgres.describe import describe
from modak.postgres.dsn import Dsn
from modak.postgres.snapshot import ExportSnapshot
from modak.postgres.splits import Split, ctid_predicate, ctid_splits
from tests.support.proxy import FaultProxy

_ROWS = 20_000


@pytest.fixture
def leaf(database: Dsn) -> Iterator[tuple[int, TableName]]:
    """A leaf of many pages, a third of them dead, so that a rewrite moves every row."""
    name = TableName("public", f"leaf_{secrets.token_hex(4)}")
    with connect(database, autocommit=True) as conn:
        conn.execute(f"CREATE TABLE {name} (id bigint PRIMARY KEY, v text, n numeric(10, 2))")
        conn.execute(f"INSERT INTO {name} SELECT -i, repeat('d', 100), i FROM generate_series(1, 10000) i")
        conn.execute(f"INSERT INTO {name} SELECT i, repeat('x', 100), i / 7.0 FROM generate_series(1, {_ROWS}) i")
        conn.execute(f"DELETE FROM {name} WHERE id < 0")
        yield describe(conn, name).oid, name
        conn.execute(f"DROP TABLE IF EXISTS {name}")


def _ids(dsn: Dsn, name: TableName, split: Split, snapshot: str | None) -> list[int]:
    query = f"SELECT id, v FROM ONLY {name} WHERE {ctid_predicate(split)}"
    with stream(dsn, query, snapshot=snapshot, batch_bytes=64 << 10) as batches:
        return [i for batch in batches for i in batch.column("id").to_pylist()]


def _exclusive(dsn: Dsn, statement: str) -> None:
    with connect(dsn, autocommit=True) as conn:
        conn.execute("SET lock_timeout = '200ms'")
        conn.execute(statement)


def test_without_the_lock_a_rewrite_between_two_tasks_loses_rows(database: Dsn, leaf: tuple[int, TableName]) -> None:
    """The hazard itself: this is what the lock of the exporter is for."""
    _, name = leaf
    with ExportSnapshot(database, []) as unguarded, connect(database) as conn:
        splits = ctid_splits(describe(conn, name).pages, 64 << 20, 16 << 20, 4)
        conn.commit()
        first = _ids(database, name, splits[0], unguarded.id)
        _exclusive(database, f"VACUUM FULL {name}")
        rest = [i for split in splits[1:] for i in _ids(database, name, split, unguarded.id)]
        assert sorted(first + rest) != list(range(1, _ROWS + 1))
        assert unguarded.held == ()


@pytest.mark.parametrize(
    "rewrite",
    [
        "VACUUM FULL {}",
        "TRUNCATE {}",
        "ALTER TABLE {} ALTER COLUMN v TYPE bytea USING v::bytea",
        "DROP TABLE {}",
        "CLUSTER {} USING {}_pkey",
    ],
)
def test_no_rewrite_comes_between_while_the_exporter_holds_its_lock(
    database: Dsn, leaf: tuple[int, TableName], rewrite: str
) -> None:
    _, name = leaf
    with ExportSnapshot(database, [leaf]) as export:
        (held,) = export.held
        splits = ctid_splits(held.pages, 64 << 20, 16 << 20, 4)
        assert len(splits) > 2
        first = _ids(database, name, splits[0], export.id)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            _exclusive(database, rewrite.replace("{}", name.name))
        rest = [i for split in splits[1:] for i in _ids(database, name, split, export.id)]
        export.check()
    assert sorted(first + rest) == list(range(1, _ROWS + 1))


def test_parallel_streams_read_exactly_one_snapshot_while_writers_run(
    database: Dsn, leaf: tuple[int, TableName]
) -> None:
    _, name = leaf
    stop = threading.Event()

    def write() -> None:
        with connect(database, autocommit=True) as conn:
            at = _ROWS
            while not stop.is_set():
                at += 1
                conn.execute(f"INSERT INTO {name} VALUES ({at}, 'late', 0)")
                conn.execute(f"UPDATE {name} SET v = v || '!' WHERE id = {at % _ROWS + 1}")
                conn.execute(f"DELETE FROM {name} WHERE id = {(at * 7) % _ROWS + 1}")
                if at % 50 == 0:
                    conn.execute(f"VACUUM {name}")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with ExportSnapshot(database, [leaf]) as export, connect(database) as conn:
            conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            conn.execute(f"SET TRANSACTION SNAPSHOT '{export.id}'")
            expected = [row[0] for row in conn.execute(f"SELECT id FROM {name} ORDER BY id")]
            splits = ctid_splits(export.held[0].pages, 64 << 20, 8 << 20, 4)
            with ThreadPoolExecutor(3) as pool:
                parts = list(pool.map(lambda split: _ids(database, name, split, export.id), splits))
            export.check()
    finally:
        stop.set()
        writer.join()
    assert sorted(i for part in parts for i in part) == expected


def test_the_snapshot_is_taken_after_the_lock(database: Dsn, leaf: tuple[int, TableName]) -> None:
    oid, name = leaf
    with connect(database) as owner, ThreadPoolExecutor(1) as pool:
        owner.execute(f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE")
        owner.execute(f"INSERT INTO {name} VALUES ({_ROWS + 1}, 'while the exporter waits', 0)")
        export = ExportSnapshot(database, [leaf])
        entering = pool.submit(export.__enter__)
        with connect(database, autocommit=True) as watcher:
            while watcher.execute(
                "SELECT count(*) FROM pg_locks WHERE relation = %s AND NOT granted", (oid,)
            ).fetchone() == (0,):
                pass
        owner.commit()
        entering.result(timeout=10)
        try:
            assert _ROWS + 1 in _ids(database, name, (0, None), export.id)
        finally:
            export.__exit__()


def test_an_exclusive_lock_of_somebody_else_is_not_waited_for_long(database: Dsn, leaf: tuple[int, TableName]) -> None:
    with connect(database) as owner:
        owner.execute(f"LOCK TABLE {leaf[1]}")
        with pytest.raises(ModakError) as refusal, ExportSnapshot(database, [leaf], lock_millis=100):
            pass
    assert refusal.value.code == "postgres.busy"
    assert refusal.value.retryable


def test_a_leaf_that_was_replaced_under_its_name_is_a_conflict(database: Dsn, leaf: tuple[int, TableName]) -> None:
    _, name = leaf
    with connect(database, autocommit=True) as conn:
        conn.execute(f"DROP TABLE {name}")
        with pytest.raises(Conflict) as gone, ExportSnapshot(database, [leaf]):
            pass
        conn.execute(f"CREATE TABLE {name} (id bigint)")
        with pytest.raises(Conflict) as replaced, ExportSnapshot(database, [leaf]):
            pass
    assert {gone.value.code, replaced.value.code} == {"export.leaf_changed"}


def test_timeouts_of_the_role_do_not_end_an_export(fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        for setting in (
            "statement_timeout",
            "idle_in_transaction_session_timeout",
            "transaction_timeout",
            "lock_timeout",
        ):
            conn.execute(f'ALTER DATABASE "{fresh_database.dbname}" SET {setting} = 200')
        conn.execute("CREATE TABLE public.t AS SELECT 1::int8 AS id")
    with ExportSnapshot(fresh_database, []) as export:
        threading.Event().wait(0.5)
        with stream(fresh_database, "SELECT id, pg_sleep(0.5)::text FROM t", snapshot=export.id) as batches:
            assert [batch.num_rows for batch in batches] == [1]
        export.check()


def test_a_lost_exporter_is_noticed_and_its_snapshot_cannot_be_joined(
    database: Dsn, leaf: tuple[int, TableName]
) -> None:
    ended = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'modak export'"
    with (
        FaultProxy(database.host, database.port) as proxy,
        ExportSnapshot(replace(database, port=proxy.port), [leaf]) as export,
    ):
        export.check()
        proxy.cut()
        with pytest.raises(Conflict) as lost:
            export.check()
        with connect(database, autocommit=True) as conn:
            conn.execute(ended)
        with pytest.raises(Conflict) as gone:
            stream(database, "SELECT 1", snapshot=export.id)
    assert lost.value.code == gone.value.code == "export.snapshot_lost"
    assert lost.value.retryable


def _connections(dsn: Dsn) -> int:
    with connect(dsn) as conn:
        row = conn.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'modak stream'"
        ).fetchone()
        assert row is not None
        return int(row[0])


def _settles_at_zero(dsn: Dsn) -> bool:
    for _ in range(100):
        if _connections(dsn) == 0:
            return True
        threading.Event().wait(0.05)
    return False


def test_a_stream_releases_its_connection_however_it_ends(fresh_database: Dsn) -> None:
    many = "SELECT i, repeat('x', 1000) AS v FROM generate_series(1, 100000) i"
    list(stream(fresh_database, "SELECT 1 AS x"))
    assert _settles_at_zero(fresh_database)
    with stream(fresh_database, many, batch_bytes=1 << 20) as early:
        next(iter(early))
    assert _settles_at_zero(fresh_database)
    with pytest.raises(ModakError):
        stream(fresh_database, "SELECT * FROM nowhere")
    with pytest.raises(ModakError, match="division by zero") as middle:
        list(
            stream(fresh_database, "SELECT 1 / (50000 - i) AS x FROM generate_series(1, 100000) i", batch_bytes=1 << 16)
        )
    assert middle.value.code == "postgres.stream"
    assert _settles_at_zero(fresh_database)


def test_batches_keep_to_the_size_that_was_asked_for(fresh_database: Dsn) -> None:
    query = "SELECT i, repeat('x', 1000) AS v FROM generate_series(1, 20000) i"
    with stream(fresh_database, query, batch_bytes=1 << 20) as batches:
        sizes = [batch.nbytes for batch in batches]
    assert len(sizes) > 10
    assert max(sizes) < 2 << 20


def test_an_empty_result_still_has_a_schema(fresh_database: Dsn) -> None:
    with stream(fresh_database, "SELECT 1::int8 AS a, 'x' AS b WHERE false") as batches:
        assert batches.schema.names == ["a", "b"]
        assert sum(batch.num_rows for batch in batches) == 0


def test_a_backend_that_dies_in_mid_stream_is_an_error_and_not_a_short_result(fresh_database: Dsn) -> None:
    many = "SELECT i, repeat('x', 1000) AS v FROM generate_series(1, 1000000) i"
    with stream(fresh_database, many, batch_bytes=1 << 20) as batches:
        rows = iter(batches)
        next(rows)
        with connect(fresh_database, autocommit=True) as conn:
            conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'modak stream'"
                " AND datname = current_database()"
            )
        with pytest.raises(ModakError) as failure:
            list(rows)
    assert failure.value.code == "postgres.connection_lost"
    assert failure.value.retryable


def test_a_policy_that_would_hide_rows_makes_the_read_fail(fresh_database: Dsn) -> None:
    role = f"reader_{secrets.token_hex(4)}"
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute("CREATE TABLE t AS SELECT generate_series(1, 10) AS i")
        conn.execute("ALTER TABLE t ENABLE ROW LEVEL SECURITY; CREATE POLICY half ON t USING (i > 5)")
        conn.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'weak'; GRANT SELECT ON t TO {role}")
        try:
            with pytest.raises(ModakError, match="row-level security"):
                list(stream(replace(fresh_database, user=role, password="weak"), "SELECT * FROM t"))
        finally:
            conn.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_made_up_snapshot_id_never_reaches_the_server(fresh_database: Dsn) -> None:
    with pytest.raises(ValueError, match="snapshot"):
        stream(fresh_database, "SELECT 1", snapshot="x'; DROP TABLE t; --")


@pytest.mark.parametrize(
    ("query", "said", "code"),
    [
        ("SELECT 1 / (i - 1) AS x FROM generate_series(1, 5) i", "division by zero", "postgres.error"),
        (
            "SELECT pg_terminate_backend(pg_backend_pid())::text AS x",
            "terminating connection",
            "postgres.connection_lost",
        ),
    ],
)
def test_what_fails_before_the_first_row_is_said_as_well(fresh_database: Dsn, query: str, said: str, code: str) -> None:
    with pytest.raises(ModakError, match=said) as failure:
        list(stream(fresh_database, query))
    assert failure.value.code == code
    assert _settles_at_zero(fresh_database)


def test_what_ends_once_only_before_the_first_row_can_be_tried_again(fresh_database: Dsn) -> None:
    def cancel() -> None:
        _until_busy(fresh_database)
        with connect(fresh_database, autocommit=True) as conn:
            conn.execute(
                "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE application_name = 'modak stream'"
                " AND datname = current_database()"
            )

    with ThreadPoolExecutor(1) as aside:
        cancelled = aside.submit(cancel)
        with pytest.raises(ModakError) as failure:
            list(stream(fresh_database, "SELECT pg_sleep(2)::text AS x"))
        cancelled.result(30)
    assert failure.value.retryable


@pytest.mark.parametrize("when", ["idle", "busy"])
def test_a_connection_that_is_lost_does_not_end_the_process(fresh_database: Dsn, when: str) -> None:
    # In a process of its own: there are versions of the driver that abort it.
    with FaultProxy(fresh_database.host, fresh_database.port) as proxy:
        program = subprocess.Popen(
            [sys.executable, "-c", _LOSES_ITS_CONNECTION, when],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "ADDRESS": replace(fresh_database, port=proxy.port).uri()},
        )
        with program:
            assert program.stdin is not None
            assert program.stdout is not None
            assert program.stdout.readline() == "open\n"
            if when == "busy":
                _until_busy(fresh_database)
            proxy.cut()
            said, _ = program.communicate("cut\n", timeout=60)
    assert (program.returncode, said) == (0, "postgres.connection_lost\n")


_LOSES_ITS_CONNECTION = """
import os, sys
from modak.core.errors import ModakError
from modak.postgres.arrow import ArrowSession
from modak.postgres.dsn import Dsn

with ArrowSession(Dsn.parse(os.environ["ADDRESS"])) as session:
    print("open", flush=True)
    if sys.argv[1] == "idle":
        sys.stdin.readline()
    try:
        session.values("SELECT pg_sleep(30)::text")
    except ModakError as error:
        print(error.code, flush=True)
"""


def _until_busy(dsn: Dsn) -> None:
    asleep = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"
    deadline = time.monotonic() + 30
    with connect(dsn, autocommit=True) as conn:
        while conn.execute(asleep).fetchone() == (0,):
            assert time.monotonic() < deadline
            time.sleep(0.05)
