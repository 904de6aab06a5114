"""What the catalog itself refuses, whoever asks: illegal steps, incoherent modes, lines that go back."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from modak.catalog import moves
from modak.catalog.migrate import migrate
from modak.catalog.read import CatalogReader
from modak.catalog.records import NewPartition
from modak.core.axis import Width
from modak.core.errors import Conflict, Refused
from modak.core.names import TableName
from modak.core.states import OP_STEPS, PARTITION_STEPS, OpPhase, PartitionState
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.catalog.build import Built, build, config, scalar

Conn = psycopg.Connection[Any]

_WAY_TO: dict[PartitionState, tuple[PartitionState, ...]] = {
    PartitionState.HOT: (),
    PartitionState.SEALING: (PartitionState.SEALING,),
    PartitionState.TIERING: (PartitionState.SEALING, PartitionState.TIERING),
    PartitionState.TIERED: (PartitionState.SEALING, PartitionState.TIERING, PartitionState.TIERED),
    PartitionState.DROPPED: tuple(list(PartitionState)[1:]),
}
_PHASES_TO: dict[OpPhase, tuple[OpPhase, ...]] = {
    OpPhase.PLANNED: (),
    OpPhase.WRITING: (OpPhase.WRITING,),
    OpPhase.PREPARED: (OpPhase.PREPARED,),
    OpPhase.COMMITTED: (OpPhase.PREPARED, OpPhase.COMMITTED),
    OpPhase.DONE: (OpPhase.PREPARED, OpPhase.COMMITTED, OpPhase.DONE),
    OpPhase.FAILED: (OpPhase.FAILED,),
    OpPhase.ABANDONED: (OpPhase.ABANDONED,),
}


def test_the_steps_of_sql_and_python_are_the_same(conn: Conn) -> None:
    partitions = set(conn.execute("SELECT from_state, to_state FROM modak.partition_steps").fetchall())
    assert partitions == {(str(a), str(b)) for a, steps in PARTITION_STEPS.items() for b in steps}
    phases = set(conn.execute("SELECT from_phase, to_phase FROM modak.op_steps").fetchall())
    assert phases == {(str(a), str(b)) for a, steps in OP_STEPS.items() for b in steps}


@pytest.mark.parametrize(("here", "there"), list(itertools.permutations(PartitionState, 2)))
def test_a_partition_takes_legal_steps_only(conn: Conn, here: PartitionState, there: PartitionState) -> None:
    with conn.transaction(force_rollback=True):
        table = build(conn, bounds=[("0", "100")])
        for state in _WAY_TO[here]:
            _step(conn, table, state)
        if there in PARTITION_STEPS[here]:
            _step(conn, table, there)
        else:
            with pytest.raises(psycopg.Error, match=f"cannot go from {here} to {there}") as caught:
                _step(conn, table, there)
            assert caught.value.sqlstate == "MDK01"


def _step(conn: Conn, table: Built, state: PartitionState) -> None:
    conn.execute("UPDATE modak.partitions SET state = %s WHERE table_id = %s", (state, table.table_id))


@pytest.mark.parametrize("state", PartitionState)
def test_a_partition_begins_hot_or_tiered(conn: Conn, state: PartitionState) -> None:
    with conn.transaction(force_rollback=True):
        table = build(conn, bounds=[])
        new = NewPartition(name="p", lower=0, upper=1, leaf_oid=1, leaf_schema="public", state=state)
        if state in (PartitionState.HOT, PartitionState.TIERED):
            moves.add_partitions(conn, table.table_id, [new])
        else:
            with pytest.raises(psycopg.Error, match="cannot begin"):
                moves.add_partitions(conn, table.table_id, [new])


def test_the_name_of_a_dropped_partition_may_be_used_again(conn: Conn) -> None:
    table = build(conn, bounds=[("0", "100")])
    again = NewPartition(name=f"{table.name.name}_0", lower=300, upper=400, leaf_oid=1, leaf_schema="public")
    with pytest.raises(psycopg.errors.UniqueViolation):
        moves.add_partitions(conn, table.table_id, [again])
    for state in _WAY_TO[PartitionState.DROPPED]:
        _step(conn, table, state)
    moves.add_partitions(conn, table.table_id, [again])


@pytest.mark.parametrize(("here", "there"), list(itertools.permutations(OpPhase, 2)))
def test_an_operation_takes_legal_steps_only(conn: Conn, here: OpPhase, there: OpPhase) -> None:
    with conn.transaction(force_rollback=True):
        conn.execute("INSERT INTO modak.op_log (op_id, kind) VALUES ('op', 'tiering')")
        for phase in _PHASES_TO[here]:
            conn.execute("UPDATE modak.op_log SET phase = %s", (phase,))
        ended = scalar(conn, "SELECT finished_at IS NOT NULL FROM modak.op_log WHERE op_id = 'op'")
        assert ended == (here in (OpPhase.DONE, OpPhase.FAILED, OpPhase.ABANDONED))
        if there in OP_STEPS[here]:
            conn.execute("UPDATE modak.op_log SET phase = %s", (there,))
        else:
            with pytest.raises(psycopg.Error, match=f"cannot go from {here} to {there}") as caught:
                conn.execute("UPDATE modak.op_log SET phase = %s", (there,))
            assert caught.value.sqlstate == "MDK02"


def test_an_operation_begins_planned(conn: Conn) -> None:
    with pytest.raises(psycopg.Error, match="cannot begin as committed"):
        conn.execute("INSERT INTO modak.op_log (op_id, kind, phase) VALUES ('op', 'tiering', 'committed')")


@pytest.mark.parametrize(
    ("changes", "constraint"),
    [
        ({"mode": "mirrored", "keep_heap": True}, "keep_heap_is_tiered_only"),
        ({"mode": "mirrored", "lake_retention": 5}, "lake_retention_is_tiered_only"),
        ({"keep_heap": True, "lake_retention": 5}, "keep_heap_excludes_lake_retention"),
        ({"lake_retention": 5, "width": None}, "lake_retention_needs_a_width"),
        ({"heap_retention": 5}, "heap_retention_is_mirrored_only"),
        ({"chunk_rows": 5}, "chunk_rows_is_mirrored_only"),
        ({"width": Width(1, months=True)}, "months_are_a_width_of_time"),
        ({"pk_attnums": (1, 2)}, "key_columns_have_numbers"),
        ({"width": Width(0)}, "tables_partition_width_check"),
        ({"lake_retention": 0}, "tables_lake_retention_check"),
        ({"mode": "other"}, "tables_mode_check"),
    ],
)
def test_an_incoherent_registration_is_refused_by_name(conn: Conn, changes: dict[str, Any], constraint: str) -> None:
    with pytest.raises(psycopg.errors.CheckViolation) as caught:
        moves.register(conn, config(TableName("public", "incoherent"), 4_000_000_001, **changes))
    assert caught.value.diag.constraint_name == constraint


@pytest.mark.parametrize(
    "changes",
    [
        {"keep_heap": True},
        {"lake_retention": 500},
        {"mode": "mirrored", "heap_retention": 5, "chunk_rows": 10},
        {"mode": "mirrored", "width": None},
    ],
)
def test_every_mode_can_be_registered_and_is_read_back_as_written(conn: Conn, changes: dict[str, Any]) -> None:
    wanted = config(TableName("Odd Schema", 'Odd "Table"'), 4_000_000_002, **changes)
    with conn.transaction(force_rollback=True):
        table_id = moves.register(conn, wanted)
        found = CatalogReader(conn).table(wanted.name)
        assert found is not None
        assert found.table_id == table_id
        assert wanted.differences(found) == ()
        assert replace(wanted, width=Width(7)).differences(found) == ("width",)
        with pytest.raises(Conflict):
            moves.register(conn, wanted)


@pytest.mark.parametrize(
    ("column", "first", "then"),
    [("t", 100, 99), ("t", 100, None), ("retention_line", 50, 49), ("retention_line", 50, None)],
)
def test_a_line_never_goes_back(conn: Conn, column: str, first: int, then: int | None) -> None:
    table = build(conn, t=100)
    update = f"UPDATE modak.cutline SET {column} = %s WHERE table_id = %s".encode()
    conn.execute(update, (first, table.table_id))
    with pytest.raises(psycopg.Error, match="cannot go back") as caught:
        conn.execute(update, (then, table.table_id))
    assert caught.value.sqlstate == "MDK03"


def test_the_retention_line_stays_below_the_cut_line(conn: Conn) -> None:
    table = build(conn, t=100)
    with pytest.raises(psycopg.errors.CheckViolation):
        conn.execute("UPDATE modak.cutline SET retention_line = 101 WHERE table_id = %s", (table.table_id,))


def test_the_first_floor_is_where_the_cut_line_began(conn: Conn) -> None:
    table = build(conn, t=None)
    reader = CatalogReader(conn)
    for t, floor in ((None, None), (100, 100), (300, 100)):
        conn.execute("UPDATE modak.cutline SET t = %s WHERE table_id = %s", (t, table.table_id))
        line = reader.cutline(table.table_id)
        assert line is not None
        assert line.first_floor == floor


def test_there_is_always_exactly_one_default_profile(fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        migrate(conn)
        _try_to_lose_the_default(conn)


def _try_to_lose_the_default(conn: Conn) -> None:
    assert CatalogReader(conn).profile().name == "default"
    with pytest.raises(psycopg.errors.UniqueViolation):
        conn.execute("INSERT INTO modak.storage_profiles (name, warehouse, is_default) VALUES ('two', 's3://b', true)")
    for statement in (
        "DELETE FROM modak.storage_profiles WHERE is_default",
        "UPDATE modak.storage_profiles SET is_default = false",
    ):
        with pytest.raises(psycopg.Error, match="must be a default") as caught:
            conn.execute(statement)
        assert caught.value.sqlstate == "MDK04"
    with conn.transaction(force_rollback=True):
        conn.execute("UPDATE modak.storage_profiles SET is_default = false")
        conn.execute("INSERT INTO modak.storage_profiles (name, warehouse, is_default) VALUES ('two', 's3://b', true)")
        conn.execute("SET CONSTRAINTS ALL IMMEDIATE")
        assert CatalogReader(conn).profile().name == "two"
        assert CatalogReader(conn).profile("default").warehouse is None


def test_one_maintenance_request_per_table_waits(conn: Conn) -> None:
    table = build(conn)
    conn.execute("INSERT INTO modak.maintenance_requests (table_id) VALUES (%s)", (table.table_id,))
    with pytest.raises(psycopg.errors.UniqueViolation):
        conn.execute("INSERT INTO modak.maintenance_requests (table_id) VALUES (%s)", (table.table_id,))
    conn.execute("UPDATE modak.maintenance_requests SET claimed_at = now() WHERE table_id = %s", (table.table_id,))
    conn.execute("INSERT INTO modak.maintenance_requests (table_id) VALUES (%s)", (table.table_id,))


def test_the_status_shows_a_table_as_it_is(conn: Conn) -> None:
    table = build(conn, t=0, watch=[0])
    conn.execute(f"INSERT INTO {table.name} VALUES (1, 10, 'late')".encode())
    moves.note_problem(conn, table.table_id, f"{table.name.name}_1", "a gap after it")
    conn.execute("SELECT modak_read_begin(%s::regclass)", (str(table.name),))
    (row,) = (each for each in CatalogReader(conn).status() if each.table_id == table.table_id)
    assert (row.cutline_t, row.cutline_s, row.delta_backlog, row.read_pins, row.copying) == (0, 1, 1, 1, False)
    assert row.partition_states == {"hot": 3}
    assert row.problems == ({"partition": f"{table.name.name}_1", "problem": "a gap after it"},)


def test_a_whole_table_state_is_read_at_once(conn: Conn) -> None:
    table = build(conn)
    state = CatalogReader(conn).state(table.name)
    assert state.table.table_id == table.table_id
    assert [part.leaf_oid for part in state.living()] == list(table.leaves)
    assert state.cutline.t == 0
    with pytest.raises(Refused, match="not registered"):
        CatalogReader(conn).state(TableName("public", "nowhere"))


def test_unregistering_forgets_everything_but_the_journal(conn: Conn) -> None:
    table = build(conn, watch=[0])
    conn.execute(f"INSERT INTO {table.name} VALUES (1, 10, 'late')".encode())
    conn.execute("INSERT INTO modak.op_log (op_id, kind, table_id) VALUES (%s, 'tiering', %s)", ("u", table.table_id))
    moves.unregister(conn, table.table_id)
    for name in ("tables", "cutline", "partitions", "delta"):
        query = f"SELECT count(*) FROM modak.{name} WHERE table_id = %s"
        assert scalar(conn, query, table.table_id) == 0
    assert scalar(conn, "SELECT count(*) FROM modak.op_log WHERE op_id = 'u'") == 1
    with pytest.raises(Conflict):
        moves.unregister(conn, table.table_id)
