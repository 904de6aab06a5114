"""Corrections in SQL: every row finds its tier, is judged as the table would judge it, or is refused by name."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import errors, sql

from modak.catalog import capture, spill
from modak.catalog.migrate import migrate
from modak.core.axis import Axis
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.catalog.build import Built, build, delta, heap, scalar

Conn = psycopg.Connection[Any]

ODD_SESSION = (
    "SET TimeZone = 'Asia/Kathmandu'; SET DateStyle = 'German, DMY'; SET IntervalStyle = 'sql_standard';"
    " SET extra_float_digits = -5; SET bytea_output = 'escape'; SET standard_conforming_strings = off;"
    " SET search_path = ''"
)


def run(conn: Conn, table: Built, statement: str, *params: Any) -> psycopg.Cursor[Any]:
    return conn.execute(sql.SQL(statement).format(table.ident), params)


def leave(conn: Conn, table: Built, *numbers: int, to: str = "dropped") -> None:
    """Take partitions through the states of tiering; the leaf itself is the test's."""
    steps = ("hot", "sealing", "tiering", "tiered", "dropped")
    for before, state in itertools.pairwise(steps[: steps.index(to) + 1]):
        conn.execute(
            "UPDATE modak.partitions SET state = %s WHERE table_id = %s AND leaf_oid = ANY (%s) AND state = %s",
            (state, table.table_id, [table.leaves[n] for n in numbers], before),
        )


def reclaimed(
    conn: Conn, columns: str = "id bigint, ts bigint, body text", *, drop: Sequence[int] = (0, 1), **how: Any
) -> Built:
    """A table with history from its first leaf on, whose leaves in `drop` are gone, without transparent writes."""
    table = build(conn, columns, **how)
    leave(conn, table, *drop)
    for number in drop:
        conn.execute(sql.SQL("DROP TABLE {}").format(table.leaf(number)))
    conn.execute(
        "UPDATE modak.cutline c SET t = (SELECT max(upper_bound) FROM modak.partitions p"
        " WHERE p.table_id = c.table_id AND p.state = 'dropped') WHERE table_id = %s",
        (table.table_id,),
    )
    return table


def upsert(conn: Conn, table: Built, **row: Any) -> str:
    return str(scalar(conn, "SELECT public.modak_upsert(%s, %s)", str(table.name), json.dumps(row)))


def bulk(conn: Conn, table: Built, rows: Any, function: str = "modak_upsert_rows") -> tuple[int, int]:
    found = conn.execute(
        f"SELECT heap, delta FROM public.{function}(%s, %s)".encode(), (str(table.name), json.dumps(rows))
    )
    return found.fetchone() or (0, 0)


def image(conn: Conn, table: Built, pk: str, key: int) -> dict[str, str | None]:
    found = delta(conn, table)[pk, key]
    assert found is not None
    return found


@contextmanager
def role(dsn: Dsn, name: str, grants: str, table: Built) -> Iterator[Conn]:
    """A session of somebody with nothing but the given rights on the table."""
    with connect(dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(name)))
        if grants:
            run(admin, table, f"GRANT {grants} ON {{}} TO {name}")
        try:
            with connect(dsn, autocommit=True) as conn:
                conn.execute(sql.SQL("SET SESSION AUTHORIZATION {}").format(sql.Identifier(name)))
                yield conn
        finally:
            admin.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(name)))


def test_a_recent_row_goes_to_the_heap_and_a_cold_one_to_the_delta(conn: Conn) -> None:
    table = reclaimed(conn)
    assert upsert(conn, table, id=1, ts=250, body="hot") == "heap"
    assert upsert(conn, table, id=1, ts=250, body="hotter") == "heap"
    assert upsert(conn, table, id=2, ts=50, body="cold") == "delta"
    assert heap(conn, table) == [(1, 250, "hotter")]
    assert delta(conn, table) == {("2", 50): {"id": "2", "ts": "50", "body": "cold"}}
    assert scalar(conn, f"SELECT count(*) FROM modak.intake_{table.table_id}") == 0


