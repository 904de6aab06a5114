"""The catalog's versions: forward only, checksummed, one migration at a time, no superuser needed."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from psycopg import sql

from modak import __version__
from modak.catalog import spill
from modak.catalog.migrate import Migration, check, known, migrate
from modak.core.errors import ModakError, Refused
from modak.core.faults import Fault, InjectedFault, arm
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.catalog.build import build, delta, scalar

_PUBLIC_COLUMNS = {
    "status": "table_id schema_name table_name mode cutline_t cutline_s metadata_location mirror_frontier"
    " retention_line cutline_updated_at delta_backlog read_pins staged_loads copying partition_states",
    "delta": "table_id pk op tier_key old_tier_key version payload updated_at",
    "partitions": "table_id partition_name lower_bound upper_bound state",
    "op_log": "op_id table_id kind phase started_at finished_at counters error",
}


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


def test_migrations_refuse_an_open_transaction(fresh_database: Dsn) -> None:
    with connect(fresh_database) as conn:
        conn.execute("SELECT 1")
        with pytest.raises(ModakError, match="open transaction"):
            migrate(conn)
