"""`modak_explain`: which tier a statement meets, told from its plan, with nothing run."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import errors, sql

from modak.catalog import spill
from modak.core.axis import Axis
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.catalog.build import Built, build, delta, heap, scalar

Conn = psycopg.Connection[Any]

NOT_NEEDED = "it asks for nothing below 100, so the lake is not needed"
MISSING = "which are in the lake and will be missing"
UNCHANGED = "which are in the lake and will not be changed"


def explain(conn: Conn, statement: str, table: Built | None = None) -> list[str]:
    told = statement.replace("@", str(table.name)) if table else statement
    return [line for (line,) in conn.execute("SELECT public.modak_explain(%s)", (told,)).fetchall()]


def reclaimed(conn: Conn, *, transparent: bool = True, **how: Any) -> Built:
    """A table with three leaves from 0 on, the first of which is gone."""
    table = build(conn, **how)
    if transparent:
        spill.enable(conn, table.name)
    conn.execute(sql.SQL("DROP TABLE {}").format(table.leaf(0)))
    edge = scalar(conn, "SELECT min(upper_bound) FROM modak.partitions WHERE table_id = %s", table.table_id)
    conn.execute("UPDATE modak.cutline SET t = %s WHERE table_id = %s", (edge, table.table_id))
    if transparent:
        assert spill.widen(conn, table.table_id, edge)
    return table


@pytest.fixture(scope="module")
def spilling(catalog: Dsn) -> Built:
    with connect(catalog, autocommit=True) as conn:
        table = reclaimed(conn)
        conn.execute(sql.SQL("INSERT INTO {} VALUES (1, 150, 'kept')").format(table.ident))
        return table


@pytest.fixture(scope="module")
def closed(catalog: Dsn) -> Built:
    with connect(catalog, autocommit=True) as conn:
        return reclaimed(conn, transparent=False)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("SELECT * FROM @", f"reads heap rows only; it may also ask for rows below 100, {MISSING}"),
        ("SELECT * FROM @ WHERE ts >= 100", f"reads the heap only; {NOT_NEEDED}"),
        ("SELECT max(body) FROM @ a JOIN pg_class c ON c.oid = a.id WHERE a.ts = 150", NOT_NEEDED),
        ("SELECT * FROM @ WHERE ts < 50 OR ts > 250", "may also ask for rows below 100"),
        ("SELECT * FROM @ WHERE ts < 50", f"finds no row in the heap: it asks only for rows below 100, {MISSING}"),
        ("SELECT * FROM @ WHERE ts > (SELECT 150)", "may also ask for rows below 100"),
        (
            "UPDATE @ SET body = 'x' WHERE id = 1",
            f"changes heap rows only; it may also ask for rows below 100, {UNCHANGED}",
        ),
        ("UPDATE @ SET body = 'x' WHERE ts = 120", f"changes the heap only; {NOT_NEEDED}"),
        ("DELETE FROM @ WHERE ts = 50", f"finds no row in the heap: it asks only for rows below 100, {UNCHANGED}"),
        (
            "WITH d AS (DELETE FROM @ WHERE ts > 250 RETURNING *) SELECT * FROM d;",
            f"changes the heap only; {NOT_NEEDED}",
        ),
        ("INSERT INTO @ VALUES (1, 50, 'x')", "lies below 100 and goes through the spill partition to the delta"),
        ("INSERT INTO @ (body, ts, id) VALUES ('50', 150, 50)", "inserts into the heap."),
        ("INSERT INTO @ VALUES (1, -5, 'x')", "before the history of the table, and will be refused"),
        ("INSERT INTO @ VALUES (1, 50, 'x'), (2, 150, 'x')", "Cannot tell which rows it has"),
        ("INSERT INTO @ SELECT 1, 50 + g, 'x' FROM generate_series(1, 9) g", "Cannot tell which rows it has"),
        ("MERGE INTO @ t USING (SELECT 1 AS i) v ON v.i = t.id WHEN MATCHED THEN DELETE", "cannot tell what it means"),
    ],
)
def test_a_statement_is_told_its_tiers(conn: Conn, spilling: Built, statement: str, said: str) -> None:
    (line,) = explain(conn, statement, spilling)
    assert line.startswith(f"{spilling.name}: ")
    assert said in line
    assert (heap(conn, spilling), delta(conn, spilling)) == ([(1, 150, "kept")], {})


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("SELECT * FROM @ WHERE ts > 150", f"cannot tell whether it asks for rows below 100, {MISSING}"),
        ("DELETE FROM @", f"cannot tell whether it asks for rows below 100, {UNCHANGED}"),
        ("SELECT * FROM @ WHERE ts < 50", "cannot tell about functions, or about partitions that were all pruned"),
        ("INSERT INTO @ VALUES (1, 50, 'x')", "will be refused: use modak_upsert"),
    ],
)
def test_without_the_spill_partition_it_says_what_it_cannot_tell(
    conn: Conn, closed: Built, statement: str, said: str
) -> None:
    (line,) = explain(conn, statement, closed)
    assert said in line


def test_each_table_and_each_way_has_a_line(conn: Conn, spilling: Built, closed: Built) -> None:
    lines = explain(
        conn, f"INSERT INTO @ SELECT * FROM {closed.name} UNION ALL SELECT * FROM @ WHERE ts > 100", spilling
    )
    inserted, *selected = lines
    assert inserted.startswith(f"{spilling.name}: ")
    assert "inserts rows from 100 on" in inserted
    assert sorted(line.split(": ")[0] for line in selected) == sorted([str(spilling.name), str(closed.name)])
    assert any(line.startswith(f"{spilling.name}: ") and NOT_NEEDED in line for line in selected)


def test_before_anything_is_reclaimed_the_heap_has_every_row(conn: Conn) -> None:
    table = build(conn)
    for statement in ("SELECT * FROM @", "DELETE FROM @ WHERE ts < 50"):
        (line,) = explain(conn, statement, table)
        assert "the heap, which holds every row" in line
    assert explain(conn, "INSERT INTO @ VALUES (1, 1, 'x')", table) == [f"{table.name}: inserts into the heap."]
    conn.execute("UPDATE modak.tables SET mode = 'mirrored' WHERE table_id = %s", (table.table_id,))
    assert explain(conn, "SELECT * FROM @", table) == [f"{table.name}: reads the heap; the lake follows it."]


def test_what_has_expired_is_not_said_to_be_in_the_lake(conn: Conn) -> None:
    table = reclaimed(conn)
    conn.execute("UPDATE modak.cutline SET retention_line = 50 WHERE table_id = %s", (table.table_id,))
    assert "below the retention line" in explain(conn, "INSERT INTO @ VALUES (1, 40, 'x')", table)[0]
    assert "to the delta" in explain(conn, "INSERT INTO @ VALUES (1, 50, 'x')", table)[0]
    conn.execute("UPDATE modak.cutline SET retention_line = 100 WHERE table_id = %s", (table.table_id,))
    assert "holds every row" in explain(conn, "SELECT * FROM @", table)[0]


def test_tier_keys_of_time_are_told_in_their_own_words(conn: Conn) -> None:
    months = ["2024-01-01 00:00+00", "2024-02-01 00:00+00", "2024-03-01 00:00+00"]
    table = reclaimed(
        conn,
        columns="id bigint, ts timestamptz, body text",
        axis=Axis.TIMESTAMPTZ,
        bounds=[(months[0], months[1]), (months[1], months[2])],
        t=1704067200000000,
    )
    with conn.transaction():
        conn.execute("SET LOCAL TimeZone = 'Asia/Kathmandu'")
        conn.execute("SET LOCAL DateStyle = 'German'")
        for at, said in (
            ("2024-01-31 23:59:59+00", "below 2024-02-01 00:00:00+00"),
            ("2024-02-01 00:00+00", "the heap"),
        ):
            assert said in explain(conn, f"INSERT INTO @ VALUES (1, '{at}', 'x')", table)[0]
    assert "nothing below 2024-02-01 00:00:00+00" in explain(conn, f"SELECT FROM @ WHERE ts > '{months[1]}'", table)[0]


def test_calls_of_our_functions_are_told(conn: Conn, spilling: Built) -> None:
    (line,) = explain(conn, """SELECT modak_upsert('@', '{"id": 1, "ts": 50}')""", spilling)
    assert "calls modak functions" in line
    (line,) = explain(conn, "SELECT * FROM modak_delete_rows('@', '[]')", spilling)
    assert "calls modak functions" in line
    assert delta(conn, spilling) == {}
    assert "touches no registered table" in explain(conn, "SELECT 1")[0]


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT 1; DELETE FROM @",
        "SELECT 1; COMMIT",
        "SELECT 1;;DROP TABLE @",
        "; DELETE FROM @",
        "SELECT $$;$$; DELETE FROM @",
        "SELECT E'\\''; DELETE FROM @; --'",
        "SELECT '\\'; DELETE FROM @; --'",
        "SELECT 1 /* /* */ ; */; DELETE FROM @",
        'SELECT 1 AS ";"; DELETE FROM @',
        "ANALYZE DELETE FROM @",
        "(ANALYZE) DELETE FROM @",
        "(ANALYZE, BUFFERS) SELECT 1",
        "EXPLAIN ANALYZE DELETE FROM @",
        "VERBOSE DELETE FROM @",
        "COPY @ FROM STDIN",
        "TRUNCATE @",
        "DROP TABLE @",
        "DO $$ BEGIN DELETE FROM @; END $$",
        "",
        "--",
    ],
)
@pytest.mark.parametrize("conforming", ["on", "off"])
def test_nothing_but_one_plain_statement_is_accepted(
    conn: Conn, spilling: Built, statement: str, conforming: str
) -> None:
    # With backslashes read the other way round one of them is a single harmless literal.
    harmless = statement.startswith("SELECT '\\'") and conforming == "off"
    with conn.transaction(force_rollback=True):
        conn.execute(f"SET LOCAL standard_conforming_strings = {conforming}".encode())
        if harmless:
            assert "touches no registered table" in explain(conn, statement, spilling)[0]
        else:
            with pytest.raises(errors.SyntaxError, match=r"^cannot explain this") as caught, conn.transaction():
                explain(conn, statement, spilling)
            assert "takes one SELECT" in (caught.value.diag.message_hint or "")
        assert heap(conn, spilling) == [(1, 150, "kept")]


def test_nothing_runs_not_even_what_planning_calls(conn: Conn, spilling: Built) -> None:
    conn.execute("CREATE TABLE ran (n int)")
    conn.execute("CREATE FUNCTION writes() RETURNS int LANGUAGE sql AS 'INSERT INTO ran VALUES (1) RETURNING n'")
    for kind in ("IMMUTABLE", "VOLATILE"):
        conn.execute(
            f"CREATE OR REPLACE FUNCTION sly() RETURNS int LANGUAGE plpgsql {kind} AS"
            " 'BEGIN RETURN public.writes(); END'".encode()
        )
        explain(conn, "DELETE FROM @ WHERE id = sly()", spilling)
        explain(conn, "CREATE TABLE made AS SELECT sly()")
    assert scalar(conn, "SELECT count(*) FROM ran") == 0
    assert scalar(conn, "SELECT to_regclass('made') IS NULL")
    assert heap(conn, spilling) == [(1, 150, "kept")]


@pytest.mark.superuser
def test_the_statement_has_the_rights_of_the_caller(conn: Conn, spilling: Built) -> None:
    conn.execute("CREATE ROLE explaining")
    try:
        with conn.transaction(force_rollback=True):
            conn.execute("SET LOCAL SESSION AUTHORIZATION explaining")
            with pytest.raises(errors.InsufficientPrivilege):
                explain(conn, "SELECT * FROM @", spilling)
        with conn.transaction(force_rollback=True):
            conn.execute(sql.SQL("GRANT SELECT ON {} TO explaining").format(spilling.ident))
            conn.execute("SET LOCAL SESSION AUTHORIZATION explaining")
            assert NOT_NEEDED in explain(conn, "SELECT * FROM @ WHERE ts = 150", spilling)[0]
    finally:
        conn.execute("DROP ROLE explaining")
