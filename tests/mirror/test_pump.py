"""The pump on real parts: what commits in Postgres is in the lake after a turn, row for row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from modak.core.errors import ModakError
from modak.lake.iceberg.catalog import IcebergLake
from modak.postgres.changes.lsn import read_lsn
from modak.postgres.changes.slot import slot_state
from modak.postgres.connect import connect
from modak.postgres.embedded import EmbeddedServer
from modak.tables.mirror.pump.buffer import Buffer
from modak.tables.mirror.pump.run import Pump
from tests.mirror.pumping import Mirrored
from tests.mirror.world import Make

HUNDRED = "SELECT i, i, 'row ' || i FROM generate_series(1, 100) AS i"
LONG = "(SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 400))"
"""Longer than a page even when compressed, so that it is stored aside."""


def files(table: Mirrored) -> tuple[int, int]:
    """Data files and deletion vectors of the lake table."""
    site = table.site
    state = site.reader.state(table.name)
    lake: IcebergLake = site.lake
    if state.cutline.snapshot_id is None:
        return 0, 0
    found = list(lake.files(state.table.lake, state.cutline.snapshot_id))
    return len(found), sum(len(each.vectors) for each in found)


def test_inserts_updates_and_deletes_are_followed(make: Make) -> None:
    table = make(rows=HUNDRED)
    table.sql(
        "INSERT INTO @ SELECT i, i, 'new ' || i FROM generate_series(101, 150) AS i",
        "UPDATE @ SET body = body || '!' WHERE id % 7 = 0",
        "DELETE FROM @ WHERE id % 10 = 0",
    )
    assert table.pump().changes == 50 + 21 + 15
    assert table.is_same()
    assert table.pump().changes == 0


def test_a_second_worker_goes_on_where_the_first_one_ended(make: Make) -> None:
    table = make(rows=HUNDRED)
    table.sql("UPDATE @ SET body = 'once' WHERE id = 5")
    table.pump()
    table.sql("UPDATE @ SET body = 'twice' WHERE id = 5", "DELETE FROM @ WHERE id = 6")
    table.pump(fresh=True)
    assert table.is_same()


def test_inserts_of_new_keys_write_no_delete(make: Make) -> None:
    table = make(rows=HUNDRED)
    table.sql("INSERT INTO @ SELECT i, i, 'new' FROM generate_series(101, 300) AS i")
    table.pump()
    table.sql("INSERT INTO @ VALUES (1000, 5, 'born and gone')", "DELETE FROM @ WHERE id = 1000")
    table.sql("INSERT INTO @ VALUES (1001, 5, 'stays')")
    table.pump()
    assert table.is_same()
    assert files(table)[1] == 0


def test_only_the_last_image_of_a_key_is_written(make: Make) -> None:
    table = make(rows=HUNDRED)
    for step in range(20):
        table.sql(f"UPDATE @ SET body = 'step {step}' WHERE id <= 10")
    table.pump()
    assert table.is_same()
    state = table.site.reader.state(table.name)
    (op,) = (op for op in table.site.reader.history(state.table.table_id) if op.kind == "pump")
    assert (op.counters["rows"], op.counters["upserts"], op.counters["removed"]) == (200, 10, 10)


def test_a_changed_primary_key_removes_the_old_one(make: Make) -> None:
    table = make(rows=HUNDRED)
    table.sql(
        "UPDATE @ SET id = id + 1000 WHERE id <= 10",
        "UPDATE @ SET id = id - 1000, body = 'back' WHERE id IN (1001, 1002)",
        "UPDATE @ SET id = 11, body = 'eleven' WHERE id = 1003 AND false",
    )
    table.together("DELETE FROM @ WHERE id = 50", "UPDATE @ SET id = 50 WHERE id = 51")
    table.pump()
    assert table.is_same()


def test_keys_that_change_places_within_a_statement_keep_both_rows(make: Make) -> None:
    table = make(
        columns="id bigint PRIMARY KEY DEFERRABLE INITIALLY IMMEDIATE, ts bigint NOT NULL, body text", rows=HUNDRED
    )
    table.sql("UPDATE @ SET id = 101 - id", "UPDATE @ SET id = id + 1")
    table.pump()
    assert table.is_same()
    table.sql("UPDATE @ SET id = id - 1")
    table.sql("INSERT INTO @ VALUES (500, 1, 'x')", "UPDATE @ SET id = id + 1", "DELETE FROM @ WHERE id = 501")
    table.pump()
    assert table.is_same()


@pytest.mark.parametrize("width", [10, 0])
def test_rows_move_between_partitions_twice_there_and_back(make: Make, width: int) -> None:
    table = make(rows=HUNDRED, partition_width=str(width))
    table.sql(
        "UPDATE @ SET ts = ts + 35 WHERE id % 3 = 0",
        "UPDATE @ SET ts = ts + 500 WHERE id % 6 = 0",
        "UPDATE @ SET ts = ts - 35 WHERE id % 3 = 0 AND id % 6 <> 0",
    )
    table.pump()
    assert table.is_same()
    table.sql("UPDATE @ SET ts = ts - 500 WHERE id % 6 = 0", "UPDATE @ SET ts = ts - 35 WHERE id % 6 = 0")
    table.pump()
    assert table.is_same()


def test_long_values_that_an_update_did_not_touch_stay(make: Make) -> None:
    table = make(rows=f"SELECT i, i, {LONG} FROM generate_series(1, 20) AS i")
    table.sql("UPDATE @ SET ts = ts + 1 WHERE id <= 10", "UPDATE @ SET ts = ts + 1 WHERE id <= 5")
    table.pump()
    assert table.is_same()


def test_long_values_stay_with_a_key_only_identity_too(make: Make) -> None:
    table = make(
        columns="id bigint PRIMARY KEY, ts bigint NOT NULL, body text, more text DEFAULT 'a default'",
        rows=f"SELECT i, i, {LONG}, {LONG} FROM generate_series(1, 40) AS i",
    )
    table.sql("ALTER TABLE @ REPLICA IDENTITY DEFAULT")
    table.sql(
        "UPDATE @ SET ts = ts + 1 WHERE id <= 10",
        f"UPDATE @ SET body = {LONG} WHERE id BETWEEN 4 AND 14",
        "UPDATE @ SET ts = ts + 1 WHERE id <= 5",
        "UPDATE @ SET id = id + 100, ts = 7 WHERE id BETWEEN 15 AND 18",
        "UPDATE @ SET id = id + 100, ts = 8 WHERE id BETWEEN 117 AND 118",
        f"INSERT INTO @ SELECT i, i, {LONG}, {LONG} FROM generate_series(300, 305) AS i",
        "UPDATE @ SET id = id + 1000, ts = 9 WHERE id >= 303",
        "DELETE FROM @ WHERE id = 40",
    )
    table.pump()
    assert table.is_same()
    # The pump has set the identity back, so whole old rows come again.
    assert table.sql(f"SELECT relreplident FROM pg_class WHERE oid = '{table.name}'::regclass") == [("f",)]


def test_a_truncated_table_is_empty_in_the_lake_and_goes_on(make: Make) -> None:
    table = make(rows=HUNDRED)
    table.sql("INSERT INTO @ VALUES (500, 1, 'before')", "TRUNCATE @", "INSERT INTO @ VALUES (1, 1, 'after')")
    table.pump()
    assert table.is_same()
    table.sql("UPDATE @ SET body = 'again'", "TRUNCATE @")
    table.pump()
    assert table.lake() == []
    table.together("INSERT INTO @ VALUES (2, 2, 'x')", "TRUNCATE @", "INSERT INTO @ VALUES (3, 3, 'y')")
    table.pump()
    assert table.is_same()


def test_truncate_with_cascade_empties_every_table_that_it_reaches(make: Make) -> None:
    parent, other = make(rows=HUNDRED), make(rows=HUNDRED)
    child = make(columns=f"id bigint PRIMARY KEY REFERENCES {parent.name}, ts bigint NOT NULL, body text", rows=HUNDRED)
    parent.sql(f"TRUNCATE @, {other.name} CASCADE")
    other.sql("INSERT INTO @ VALUES (7, 7, 'seven')")
    for table in (parent, other, child):
        table.pump()
    assert (parent.lake(), child.lake()) == ([], [])
    assert other.is_same()
    assert len(other.lake()) == 1


def test_a_transaction_larger_than_the_buffer_goes_to_disk_and_lands_whole(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make(rows=HUNDRED)
    monkeypatch.setattr("modak.tables.mirror.pump.run.Pump._room", lambda *_, **__: 500)
    monkeypatch.setattr("modak.tables.mirror.pump.run.BATCH_BYTES", 1 << 14)
    spilled: list[int] = []
    spill = Buffer._spill

    def counted(buffer: Buffer, folded: Any) -> None:
        spilled.append(len(folded))
        spill(buffer, folded)

    monkeypatch.setattr(Buffer, "_spill", counted)
    table.together(
        "INSERT INTO @ SELECT i, i, 'new ' || i FROM generate_series(1001, 9000) AS i",
        "UPDATE @ SET body = 'all'",
        "UPDATE @ SET id = id + 100000 WHERE id % 5 = 0",
        "DELETE FROM @ WHERE id % 7 = 0",
    )
    turn = table.pump()
    assert turn.flushes == 1
    assert len(spilled) > 3
    assert table.is_same()


def test_a_batch_lands_by_rows_before_everything_is_read(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make(rows=HUNDRED)
    monkeypatch.setattr("modak.tables.mirror.pump.run.BATCH_BYTES", 1 << 16)
    pump = Pump(table.site, table.epoch, table.known_id)
    pump.pace = replace(pump.pace, batch=1000)
    table.pumps.append(pump)
    for at in range(10_000, 40_000, 1000):
        table.sql(f"INSERT INTO @ SELECT i, i, 'new ' || i FROM generate_series({at}, {at + 999}) AS i")
    assert table.pump().flushes > 1
    assert table.is_same()


def test_composite_and_text_keys(make: Make) -> None:
    table = make(
        columns="tenant uuid, id text, ts date NOT NULL, body jsonb, PRIMARY KEY (tenant, id)",
        pk=("tenant", "id"),
        rows="SELECT ('00000000-0000-0000-0000-00000000000' || i % 3)::uuid, 'k' || i, DATE '2024-01-01' + i,"
        " jsonb_build_object('i', i) FROM generate_series(1, 60) AS i",
    )
    table.sql(
        "UPDATE @ SET body = NULL WHERE id LIKE 'k1%'",
        "DELETE FROM @ WHERE id LIKE 'k2%'",
        "UPDATE @ SET id = id || 'x', ts = ts + 100 WHERE id LIKE 'k3%'",
        "INSERT INTO @ SELECT tenant, 'fresh ' || id, ts, body FROM @",
    )
    table.pump()
    heap = table.sql("SELECT tenant::text, id, ts, body::text FROM @ ORDER BY 1, 2")
    lake = sorted((str(row["tenant"]), row["id"], row["ts"], row["body"]) for row in table.lake())
    assert lake == sorted(heap)


def test_a_table_without_changes_does_not_hold_wal(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modak.tables.mirror.pump.run.IDLE_SECONDS", 0.0)
    table, busy = make(rows=HUNDRED), make(rows=HUNDRED)
    before = table.site.reader.state(table.name)
    busy.sql("INSERT INTO @ SELECT i, i, 'x' FROM generate_series(1000, 9000) AS i")
    table.pump()
    after = table.site.reader.state(table.name)
    assert after.cutline.frontier is not None
    assert before.cutline.frontier is not None
    assert read_lsn(after.cutline.frontier) > read_lsn(before.cutline.frontier) + 500_000
    assert after.cutline.snapshot_id == before.cutline.snapshot_id
    with table.site.connect(autocommit=True) as conn:
        slot = slot_state(conn, table.pumps[0].slot)
    assert slot is not None
    assert slot.confirmed_lsn is not None
    assert read_lsn(after.cutline.frontier) >= slot.confirmed_lsn > read_lsn(before.cutline.frontier) + 500_000


def test_the_server_is_told_only_what_the_lake_has(make: Make) -> None:
    table = make(rows=HUNDRED)
    for step in range(5):
        table.sql(f"UPDATE @ SET body = 'step {step}'")
        table.pump()
        state = table.site.reader.state(table.name)
        with table.site.connect(autocommit=True) as conn:
            slot = slot_state(conn, table.pumps[0].slot)
        assert slot is not None
        assert slot.confirmed_lsn is not None
        assert state.cutline.frontier is not None
        assert slot.confirmed_lsn <= read_lsn(state.cutline.frontier)
    assert table.is_same()


def test_truncate_is_refused_by_name_where_the_heap_retires_rows(server: EmbeddedServer, make: Make) -> None:
    table = make(rows=HUNDRED)
    table.sql(f"UPDATE modak.tables SET heap_retention = 10 WHERE table_id = {table.known_id}")
    table.sql("INSERT INTO @ VALUES (1000, 1, 'x')")
    # A superuser can go round the trigger that refuses it at once.
    with connect(server.dsn(table.site.dsn.dbname), autocommit=True) as conn:
        conn.execute(f"SET session_replication_role = replica; TRUNCATE {table.name}")  # type: ignore[arg-type]
    with pytest.raises(ModakError, match="truncated"):
        table.pump()
    assert len(table.lake()) == 100
