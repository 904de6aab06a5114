"""What a pump has to notice by itself: old looks, slots made anew behind its back, rows too wide, values corrected."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from modak.catalog.mirrors import read_health
from modak.core import faults
from modak.core.errors import ModakError, NotLeader
from modak.core.faults import Fault, InjectedFault
from modak.core.names import TableName
from modak.lake.iceberg.catalog import IcebergLake
from modak.lake.model import LakeName, LakeTable
from modak.postgres.changes import source
from modak.postgres.changes.slot import replication_connection
from modak.runtime import mirrors
from modak.runtime.leader import Leader
from modak.tables.mirror.names import publication_name, slot_name
from modak.tables.mirror.pump import buffer
from modak.tables.mirror.pump.buffer import Buffer
from modak.tables.mirror.pump.run import Pump
from modak.tables.mirror.replication import fresh_slot
from modak.tables.site import Site
from tests.mirror.pumping import Mirrored
from tests.mirror.world import Make

HUNDRED = "SELECT i, i, 'row ' || i FROM generate_series(1, 100) AS i"
PATIENCE = 120.0


@pytest.fixture
def looks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first turn looks after the table, and no later one."""
    monkeypatch.setattr(Pump, "_is_due", lambda pump: pump._looked_after is None)


def until_reanchored(table: Mirrored) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            if table.pump().reanchored:
                return
        except ModakError as error:
            if not error.code.startswith("types."):
                raise
        assert time.monotonic() < deadline, "it was not compared"
        time.sleep(0.1)


@pytest.mark.usefixtures("looks_once")
@pytest.mark.parametrize(
    "change",
    [
        ("ALTER TABLE @ ADD COLUMN c int", "UPDATE @ SET c = 5 WHERE id < 50"),
        ("ALTER TABLE @ ALTER n TYPE bigint", f"UPDATE @ SET n = {2**40} WHERE id < 50"),
        ("ALTER TABLE @ RENAME n TO m", "UPDATE @ SET m = 5 WHERE id < 50"),
    ],
)
def test_an_old_look_at_the_columns_changes_nothing_later(make: Make, change: tuple[str, ...]) -> None:
    table = make(
        columns="id bigint PRIMARY KEY, ts bigint NOT NULL, body text, n int",
        rows="SELECT i, i, 'row ' || i, i FROM generate_series(1, 100) AS i",
    )
    table.sql("UPDATE @ SET body = 'first' WHERE id < 10")
    table.pump()
    table.sql(*change)
    table.pump()
    assert table.is_same()
    table.pump()
    assert table.is_same()


@pytest.mark.usefixtures("looks_once")
def test_a_slot_that_was_made_anew_between_two_turns_is_noticed(make: Make) -> None:
    table = make(rows=HUNDRED)
    table.sql("UPDATE @ SET body = 'seen' WHERE id < 10")
    table.pump()
    slot = table.pumps[0].slot
    table.sql(
        f"SELECT pg_drop_replication_slot('{slot}')",
        "UPDATE @ SET body = 'unseen' WHERE id < 20",
        f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')",
        "UPDATE @ SET body = 'seen again' WHERE id > 90",
    )
    assert table.pump().reanchored
    assert table.is_same()


@pytest.mark.usefixtures("looks_once")
def test_a_slot_that_was_made_anew_right_before_it_is_read_is_noticed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make(rows=HUNDRED)
    table.pump()
    slot, usable = table.pumps[0].slot, source.usable_slot

    def replaced(*asked: Any) -> Any:
        found = usable(*asked)
        monkeypatch.undo()
        table.sql(
            f"SELECT pg_drop_replication_slot('{slot}')",
            "UPDATE @ SET body = 'unseen' WHERE id < 20",
            f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')",
        )
        return found

    monkeypatch.setattr(source, "usable_slot", replaced)
    assert table.pump().reanchored
    assert table.is_same()