def test_transparent_writes_do_not_change_the_route(conn: Conn) -> None:
    table = build(conn)
    spill.enable(conn, table.name)
    leave(conn, table, 0)
    conn.execute(sql.SQL("DROP TABLE {}").format(table.leaf(0)))
    conn.execute("UPDATE modak.cutline SET t = 200 WHERE table_id = %s", (table.table_id,))
    assert upsert(conn, table, id=1, ts=50, body="not yet widened") == "delta"
    assert spill.widen(conn, table.table_id, 100)
    assert upsert(conn, table, id=2, ts=50, body="widened") == "delta"
    assert spill.disable(conn, table.name)
    assert upsert(conn, table, id=3, ts=50, body="disabled") == "delta"
    assert set(delta(conn, table)) == {("1", 50), ("2", 50), ("3", 50)}


def test_an_attached_leaf_below_the_cut_line_keeps_its_rows_and_the_trigger_follows(conn: Conn) -> None:
    table = build(conn, watch=[0, 1])
    conn.execute("UPDATE modak.cutline SET t = 200 WHERE table_id = %s", (table.table_id,))
    leave(conn, table, 0, 1, to="tiered")
    assert upsert(conn, table, id=1, ts=50, body="a") == "heap"
    assert image(conn, table, "1", 50)["body"] == "a"
    assert scalar(conn, "SELECT modak_delete(%s, '1', 50)", str(table.name)) == "heap"
    assert delta(conn, table) == {("1", 50): None}
    assert heap(conn, table) == []


def test_a_leaf_that_nobody_recorded_counts_too(conn: Conn) -> None:
    table = reclaimed(conn)
    run(conn, table, f"CREATE TABLE {table.name}_again PARTITION OF {{}} FOR VALUES FROM (0) TO (40)")
    assert upsert(conn, table, id=1, ts=39, body="x") == "heap"
    assert upsert(conn, table, id=1, ts=40, body="x") == "delta"


def test_a_default_partition_does_not_take_cold_rows(conn: Conn) -> None:
    table = reclaimed(conn)
    run(conn, table, f"CREATE TABLE {table.name}_rest PARTITION OF {{}} DEFAULT")
    assert upsert(conn, table, id=1, ts=50, body="x") == "delta"
    assert upsert(conn, table, id=1, ts=5000, body="x") == "heap"


def test_a_mirrored_table_is_its_heap(conn: Conn) -> None:
    table = build(conn)
    conn.execute("UPDATE modak.tables SET mode = 'mirrored' WHERE table_id = %s", (table.table_id,))
    conn.execute("UPDATE modak.cutline SET t = 300 WHERE table_id = %s", (table.table_id,))
    assert upsert(conn, table, id=1, ts=50, body="x") == "heap"
    assert scalar(conn, "SELECT modak_delete(%s, '1', 50)", str(table.name)) == "heap"
    assert (heap(conn, table), delta(conn, table)) == ([], {})


def test_a_leaf_between_detach_and_drop_is_busy(conn: Conn, catalog: Dsn) -> None:
    table = build(conn)
    conn.execute("UPDATE modak.cutline SET t = 200 WHERE table_id = %s", (table.table_id,))
    leave(conn, table, 0, to="tiered")
    with connect(catalog) as older:
        older.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        older.execute("SELECT count(*) FROM pg_inherits")
        conn.execute(sql.SQL("ALTER TABLE {} DETACH PARTITION {}").format(table.ident, table.leaf(0)))
        for session in (conn, older):
            with session.transaction(force_rollback=True):
                with pytest.raises(errors.ObjectInUse, match="tier key 50 is about to be dropped") as caught:
                    upsert(session, table, id=1, ts=50, body="x")
                assert (caught.value.sqlstate, caught.value.diag.message_hint) == ("55006", "Try again in a moment.")
            with session.transaction(force_rollback=True), pytest.raises(errors.ObjectInUse):
                session.execute("SELECT modak_delete(%s, '1', 50)", (str(table.name),))
        assert upsert(conn, table, id=1, ts=150, body="still attached") == "heap"
        leave(conn, table, 0)
        conn.execute(sql.SQL("DROP TABLE {}").format(table.leaf(0)))
        assert upsert(older, table, id=1, ts=50, body="x") == "delta"
    assert delta(conn, table)["1", 50] is not None


