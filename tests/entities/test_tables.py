"""The three tables: made once, checked always, and no write goes by unseen."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from secrets import token_hex
from typing import Any, cast

import psycopg
import pytest
from psycopg import sql

from modak.core import faults
from modak.core.errors import Refused, UsageError
from modak.entities.changelog import ChangeLog
from modak.entities.compaction import compact
from modak.entities.config import CDCConfig
from modak.entities.flushing import flush
from modak.entities.initial import init
from modak.entities.reconciling import reconcile
from modak.entities.tables import EntityTables, check, install
from modak.entities.verifying import verify
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.postgres.embedded import EmbeddedServer
from tests.entities.test_flush import at
from tests.entities.world import SCHEMA, World, key


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_install_can_be_run_again_and_takes_odd_names(fresh_database: Dsn) -> None:
    tables = EntityTables.of(
        CDCConfig(change_log_table='"Odd Log"', entity_main_table='odd."Main; drop"', eav_data_table="odd.eav")
    )
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute("CREATE SCHEMA odd")
        with pytest.raises(Refused, match="no table") as caught:
            check(conn, tables)
        assert "entities install" in caught.value.hint
        first = install(conn, tables)
        assert install(conn, tables) == first
        conn.execute("INSERT INTO odd.eav VALUES (1, gen_random_uuid(), 1) ")
        assert conn.execute('SELECT count(*) FROM public."Odd Log" WHERE flushed_at = 0').fetchone() == (1,)


def test_every_flow_takes_odd_names(world: World) -> None:
    world.sql("CREATE SCHEMA odd")
    world.configure(
        change_log_table='"Odd ""Log"', entity_main_table='odd."Main; drop"', eav_data_table='odd."eav {main}"'
    )
    with world.connect() as conn:
        install(conn, world.store.tables)
    world.sql(
        'INSERT INTO odd."Main; drop" (ltbase_schema_id, ltbase_row_id, text_01, ltbase_created_at, ltbase_updated_at)'
        " VALUES (7, %s, 'one', 1, 1), (7, %s, 'two', 1, 1)",
        (key(1), key(2)),
    )
    assert flush(world.store)[0].rows == 2
    world.sql("INSERT INTO odd.\"eav {main}\" VALUES (7, %s, 4, '', NULL, 5)", (key(1),))
    assert world.read()[key(1)]["qty"] == 5
    assert init(world.store, SCHEMA, replace_delta=True).rows == 2
    assert (verify(world.store, SCHEMA).compared, compact(world.store)[0].error) == (2, None)
    assert reconcile(world.store, SCHEMA, repair=True, gc=True).deleted == 0
    assert world.titles() == {1: "one", 2: "two"}
    with pytest.raises(UsageError, match="has a % in it"):
        EntityTables.of(CDCConfig(eav_data_table='"eav %s"'))


def test_tables_of_another_shape_are_refused_with_everything_that_is_wrong(fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute("CREATE TABLE change_log (schema_id int, row_id uuid, flushed_at int8, PRIMARY KEY (row_id))")
        with pytest.raises(Refused) as caught:
            install(conn, EntityTables.of(CDCConfig()))
        for part in ("schema_id is integer", "no column changed_at", "primary key"):
            assert part in caught.value.message
        assert conn.execute("SELECT to_regclass('entity_main')").fetchone() == (None,)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("entity_main ALTER ltbase_created_at DROP NOT NULL", "entity_main.ltbase_created_at takes NULL"),
        ("entity_main ALTER ltbase_updated_at DROP NOT NULL", "entity_main.ltbase_updated_at takes NULL"),
        ("change_log ALTER changed_at DROP NOT NULL", "change_log.changed_at takes NULL"),
        ("entity_main ALTER ltbase_deleted_at SET NOT NULL", "entity_main.ltbase_deleted_at takes no NULL"),
        ("change_log ALTER deleted_at SET NOT NULL", "change_log.deleted_at takes no NULL"),
        ("change_log ADD who text NOT NULL", "for want of public.change_log.who"),
    ],
)
def test_columns_that_would_stop_writers_or_flushes_are_refused(world: World, change: str, said: str) -> None:
    world.sql(f"ALTER TABLE {change}")
    with world.connect() as conn:
        for act in (install, check):
            with pytest.raises(Refused, match="not those of an entity store") as caught:
                act(conn, world.store.tables)
            assert said in caught.value.message


def test_columns_of_the_log_that_fill_themselves_are_welcome(world: World) -> None:
    world.sql(
        "CREATE DOMAIN filled AS text NOT NULL DEFAULT 'x'; ALTER TABLE change_log ADD who text NOT NULL DEFAULT"
        " current_user, ADD at int GENERATED ALWAYS AS IDENTITY, ADD note text, ADD twice bigint NOT NULL GENERATED"
        " ALWAYS AS (changed_at * 2) STORED, ADD of filled"
    )
    world.put(1, title="one")
    assert flush(world.store)[0].marked == 1
    assert world.titles() == {1: "one"}


def test_the_triggers_of_another_change_log_are_never_replaced(world: World) -> None:
    other = EntityTables.of(CDCConfig(change_log_table="other_log"))
    with world.connect() as conn:
        for act in (install, check):
            with pytest.raises(Refused) as caught:
                act(conn, other)
            if act is check:
                assert caught.value.code == "entities.no_tables"
                continue
            assert "entity_main and public.eav_data are watched for another change log" in caught.value.message
            assert "public.change_log_mark_main()" in caught.value.message
        assert conn.execute("SELECT to_regclass('other_log')").fetchone() == (None,)
        world.put(1, title="one")
        assert world.dirty() == 1
        # Whoever has made that log by hand is told the same by every command.
        conn.execute("CREATE TABLE other_log (LIKE change_log INCLUDING ALL)")
        with pytest.raises(Refused, match="watched for another change log") as caught:
            check(conn, other)
        statement = re.search(r"DROP FUNCTION .* CASCADE", caught.value.hint)
        assert statement is not None
        conn.execute(statement[0])  # type: ignore[call-overload]
        assert install(conn, other).dirtied == 0
        world.put(1, title="two")
        assert conn.execute("SELECT count(*) FROM other_log").fetchone() == (1,)
        with pytest.raises(Refused, match="watched for another change log"):
            flush(world.store)


# What is left of the triggers when somebody who switched them off installs again.
UNWATCHED = (
    "SELECT",
    "ALTER TABLE entity_main ENABLE TRIGGER USER",
    "DROP TRIGGER modak_entities_update ON entity_main",
)


@pytest.mark.parametrize("how", UNWATCHED)
@pytest.mark.parametrize("slots", [True, False])
def test_what_changed_while_nobody_watched_is_exported_after_an_install(world: World, how: str, slots: bool) -> None:
    world.many(0, 3)
    world.put(1, schema_id=9, title="of another schema")
    init(world.store, SCHEMA)
    if not slots:
        # All rows were there before the log.
        world.sql("DELETE FROM change_log")
    world.sql("ALTER TABLE entity_main DISABLE TRIGGER USER")
    world.sql("UPDATE entity_main SET text_01 = 'unseen' WHERE ltbase_row_id = %s AND ltbase_schema_id = 7", (key(1),))
    world.sql(how)
    with world.connect() as conn:
        assert install(conn, world.store.tables).dirtied == 4
        assert install(conn, world.store.tables).dirtied == 0
    assert world.titles() == {0: "row 0", 1: "unseen", 2: "row 2"}
    flush(world.store, schemas=[SCHEMA])
    assert (world.dirty(), world.titles()) == (0, {0: "row 0", 1: "unseen", 2: "row 2"})


def test_a_flush_under_way_does_not_mark_what_an_install_made_dirty(world: World) -> None:
    world.many(0, 3)

    def gap() -> None:
        world.sql("ALTER TABLE entity_main DISABLE TRIGGER USER")
        world.sql("UPDATE entity_main SET text_01 = 'unseen' WHERE ltbase_row_id = %s", (key(1),))
        with world.connect() as conn:
            install(conn, world.store.tables)

    at("flush.after_export", gap)
    flush(world.store)
    faults.watch(None)
    assert world.titles()[1] == "unseen"
    flush(world.store)
    assert (world.dirty(), world.titles()[1]) == (0, "unseen")


def test_a_log_that_was_dropped_is_made_anew_with_every_row_in_it(world: World) -> None:
    world.many(0, 3)
    world.sql("DROP TABLE change_log")
    with world.connect() as conn:
        assert install(conn, world.store.tables).dirtied == 3
    assert world.dirty() == 3


def test_a_store_whose_writes_are_not_watched_is_never_flushed(world: World) -> None:
    world.many(0, 2)
    for statement in (
        "ALTER TABLE eav_data DISABLE TRIGGER modak_entities_update",
        "ALTER TABLE eav_data ENABLE TRIGGER modak_entities_update",
        "DROP TRIGGER modak_entities_update ON eav_data",
    ):
        world.sql(statement)
        with pytest.raises(Refused, match="are not watched") as caught:
            flush(world.store)
        assert "entities install" in caught.value.hint
    with world.connect() as conn:
        install(conn, world.store.tables)
    assert flush(world.store)[0].rows == 2


@pytest.mark.parametrize("table", ["entity_main", "eav_data", "change_log"])
def test_truncate_is_refused(world: World, table: str) -> None:
    world.many(0, 2)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="TRUNCATE"):
        world.sql(f"TRUNCATE {table}")


def test_every_kind_of_write_makes_its_rows_dirty(server: EmbeddedServer, world: World) -> None:
    world.many(0, 6)
    flush(world.store)
    assert world.dirty() == 0
    with connect(server.dsn(world.dsn.dbname), autocommit=True) as conn:
        conn.execute("SET session_replication_role = replica")
        conn.execute("UPDATE entity_main SET text_01 = 'x' WHERE ltbase_row_id = %s", (key(0),))
    assert world.dirty() == 1
    world.sql("UPDATE entity_main SET ltbase_row_id = %s WHERE ltbase_row_id = %s", (key(77), key(1)))
    assert world.dirty() == 3
    world.sql("DELETE FROM eav_data WHERE row_id = %s", (key(2),))
    world.sql("DELETE FROM entity_main WHERE ltbase_row_id = %s", (key(3),))
    world.sql("UPDATE eav_data SET value_numeric = 5 WHERE row_id = %s", (key(4),))
    assert world.dirty() == 6
    with (
        psycopg.connect(world.dsn.conninfo()) as conn,
        conn.cursor().copy("COPY eav_data (schema_id, row_id, attr_id, value_numeric) FROM STDIN") as copy,
    ):
        copy.write_row((SCHEMA, key(5), 3, 1))
    assert world.dirty() == 7
    before = world.read()
    flush(world.store)
    assert world.dirty() == 0
    assert {row_id: row["title"] for row_id, row in world.read().items()} == {
        row_id: row["title"] for row_id, row in before.items()
    }


def test_writers_of_the_same_rows_in_other_orders_do_not_wait_in_a_circle(world: World) -> None:
    world.many(0, 40)
    failures: list[Exception] = []

    def update(attribute: int, order: str) -> None:
        """Attributes of its own, so that two of these only meet in the log."""
        try:
            for turn in range(15):
                world.sql(
                    f"INSERT INTO eav_data SELECT 7, row_id, {attribute}, '{turn}' FROM eav_data WHERE attr_id = 4"
                    f" ORDER BY row_id {order}"
                )
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=update, args=pair) for pair in ((3, "ASC"), (6, "DESC"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_the_log_keeps_one_flushed_slot_per_row(world: World) -> None:
    for turn in range(4):
        world.put(1, title=f"turn {turn}")
        flush(world.store)
    assert world.sql("SELECT count(*), min(flushed_at) > 0 FROM change_log") == [(1, True)]


class Explained:
    """A connection that has what is run explained."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self._conn = conn
        self.plan = ""

    def execute(self, query: sql.Composed, names: dict[str, Any]) -> Explained:
        lines = self._conn.execute(sql.SQL("EXPLAIN (ANALYZE, TIMING OFF, COSTS OFF) ") + query, names)
        self.plan = "\n".join(line for (line,) in lines)
        return self

    def fetchone(self) -> None:
        return None