@pytest.mark.usefixtures("looks_once")
def test_a_table_that_was_renamed_since_it_was_looked_at_is_compared_under_its_name(make: Make) -> None:
    table = make(rows=HUNDRED)
    table.pump()
    slot, new = table.pumps[0].slot, TableName("public", f"{table.name.name}_new")
    table.sql(f"ALTER TABLE @ RENAME TO {new.name}", f"SELECT pg_drop_replication_slot('{slot}')")
    table.name = new
    table.sql("UPDATE @ SET body = 'unseen' WHERE id < 20")
    assert table.pump().reanchored
    assert table.is_same()


def test_whoever_has_lost_the_lead_takes_no_slot_away(make: Make) -> None:
    table = make(rows=HUNDRED)
    table.pump()
    record = table.site.reader.state(table.name).table
    stale = table.site.writer(replace(table.epoch, number=table.epoch.number - 1))
    with pytest.raises(NotLeader), fresh_slot(table.site, stale, record):
        pass
    table.sql("UPDATE @ SET body = 'followed'")
    assert not table.pump(fresh=True).reanchored
    assert table.is_same()


def test_a_crash_before_a_large_peek_is_confirmed_stops_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modak.tables.mirror.pump.run.PEEK_MESSAGES", 50)
    table = make(rows=HUNDRED)
    table.sql(*(f"UPDATE @ SET body = 'step {step}' WHERE id <= 20" for step in range(4)))
    faults.arm(Fault("pump.before_confirm"))
    with pytest.raises(InjectedFault):
        table.pump()
    faults.arm(None)
    before = _confirmed(table)
    for _ in range(6):
        table.pump(fresh=True)
    assert _confirmed(table) != before
    table.sql("INSERT INTO @ VALUES (500, 1, 'later')")
    for _ in range(3):
        table.pump()
    assert table.is_same()