def test_a_leaf_whose_detach_is_pending_is_busy_too(conn: Conn, catalog: Dsn) -> None:
    table = build(conn)
    conn.execute("UPDATE modak.cutline SET t = 200 WHERE table_id = %s", (table.table_id,))
    leave(conn, table, 0, to="tiered")

    def detach() -> None:
        with connect(catalog, autocommit=True) as own:
            own.execute(sql.SQL("ALTER TABLE {} DETACH PARTITION {} CONCURRENTLY").format(table.ident, table.leaf(0)))

    with connect(catalog) as reader:
        run(reader, table, "SELECT FROM {}")
        thread = threading.Thread(target=detach)
        thread.start()
        for _ in range(200):
            if scalar(conn, "SELECT inhdetachpending FROM pg_inherits WHERE inhrelid = %s", table.leaves[0]):
                break
            time.sleep(0.02)
        with pytest.raises(errors.ObjectInUse):
            upsert(conn, table, id=1, ts=50, body="x")
        with pytest.raises(errors.ObjectInUse):
            conn.execute("SELECT modak_delete(%s, '1', 50)", (str(table.name),))
        reader.rollback()
    thread.join()
    assert delta(conn, table) == {}


def test_a_delete_that_a_detach_overtakes_asks_to_be_tried_again(conn: Conn, catalog: Dsn) -> None:
    table = build(conn)
    run(conn, table, "INSERT INTO {} VALUES (1, 50, 'x')")
    conn.execute("UPDATE modak.cutline SET t = 200 WHERE table_id = %s", (table.table_id,))
    leave(conn, table, 0, to="tiered")
    caught: list[BaseException] = []

    def delete() -> None:
        with connect(catalog, autocommit=True) as other:
            try:
                other.execute("SELECT modak_delete(%s, '1', 50)", (str(table.name),))
            except psycopg.Error as error:
                caught.append(error)

    with connect(catalog) as detaching:
        detaching.execute(sql.SQL("ALTER TABLE {} DETACH PARTITION {}").format(table.ident, table.leaf(0)))
        thread = threading.Thread(target=delete)
        thread.start()
        for _ in range(200):
            if scalar(
                conn, "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = %s::regclass", str(table.name)
            ):
                break
            time.sleep(0.02)
        detaching.commit()
    thread.join()
    assert [getattr(error, "sqlstate", None) for error in caught] == ["40001"]
    assert scalar(conn, f"SELECT count(*) FROM {table.name}_0") == 1


@pytest.mark.parametrize(
    ("ts", "reason"), [(-1, "no partition of"), (30, "tier key 30 lies below the retention line 40 of public")]
)
def test_rows_that_cannot_be_corrected_are_refused_by_name(conn: Conn, ts: int, reason: str) -> None:
    table = reclaimed(conn)
    conn.execute("UPDATE modak.cutline SET retention_line = 40 WHERE table_id = %s", (table.table_id,))
    conn.execute("DROP TABLE IF EXISTS pg_temp.refused")
    conn.execute(f"CREATE TEMP TABLE refused AS SELECT 1::bigint AS id, {ts}::bigint AS ts, 'x' AS body".encode())
    for call in (
        lambda: upsert(conn, table, id=1, ts=ts, body="x"),
        lambda: bulk(conn, table, [{"id": 1, "ts": 250, "body": "x"}, {"id": 1, "ts": ts, "body": "x"}]),
        lambda: scalar(conn, "SELECT modak_delete(%s, '1', %s)", str(table.name), ts),
        lambda: bulk(conn, table, [{"id": 1, "ts": 250}, {"id": 1, "ts": ts}], "modak_delete_rows"),
        lambda: conn.execute("SELECT * FROM modak_upsert_from(%s, 'refused')", (str(table.name),)),
        lambda: conn.execute("SELECT * FROM modak_delete_from(%s, 'refused')", (str(table.name),)),
    ):
        with pytest.raises(errors.CheckViolation, match=reason) as caught:
            call()
        assert caught.value.diag.message_hint
    assert (heap(conn, table), delta(conn, table)) == ([], {})


def test_a_hot_row_without_a_partition_fails_as_a_plain_insert_does(conn: Conn) -> None:
    with pytest.raises(errors.CheckViolation, match="no partition of relation"):
        upsert(conn, reclaimed(conn), id=1, ts=10**6, body="x")


