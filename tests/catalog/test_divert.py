"""Plain INSERT and COPY of historical rows beside a DEFAULT partition: diverted, while recent rows stay there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from psycopg import errors, sql

from modak.catalog import moves, spill
from modak.catalog.migrate import migrate
from modak.catalog.records import NewPartition
from modak.core.axis import Axis
from modak.core.errors import ModakError
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.catalog.build import Built, build, delta, heap, scalar

Conn = psycopg.Connection[Any]


def run(conn: Conn, table: Built, statement: str, *params: Any) -> psycopg.Cursor[Any]:
    return conn.execute(sql.SQL(statement).format(table.ident), params)


def rest(table: Built) -> sql.Identifier:
    return sql.Identifier(table.name.schema, f"{table.name.name}_rest")


def with_default(conn: Conn, columns: str = "id bigint, ts bigint, body text", **how: Any) -> Built:
    """A table whose history began at 0, without partitions below 200, and with a DEFAULT partition."""
    table = build(conn, columns, **how)
    conn.execute(sql.SQL("CREATE TABLE {} PARTITION OF {} DEFAULT").format(rest(table), table.ident))
    assert spill.enable(conn, table.name) == f"public.{table.name.name}_rest"
    reclaim(conn, table, 0)
    reclaim(conn, table, 1)
    return table


def reclaim(conn: Conn, table: Built, number: int, upper: int | None = None) -> None:
    with conn.transaction():
        conn.execute(
            "UPDATE modak.cutline SET t = %s WHERE table_id = %s", (upper or (number + 1) * 100, table.table_id)
        )
        for step in ("sealing", "tiering", "tiered", "dropped"):
            conn.execute("UPDATE modak.partitions SET state = %s WHERE leaf_oid = %s", (step, table.leaves[number]))
        conn.execute(sql.SQL("DROP TABLE {}").format(table.leaf(number)))


def kept(conn: Conn, table: Built) -> list[tuple[Any, ...]]:
    return conn.execute(sql.SQL("SELECT * FROM ONLY {} ORDER BY 1").format(rest(table))).fetchall()


def test_historical_rows_go_to_the_delta_and_rows_of_no_partition_stay_in_the_default_one(conn: Conn) -> None:
    table = with_default(conn)
    done = run(conn, table, "INSERT INTO {} VALUES (1, 50, 'cold'), (2, 250, 'hot'), (3, 900, 'ahead')")
    assert done.rowcount == 2
    assert delta(conn, table) == {("1", 50): {"id": "1", "ts": "50", "body": "cold"}}
    assert heap(conn, table) == [(2, 250, "hot"), (3, 900, "ahead")]
    assert kept(conn, table) == [(3, 900, "ahead")]
    with conn.cursor().copy(sql.SQL("COPY {} FROM STDIN").format(table.ident)) as copy:
        for number in range(10, 400, 100):
            copy.write_row((number, number, "copied"))
    assert set(delta(conn, table)) == {("1", 50), ("10", 10), ("110", 110)}
    assert kept(conn, table) == [(3, 900, "ahead"), (310, 310, "copied")]
    run(conn, table, "INSERT INTO {} VALUES (10, 10, 'new') ON CONFLICT (id, ts) DO UPDATE SET body = excluded.body")
    run(conn, table, "INSERT INTO {} VALUES (3, 900, 'new') ON CONFLICT (id, ts) DO UPDATE SET body = excluded.body")
    assert (delta(conn, table)["10", 10] or {})["body"] == "new"
    assert kept(conn, table)[0] == (3, 900, "new")


@pytest.mark.parametrize(("ts", "reason"), [(-1, "no partition of"), (30, "below the retention line")])
def test_rows_that_no_read_would_show_are_refused(conn: Conn, ts: int, reason: str) -> None:
    table = with_default(conn)
    conn.execute("UPDATE modak.cutline SET retention_line = 40 WHERE table_id = %s", (table.table_id,))
    with pytest.raises(errors.CheckViolation, match=reason) as caught:
        run(conn, table, "INSERT INTO {} VALUES (1, %s, 'x')", ts)
    assert caught.value.diag.message_hint
    assert (kept(conn, table), delta(conn, table)) == ([], {})


def test_constraints_generated_columns_and_changes_of_the_table_hold_for_diverted_rows(conn: Conn) -> None:
    table = with_default(
        conn,
        "id bigint, ts bigint, body text NOT NULL DEFAULT 'none', n int CHECK (n > 0),"
        " twice bigint GENERATED ALWAYS AS (ts * 2) STORED",
    )
    run(conn, table, "INSERT INTO {} (id, ts) VALUES (1, 50)")
    assert delta(conn, table) == {("1", 50): {"id": "1", "ts": "50", "body": "none", "n": None, "twice": "100"}}
    with pytest.raises(errors.CheckViolation, match="n_check"):
        run(conn, table, "INSERT INTO {} VALUES (1, 60, 'x', 0)")
    with pytest.raises(errors.NotNullViolation):
        run(conn, table, "INSERT INTO {} VALUES (1, 60, NULL)")
    run(conn, table, "ALTER TABLE {} ADD COLUMN extra int NOT NULL DEFAULT 5 CHECK (extra < 10)")
    run(conn, table, "ALTER TABLE {} DROP COLUMN body")
    run(conn, table, "ALTER TABLE {} RENAME COLUMN id TO key")
    run(conn, table, "INSERT INTO {} (key, ts) VALUES (2, 70)")
    image = {"key": "2", "ts": "70", "n": None, "twice": "140", "extra": "5"}
    assert delta(conn, table)["2", 70] == image
    with pytest.raises(errors.CheckViolation):
        run(conn, table, "INSERT INTO {} (key, ts, extra) VALUES (2, 80, 11)")


def test_time_keys_are_diverted_too_and_infinity_is_told_as_such(conn: Conn) -> None:
    days = [("2024-01-01+00", "2024-01-02+00"), ("2024-01-02+00", "2024-01-03+00")]
    first, second = 1704067200000000, 1704153600000000
    table = build(conn, "id bigint, ts timestamptz", axis=Axis.TIMESTAMPTZ, bounds=days, t=first)
    conn.execute(sql.SQL("CREATE TABLE {} PARTITION OF {} DEFAULT").format(rest(table), table.ident))
    spill.enable(conn, table.name)
    reclaim(conn, table, 0, second)
    run(conn, table, "INSERT INTO {} VALUES (1, '2024-01-01 12:00+00'), (2, '2024-01-02+00'), (3, 'infinity')")
    assert set(delta(conn, table)) == {("1", first + 43_200_000_000)}
    assert [row[0] for row in conn.execute(sql.SQL("SELECT id FROM ONLY {}").format(rest(table)))] == [3]
    for early, said in (("2023-12-31+00", "2023-12-31"), ("-infinity", "-infinity")):
        with pytest.raises(errors.CheckViolation, match=f"for tier key {said}"):
            run(conn, table, "INSERT INTO {} VALUES (4, %s)", early)


def test_an_update_takes_a_row_from_a_partition_to_the_delta_but_not_from_the_default_one(conn: Conn) -> None:
    table = with_default(conn)
    run(conn, table, "INSERT INTO {} VALUES (1, 250, 'hot'), (2, 900, 'ahead')")
    run(conn, table, "UPDATE {} SET ts = 50 WHERE id = 1")
    assert delta(conn, table) == {("1", 50): {"id": "1", "ts": "50", "body": "hot"}}
    run(conn, table, "UPDATE {} SET body = 'changed', ts = 901 WHERE id = 2")
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="cannot move a row") as caught:
        run(conn, table, "UPDATE {} SET ts = 60 WHERE id = 2")
    assert caught.value.diag.message_hint == "Delete the row and insert it anew."
    assert heap(conn, table) == [(2, 901, "changed")]


def test_an_update_takes_a_row_from_the_default_partition_to_one_that_stands_below_the_cut_line(conn: Conn) -> None:
    table = with_default(conn)
    run(conn, table, "INSERT INTO {} VALUES (1, 900, 'ahead')")
    conn.execute("UPDATE modak.cutline SET t = 300 WHERE table_id = %s", (table.table_id,))
    run(conn, table, "UPDATE {} SET ts = 250 WHERE id = 1")
    assert conn.execute(sql.SQL("SELECT * FROM ONLY {}").format(table.leaf(2))).fetchall() == [(1, 250, "ahead")]
    assert (kept(conn, table), delta(conn, table)) == ([], {})


def test_a_row_for_a_partition_that_stands_is_never_diverted(conn: Conn) -> None:
    table = with_default(conn)
    conn.execute("UPDATE modak.cutline SET t = 300 WHERE table_id = %s", (table.table_id,))
    run(conn, table, "INSERT INTO {} VALUES (1, 250, 'still in the heap')")
    into = sql.SQL("INSERT INTO {} VALUES (2, 250, 'x')").format(rest(table))
    with pytest.raises(errors.CheckViolation, match="belongs into partition"):
        conn.execute(into)
    run(conn, table, f"ALTER TABLE {{}} DETACH PARTITION {table.name}_2")
    with pytest.raises(errors.ObjectInUse, match="about to be dropped"):
        run(conn, table, "INSERT INTO {} VALUES (2, 250, 'x')")
    assert delta(conn, table) == {}


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_snapshot_from_before_the_cut_line_moved_hides_no_row(conn: Conn, catalog: Dsn, level: str) -> None:
    table = with_default(conn)
    with connect(catalog) as old:
        old.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
        old.execute("SELECT 1 FROM modak.schema_meta")
        reclaim(conn, table, 2)
        run(old, table, "INSERT INTO {} VALUES (1, 50, 'cold')")
        with pytest.raises(errors.SerializationFailure, match="has changed in the meantime"):
            run(old, table, "INSERT INTO {} VALUES (2, 250, 'cold now')")
    with connect(catalog) as young:
        young.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
        run(young, table, "INSERT INTO {} VALUES (2, 250, 'cold now'), (3, 900, 'ahead')")
        young.commit()
    assert set(delta(conn, table)) == {("2", 250)}
    assert kept(conn, table) == [(3, 900, "ahead")]


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_snapshot_from_before_a_partition_came_and_went_hides_no_row(conn: Conn, catalog: Dsn, level: str) -> None:
    table = with_default(conn)
    with connect(catalog) as old, connect(catalog) as older:
        for each in (old, older):
            each.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
            each.execute("SELECT 1 FROM modak.schema_meta")
        with conn.transaction(force_rollback=True):
            conn.execute("UPDATE modak.cutline SET t = 250 WHERE table_id = %s", (table.table_id,))
        run(old, table, "INSERT INTO {} VALUES (1, 900, 'ahead')")
        old.commit()
        run(conn, table, f"CREATE TABLE {table.name}_3 PARTITION OF {{}} FOR VALUES FROM (300) TO (400)")
        leaf = scalar(conn, "SELECT %s::regclass::oid", f"{table.name}_3")
        part = NewPartition(name=f"{table.name.name}_3", lower=300, upper=400, leaf_oid=leaf, leaf_schema="public")
        moves.add_partitions(conn, table.table_id, [part])
        reclaim(conn, Built(table.table_id, table.name, (*table.leaves, leaf)), 3)
        with pytest.raises(errors.SerializationFailure, match="has changed in the meantime"):
            run(older, table, "INSERT INTO {} VALUES (2, 350, 'cold now')")
    run(conn, table, "INSERT INTO {} VALUES (2, 350, 'cold now')")
    assert set(delta(conn, table)) == {("2", 350)}
    assert kept(conn, table) == [(1, 900, "ahead")]


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_snapshot_from_before_the_diversion_hides_no_row(conn: Conn, catalog: Dsn, level: str) -> None:
    table = build(conn)
    conn.execute(sql.SQL("CREATE TABLE {} PARTITION OF {} DEFAULT").format(rest(table), table.ident))
    with connect(catalog) as old:
        old.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
        old.execute("SELECT 1 FROM modak.schema_meta")
        spill.enable(conn, table.name)
        reclaim(conn, table, 0)
        with pytest.raises(errors.SerializationFailure, match="has changed in the meantime"):
            run(old, table, "INSERT INTO {} VALUES (1, 50, 'cold')")
    assert kept(conn, table) == []


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
@pytest.mark.parametrize("state", ["sealing", "tiering"])
def test_a_partition_that_is_detached_on_its_way_to_the_lake_takes_no_rows_meanwhile(
    conn: Conn, state: str, level: str
) -> None:
    """The cut-line would pass over them."""
    table = with_default(conn)
    for step in ("sealing", "tiering")[: ("sealing", "tiering").index(state) + 1]:
        conn.execute("UPDATE modak.partitions SET state = %s WHERE leaf_oid = %s", (step, table.leaves[2]))
    run(conn, table, "INSERT INTO {} VALUES (3, 900, 'ahead')")
    run(conn, table, f"ALTER TABLE {{}} DETACH PARTITION {table.name}_2")
    with conn.transaction(force_rollback=True):
        conn.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
        with pytest.raises(errors.ObjectInUse, match="was detached") as caught:
            run(conn, table, "INSERT INTO {} VALUES (2, 250, 'x')")
    assert caught.value.diag.message_hint
    run(conn, table, "UPDATE {} SET body = 'still ahead' WHERE id = 3")
    assert kept(conn, table) == [(3, 900, "still ahead")]


def mirrored_with_default(conn: Conn) -> Built:
    """A mirror with heap retention, whose DEFAULT partition had a historical row before it was diverted."""
    table = build(conn)
    conn.execute("UPDATE modak.tables SET mode = 'mirrored' WHERE table_id = %s", (table.table_id,))
    conn.execute(sql.SQL("CREATE TABLE {} PARTITION OF {} DEFAULT").format(rest(table), table.ident))
    reclaim(conn, table, 0)
    run(conn, table, "INSERT INTO {} VALUES (1, 50, 'followed'), (2, -50, 'older still')")
    return table


def test_rows_that_a_mirror_follows_in_its_default_partition_stay_with_the_change_stream(conn: Conn) -> None:
    table = mirrored_with_default(conn)
    spill.enable(conn, table.name)
    upsert = "INSERT INTO {} VALUES (%s, %s, 'new') ON CONFLICT (id, ts) DO UPDATE SET body = excluded.body"
    run(conn, table, upsert, 1, 50)
    run(conn, table, upsert, 2, -50)
    run(conn, table, "INSERT INTO {} VALUES (1, 50, 'newer') ON CONFLICT DO NOTHING")
    with pytest.raises(errors.UniqueViolation):
        run(conn, table, "INSERT INTO {} VALUES (1, 50, 'again')")
    assert (kept(conn, table), delta(conn, table)) == ([(1, 50, "new"), (2, -50, "new")], {})
    run(conn, table, upsert, 3, 50)
    assert list(delta(conn, table)) == [("3", 50)]


@pytest.mark.bare
@pytest.mark.superuser
def test_the_look_into_the_default_partition_of_a_mirror_needs_no_lasting_membership(
    conn: Conn, fresh_database: Dsn
) -> None:
    conn.execute("DROP ROLE IF EXISTS divert_worker, divert_keeper")
    conn.execute(
        "CREATE ROLE divert_worker LOGIN PASSWORD 'plain'; CREATE ROLE divert_keeper;"
        " GRANT divert_keeper TO divert_worker"
    )
    name = sql.Identifier(fresh_database.dbname)
    conn.execute(sql.SQL("ALTER DATABASE {} OWNER TO divert_worker").format(name))
    with connect(fresh_database, autocommit=True) as admin:
        with connect(replace(fresh_database, user="divert_worker", password="plain"), autocommit=True) as worker:
            migrate(worker)
            table = mirrored_with_default(worker)
            admin.execute("GRANT CREATE ON SCHEMA public TO divert_keeper")
            admin.execute(sql.SQL("ALTER TABLE {} OWNER TO divert_keeper").format(rest(table)))
            spill.enable(worker, table.name)
            admin.execute("REVOKE divert_keeper FROM divert_worker")
            run(worker, table, "INSERT INTO {} VALUES (1, 50, 'again') ON CONFLICT DO NOTHING")
            assert delta(worker, table) == {}
        admin.execute("REASSIGN OWNED BY divert_worker, divert_keeper TO CURRENT_USER")
        admin.execute("DROP OWNED BY divert_worker, divert_keeper")


def test_what_only_the_default_partition_asks_of_its_rows_history_need_not_keep_to(conn: Conn) -> None:
    """A CHECK lets Postgres attach partitions without a look at the DEFAULT one."""
    table = build(conn, "id bigint, ts bigint, body text, n int CHECK (n > 0)")
    conn.execute(sql.SQL("CREATE TABLE {} PARTITION OF {} DEFAULT").format(rest(table), table.ident))
    own = "ALTER TABLE {} ADD CONSTRAINT ahead CHECK (ts >= 300), ALTER body SET NOT NULL"
    conn.execute(sql.SQL(own).format(rest(table)))
    spill.enable(conn, table.name)
    reclaim(conn, table, 0)
    run(conn, table, "INSERT INTO {} VALUES (1, 50, NULL, 1)")
    assert list(delta(conn, table)) == [("1", 50)]
    with pytest.raises(errors.CheckViolation, match="n_check"):
        run(conn, table, "INSERT INTO {} VALUES (2, 50, 'x', 0)")
    conn.execute(sql.SQL("ALTER TABLE {} ADD CONSTRAINT more CHECK (ts >= 400)").format(rest(table)))
    run(conn, table, "INSERT INTO {} VALUES (3, 50, 'x', 1)")
    run(conn, table, "ALTER TABLE {} ALTER body SET NOT NULL")
    with pytest.raises(errors.NotNullViolation):
        run(conn, table, "INSERT INTO {} VALUES (4, 50, NULL, 1)")


@pytest.mark.parametrize("act", [spill.enable, spill.disable])
def test_nobody_waits_behind_a_switch_that_waits_for_a_writer(
    conn: Conn, catalog: Dsn, act: Callable[[Conn, Any], object]
) -> None:
    table = with_default(conn)
    if act is spill.enable:
        assert spill.disable(conn, table.name)
    with connect(catalog) as writer:
        run(writer, table, "INSERT INTO {} VALUES (1, 900, 'open')")
        with pytest.raises(ModakError) as busy:
            act(conn, table.name)
        assert busy.value.code == "postgres.busy"
        conn.execute("SET lock_timeout = '100ms'")
        run(conn, table, "INSERT INTO {} VALUES (2, 901, 'meanwhile')")
    act(conn, table.name)
    assert spill.diverts(conn, table.table_id) == (act is spill.enable)


def test_a_default_partition_that_is_let_go_keeps_its_own_rows(conn: Conn) -> None:
    table = with_default(conn)
    run(conn, table, f"ALTER TABLE {{}} DETACH PARTITION {table.name}_rest")
    conn.execute(sql.SQL("INSERT INTO {} VALUES (1, 50, 'its own')").format(rest(table)))
    assert kept(conn, table) == [(1, 50, "its own")]
    assert spill.is_astray(conn, table.table_id)
    assert spill.enable(conn, table.name) == f"public.{table.name.name}_modak_spill"
    run(conn, table, "INSERT INTO {} VALUES (2, 50, 'history')")
    assert set(delta(conn, table)) == {("2", 50)}
    assert (
        scalar(
            conn,
            "SELECT count(*) FROM pg_trigger WHERE tgname LIKE '~modak_divert%%' AND tgrelid = %s::regclass",
            f"{table.name}_rest",
        )
        == 0
    )


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
def test_a_detached_default_partition_that_is_read_for_long_holds_nothing_up(
    conn: Conn, catalog: Dsn, level: str
) -> None:
    table = with_default(conn)
    run(conn, table, f"ALTER TABLE {{}} DETACH PARTITION {table.name}_rest")
    with connect(catalog) as reader:
        reader.execute(sql.SQL("SELECT 1 FROM {}").format(rest(table)))
        assert spill.enable(conn, table.name) == f"public.{table.name.name}_modak_spill"
    assert spill.disable(conn, table.name)

    def its_own(number: int) -> None:
        with conn.transaction():
            conn.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
            conn.execute(sql.SQL("INSERT INTO {} VALUES (%s, 50, 'its own')").format(rest(table)), (number,))

    its_own(1)
    conn.execute(sql.SQL("ALTER TABLE {} ATTACH PARTITION {} DEFAULT").format(table.ident, rest(table)))
    its_own(2)
    conn.execute("DELETE FROM modak.tables WHERE table_id = %s", (table.table_id,))
    its_own(3)
    assert [row[0] for row in kept(conn, table)] == [1, 2, 3]
    assert delta(conn, table) == {}


@pytest.mark.bare
@pytest.mark.superuser
def test_a_detached_default_partition_of_somebody_else_holds_nothing_up(conn: Conn, fresh_database: Dsn) -> None:
    conn.execute("DROP ROLE IF EXISTS divert_worker; CREATE ROLE divert_worker LOGIN PASSWORD 'plain'")
    conn.execute(sql.SQL("ALTER DATABASE {} OWNER TO divert_worker").format(sql.Identifier(fresh_database.dbname)))
    with connect(fresh_database, autocommit=True) as admin:
        with connect(replace(fresh_database, user="divert_worker", password="plain"), autocommit=True) as worker:
            migrate(worker)
            table = with_default(worker)
            run(worker, table, f"ALTER TABLE {{}} DETACH PARTITION {table.name}_rest")
            admin.execute(sql.SQL("ALTER TABLE {} OWNER TO CURRENT_USER").format(rest(table)))
            assert spill.enable(worker, table.name) == f"public.{table.name.name}_modak_spill"
            assert spill.disable(worker, table.name)
        admin.execute(sql.SQL("INSERT INTO {} VALUES (1, 50, 'its own')").format(rest(table)))
        admin.execute("REASSIGN OWNED BY divert_worker TO CURRENT_USER; DROP OWNED BY divert_worker")


def test_a_default_partition_beside_the_spill_is_let_go_altogether(conn: Conn) -> None:
    table = build(conn)
    assert spill.enable(conn, table.name) == f"public.{table.name.name}_modak_spill"
    conn.execute(sql.SQL("CREATE TABLE {} PARTITION OF {} DEFAULT").format(rest(table), table.ident))
    assert spill.is_astray(conn, table.table_id)
    assert spill.enable(conn, table.name) == f"public.{table.name.name}_rest"
    assert not spill.is_astray(conn, table.table_id)
    run(conn, table, f"ALTER TABLE {{}} DETACH PARTITION {table.name}_rest")
    assert spill.is_astray(conn, table.table_id)
    assert spill.enable(conn, table.name) == f"public.{table.name.name}_modak_spill"
    assert not spill.is_astray(conn, table.table_id)
    assert scalar(conn, "SELECT count(*) FROM pg_trigger WHERE tgrelid = %s::regclass", f"{table.name}_rest") == 0


@pytest.mark.superuser
@pytest.mark.parametrize("way", ["default", "spill"])
def test_a_writer_under_row_security_writes_no_history(conn: Conn, way: str) -> None:
    """No policy is asked for a row that a BEFORE trigger takes, and it would take the place of somebody else's."""
    table = with_default(conn) if way == "default" else build(conn)
    if way == "spill":
        reclaim(conn, table, 0)
        assert spill.enable(conn, table.name) == f"public.{table.name.name}_modak_spill"
    conn.execute("DROP ROLE IF EXISTS policed_writer; CREATE ROLE policed_writer")
    run(conn, table, "GRANT INSERT ON {0} TO policed_writer; ALTER TABLE {0} ENABLE ROW LEVEL SECURITY")
    run(conn, table, "CREATE POLICY own ON {} FOR INSERT TO policed_writer WITH CHECK (body = 'mine')")
    with conn.transaction(force_rollback=True):
        conn.execute("SET LOCAL ROLE policed_writer")
        run(conn, table, "INSERT INTO {} VALUES (1, 250, 'mine')")
        with pytest.raises(errors.InsufficientPrivilege, match="row security of"):
            run(conn, table, "INSERT INTO {} VALUES (1, 50, 'mine')")
    run(conn, table, "INSERT INTO {} VALUES (1, 50, 'of the owner')")
    # Who writes is the owner of a function, not who calls it.
    for number, name in ((2, "freely()"), (3, "policed()")):
        body = f"INSERT INTO {table.name} VALUES ({number}, 50, $$mine$$)"
        conn.execute(f"CREATE FUNCTION public.{name} RETURNS void LANGUAGE sql SECURITY DEFINER AS '{body}'".encode())
    conn.execute("ALTER FUNCTION public.policed() OWNER TO policed_writer")
    with conn.transaction():
        conn.execute("SET LOCAL ROLE policed_writer")
        conn.execute("SELECT public.freely()")
    with pytest.raises(errors.InsufficientPrivilege, match="row security of"):
        conn.execute("SELECT public.policed()")
    assert list(delta(conn, table)) == [("1", 50), ("2", 50)]
    conn.execute("DROP FUNCTION public.freely(), public.policed()")
    run(conn, table, "DROP POLICY own ON {0}; REVOKE ALL ON {0} FROM policed_writer")