def test_marking_rows_that_were_flushed_before_compares_none_with_all_others(world: World) -> None:
    """A plan that joins two lists of rows by their product takes half a minute for twenty thousand."""
    rows = 3_000
    world.sql(
        "INSERT INTO change_log (schema_id, row_id, flushed_at, changed_at) SELECT 7, md5(i::text)::uuid, slot, 1"
        f" FROM generate_series(1, {rows}) AS i, unnest(ARRAY[0, 1]) AS slot"
    )
    changes = ChangeLog(world.store.tables, SCHEMA, "")
    with world.store.connect() as conn:
        (part,) = changes.batch(conn, rows, rows)
        explained = Explained(conn)
        changes.mark(cast("psycopg.Connection[Any]", explained), part, 2)
    assert world.sql("SELECT count(*), min(flushed_at) FROM change_log") == [(rows, 2)]
    compared = sum(map(int, re.findall(r"Rows Removed by Join Filter: (\d+)", explained.plan)))
    assert compared <= rows, explained.plan


def test_dirty_rows_are_found_by_the_partial_index(world: World) -> None:
    world.sql(
        "INSERT INTO change_log SELECT 7, gen_random_uuid(), 1, 1 FROM generate_series(1, 20000); ANALYZE change_log"
    )
    plan = world.sql(
        "EXPLAIN SELECT row_id FROM change_log WHERE schema_id = 7 AND flushed_at = 0 ORDER BY changed_at LIMIT 5"
    )
    assert "change_log_dirty" in str(plan)