@pytest.mark.parametrize("ts", [50, 250])
@pytest.mark.parametrize(
    ("row", "error", "said"),
    [
        ({"id": 1, "Body": "x"}, errors.UndefinedColumn, 'column "Body"'),
        ({"id": 1, "twice": 7}, errors.GeneratedAlways, 'column "twice"'),
        ({"id": 1, "n": "many"}, errors.InvalidTextRepresentation, "many"),
        ({"id": 1, "n": 0}, errors.CheckViolation, "n_check"),
        ({"id": 1, "body": None}, errors.NotNullViolation, '"body"'),
        ({"id": None}, errors.NotNullViolation, '"id"'),
        ({}, errors.NotNullViolation, '"id"'),
        ({"id": 1, "ts": None}, errors.NotNullViolation, 'tier key column "ts"'),
        ({"id": 1, "short": "too long"}, errors.StringDataRightTruncation, "too long"),
        ({"id": 1, "price": 12345.5}, errors.NumericValueOutOfRange, "overflow"),
        ({"id": 1, 'n") VALUES (1); --': 1}, errors.UndefinedColumn, "does not exist"),
    ],
)
def test_both_tiers_refuse_what_the_table_refuses(
    conn: Conn, judged: Built, ts: int, row: dict[str, Any], error: type[psycopg.Error], said: str
) -> None:
    with pytest.raises(error, match=said):
        upsert(conn, judged, **{"ts": ts, **row})
    assert (heap(conn, judged), delta(conn, judged)) == ([], {})


@pytest.fixture(scope="module")
def judged(catalog: Dsn) -> Built:
    with connect(catalog, autocommit=True) as conn:
        return reclaimed(
            conn,
            "id bigint, ts bigint, body text NOT NULL DEFAULT 'none', n int CONSTRAINT n_check CHECK (n > 0),"
            " short varchar(3), price numeric(5, 2), twice bigint GENERATED ALWAYS AS (ts * 2) STORED",
        )


def test_a_row_without_its_tier_key_has_no_place(conn: Conn, judged: Built) -> None:
    with pytest.raises(errors.NotNullViolation, match=r'tier key column "ts" of .* is missing'):
        upsert(conn, judged, id=1)
    for wrong in ("[]", "7", "null", '"x"'):
        with pytest.raises(errors.InvalidParameterValue, match="array of objects"):
            conn.execute("SELECT modak_upsert(%s, %s)", (str(judged.name), wrong))
    with pytest.raises(errors.UndefinedObject, match="not registered"):
        conn.execute("SELECT modak_upsert('pg_class', '{}')")


def test_columns_left_out_get_what_insert_would_give_them(conn: Conn) -> None:
    table = reclaimed(
        conn,
        "id bigint GENERATED ALWAYS AS IDENTITY, ts bigint, body text DEFAULT 'none', n int,"
        " twice bigint GENERATED ALWAYS AS (ts * 2) STORED, made timestamptz DEFAULT now(), serial serial",
    )
    assert upsert(conn, table, ts=50) == "delta"
    assert upsert(conn, table, ts=250) == "heap"
    assert bulk(
        conn, table, [{"ts": 51}, {"ts": 52, "n": 3}, {"id": 77, "ts": 53, "body": None}, {"id": 77, "ts": 253}]
    ) == (1, 3)
    cold = {key: row or {} for (_, key), row in delta(conn, table).items()}
    assert {k: (r["body"], r["n"], r["twice"]) for k, r in cold.items()} == {
        50: ("none", None, "100"),
        51: ("none", None, "102"),
        52: ("none", "3", "104"),
        53: (None, None, "106"),
    }
    assert cold[53]["id"] == "77"
    ids = [int(r["id"] or 0) for k, r in cold.items() if k != 53] + [i for (i,) in heap(conn, table, "id") if i != 77]
    assert sorted(ids) == [1, 2, 3, 4]
    assert all(r["made"] and r["serial"] for r in cold.values())


def test_the_intake_follows_the_table_and_leaves_with_it(conn: Conn) -> None:
    table = reclaimed(conn, "id bigint, ts bigint, body text, number serial")
    upsert(conn, table, id=1, ts=50, body="x")
    run(conn, table, "ALTER TABLE {} ADD COLUMN extra int NOT NULL DEFAULT 5 CHECK (extra < 10)")
    run(conn, table, "ALTER TABLE {} DROP COLUMN body")
    run(conn, table, "ALTER TABLE {} RENAME COLUMN id TO key")
    assert upsert(conn, table, key=2, ts=50) == "delta"
    run(conn, table, "ALTER TABLE {} ALTER extra SET DEFAULT 6")
    assert upsert(conn, table, key=3, ts=50) == "delta"
    assert [image(conn, table, pk, 50)["extra"] for pk in "23"] == ["5", "6"]
    with pytest.raises(errors.CheckViolation):
        upsert(conn, table, key=4, ts=50, extra=11)
    assert scalar(conn, "SELECT modak_delete(%s, '2', 50)", str(table.name)) == "delta"
    run(conn, table, "DROP TABLE {}")
    conn.execute("DELETE FROM modak.tables WHERE table_id = %s", (table.table_id,))
    assert scalar(conn, "SELECT to_regclass(%s) IS NULL", f"modak.intake_{table.table_id}")


