"""The values of corrections: judged and shaped as the table would, by every way the same."""

from __future__ import annotations

import itertools
import json
from typing import Any

import psycopg
import pytest
from psycopg import errors, sql

from modak.catalog import capture
from modak.core.axis import Axis
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.catalog.build import Built, delta, heap, scalar
from tests.catalog.correcting import ODD_SESSION, Conn, bulk, image, reclaimed, run, upsert


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


_MONETARY = ("de_DE.utf8", "de_DE.UTF-8", "en_GB.utf8", "en_GB.UTF-8", "ja_JP.utf8", "en_US.utf8", "en_US.UTF-8")


def test_every_function_that_makes_texts_has_one_form_of_money(conn: Conn) -> None:
    rows = conn.execute(
        "SELECT p.proname, 'lc_monetary=C' = ANY (p.proconfig) FROM pg_proc p"
        " WHERE p.pronamespace = 'modak'::regnamespace AND 'bytea_output=hex' = ANY (p.proconfig)"
    ).fetchall()
    assert {"capture", "divert", "take_in", "bury", "modak_read_row"} <= {name for name, _ in rows}
    assert [name for name, plain in rows if not plain] == []


def test_money_is_the_same_text_wherever_the_writer_comes_from(conn: Conn, catalog: Dsn) -> None:
    table = reclaimed(conn, "id bigint, ts bigint, price money")
    with connect(catalog, autocommit=True) as odd:
        for locale in _MONETARY:
            try:
                odd.execute(sql.SQL("SET lc_monetary = {}").format(locale))
            except errors.InvalidParameterValue:
                continue
            if scalar(odd, "SELECT 1234::money::text") != "$1,234.00":
                break
        else:
            pytest.skip("the server has no locale whose money looks otherwise")
        assert upsert(odd, table, id=1, ts=50, price=1234) == "delta"
    assert image(conn, table, "1", 50)["price"] == "$1,234.00"


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