def _confirmed(table: Mirrored) -> str:
    slot = slot_name(table.known_id, table.site.dsn.dbname)
    ((at,),) = table.sql(f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{slot}'")
    return str(at)


@pytest.mark.parametrize("how", ["one transaction", "many transactions"])
def test_wide_rows_wait_in_memory_only_up_to_a_limit(make: Make, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(buffer, "MOST_BYTES", 4 << 20)
    monkeypatch.setattr("modak.tables.mirror.pump.run.BATCH_BYTES", 1 << 18)
    waited: list[int] = []
    add = Buffer.add

    def noted(self: Buffer, *given: Any) -> None:
        add(self, *given)
        waited.append(self._bytes)

    monkeypatch.setattr(Buffer, "add", noted)
    table = make(rows=HUNDRED)
    wide = [
        f"INSERT INTO @ SELECT i, i, repeat(md5(i::text), 3000) FROM generate_series({at}, {at + 19}) AS i"
        for at in range(1000, 1600, 20)
    ]
    if how == "one transaction":
        table.together(*wide, "UPDATE @ SET ts = ts + 1 WHERE id % 3 = 0")
        assert table.pump().flushes == 1
    else:
        table.sql(*wide)
        assert table.pump().flushes > 5
    assert table.is_same()
    assert max(waited) <= 4 << 20


def test_a_bucket_larger_than_memory_is_folded_share_by_share(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer, "MOST_BYTES", 1 << 12)
    waiting = Buffer(tmp_path / "batch")
    for first in (0, 1000, 0):
        keys = list(range(first, first + 2000))
        waiting.add(_events(keys, f"from {first}"), len(keys), 10_000)
    parts = list(waiting.parts())
    assert len(parts) > buffer.BUCKETS
    found = [row for part in parts for row in zip(part["k0"].to_pylist(), part["c2"].to_pylist(), strict=True)]
    assert sorted(key for key, _ in found) == list(range(3000))
    assert all(body == ("from 0" if key < 2000 else "from 1000") for key, body in found)
    assert max(part.nbytes for part in parts) < 1 << 13


def _events(keys: list[int], body: str) -> pa.Table:
    size = len(keys)
    truth = pa.array([True] * size)
    return pa.table(
        {
            "k0": pa.array(keys, pa.int64()),
            "put": truth,
            "fresh": pa.array([False] * size),
            "net": pa.array([0] * size, pa.int32()),
            "ends": truth,
            "loose": pa.array([False] * size),
            "tier": pa.array(keys, pa.int64()),
            "c1": pa.array(keys, pa.int64()),
            "c2": pa.array([body] * size),
        }
    )


def test_a_lake_that_is_away_keeps_only_its_own_table_waiting(
    make: Make, ground: tuple[Site, Leader], monkeypatch: pytest.MonkeyPatch
) -> None:
    site, leader = ground
    broken, healthy = make(rows=HUNDRED), make(rows=HUNDRED)
    lake, load = site.reader.state(broken.name).table.lake, IcebergLake.load

    def loaded(self: IcebergLake, name: LakeName, *more: Any) -> LakeTable | None:
        if name == lake:
            raise ModakError("storage.gone", "The bucket is away.", retryable=True)
        return load(self, name, *more)

    monkeypatch.setattr(IcebergLake, "load", loaded)
    broken.sql("UPDATE @ SET body = 'waits'")
    healthy.sql("UPDATE @ SET body = 'followed'")

    def said() -> str | None:
        with site.connect(autocommit=True) as conn:
            health = read_health(conn).get(broken.known_id)
        return health.error if health else None

    with mirrors.serving(site, leader):
        deadline = time.monotonic() + PATIENCE
        while not (healthy.is_same() and "storage.gone" in (said() or "")):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_somebody_who_holds_the_slot_is_evicted_by_one_who_streams_too(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "choose", lambda *_: "stream")
    table = make(rows=HUNDRED)
    slot, publication = slot_name(table.known_id, table.site.dsn.dbname), publication_name(table.known_id)
    with replication_connection(table.site.dsn) as zombie:
        zombie.pgconn.exec_(
            f"START_REPLICATION SLOT {slot} LOGICAL 0/0 (proto_version '1', publication_names '{publication}')".encode()
        )
        table.sql("UPDATE @ SET body = 'changed' WHERE id < 10")
        assert table.pump().waits_for is not None
        table.pump()
    assert table.is_same()


@pytest.mark.parametrize(
    ("kind", "unfit", "fit"),
    [
        ("numeric(10, 2)", "'NaN'", "1.5"),
        ("numeric(30, 2)", "'NaN'", "NULL"),
        ("int[]", "'{{1,2},{3,4}}'", "'{1,2}'"),
    ],
)
def test_a_value_that_the_lake_refuses_stops_the_mirror_until_it_is_corrected(
    make: Make, kind: str, unfit: str, fit: str
) -> None:
    table = make(
        columns=f"id bigint PRIMARY KEY, ts bigint NOT NULL, v {kind}",
        rows="SELECT i, i, NULL FROM generate_series(1, 50) AS i",
    )
    table.sql(f"INSERT INTO @ VALUES (100, 1, {unfit})", "UPDATE @ SET ts = 5 WHERE id = 7")
    for _ in range(2):
        with pytest.raises(ModakError, match="Column v holds"):
            table.pump()
    table.sql(f"UPDATE @ SET v = {fit} WHERE id = 100")
    until_reanchored(table)
    assert table.is_same()
    table.sql("UPDATE @ SET ts = ts + 1")
    assert not table.pump().reanchored
    assert table.is_same()


def test_rows_that_change_places_while_a_copy_heals_are_kept(make: Make) -> None:
    table = make(columns="id bigint PRIMARY KEY DEFERRABLE, ts bigint NOT NULL, body text", rows=HUNDRED)
    table.sql(
        f"UPDATE modak.cutline SET heal_until = pg_current_wal_lsn() + 100000000 WHERE table_id = {table.known_id}"
    )
    table.sql("UPDATE @ SET id = id + 1")
    table.pump()
    assert table.is_same()
    table.sql("UPDATE @ SET id = id - 1", "UPDATE @ SET body = 'after'")
    table.pump()
    assert table.is_same()