def test_every_type_has_the_same_image_by_every_way_and_in_every_session(conn: Conn, catalog: Dsn) -> None:
    conn.execute(
        "CREATE TYPE mood AS ENUM ('so, so', 'fine'); CREATE DOMAIN percent AS numeric(5, 2) CHECK (VALUE <= 100)"
    )
    conn.execute("CREATE TYPE pair AS (a int, b text)")
    table = reclaimed(
        conn,
        "id uuid, ts bigint, yes bool, small int2, price numeric(10, 3), share percent, r float4, d float8, day date,"
        " at timestamptz(3), plain timestamp, hour time, span interval, raw bytea, doc jsonb, old json,"
        " mood public.mood, tags text[], grid int[], pair public.pair, net inet, fixed char(4), words varchar(20)",
        drop=[0],
        bounds=(("0", "100"), ("100", "200")),
    )
    capture.install(conn, table.table_id, table.leaves[1])
    pk = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
    values = {
        "id": "6BA7B810-9DAD-11D1-80B4-00C04FD430C8", "yes": True, "small": -3, "price": "12.5", "share": 99.5,
        "r": 0.1, "d": 0.1, "day": "2024-02-29", "at": "2024-02-29T23:59:59.9996+05:45",
        "plain": "2024-02-29T12:00:00.000001",
        "hour": "23:59:59.5", "span": "P1Y2M3DT4H5M6.5S", "raw": "\\x00ff5c27", "doc": {"a": [1, None, "x\\y"]},
        "old": {"b": 1}, "mood": "so, so", "tags": ["a,b", None, 'q"\\'], "grid": [[1, 2], [3, 4]],
        "pair": {"a": 1, "b": "x y"}, "net": "10.0.0.1/8", "fixed": "ab", "words": "o'clock \\ \u2603",
    }  # fmt: skip
    with connect(catalog, autocommit=True) as odd:
        odd.execute(ODD_SESSION)
        images = []
        for session in (conn, odd):
            for ts, route in ((50, "delta"), (150, "heap")):
                assert upsert(session, table, ts=ts, **values) == route
                images.append({**image(conn, table, pk, ts), "ts": None})
                assert (
                    scalar(session, "SELECT public.modak_delete(%s, %s, %s)", str(table.name), f'"{pk}"', ts) == route
                )
        assert heap(conn, table) == []
        assert delta(conn, table) == {(pk, 50): None, (pk, 150): None}
        assert len(images) == 4
        assert images[0] == images[1] == images[2] == images[3]
        assert images[0]["at"] == "2024-02-29 18:15:00+00"
        assert (images[0]["raw"], images[0]["share"], images[0]["d"]) == ("\\x00ff5c27", "99.50", "0.1")
        assert upsert(odd, table, ts=51, id=values["id"]) == "delta"
    nothing = image(conn, table, pk, 51)
    assert {column for column, value in nothing.items() if value is not None} == {"id", "ts"}
    with pytest.raises(errors.CheckViolation, match="percent"):
        upsert(conn, table, ts=51, id=values["id"], share=101)
    with pytest.raises(errors.InvalidTextRepresentation, match="mood"):
        upsert(conn, table, ts=51, id=values["id"], mood="bad")


