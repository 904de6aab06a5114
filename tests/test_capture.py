"""Late writes into a sealed leaf are never lost: each hazard of the capture trigger, recreated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql

from modak.catalog import capture, pk
from modak.catalog.migrate import migrate
from modak.core.axis import Axis
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.catalog.build import Built, build, delta, scalar

Conn = psycopg.Connection[Any]


@pytest.fixture(scope="module")
def catalog(database: Dsn) -> Dsn:
    with connect(database) as conn:
        migrate(conn)
    return database


@pytest.fixture
def conn(catalog: Dsn) -> Iterator[Conn]:
    with connect(catalog, autocommit=True) as opened:
        yield opened


def run(conn: Conn, table: Built, statement: str, *params: Any) -> None:
    conn.execute(sql.SQL(statement).format(table.ident), params)


def test_insert_update_and_delete_in_a_watched_leaf_reach_the_delta(conn: Conn) -> None:
    table = build(conn, watch=[0])
    run(conn, table, "INSERT INTO {} VALUES (1, 10, 'a'), (2, 20, 'b'), (3, 30, NULL), (9, 150, 'hot')")
    run(conn, table, "UPDATE {} SET body = 'b2' WHERE id = 2")
    run(conn, table, "DELETE FROM {} WHERE id = 1")
    assert delta(conn, table) == {
        ("3", 30): {"id": "3", "ts": "30", "body": None},
        ("2", 20): {"id": "2", "ts": "20", "body": "b2"},
        ("1", 10): None,
    }


def test_a_rolled_back_write_leaves_nothing(conn: Conn) -> None:
    table = build(conn, watch=[0])
    with conn.transaction(force_rollback=True):
        run(conn, table, "INSERT INTO {} VALUES (1, 10, 'a')")
    assert delta(conn, table) == {}


def test_versions_of_a_key_grow_with_every_change_and_name_the_transaction(conn: Conn) -> None:
    table = build(conn, watch=[0])
    seen = []
    for body in "abc":
        with conn.transaction():
            run(
                conn,
                table,
                "INSERT INTO {} VALUES (1, 10, %s) ON CONFLICT (id, ts) DO UPDATE SET body = excluded.body",
                body,
            )
            xid = scalar(conn, "SELECT pg_current_xact_id()::text")
        row = conn.execute(
            "SELECT version, xid::text, old_tier_key FROM modak.delta WHERE table_id = %s", (table.table_id,)
        ).fetchone()
        assert row is not None
        assert row[1:] == (xid, None)
        seen.append(row[0])
    assert seen == sorted(set(seen))


def test_the_writers_session_settings_do_not_change_the_text(conn: Conn) -> None:
    columns = "id date, ts timestamptz, f float8, b bytea, i interval, t timetz, r int4range, n numeric, ok bool"
    table = build(conn, columns, axis=Axis.TIMESTAMPTZ, bounds=[("2024-01-01", "2024-02-01")], watch=[0])
    insert = (
        "INSERT INTO {} VALUES ('2024-01-05', '2024-01-05 03:04:05.123456+05', 0.1::float8 + 0.2, '\\xdeadbeef',"
        " '1 day 2 hours', '03:04+02', '[1,5)', 1.50, true)"
    )
    run(conn, table, insert.replace("{}", "{}"))
    before = delta(conn, table)
    for setting in (
        "TimeZone = 'Asia/Tokyo'",
        "DateStyle = 'German, DMY'",
        "extra_float_digits = -5",
        "bytea_output = 'escape'",
        "IntervalStyle = 'sql_standard'",
        "standard_conforming_strings = off",
        "search_path = pg_temp",
    ):
        conn.execute(f"SET {setting}".encode())
    run(conn, table, "UPDATE {} SET n = n")
    assert delta(conn, table) == before
    assert before == {
        ("2024-01-05", 1704405845123456): {
            "id": "2024-01-05",
            "ts": "2024-01-04 22:04:05.123456+00",
            "f": "0.30000000000000004",
            "b": "\\xdeadbeef",
            "i": "P1DT2H",
            "t": "03:04:00+02",
            "r": "[1,5)",
            "n": "1.50",
            "ok": "true",
        }
    }


def test_a_renamed_key_and_added_and_dropped_columns_are_followed(conn: Conn) -> None:
    table = build(conn, watch=[0])
    run(conn, table, "ALTER TABLE {} RENAME COLUMN id TO key")
    run(conn, table, "ALTER TABLE {} RENAME COLUMN ts TO at")
    run(conn, table, "ALTER TABLE {} ADD COLUMN extra int DEFAULT 7")
    run(conn, table, "ALTER TABLE {} DROP COLUMN body")
    run(conn, table, "INSERT INTO {} (key, at) VALUES (1, 10)")
    assert delta(conn, table) == {("1", 10): {"key": "1", "at": "10", "extra": "7"}}


def test_a_leaf_whose_columns_are_numbered_differently_is_understood(conn: Conn) -> None:
    table = build(conn)
    odd = sql.Identifier(f"{table.name.name}_odd")
    conn.execute(sql.SQL("CREATE TABLE {} (gone int, body text, ts bigint NOT NULL, id bigint NOT NULL)").format(odd))
    conn.execute(sql.SQL("ALTER TABLE {} DROP COLUMN gone").format(odd))
    conn.execute(sql.SQL("ALTER TABLE {} ATTACH PARTITION {} FOR VALUES FROM (900) TO (1000)").format(table.ident, odd))
    capture.install(conn, table.table_id, scalar(conn, "SELECT %s::regclass::oid", f"{table.name.name}_odd"))
    run(conn, table, "ALTER TABLE {} RENAME COLUMN id TO key")
    run(conn, table, "INSERT INTO {} (key, ts, body) VALUES (5, 950, 'x')")
    conn.execute(sql.SQL("ALTER TABLE {} DETACH PARTITION {}").format(table.ident, odd))
    run(conn, table, "ALTER TABLE {} RENAME COLUMN key TO other")
    conn.execute(sql.SQL("UPDATE {} SET body = 'after the detach'").format(odd))
    assert delta(conn, table) == {("5", 950): {"key": "5", "ts": "950", "body": "after the detach"}}


def test_json_with_a_nul_escape_does_not_break_the_write(conn: Conn) -> None:
    table = build(conn, "id bigint, ts bigint, doc json, docs json[]", watch=[0])
    run(conn, table, """INSERT INTO {} VALUES (1, 10, '{{"a": "x\\u0000y"}}', ARRAY['{{"b": "\\u0000"}}'::json])""")
    image = delta(conn, table)["1", 10]
    assert image is not None
    assert image["doc"] == '{"a": "x\\u0000y"}'


def test_generated_and_odd_columns_are_in_the_image(conn: Conn) -> None:
    conn.execute("DROP TYPE IF EXISTS mood CASCADE; CREATE TYPE mood AS ENUM ('glad', 'sad')")
    conn.execute("DROP TYPE IF EXISTS pair CASCADE; CREATE TYPE pair AS (a int, b text)")
    conn.execute("DROP DOMAIN IF EXISTS yes CASCADE; CREATE DOMAIN yes AS bool")
    columns = (
        'id bigint, ts bigint, "odd ""name\\" mood, p pair, empty pair, d yes, a text[],'
        " twice bigint GENERATED ALWAYS AS (ts * 2) STORED, c char(4)"
    )
    table = build(conn, columns, watch=[0])
    run(
        conn,
        table,
        "INSERT INTO {} VALUES (1, 10, 'sad', (1, 'x y'), (NULL, NULL), true, ARRAY['a,b', NULL], DEFAULT, 'ab')",
    )
    assert delta(conn, table)["1", 10] == {
        "id": "1",
        "ts": "10",
        'odd "name\\': "sad",
        "p": '(1,"x y")',
        "empty": "(,)",
        "d": "true",
        "a": '{"a,b",NULL}',
        "twice": "20",
        "c": "ab",
    }


def test_a_users_cast_never_runs_with_our_rights(conn: Conn) -> None:
    conn.execute("DROP TYPE IF EXISTS trap CASCADE; CREATE TYPE trap AS ENUM ('set')")
    conn.execute(
        "CREATE OR REPLACE FUNCTION spring(trap) RETURNS text LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'sprung'; END $$"
    )
    conn.execute("CREATE CAST (trap AS text) WITH FUNCTION spring(trap)")
    table = build(conn, "id bigint, ts bigint, t trap", watch=[0])
    run(conn, table, "INSERT INTO {} VALUES (1, 10, 'set')")
    assert delta(conn, table)["1", 10] == {"id": "1", "ts": "10", "t": "set"}


def test_a_users_trigger_that_writes_again_ends_in_the_last_image(conn: Conn) -> None:
    table = build(conn, watch=[0])
    conn.execute(
        sql.SQL(
            "CREATE OR REPLACE FUNCTION touch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " IF pg_trigger_depth() = 1 THEN EXECUTE format('UPDATE %s SET body = body || ''!''', TG_RELID::regclass);"
            " END IF; RETURN NULL; END $$"
        )
    )
    run(conn, table, "CREATE TRIGGER a_first AFTER INSERT OR UPDATE ON {} FOR EACH ROW EXECUTE FUNCTION touch()")
    # The trigger of the first row also changes the second one, before that one's own event comes.
    run(conn, table, "INSERT INTO {} VALUES (1, 10, 'a'), (2, 20, 'b')")
    stored = {(str(i), t): b for i, t, b in conn.execute(sql.SQL("SELECT * FROM {}").format(table.ident)).fetchall()}
    assert stored == {("1", 10): "a!!", ("2", 20): "b!!"}
    assert {key: (image or {})["body"] for key, image in delta(conn, table).items()} == stored


def test_a_users_trigger_that_removes_the_row_ends_in_a_tombstone(conn: Conn) -> None:
    table = build(conn, watch=[0])
    conn.execute(
        "CREATE OR REPLACE FUNCTION undo() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN EXECUTE format('DELETE FROM %s WHERE id = 2', TG_RELID::regclass); RETURN NULL; END $$"
    )
    run(conn, table, "CREATE TRIGGER undo AFTER INSERT ON {} FOR EACH ROW EXECUTE FUNCTION undo()")
    run(conn, table, "INSERT INTO {} VALUES (1, 10, 'a'), (2, 20, 'b')")
    assert delta(conn, table) == {("1", 10): {"id": "1", "ts": "10", "body": "a"}, ("2", 20): None}


def test_a_writer_without_any_right_on_our_schema_is_captured(conn: Conn, catalog: Dsn) -> None:
    table = build(conn, watch=[0])
    conn.execute("DROP ROLE IF EXISTS capture_writer; CREATE ROLE capture_writer LOGIN PASSWORD 'w'")
    run(conn, table, "GRANT INSERT, UPDATE, DELETE, SELECT ON {} TO capture_writer")
    with conn.transaction():
        conn.execute("SET LOCAL ROLE capture_writer")
        run(conn, table, "INSERT INTO {} VALUES (1, 10, 'a')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege), conn.transaction():
            conn.execute("SELECT FROM modak.delta")
    assert ("1", 10) in delta(conn, table)
    run(conn, table, "REVOKE ALL ON {} FROM capture_writer")


def test_nobody_else_may_attach_the_trigger_to_a_table_of_theirs(conn: Conn) -> None:
    conn.execute("DROP ROLE IF EXISTS capture_rogue; CREATE ROLE capture_rogue")
    with conn.transaction(force_rollback=True):
        conn.execute("SET LOCAL ROLE capture_rogue")
        conn.execute("CREATE TEMP TABLE mine (id bigint, ts bigint)")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute(
                "CREATE TRIGGER t AFTER INSERT ON mine FOR EACH ROW EXECUTE FUNCTION modak.capture('1', '{1}', '2')"
            )


def test_a_replica_session_is_captured_too(conn: Conn) -> None:
    table = build(conn, watch=[0])
    conn.execute("SET session_replication_role = replica")
    run(conn, table, "INSERT INTO {} VALUES (1, 10, 'a')")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        run(conn, table, "TRUNCATE {}")
    assert ("1", 10) in delta(conn, table)


def test_a_move_inside_the_leaf_leaves_a_tombstone_and_says_where_it_came_from(conn: Conn) -> None:
    table = build(conn, watch=[0])
    run(conn, table, "INSERT INTO {} VALUES (1, 10, 'a')")
    run(conn, table, "UPDATE {} SET ts = 20")
    run(conn, table, "UPDATE {} SET ts = 30")
    run(conn, table, "UPDATE {} SET id = 2")
    image = {"id": "2", "ts": "30", "body": "a"}
    assert delta(conn, table) == {("1", 10): None, ("1", 20): None, ("1", 30): None, ("2", 30): image}
    origins = conn.execute(
        "SELECT tier_key, old_tier_key FROM modak.delta WHERE table_id = %s AND pk = '1' ORDER BY 1", (table.table_id,)
    ).fetchall()
    assert origins == [(10, None), (20, 10), (30, 20)]


def test_two_rows_may_swap_their_keys(conn: Conn) -> None:
    table = build(conn, "id bigint, ts bigint, body text", watch=[0])
    run(conn, table, "INSERT INTO {} VALUES (1, 10, 'a'), (2, 20, 'b')")
    with conn.transaction():
        run(conn, table, "UPDATE {} SET ts = 11 WHERE id = 1")
        run(conn, table, "UPDATE {} SET id = 1, ts = 10 WHERE id = 2")
        run(conn, table, "UPDATE {} SET id = 2, ts = 20 WHERE ts = 11")
    assert {key: image and image["body"] for key, image in delta(conn, table).items()} == {
        ("1", 11): None,
        ("1", 10): "b",
        ("2", 20): "a",
    }


@pytest.mark.parametrize(("watch", "expected"), [([0], {"1"}), ([1], {"2"}), ([0, 1], {"1", "2"})])
def test_a_move_between_leaves_is_gone_there_and_here_there(conn: Conn, watch: list[int], expected: set[str]) -> None:
    table = build(conn)
    run(conn, table, "INSERT INTO {} VALUES (1, 10, 'a')")
    for number in watch:
        capture.install(conn, table.table_id, table.leaves[number])
    run(conn, table, "UPDATE {} SET ts = 110, body = 'moved'")
    everything = {"1": (("1", 10), None), "2": (("1", 110), {"id": "1", "ts": "110", "body": "moved"})}
    assert delta(conn, table) == dict(everything[which] for which in expected)


def test_truncate_is_refused_on_the_leaf_and_through_the_table(conn: Conn) -> None:
    table = build(conn, watch=[1])
    run(conn, table, "INSERT INTO {} VALUES (1, 110, 'a')")
    for target in (table.ident, table.leaf(1)):
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="on its way to the lake") as caught:
            conn.execute(sql.SQL("TRUNCATE {}").format(target))
        assert "DELETE" in (caught.value.diag.message_hint or "")
    conn.execute(sql.SQL("TRUNCATE {}").format(table.leaf(0)))


@pytest.mark.parametrize(
    ("value", "axis", "kind", "expected"),
    [
        ("2024-02-29", Axis.DATE, "date", 19782),
        ("1969-12-31", Axis.DATE, "date", -1),
        ("infinity", Axis.DATE, "date", 2**63 - 1),
        ("-infinity", Axis.DATE, "date", -(2**63)),
        ("0044-03-15 BC", Axis.DATE, "date", -735160),
        ("1970-01-01 00:00:00.000001", Axis.TIMESTAMP, "timestamp", 1),
        ("1969-12-31 23:59:59.999999", Axis.TIMESTAMP, "timestamp", -1),
        ("9999-12-31 23:59:59.999999", Axis.TIMESTAMP, "timestamp", 253402300799999999),
        ("294276-12-31 23:59:59.999999", Axis.TIMESTAMP, "timestamp", 2**63 - 1),
        ("infinity", Axis.TIMESTAMPTZ, "timestamptz", 2**63 - 1),
        ("-infinity", Axis.TIMESTAMPTZ, "timestamptz", -(2**63)),
        ("2024-01-01 00:00:00+02", Axis.TIMESTAMPTZ, "timestamptz", 1704060000000000),
        ("-5", Axis.INTEGER, "smallint", -5),
    ],
)
def test_the_tier_key_lands_on_the_axis(conn: Conn, value: str, axis: Axis, kind: str, expected: int) -> None:
    table = build(conn, f"id int, ts {kind}", axis=axis, bounds=[])
    conn.execute(
        sql.SQL("CREATE TABLE {} PARTITION OF {} FOR VALUES FROM (MINVALUE) TO (MAXVALUE)").format(
            table.leaf(0), table.ident
        )
    )
    capture.install(conn, table.table_id, scalar(conn, "SELECT %s::regclass::oid", f"{table.name.name}_0"))
    run(conn, table, "INSERT INTO {} VALUES (1, %s)", value)
    assert list(delta(conn, table)) == [("1", expected)]


@pytest.mark.parametrize(
    ("axis", "key"),
    [
        (Axis.INTEGER, -7),
        (Axis.DATE, 19782),
        (Axis.DATE, -1),
        (Axis.TIMESTAMP, 253402300799999999),
        (Axis.TIMESTAMP, -1),
        (Axis.TIMESTAMPTZ, 1704405845123456),
    ],
)
def test_axis_literals_of_sql_and_python_mean_the_same(conn: Conn, axis: Axis, key: int) -> None:
    kind = "bigint" if axis is Axis.INTEGER else str(axis)
    assert scalar(conn, f"SELECT modak.axis_literal(%s, %s)::{kind} = %s::{kind}", axis, key, axis.literal(key)), (
        scalar(conn, "SELECT modak.axis_literal(%s, %s)", axis, key)
    )


_PART = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8) | st.text("\\\x1fab", max_size=6)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(keys=st.lists(st.tuples(_PART, _PART), min_size=1, max_size=5, unique=True))
def test_composite_keys_are_the_same_text_in_sql_and_python(conn: Conn, keys: list[tuple[str, str]]) -> None:
    with conn.transaction(force_rollback=True):
        table = build(conn, 'a text COLLATE "C", b text COLLATE "C", ts bigint', pk=("b", "a"), watch=[0])
        with conn.cursor() as cursor:
            cursor.executemany(sql.SQL("INSERT INTO {} (b, a, ts) VALUES (%s, %s, 1)").format(table.ident), keys)
        assert {key for key, _ in delta(conn, table)} == {pk.encode(key) for key in keys}
        assert {pk.decode(key, 2) for key, _ in delta(conn, table)} == set(keys)


@given(parts=st.lists(_PART, min_size=1, max_size=4))
def test_keys_survive_encoding(parts: list[str]) -> None:
    assert pk.decode(pk.encode(parts), len(parts)) == tuple(parts)


def test_a_malformed_key_is_refused() -> None:
    with pytest.raises(ValueError, match="not a key"):
        pk.decode("a\x1fb\x1fc", 2)


def test_install_again_keeps_the_trigger_and_verify_believes_it(conn: Conn) -> None:
    table = build(conn)
    leaf = table.leaves[0]
    first = capture.install(conn, table.table_id, leaf)
    assert capture.install(conn, table.table_id, leaf) == first
    assert capture.verify(conn, table.table_id, leaf, first).holds


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        ('DROP TRIGGER "!modak_capture" ON {}', "missing"),
        ('ALTER TABLE {} DISABLE TRIGGER "!modak_capture"', "disabled"),
        ("ALTER TABLE {} DISABLE TRIGGER ALL", "disabled"),
        ('ALTER TABLE {} ENABLE TRIGGER "!modak_capture"', "disabled"),
        ('DROP TRIGGER "!modak_no_truncate" ON {}', "TRUNCATE"),
        ('ALTER TABLE {} DISABLE TRIGGER "!modak_no_truncate"', "TRUNCATE"),
    ],
)
def test_verify_notices_what_was_done_to_the_trigger(conn: Conn, harm: str, complaint: str) -> None:
    table = build(conn)
    leaf = table.leaves[0]
    oid = capture.install(conn, table.table_id, leaf)
    conn.execute(sql.SQL(harm).format(table.leaf(0)))
    seen = capture.verify(conn, table.table_id, leaf, oid)
    assert not seen.holds
    assert complaint in (seen.broken or "")
    repaired = capture.install(conn, table.table_id, leaf)
    assert capture.verify(conn, table.table_id, leaf, repaired).holds


def test_verify_notices_another_trigger_of_the_same_name(conn: Conn) -> None:
    table = build(conn)
    leaf = table.leaves[0]
    oid = capture.install(conn, table.table_id, leaf)
    capture.remove(conn, leaf)
    again = capture.install(conn, table.table_id, leaf)
    assert "not the one" in (capture.verify(conn, table.table_id, leaf, oid).broken or "")
    assert capture.verify(conn, table.table_id, leaf, again).holds


def test_removed_triggers_capture_nothing_and_a_gone_leaf_is_fine(conn: Conn) -> None:
    table = build(conn, watch=[0])
    capture.remove(conn, table.leaves[0])
    run(conn, table, "INSERT INTO {} VALUES (1, 10, 'a')")
    assert delta(conn, table) == {}
    capture.remove(conn, 4_000_000_000)


def test_a_trigger_left_behind_by_an_unregistered_table_lets_writes_pass(conn: Conn) -> None:
    table = build(conn, watch=[0])
    run(conn, table, "INSERT INTO {} VALUES (1, 10, 'a')")
    conn.execute("DELETE FROM modak.tables WHERE table_id = %s", (table.table_id,))
    assert delta(conn, table) == {}
    run(conn, table, "INSERT INTO {} VALUES (2, 20, 'b')")
    assert delta(conn, table) == {}


def test_copy_and_merge_are_captured(conn: Conn) -> None:
    table = build(conn, watch=[0])
    with conn.cursor().copy(sql.SQL("COPY {} FROM STDIN").format(table.ident)) as copy:
        for number in range(50):
            copy.write_row((number, number, "x"))
    run(
        conn,
        table,
        "MERGE INTO {} t USING (VALUES (1), (99)) v (id) ON t.id = v.id"
        " WHEN MATCHED THEN DELETE WHEN NOT MATCHED THEN INSERT VALUES (v.id, v.id, 'new')",
    )
    found = delta(conn, table)
    assert len(found) == 51
    assert found["1", 1] is None
    assert (found["99", 99] or {})["body"] == "new"


def test_concurrent_writers_of_one_key_end_with_the_last_committed_image(conn: Conn, catalog: Dsn) -> None:
    table = build(conn, watch=[0])
    run(conn, table, "INSERT INTO {} VALUES (1, 10, 'start')")
    with connect(catalog) as first, connect(catalog) as second:
        run(first, table, "UPDATE {} SET body = 'first'")
        second.execute("SELECT set_config('lock_timeout', '50ms', false)")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            run(second, table, "UPDATE {} SET body = 'second'")
        second.rollback()
        first.commit()
        run(second, table, "UPDATE {} SET body = body || ' second'")
        second.commit()
    assert delta(conn, table)["1", 10] == {"id": "1", "ts": "10", "body": "first second"}
