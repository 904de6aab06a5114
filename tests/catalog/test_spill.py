"""Plain INSERT and COPY of historical rows: into the delta, judged as the table would judge them, never kept."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest
from psycopg import sql

from modak.catalog import spill
from modak.core.axis import Axis
from modak.core.errors import ModakError
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.catalog.build import Built, build, delta, heap, scalar

Conn = psycopg.Connection[Any]


def run(conn: Conn, table: Built, statement: str, *params: Any) -> psycopg.Cursor[Any]:
    return conn.execute(sql.SQL(statement).format(table.ident), params)


def reclaimed(conn: Conn, columns: str = "id bigint, ts bigint, body text", **how: Any) -> Built:
    """A table whose history began at 0 and whose leaves below 200 are dropped, with transparent writes."""
    table = build(conn, columns, **how)
    spill.enable(conn, table.name)
    for number in (0, 1):
        conn.execute(sql.SQL("DROP TABLE {}").format(table.leaf(number)))
    conn.execute("UPDATE modak.cutline SET t = 200 WHERE table_id = %s", (table.table_id,))
    assert spill.widen(conn, table.table_id, 200)
    return table


def test_a_historical_row_goes_to_the_delta_and_a_recent_one_to_the_heap(conn: Conn) -> None:
    table = reclaimed(conn)
    done = run(conn, table, "INSERT INTO {} VALUES (1, 50, 'cold'), (2, 250, 'hot')")
    assert done.rowcount == 1
    assert delta(conn, table) == {("1", 50): {"id": "1", "ts": "50", "body": "cold"}}
    assert heap(conn, table) == [(2, 250, "hot")]
    assert spill.stray_rows(conn, table.table_id) == 0


def test_copy_and_on_conflict_go_through(conn: Conn) -> None:
    table = reclaimed(conn)
    with conn.cursor().copy(sql.SQL("COPY {} FROM STDIN").format(table.ident)) as copy:
        for number in range(0, 300, 10):
            copy.write_row((number, number, "copied"))
    run(conn, table, "INSERT INTO {} VALUES (10, 10, 'new') ON CONFLICT (id, ts) DO UPDATE SET body = excluded.body")
    run(conn, table, "INSERT INTO {} VALUES (210, 210, 'new') ON CONFLICT (id, ts) DO UPDATE SET body = excluded.body")
    run(conn, table, "INSERT INTO {} VALUES (20, 20, 'new'), (20, 20, 'newer') ON CONFLICT DO NOTHING")
    found = delta(conn, table)
    assert len(found) == 20
    assert {(found[str(n), n] or {})["body"] for n in (10,)} == {"new"}
    assert (found["20", 20] or {})["body"] == "newer"
    assert (210, 210, "new") in heap(conn, table)


@pytest.mark.parametrize(
    ("ts", "reason"),
    [(-1, "no partition of"), (-(10**12), "no partition of"), (30, "below the retention line")],
)
def test_rows_outside_the_reclaimed_range_are_refused(conn: Conn, ts: int, reason: str) -> None:
    table = reclaimed(conn)
    conn.execute("UPDATE modak.cutline SET retention_line = 40 WHERE table_id = %s", (table.table_id,))
    with pytest.raises(psycopg.errors.CheckViolation, match=reason) as caught:
        run(conn, table, "INSERT INTO {} VALUES (1, %s, 'x')", ts)
    assert caught.value.sqlstate == "23514"
    assert caught.value.diag.message_hint
    assert delta(conn, table) == {}


def test_a_recent_row_put_straight_into_the_spill_is_refused(conn: Conn) -> None:
    table = reclaimed(conn)
    found = spill.find(conn, table.table_id)
    assert found is not None
    assert found.name.name == f"{table.name.name}_modak_spill"
    with pytest.raises(psycopg.errors.CheckViolation, match="does not belong"):
        conn.execute(f"INSERT INTO {found.name} VALUES (1, 250, 'x')".encode())


def test_a_far_future_row_finds_no_partition(conn: Conn) -> None:
    table = reclaimed(conn)
    with pytest.raises(psycopg.errors.CheckViolation):
        run(conn, table, "INSERT INTO {} VALUES (1, 10000, 'x')")


def test_before_anything_is_reclaimed_every_historical_row_is_refused(conn: Conn) -> None:
    table = build(conn, t=0)
    spill.enable(conn, table.name)
    with pytest.raises(psycopg.errors.CheckViolation, match="no partition"):
        run(conn, table, "INSERT INTO {} VALUES (1, -5, 'x')")
    run(conn, table, "INSERT INTO {} VALUES (1, 5, 'x')")
    assert delta(conn, table) == {}


def test_constraints_generated_columns_and_defaults_hold_for_diverted_rows(conn: Conn) -> None:
    table = reclaimed(
        conn,
        "id bigint, ts bigint, body text NOT NULL DEFAULT 'none', n int CHECK (n > 0),"
        " twice bigint GENERATED ALWAYS AS (ts * 2) STORED, serial bigint GENERATED ALWAYS AS IDENTITY",
    )
    run(conn, table, "INSERT INTO {} (id, ts) VALUES (1, 50)")
    image = {"id": "1", "ts": "50", "body": "none", "n": None, "twice": "100", "serial": "1"}
    assert delta(conn, table) == {("1", 50): image}
    for values, error in (
        ("(2, 50, NULL, 1)", psycopg.errors.NotNullViolation),
        ("(2, 50, 'x', 0)", psycopg.errors.CheckViolation),
        ("(NULL, 50, 'x', 1)", psycopg.errors.NotNullViolation),
    ):
        with pytest.raises(error):
            run(conn, table, f"INSERT INTO {{}} (id, ts, body, n) VALUES {values}")
    assert list(delta(conn, table)) == [("1", 50)]
    assert scalar(conn, f"SELECT count(*) FROM modak.shadow_{table.table_id}") == 0


def test_the_shadow_follows_the_table(conn: Conn) -> None:
    table = reclaimed(conn)
    run(conn, table, "ALTER TABLE {} ADD COLUMN extra int NOT NULL DEFAULT 5 CHECK (extra < 10)")
    run(conn, table, "ALTER TABLE {} DROP COLUMN body")
    run(conn, table, "ALTER TABLE {} RENAME COLUMN id TO key")
    run(conn, table, "INSERT INTO {} (key, ts) VALUES (1, 50)")
    assert delta(conn, table) == {("1", 50): {"key": "1", "ts": "50", "extra": "5"}}
    with pytest.raises(psycopg.errors.CheckViolation):
        run(conn, table, "INSERT INTO {} VALUES (2, 60, 11)")
    run(conn, table, "ALTER TABLE {} ALTER extra DROP NOT NULL")
    run(conn, table, "INSERT INTO {} VALUES (3, 70, NULL)")
    assert delta(conn, table)["3", 70] == {"key": "3", "ts": "70", "extra": None}
    conn.execute("UPDATE modak.cutline SET t = 300 WHERE table_id = %s", (table.table_id,))
    conn.execute(sql.SQL("DROP TABLE {}").format(table.leaf(2)))
    assert spill.widen(conn, table.table_id, 300)
    run(conn, table, "INSERT INTO {} VALUES (4, 250, 1)")
    assert ("4", 250) in delta(conn, table)


def test_a_users_before_trigger_has_its_say_first(conn: Conn) -> None:
    table = reclaimed(conn)
    conn.execute(
        "CREATE OR REPLACE FUNCTION shout() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN NEW.body := upper(NEW.body); RETURN NEW; END $$"
    )
    run(conn, table, "CREATE TRIGGER zz_shout BEFORE INSERT ON {} FOR EACH ROW EXECUTE FUNCTION shout()")
    run(conn, table, "INSERT INTO {} VALUES (1, 50, 'quiet')")
    assert (delta(conn, table)["1", 50] or {})["body"] == "QUIET"


def test_the_trigger_does_not_look_at_the_cut_line(conn: Conn) -> None:
    table = build(conn, t=0)
    spill.enable(conn, table.name)
    conn.execute("UPDATE modak.cutline SET t = 300 WHERE table_id = %s", (table.table_id,))
    run(conn, table, "INSERT INTO {} VALUES (1, 50, 'still in the heap')")
    assert delta(conn, table) == {}
    assert heap(conn, table) == [(1, 50, "still in the heap")]


@pytest.mark.superuser
def test_a_writer_without_rights_on_our_schema_and_replica_sessions_are_diverted(conn: Conn) -> None:
    table = reclaimed(conn)
    conn.execute("DROP ROLE IF EXISTS spill_writer; CREATE ROLE spill_writer")
    run(conn, table, "GRANT INSERT ON {} TO spill_writer")
    with conn.transaction():
        conn.execute("SET LOCAL session_replication_role = replica; SET LOCAL ROLE spill_writer")
        run(conn, table, "INSERT INTO {} VALUES (1, 50, 'x')")
    assert list(delta(conn, table)) == [("1", 50)]
    run(conn, table, "REVOKE ALL ON {} FROM spill_writer")


def test_time_keys_spill_too(conn: Conn) -> None:
    conn.execute("SET TimeZone = 'Asia/Tokyo'")
    days = [("2024-01-01+00", "2024-01-02+00"), ("2024-01-02+00", "2024-01-03+00")]
    first, second = 1704067200000000, 1704153600000000
    table = build(conn, "id bigint, ts timestamptz", axis=Axis.TIMESTAMPTZ, bounds=days, t=first)
    spill.enable(conn, table.name)
    conn.execute(sql.SQL("DROP TABLE {}").format(table.leaf(0)))
    conn.execute("UPDATE modak.cutline SET t = %s WHERE table_id = %s", (second, table.table_id))
    assert spill.widen(conn, table.table_id, second)
    run(conn, table, "INSERT INTO {} VALUES (1, '2024-01-01 12:00:00.5+00'), (2, '2024-01-02 00:00+00')")
    assert delta(conn, table) == {
        ("1", first + 43_200_500_000): {"id": "1", "ts": "2024-01-01 12:00:00.5+00"},
    }
    with pytest.raises(psycopg.errors.CheckViolation, match="2023-12-31"):
        run(conn, table, "INSERT INTO {} VALUES (1, '2023-12-31 23:59+00')")


def test_enabling_twice_is_one_spill_and_disabling_removes_all_of_it(conn: Conn) -> None:
    table = build(conn)
    name = spill.enable(conn, table.name)
    assert spill.enable(conn, table.name) == name
    assert spill.disable(conn, table.name)
    assert not spill.disable(conn, table.name)
    assert spill.find(conn, table.table_id) is None
    assert scalar(conn, "SELECT to_regclass(%s) IS NULL", name)
    assert scalar(conn, "SELECT to_regclass(%s) IS NULL", f"modak.shadow_{table.table_id}")
    assert scalar(conn, "SELECT modak_enable_transparent_writes(%s::regclass)", str(table.name)) == name


def test_a_users_partition_in_the_way_is_named(conn: Conn) -> None:
    table = build(conn)
    conn.execute(f"CREATE TABLE {table.name}_old PARTITION OF {table.name} FOR VALUES FROM (MINVALUE) TO (0)".encode())
    with pytest.raises(ModakError, match=r"_old .* is in the way"):
        spill.enable(conn, table.name)


@pytest.mark.superuser
def test_only_the_owner_may_switch_transparent_writes(conn: Conn) -> None:
    table = build(conn)
    conn.execute("DROP ROLE IF EXISTS spill_rogue; CREATE ROLE spill_rogue")
    with conn.transaction(force_rollback=True):
        conn.execute("SET LOCAL ROLE spill_rogue")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("SELECT modak_enable_transparent_writes(%s::regclass)", (str(table.name),))


def test_the_spill_never_reaches_above_the_cut_line(conn: Conn) -> None:
    table = build(conn, t=0)
    spill.enable(conn, table.name)
    conn.execute(sql.SQL("DROP TABLE {}").format(table.leaf(0)))
    with pytest.raises(ModakError, match="cut-line"):
        spill.widen(conn, table.table_id, 100)


def test_widening_gives_up_at_once_behind_an_open_reader_and_writers_go_on(conn: Conn, catalog: Dsn) -> None:
    table = reclaimed(conn)
    conn.execute(sql.SQL("DROP TABLE {}").format(table.leaf(2)))
    conn.execute("UPDATE modak.cutline SET t = 300 WHERE table_id = %s", (table.table_id,))
    with connect(catalog) as reader:
        run(reader, table, "SELECT * FROM {}")
        assert not spill.widen(conn, table.table_id, 300)
        run(conn, table, "INSERT INTO {} VALUES (1, 50, 'meanwhile')")
    assert spill.widen(conn, table.table_id, 300)
    assert spill.widen(conn, table.table_id, 300)
    assert ("1", 50) in delta(conn, table)


def test_a_stray_row_is_seen_and_never_dropped(conn: Conn) -> None:
    table = reclaimed(conn)
    found = spill.find(conn, table.table_id)
    assert found is not None
    conn.execute(f'ALTER TABLE {found.name} DISABLE TRIGGER "~modak_spill"'.encode())
    run(conn, table, "INSERT INTO {} VALUES (1, 50, 'stray')")
    assert spill.stray_rows(conn, table.table_id) == 1
    with pytest.raises(ModakError, match="holds rows"):
        spill.disable(conn, table.name)


def test_two_writers_after_a_change_of_the_table_both_get_through(conn: Conn, catalog: Dsn) -> None:
    table = reclaimed(conn)
    run(conn, table, "ALTER TABLE {} ADD COLUMN extra int")
    failures: list[BaseException] = []

    def write(number: int) -> None:
        try:
            with connect(catalog) as own:
                run(own, table, "INSERT INTO {} VALUES (%s, 50, 'x', 1)", number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(delta(conn, table)) == 4


def test_a_long_table_name_still_gets_a_spill(conn: Conn) -> None:
    assert scalar(conn, "SELECT modak.spill_name(%s)", "é" * 31) == "é" * 25 + "_modak_spill"


def test_the_route_is_narrated_on_request(conn: Conn) -> None:
    table = reclaimed(conn)
    heard: list[str] = []
    conn.add_notice_handler(lambda diag: heard.append(diag.message_primary or ""))
    conn.execute("SET modak.explain = on")
    run(conn, table, "INSERT INTO {} VALUES (1, 50, 'x')")
    assert heard == [f"modak: row 1 of {table.name} goes to the delta"]
