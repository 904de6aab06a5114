"""Who may correct what, and what the functions need."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from psycopg import errors, sql

from modak.catalog import spill
from modak.catalog.migrate import migrate
from modak.core.axis import Axis
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.catalog.build import delta, heap, scalar
from tests.catalog.correcting import Conn, image, reclaimed, role, run, upsert


@pytest.mark.superuser
def test_cold_rows_need_the_rights_that_hot_rows_need(conn: Conn, catalog: Dsn) -> None:
    table = reclaimed(conn)
    upsert(conn, table, id=1, ts=50, body="mine")
    delete = "SELECT modak_delete(%s, '1', %s)"
    with role(catalog, "nobody_special", "", table) as own:
        with pytest.raises(errors.InsufficientPrivilege):
            upsert(own, table, id=1, ts=50, body="x")
        with pytest.raises(errors.InsufficientPrivilege):
            own.execute(f"INSERT INTO modak.intake_{table.table_id} VALUES (1, 50, 'x')".encode())
        for call in ("take_in(%s, '{}')", "bury(%s, '[]')", "open_intake(%s)", "next_identity(%s::regclass, 1::int2)"):
            with pytest.raises(errors.InsufficientPrivilege):
                own.execute(f"SELECT modak.{call}".encode(), (str(table.name),))
        for forbidden in ("seam_of(%s)", "registered(%s)"):
            with pytest.raises(errors.InsufficientPrivilege):
                own.execute(f"SELECT modak.{forbidden}".encode(), (str(table.name),))
    with role(catalog, "only_inserts", "SELECT, INSERT", table) as own:
        for ts in (50, 250):
            with pytest.raises(errors.InsufficientPrivilege):
                upsert(own, table, id=1, ts=ts, body="x")
            with pytest.raises(errors.InsufficientPrivilege):
                own.execute(delete, (str(table.name), ts))
    with role(catalog, "plain_user", "SELECT, INSERT, UPDATE", table) as own:
        assert upsert(own, table, id=1, ts=50, body="theirs") == "delta"
        assert upsert(own, table, id=1, ts=250, body="theirs") == "heap"
        own.execute("CREATE TEMP TABLE src AS SELECT 5::bigint AS id, 55::bigint AS ts, 't' AS body")
        assert own.execute("SELECT * FROM modak_upsert_from(%s, 'src')", (str(table.name),)).fetchall() == [(0, 1)]
        with pytest.raises(errors.InsufficientPrivilege):
            own.execute(delete, (str(table.name), 50))
    with role(catalog, "only_deletes", "SELECT, DELETE", table) as own:
        assert scalar(own, delete, str(table.name), 250) == "heap"
        assert scalar(own, delete, str(table.name), 50) == "delta"
    assert delta(conn, table)["1", 50] is None


@pytest.mark.superuser
def test_row_security_holds_for_hot_rows_and_closes_the_cold_ones(conn: Conn, catalog: Dsn) -> None:
    table = reclaimed(conn)
    run(conn, table, "ALTER TABLE {} ENABLE ROW LEVEL SECURITY")
    run(conn, table, "CREATE POLICY own_rows ON {} USING (body = current_user)")
    with role(catalog, "policed", "SELECT, INSERT, UPDATE, DELETE", table) as own:
        assert upsert(own, table, id=1, ts=250, body="policed") == "heap"
        for body, ts, said in (("other", 250, "row-level security"), ("policed", 50, "row security of")):
            with pytest.raises(errors.InsufficientPrivilege, match=said):
                upsert(own, table, id=2, ts=ts, body=body)
        with pytest.raises(errors.InsufficientPrivilege, match="row security of"):
            own.execute("SELECT modak_delete(%s, '1', 50)", (str(table.name),))
    assert (heap(conn, table), delta(conn, table)) == ([(1, 250, "policed")], {})


@pytest.mark.superuser
def test_what_the_table_calls_runs_with_the_callers_rights(conn: Conn, catalog: Dsn) -> None:
    conn.execute("CREATE FUNCTION who(text) RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RETURN $1 = current_user; END'")
    table = reclaimed(conn, "id bigint, ts bigint, body text DEFAULT current_user CHECK (public.who(body))")
    with role(catalog, "the_caller", "SELECT, INSERT, UPDATE", table) as own:
        assert upsert(own, table, id=1, ts=50) == "delta"
    assert image(conn, table, "1", 50)["body"] == "the_caller"


def test_triggers_of_the_heap_see_the_callers_search_path(conn: Conn) -> None:
    table = reclaimed(conn)
    conn.execute("CREATE SCHEMA app; CREATE TABLE app.audit (id bigint)")
    conn.execute(
        "CREATE FUNCTION app.note() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN INSERT INTO audit VALUES (NEW.id); RETURN NEW; END'"
    )
    run(conn, table, "CREATE TRIGGER note BEFORE INSERT ON {} FOR EACH ROW EXECUTE FUNCTION app.note()")
    with conn.transaction():
        conn.execute("SET LOCAL search_path = app, public")
        assert upsert(conn, table, id=7, ts=250, body="x") == "heap"
    assert scalar(conn, "SELECT id FROM app.audit") == 7


@pytest.mark.parametrize("kind", ["STORED", "VIRTUAL"])
def test_generated_columns_are_part_of_the_image(conn: Conn, kind: str) -> None:
    if kind == "VIRTUAL" and conn.info.server_version < 180_000:
        pytest.skip("virtual generated columns came with Postgres 18")
    table = reclaimed(conn, f"id bigint, ts bigint, more bigint GENERATED ALWAYS AS (ts + 7) {kind}")
    assert upsert(conn, table, id=1, ts=50) == "delta"
    assert image(conn, table, "1", 50) == {"id": "1", "ts": "50", "more": "57"}


@pytest.mark.superuser
@pytest.mark.bare
def test_a_worker_without_superuser_rights_is_enough(fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as admin:
        admin.execute("CREATE ROLE modest_worker LOGIN PASSWORD 'plain'; CREATE ROLE modest_writer")
        admin.execute(sql.SQL("ALTER DATABASE {} OWNER TO modest_worker").format(sql.Identifier(fresh_database.dbname)))
    try:
        with connect(replace(fresh_database, user="modest_worker", password="plain"), autocommit=True) as worker:
            migrate(worker)
            table = reclaimed(worker, "id bigint GENERATED ALWAYS AS IDENTITY, ts bigint, body text")
            run(worker, table, "GRANT SELECT, INSERT, UPDATE, DELETE ON {} TO modest_writer")
        with connect(fresh_database, autocommit=True) as writer:
            writer.execute("SET SESSION AUTHORIZATION modest_writer")
            assert upsert(writer, table, ts=50, body="x") == "delta"
            assert upsert(writer, table, id=2, ts=250, body="x") == "heap"
            assert scalar(writer, "SELECT modak_delete(%s, '1', 50)", str(table.name)) == "delta"
    finally:
        with connect(fresh_database, autocommit=True) as admin:
            admin.execute("REASSIGN OWNED BY modest_worker TO CURRENT_USER; DROP OWNED BY modest_worker, modest_writer")
            admin.execute("ALTER ROLE modest_worker NOLOGIN")


def test_the_examples_of_the_document_run(fresh_database: Dsn) -> None:
    page = (Path(__file__).parents[2] / "docs" / "correcting.md").read_text()
    months = ["2024-01-01 00:00+00", "2024-02-01 00:00+00", "2024-03-01 00:00+00", "2024-04-01 00:00+00"]
    said: list[str] = []
    with connect(fresh_database, autocommit=True) as conn:
        migrate(conn)
        table = reclaimed(
            conn,
            "device int, at timestamptz, reading numeric(10, 2), note text",
            pk=("device",),
            tier="at",
            axis=Axis.TIMESTAMPTZ,
            bounds=list(itertools.pairwise(months)),
            drop=[0],
        )
        spill.enable(conn, table.name)
        run(conn, table, "ALTER TABLE {} RENAME TO events")
        conn.add_notice_handler(lambda notice: said.append(notice.message_primary or ""))
        answers = []
        for block in re.findall(r"```sql\n(.*?)```", page, flags=re.DOTALL):
            for statement in filter(str.strip, re.split(r";\n", block)):
                done = conn.execute(statement.encode())
                answers += done.fetchall() if done.description else []
    assert answers[:3] == [("delta",)] * 3
    assert answers[3:8] == [(1, 1), (0, 1000), (0, 1000), (0, 1), ("delta",)]
    assert "will not be changed" in answers[8][0]
    assert "the lake is not needed" in answers[9][0]
    assert said == [f"modak: 1 row of {table.name} to the delta"]