@pytest.mark.superuser
def test_a_writer_without_rights_on_our_schema_and_replica_sessions_are_diverted(conn: Conn) -> None:
    table = with_default(conn)
    conn.execute("DROP ROLE IF EXISTS divert_writer; CREATE ROLE divert_writer")
    run(conn, table, "GRANT INSERT ON {} TO divert_writer")
    with conn.transaction():
        conn.execute("SET LOCAL session_replication_role = replica; SET LOCAL ROLE divert_writer")
        run(conn, table, "INSERT INTO {} VALUES (1, 50, 'x'), (2, 900, 'y')")
    assert list(delta(conn, table)) == [("1", 50)]
    run(conn, table, "REVOKE ALL ON {} FROM divert_writer")


def test_explain_tells_where_an_insert_goes(conn: Conn) -> None:
    table = with_default(conn)

    def told(ts: int) -> str:
        return str(scalar(conn, "SELECT modak_explain(%s)", f"INSERT INTO {table.name} VALUES (1, {ts}, 'x')"))

    assert "goes through the DEFAULT partition to the delta" in told(50)
    assert told(900).endswith("inserts into the heap.")
    assert told(-5).endswith("will be refused.")
    assert spill.disable(conn, table.name)
    assert "goes into the DEFAULT partition, where no read looks: use modak_upsert" in told(50)
    assert "goes into the DEFAULT partition, where no read looks" in told(-5)