def test_composite_keys_escape_their_parts(conn: Conn) -> None:
    table = reclaimed(conn, "a text, b int, ts bigint, body text", pk=("a", "b"))
    strange = "x\\y\x1fz'\"; DROP TABLE t; --"
    assert upsert(conn, table, a=strange, b=1, ts=50, body="x") == "delta"
    ((pk, at),) = delta(conn, table)
    assert (pk, at) == ("x\\\\y\\\x1fz'\"; DROP TABLE t; --\x1f1", 50)
    name = str(table.name)
    assert scalar(conn, "SELECT modak_delete(%s, %s, 50)", name, json.dumps({"a": strange, "b": 1})) == "delta"
    assert delta(conn, table) == {(pk, 50): None}
    key_and_tier = json.dumps({"a": strange, "b": 1, "ts": 50})
    assert scalar(conn, "SELECT modak_delete(%s, %s, 50)", name, key_and_tier) == "delta"
    for key, error, said in (
        ('"x"', errors.InvalidParameterValue, r"has the columns \(a, b\)"),
        ('{"a": "x"}', errors.NotNullViolation, 'key column "b"'),
        ('{"a": "x", "b": null}', errors.NotNullViolation, "must not be null"),
        ('{"a": "x", "b": 1, "c": 2}', errors.UndefinedColumn, 'column "c"'),
        ('{"a": "x", "b": 1, "body": 2}', errors.UndefinedColumn, 'column "body"'),
        ('{"a": "x", "b": 1, "ts": 51}', errors.InvalidParameterValue, "must agree|names tier key 51"),
        ('{"a": "x", "b": "one"}', errors.InvalidTextRepresentation, "one"),
    ):
        with pytest.raises(error, match=said):
            conn.execute("SELECT modak_delete(%s, %s, 50)", (name, key))


def test_deletes_find_the_heap_row_or_leave_a_tombstone(conn: Conn) -> None:
    table = reclaimed(conn)
    bulk(conn, table, [{"id": n, "ts": ts, "body": "x"} for n in (1, 2) for ts in (50, 250)])
    name = str(table.name)
    assert scalar(conn, "SELECT modak_delete(%s, '1', 250)", name) == "heap"
    assert scalar(conn, "SELECT modak_delete(%s, '\"1\"', '50')", name) == "delta"
    assert scalar(conn, "SELECT modak_delete(%s, '{\"id\": 9}', 50)", name) == "delta"
    assert heap(conn, table) == [(2, 250, "x")]
    assert {key: bool(row) for key, row in delta(conn, table).items()} == {
        ("1", 50): False,
        ("2", 50): True,
        ("9", 50): False,
    }


def test_a_key_corrected_again_is_one_row_with_the_newest_version(conn: Conn) -> None:
    table = reclaimed(conn)
    upsert(conn, table, id=1, ts=50, body="a")
    first = scalar(conn, "SELECT version FROM modak.delta WHERE table_id = %s", table.table_id)
    conn.execute("UPDATE modak.delta SET folded_into = 5, folded_generation = 5 WHERE table_id = %s", (table.table_id,))
    conn.execute("SELECT modak_delete(%s, '1', 50)", (str(table.name),))
    upsert(conn, table, id=1, ts=50, body="b")
    row = conn.execute(
        "SELECT op, version > %s, payload ->> 'body', folded_into, folded_generation FROM modak.delta"
        " WHERE table_id = %s",
        (first, table.table_id),
    ).fetchall()
    assert row == [(1, True, "b", None, None)]


@pytest.mark.parametrize(
    ("axis", "column", "bounds", "cold", "hot", "key"),
    [
        (Axis.DATE, "date", ("2024-01-01", "2024-02-01", "2024-03-01"), "2024-01-15", "2024-02-15", 19737),
        (
            Axis.TIMESTAMPTZ,
            "timestamptz",
            ("2024-01-01+00", "2024-02-01+00", "2024-03-01+00"),
            "2024-01-31 23:59:59.999999+00",
            "2024-02-01 00:00:00+00",
            1706745599999999,
        ),
        (
            Axis.TIMESTAMP,
            "timestamp",
            ("2024-01-01", "2024-02-01", "2024-03-01"),
            "2024-01-31 23:59:59.999999",
            "2024-02-01 00:00:00",
            1706745599999999,
        ),
    ],
)
def test_tier_keys_of_time(
    conn: Conn, catalog: Dsn, axis: Axis, column: str, bounds: tuple[str, ...], cold: str, hot: str, key: int
) -> None:
    table = reclaimed(
        conn,
        f"id bigint, ts {column}, body text",
        axis=axis,
        bounds=list(itertools.pairwise(bounds)),
        drop=[0],
    )
    name = str(table.name)
    with connect(catalog, autocommit=True) as odd:
        odd.execute(ODD_SESSION)
        for session in (conn, odd):
            assert upsert(session, table, id=1, ts=cold, body="x") == "delta"
            assert upsert(session, table, id=1, ts=hot, body="x") == "heap"
            assert list(delta(conn, table)) == [("1", key)]
            assert len(heap(conn, table)) == 1
            for typed in (f"%s::{column}", "%s"):
                assert scalar(session, f"SELECT public.modak_delete(%s, '1', {typed})", name, cold) == "delta"
                assert scalar(session, f"SELECT public.modak_delete(%s, '1', {typed})", name, hot) == "heap"
            assert (heap(conn, table), delta(conn, table)) == ([], {("1", key): None})
    with pytest.raises(errors.DatatypeMismatch, match='tier key column "ts"'):
        conn.execute("SELECT modak_delete(%s, '1', 5)", (name,))
    with pytest.raises(errors.CheckViolation, match="for tier key -infinity"):
        upsert(conn, table, id=1, ts="-infinity", body="x")
    with pytest.raises(errors.CheckViolation, match="no partition"):
        upsert(conn, table, id=1, ts="infinity", body="x")
    if axis is Axis.DATE:
        with pytest.raises(errors.DatatypeMismatch):
            conn.execute("SELECT modak_delete(%s, '1', now())", (name,))