def test_rows_that_a_subscription_applies_are_dirty_too(server: EmbeddedServer, world: World) -> None:
    """Applying fires no statement triggers; another database of the same server is the publisher."""
    name = f"publisher_{token_hex(4)}"
    admin = connect(server.dsn(world.dsn.dbname), autocommit=True)
    admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    try:
        publisher = World(server.dsn(name), world.objects)
        publisher.sql("CREATE PUBLICATION here FOR TABLE entity_main, eav_data")
        publisher.sql("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (name,))
        where = publisher.dsn.conninfo().replace("'", "''")
        admin.execute(
            f"CREATE SUBSCRIPTION there CONNECTION '{where}' PUBLICATION here"  # type: ignore[arg-type]
            f" WITH (create_slot = false, slot_name = '{name}', copy_data = false)"
        )
        publisher.put(1, title="applied", qty=5)
        publisher.put(2, title="short")
        publisher.delete(2)
        publisher.put(3, title="last")
        until(lambda: 3 in world.titles())
        assert world.titles() == {1: "applied", 3: "last"}
        assert world.dirty() == 3
        flush(world.store)
        publisher.put(1, title="again")
        until(lambda: world.titles()[1] == "again")
    finally:
        admin.execute("DROP SUBSCRIPTION IF EXISTS there")
        admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
        admin.close()
