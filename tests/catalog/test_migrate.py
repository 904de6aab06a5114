"""The catalog's versions: forward only, checksummed, one migration at a time, no superuser needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from psycopg import Connection, sql

from modak import __version__
from modak.catalog import spill
from modak.catalog.migrate import Migration, check, known, migrate
from modak.core.clock import FrozenClock
from modak.core.errors import ModakError, Refused
from modak.core.faults import Fault, InjectedFault, arm
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.catalog.build import Built, build, delta, scalar

_PUBLIC_COLUMNS = {
    "status": "table_id schema_name table_name mode cutline_t cutline_s metadata_location mirror_frontier"
    " retention_line cutline_updated_at delta_backlog read_pins staged_loads copying partition_states",
    "delta": "table_id pk op tier_key old_tier_key version payload updated_at",
    "partitions": "table_id partition_name lower_bound upper_bound state",
    "op_log": "op_id table_id kind phase started_at finished_at counters error",
}

pytestmark = pytest.mark.bare


def test_an_empty_database_is_migrated_once_and_then_fits(fresh_database: Dsn) -> None:
    with connect(fresh_database) as conn:
        with pytest.raises(Refused) as refused:
            check(conn)
        assert refused.value.code == "catalog.older"
        assert migrate(conn) == [migration.name for migration in known()]
        assert migrate(conn) == []
        check(conn)
        assert scalar(conn, "SELECT modak_version()") == __version__


def test_public_names_are_there(fresh_database: Dsn) -> None:
    with connect(fresh_database) as conn:
        migrate(conn)
        for name, wanted in _PUBLIC_COLUMNS.items():
            columns = [c.name for c in conn.execute(f"SELECT * FROM modak.{name}".encode()).description or ()]
            if name == "status":
                assert columns[: len(wanted.split())] == wanted.split()
            assert set(wanted.split()) <= set(columns)
        for schema in ("modak", "public"):
            for function in (
                "modak_read_begin(regclass, interval)",
                "modak_read_end(bigint)",
                "modak_version()",
                "modak_enable_transparent_writes(regclass)",
                "modak_disable_transparent_writes(regclass)",
                "modak_upsert(regclass, jsonb)",
                "modak_upsert_rows(regclass, jsonb)",
                "modak_upsert_from(regclass, regclass)",
                *(
                    f"modak_delete(regclass, jsonb, {key})"
                    for key in ("bigint", "date", "timestamp", "timestamptz", "text")
                ),
                "modak_delete_rows(regclass, jsonb)",
                "modak_delete_from(regclass, regclass)",
                "modak_explain(text)",
            ):
                assert scalar(conn, "SELECT to_regprocedure(%s) IS NOT NULL", f"{schema}.{function}"), function


def test_a_newer_catalog_refuses_this_worker(fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        migrate(conn)
        conn.execute("INSERT INTO modak.schema_meta VALUES (999, '999_future', 'x', '9.9.9')")
        for attempt in (migrate, check):
            with pytest.raises(Refused, match="999_future") as refused:
                attempt(conn)
            assert refused.value.code == "catalog.newer"


def test_a_changed_migration_is_refused(fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        migrate(conn)
        edited = [replace(known()[0], text=known()[0].text + "\n-- edited"), *known()[1:]]
        for attempt in (migrate, check):
            with pytest.raises(Refused, match="001_catalog") as refused:
                attempt(conn, edited)
            assert refused.value.code == "catalog.changed"


def test_a_migration_that_fails_leaves_the_earlier_ones_and_nothing_of_itself(fresh_database: Dsn) -> None:
    broken = Migration(900, "900_broken", "CREATE TABLE modak.half (); SELECT 1 / 0;")
    with connect(fresh_database) as conn:
        with pytest.raises(ModakError, match="division by zero"):
            migrate(conn, [*known(), broken])
        check(conn)
        assert scalar(conn, "SELECT to_regclass('modak.half') IS NULL")
        conn.rollback()
        assert migrate(conn, [*known(), replace(broken, text="CREATE TABLE modak.half ()")]) == ["900_broken"]


def test_workers_that_start_together_migrate_once(fresh_database: Dsn) -> None:
    applied: list[str] = []
    failures: list[BaseException] = []

    def start() -> None:
        try:
            with connect(fresh_database) as conn:
                applied.extend(migrate(conn))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(applied) == [migration.name for migration in known()]


@pytest.mark.parametrize("point", ["catalog.before_migration", "catalog.after_migration"])
def test_a_crash_between_migrations_is_made_good_by_the_next_start(fresh_database: Dsn, point: str) -> None:
    with connect(fresh_database) as conn:
        arm(Fault(point, after=1))
        with pytest.raises(InjectedFault):
            migrate(conn)
        arm(None)
        migrate(conn)
        check(conn)


@pytest.mark.superuser
def test_the_owner_of_the_database_needs_no_other_rights(fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        for role in ("plain_owner", "plain_writer"):
            conn.execute(f"DROP ROLE IF EXISTS {role}; CREATE ROLE {role} LOGIN PASSWORD 'plain'".encode())
        conn.execute(sql.SQL("ALTER DATABASE {} OWNER TO plain_owner").format(sql.Identifier(fresh_database.dbname)))
    try:
        _live_as_a_plain_owner(fresh_database)
    finally:
        with connect(fresh_database, autocommit=True) as conn:
            conn.execute("REASSIGN OWNED BY plain_owner TO CURRENT_USER; DROP OWNED BY plain_owner, plain_writer")


def _live_as_a_plain_owner(dsn: Dsn) -> None:
    with connect(replace(dsn, user="plain_owner", password="plain"), autocommit=True) as conn:
        assert scalar(conn, "SELECT NOT rolsuper FROM pg_roles WHERE rolname = current_user")
        migrate(conn)
        table = build(conn, watch=[1])
        spill.enable(conn, table.name)
        conn.execute(sql.SQL("DROP TABLE {}").format(table.leaf(0)))
        conn.execute("UPDATE modak.cutline SET t = 100")
        assert spill.widen(conn, table.table_id, 100)
        conn.execute(sql.SQL("GRANT SELECT, INSERT, UPDATE ON {} TO plain_writer").format(table.ident))
        with connect(replace(dsn, user="plain_writer", password="plain"), autocommit=True) as other:
            other.execute(sql.SQL("INSERT INTO {} VALUES (1, 50, 'cold'), (2, 150, 'sealed')").format(table.ident))
            conn.execute(sql.SQL("ALTER TABLE {} ADD COLUMN extra int").format(table.ident))
            other.execute(sql.SQL("INSERT INTO {} VALUES (3, 51, 'cold', 7)").format(table.ident))
            pin = scalar(other, "SELECT pin_id FROM modak_read_begin(%s::regclass)", str(table.name))
            assert scalar(other, "SELECT modak_read_end(%s)", pin)
        assert set(delta(conn, table)) == {("1", 50), ("2", 150), ("3", 51)}


_JOURNAL = {
    "open": ("prepared", None, "prepared"),
    "landed": ("committed", None, "committed"),
    "cut_off": ("abandoned", None, "abandoned"),
    "deferred": ("abandoned", "everything was deferred", "abandoned"),
    "refused": ("abandoned", "lake.frozen: It is frozen.", "failed"),
}
"""Operations of a catalog before 025: their phase and error, and their phase after it."""


def test_a_catalog_with_tables_pins_and_operations_is_brought_up_to_date(fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        migrate(conn, known()[:21])
        conn.execute("CREATE TYPE mood AS ENUM ('sad', 'glad')")
        table = build(conn, "id mood, ts bigint, body text")
        beside = build(conn)
        spill.enable(conn, beside.name)
        spilling = build(conn)
        spill.enable(conn, spilling.name)
        conn.execute(sql.SQL("DROP TABLE {}").format(spilling.leaf(0)))
        conn.execute("UPDATE modak.cutline SET t = 100 WHERE table_id = %s", (spilling.table_id,))
        assert spill.widen(conn, spilling.table_id, 100)
        for each in (table, beside):
            conn.execute(f"CREATE TABLE {each.name}_rest PARTITION OF {each.name} DEFAULT".encode())
        conn.execute(f"INSERT INTO {table.name} VALUES ('sad', 900, 'ahead')".encode())
        pin, query = _taken(conn, table)
        for name, (phase, error, _) in _JOURNAL.items():
            conn.execute(
                "INSERT INTO modak.op_log (op_id, table_id, kind) VALUES (%s, %s, 'tier')", (name, table.table_id)
            )
            for step in ("prepared", phase):
                conn.execute("UPDATE modak.op_log SET phase = %s, error = %s WHERE op_id = %s", (step, error, name))
        ended = dict(conn.execute("SELECT op_id, finished_at FROM modak.op_log").fetchall())

        assert migrate(conn) == [migration.name for migration in known()[21:]]

        rows = conn.execute("SELECT op_id, phase FROM modak.op_log").fetchall()
        assert dict(rows) == {name: after for name, (_, _, after) in _JOURNAL.items()}
        assert dict(conn.execute("SELECT op_id, finished_at FROM modak.op_log").fetchall()) == ended
        assert scalar(conn, "SELECT unfinished_ops FROM modak.status WHERE table_id = %s", table.table_id) == 2
        labels = conn.execute("SELECT label FROM modak.key_labels WHERE table_id = %s", (table.table_id,)).fetchall()
        assert sorted(labels) == [("glad",), ("sad",)]
        # Nobody has enabled transparent writes for the first; the second lost them to its DEFAULT partition.
        assert not spill.is_astray(conn, table.table_id)
        assert spill.is_astray(conn, beside.table_id)
        # A pin from before goes on, and the names of its file are those of now as far as anybody knows.
        assert conn.execute(query.encode()).fetchall() == []
        columns = conn.execute("SELECT column_name, lake_name FROM modak_read_columns(%s)", (pin,)).fetchall()
        assert columns == [(name, name) for name in ("id", "ts", "body")]
        conn.execute("UPDATE modak.cutline SET t = 100 WHERE table_id = %s", (table.table_id,))
        for step in ("sealing", "tiering", "tiered", "dropped"):
            conn.execute("UPDATE modak.partitions SET state = %s WHERE leaf_oid = %s", (step, table.leaves[0]))
        conn.execute(sql.SQL("DROP TABLE {}").format(table.leaf(0)))
        assert (
            scalar(conn, "SELECT modak_upsert(%s::regclass, %s)", str(table.name), '{"id": "sad", "ts": 50}') == "delta"
        )
        (image,) = conn.execute(f"SELECT pk, payload FROM ({_taken(conn, table)[1]}) d".encode()).fetchall()
        assert image == ("sad", {"id": "sad", "ts": "50", "body": None})
        assert spill.enable(conn, table.name) == f"{table.name}_rest"
        conn.execute(f"INSERT INTO {spilling.name} VALUES (1, 50, 'cold')".encode())
        assert list(delta(conn, spilling)) == [("1", 50)]


def _taken(conn: Connection[Any], table: Built) -> tuple[int, str]:
    row = conn.execute("SELECT pin_id, delta_query FROM modak_read_begin(%s::regclass)", (str(table.name),)).fetchone()
    assert row is not None
    return row[0], row[1]


@dataclass
class Acting(FrozenClock):
    """A clock on which, while somebody sleeps, something else happens."""

    acts: list[Callable[[], object]] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.acts.pop(0)()


def test_a_migration_that_has_to_wait_makes_nobody_else_wait(fresh_database: Dsn) -> None:
    """A leader of the version before goes on meanwhile; the default of the lock's wait is for ever."""
    with connect(fresh_database) as conn, connect(fresh_database) as reader:
        migrate(conn, known()[:21])
        reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT count(*) FROM modak.read_pins")

        def at_work() -> None:
            with connect(fresh_database, autocommit=True) as leader:
                leader.execute("SET lock_timeout = '100ms'")
                leader.execute("UPDATE modak.read_pins SET t = t")

        assert migrate(conn, clock=Acting(acts=[at_work, reader.rollback])) == [each.name for each in known()[21:]]


def test_a_migration_that_never_gets_its_lock_says_so(fresh_database: Dsn) -> None:
    with connect(fresh_database) as conn, connect(fresh_database) as reader:
        migrate(conn, known()[:21])
        reader.execute("SELECT count(*) FROM modak.read_pins")
        clock = Acting()
        clock.acts = [lambda: FrozenClock.sleep(clock, 31)]
        with pytest.raises(ModakError) as busy:
            migrate(conn, clock=clock)
        assert busy.value.code == "postgres.busy"


def test_migrations_refuse_an_open_transaction(fresh_database: Dsn) -> None:
    with connect(fresh_database) as conn:
        conn.execute("SELECT 1")
        with pytest.raises(ModakError, match="open transaction"):
            migrate(conn)