def test_a_tier_key_of_another_kind_is_refused(conn: Conn) -> None:
    name = str(reclaimed(conn).name)
    with pytest.raises(errors.DatatypeMismatch, match="is no date"):
        conn.execute("SELECT modak_delete(%s, '1', current_date)", (name,))
    with pytest.raises(errors.InvalidTextRepresentation):
        conn.execute("SELECT modak_delete(%s, '1', '2024-01-01')", (name,))


def test_a_set_is_all_or_nothing_and_names_a_key_that_comes_twice(conn: Conn) -> None:
    table = reclaimed(conn)
    row = {"id": 1, "ts": 50, "body": "x"}
    for rows in ([row, {**row, "body": "y"}], [row, {"id": "1", "ts": 50}], [{**row, "ts": 250}] * 2):
        with pytest.raises(errors.CardinalityViolation, match=r"key \(id, ts\) = \(1, (50|250)\) of .* more than once"):
            bulk(conn, table, rows)
    with pytest.raises(errors.CardinalityViolation):
        bulk(conn, table, [{"id": 1, "ts": 50}] * 2, "modak_delete_rows")
    with pytest.raises(errors.InvalidTextRepresentation):
        bulk(conn, table, [{**row, "ts": 250}, {**row, "id": "one"}])
    with pytest.raises(errors.UndefinedColumn, match="boddy"):
        bulk(conn, table, [row, {"id": 2, "ts": 50, "boddy": "x"}])
    for wrong in ({"id": 1}, [row, 7], None):
        with pytest.raises(errors.InvalidParameterValue, match="array of objects"):
            bulk(conn, table, wrong)
    assert (heap(conn, table), delta(conn, table)) == ([], {})
    assert bulk(conn, table, []) == (0, 0)
    assert bulk(conn, table, [], "modak_delete_rows") == (0, 0)


def test_a_table_is_a_source_too(conn: Conn) -> None:
    table = reclaimed(conn)
    name = str(table.name)
    conn.execute("CREATE TEMP TABLE src (ts int, id numeric, body varchar)")
    conn.execute("INSERT INTO src VALUES (50, 1, 'a'), (250, 2, 'b'), (60, 3, NULL)")
    call = "SELECT heap, delta FROM modak_{}_from(%s, 'src')"
    assert conn.execute(call.format("upsert").encode(), (name,)).fetchall() == [(1, 2)]
    assert heap(conn, table) == [(2, 250, "b")]
    assert delta(conn, table)["3", 60] == {"id": "3", "ts": "60", "body": None}
    assert conn.execute(call.format("delete").encode(), (name,)).fetchall() == [(1, 2)]
    assert (heap(conn, table), delta(conn, table)) == ([], {("1", 50): None, ("3", 60): None})
    conn.execute("INSERT INTO src VALUES (50, 1, 'again')")
    for verb in ("upsert", "delete"):
        with pytest.raises(errors.CardinalityViolation, match=r"\(1, 50\)"):
            conn.execute(call.format(verb).encode(), (name,))
    conn.execute("ALTER TABLE src ADD COLUMN other int")
    for verb in ("upsert", "delete"):
        with pytest.raises(errors.UndefinedColumn, match="other"):
            conn.execute(call.format(verb).encode(), (name,))
    conn.execute("DROP TABLE src; CREATE TEMP TABLE src (id int)")
    with pytest.raises(errors.NotNullViolation, match='"ts"'):
        conn.execute(call.format("upsert").encode(), (name,))
    with pytest.raises(errors.NotNullViolation, match='"ts"'):
        conn.execute(call.format("delete").encode(), (name,))
    conn.execute("DROP TABLE src")


