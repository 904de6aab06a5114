"""Corrections in SQL: every row finds its tier, or is refused by name; sets of them are all or nothing."""

from __future__ import annotations

import threading
import time

import psycopg
import pytest
from psycopg import errors, sql

from modak.catalog import spill
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.catalog.build import build, delta, heap, scalar
from tests.catalog.correcting import Conn, bulk, image, leave, reclaimed, run, upsert


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