def test_a_key_that_does_not_fit_its_column_deletes_nothing(conn: Conn) -> None:
    table = reclaimed(conn, "id varchar(3), ts bigint, body text")
    bulk(conn, table, [{"id": "abc", "ts": ts, "body": "x"} for ts in (50, 250)])
    for ts in (50, 250):
        conn.execute("CREATE TEMP TABLE long_keys AS SELECT 'abcd'::text AS id, %s::int AS ts", (ts,))
        if ts == 50:
            with pytest.raises(errors.StringDataRightTruncation):
                conn.execute("SELECT * FROM modak_delete_from(%s, 'long_keys')", (str(table.name),))
        else:
            gone = conn.execute("SELECT * FROM modak_delete_from(%s, 'long_keys')", (str(table.name),))
            assert gone.fetchall() == [(0, 0)]
        conn.execute("DROP TABLE long_keys")
    assert len(heap(conn, table)) == 1
    assert delta(conn, table)["abc", 50] is not None


def test_fifty_thousand_rows_go_in_one_call(conn: Conn) -> None:
    table = reclaimed(conn)
    name = str(table.name)
    conn.execute(
        b"CREATE TEMP TABLE many AS SELECT g AS id, g % 300 AS ts, 'b' || g AS body FROM generate_series(1, 50000) g"
    )
    cold = scalar(conn, "SELECT count(*) FROM many WHERE ts < 200")
    started = time.monotonic()
    for call in (
        "modak_upsert_from(%s, 'many')",
        "modak_upsert_rows(%s, (SELECT jsonb_agg(m) FROM many m))",
        "modak_delete_from(%s, 'many')",
    ):
        assert conn.execute(f"SELECT heap, delta FROM {call}".encode(), (name,)).fetchall() == [(50000 - cold, cold)]
    assert time.monotonic() - started < 120
    assert scalar(conn, "SELECT count(*) FROM modak.delta WHERE table_id = %s AND op = 2", table.table_id) == cold
    conn.execute("DROP TABLE many")


def test_a_rollback_leaves_nothing(conn: Conn) -> None:
    table = reclaimed(conn)
    with conn.transaction(force_rollback=True):
        assert upsert(conn, table, id=1, ts=50, body="x") == "delta"
        assert upsert(conn, table, id=1, ts=250, body="x") == "heap"
        assert len(delta(conn, table)) == 1
    assert (heap(conn, table), delta(conn, table)) == ([], {})
    assert upsert(conn, table, id=1, ts=50, body="x") == "delta"


def test_callers_that_come_together_both_succeed(conn: Conn, catalog: Dsn) -> None:
    table = reclaimed(conn)
    failures: list[BaseException] = []

    def correct(start: int) -> None:
        try:
            with connect(catalog, autocommit=True) as own:
                for n in range(10):
                    bulk(own, table, [{"id": m, "ts": 50, "body": f"{start} {n}"} for m in range(start, start + 20)])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=correct, args=(start,)) for start in (0, 10, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(delta(conn, table)) == 30


def test_the_route_is_told_when_asked(conn: Conn) -> None:
    table = reclaimed(conn)
    said: list[str] = []
    conn.add_notice_handler(lambda notice: said.append(notice.message_primary or ""))
    with conn.transaction():
        conn.execute("SET LOCAL modak.explain = on")
        bulk(conn, table, [{"id": 1, "ts": 50}, {"id": 2, "ts": 50}, {"id": 1, "ts": 250}])
        conn.execute("SELECT modak_delete(%s, '1', 50)", (str(table.name),))
    upsert(conn, table, id=1, ts=50)
    assert said == [
        f"modak: 1 row of {table.name} to the heap",
        f"modak: 2 rows of {table.name} to the delta",
        f"modak: 1 row of {table.name} to the delta",
    ]


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
