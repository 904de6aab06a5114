"""How Postgres finds the old row of a change, and what a partition does before anybody watches it."""

from __future__ import annotations

import secrets
from itertools import pairwise

import pyarrow as pa
import pytest

from modak.tables.mirror.pump.run import Pump
from tests.mirror.pumping import Mirrored
from tests.mirror.world import Make

LONG = "(SELECT string_agg(md5(i || '-' || j), '') FROM generate_series(1, 200) AS j)"
"""Too long, and too random, to stand in its row."""
HUNDRED = "SELECT i, i, 'row ' || i FROM generate_series(1, 100) AS i"


@pytest.fixture
def parted(make: Make) -> Mirrored:
    """Rows 1…199 in two partitions."""
    leaves = [f"leaf_{secrets.token_hex(4)}" for _ in range(2)]
    table = make(
        columns="id bigint, ts bigint NOT NULL, body text, more text, PRIMARY KEY (id, ts)",
        pk=("id", "ts"),
        more="PARTITION BY RANGE (ts)",
        before="; ".join(
            f"CREATE TABLE {leaf} PARTITION OF @ FOR VALUES FROM ({low}) TO ({high})"
            for leaf, (low, high) in zip(leaves, pairwise((0, 100, 200)), strict=True)
        ),
    )
    table.sql(f"INSERT INTO @ SELECT i, i, 'row ' || i, {LONG} FROM generate_series(1, 199) AS i")
    table.pump()
    return table


def test_a_long_value_stays_where_a_partition_writes_its_key_alone_under_a_whole_root(parted: Mirrored) -> None:
    leaf = add_leaf(parted)
    parted.sql(
        f"INSERT INTO @ SELECT i, 200, 'row ' || i, {LONG} FROM generate_series(1, 10) AS i",
        "UPDATE @ SET ts = ts + 1 WHERE ts = 200 AND id <= 5",
        "UPDATE @ SET ts = ts + 1 WHERE ts = 201 AND id <= 3",
    )
    parted.pump()
    assert all(row["more"] for row in parted.lake())
    assert parted.is_same()
    parted.sql(f"ALTER TABLE {leaf} REPLICA IDENTITY DEFAULT", "UPDATE @ SET ts = ts + 1 WHERE ts >= 200")
    parted.pump()
    assert parted.is_same()


def test_rows_of_uuid_keys_stay_where_a_large_transaction_is_on_disk(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modak.tables.mirror.pump.run.Pump._room", lambda *_, **__: 100)
    monkeypatch.setattr("modak.tables.mirror.pump.run.BATCH_BYTES", 1 << 14)
    table = make(
        columns="id uuid PRIMARY KEY, ts bigint NOT NULL, body text",
        rows=f"SELECT gen_random_uuid(), i, {LONG} FROM generate_series(1, 400) AS i",
    )
    table.sql("ALTER TABLE @ REPLICA IDENTITY DEFAULT", "UPDATE @ SET ts = ts + 1")
    table.pump()
    heap = {str(row["id"]): (row["ts"], row["body"]) for row in table.heap()}
    assert {str(row["id"]): (row["ts"], row["body"]) for row in table.lake()} == heap


@pytest.mark.parametrize(
    "change",
    ["UPDATE @ SET id = 1001 WHERE id = 1", "DELETE FROM @ WHERE id = 1", "UPDATE @ SET body = 'b' WHERE id = 1"],
)
def test_under_the_identity_of_another_index_heap_and_lake_are_compared(make: Make, change: str) -> None:
    table = make(columns="id bigint PRIMARY KEY, ts bigint NOT NULL, body text NOT NULL UNIQUE", rows=HUNDRED)
    table.pump()
    table.sql(f"ALTER TABLE @ REPLICA IDENTITY USING INDEX {table.name.name}_body_key", change)
    assert table.pump().reanchored
    assert table.is_same()
    table.sql("UPDATE @ SET id = 1002 WHERE id = 2")
    assert not table.pump().reanchored
    assert table.is_same()


@pytest.mark.parametrize("looks_after", ["the turn", "the cycle"])
def test_a_partition_that_had_the_identity_of_another_index_is_compared(parted: Mirrored, looks_after: str) -> None:
    leaf = add_leaf(parted)
    parted.sql("INSERT INTO @ SELECT i, 200 + i, 'row ' || i, 'x' FROM generate_series(1, 50) AS i")
    parted.cycles()
    assert parted.is_same()
    parted.sql(
        f"ALTER TABLE {leaf} ALTER body SET NOT NULL",
        f"CREATE UNIQUE INDEX {leaf}_body ON {leaf} (body)",
        f"ALTER TABLE {leaf} REPLICA IDENTITY USING INDEX {leaf}_body",
        "UPDATE @ SET id = 1001 WHERE id = 1 AND ts = 201",
    )
    if looks_after == "the turn":
        parted.pumps[0]._looked_after = None
        parted.pump()
    parted.cycles()
    assert parted.is_same()
    assert parted.sql("SELECT count(*) FROM modak.mirror_diffs") == [(0,)]


def test_a_deleted_row_of_a_partition_with_the_identity_of_another_index_is_compared(parted: Mirrored) -> None:
    leaf = add_leaf(parted)
    parted.sql(
        f"ALTER TABLE {leaf} ALTER body SET NOT NULL",
        f"CREATE UNIQUE INDEX {leaf}_body ON {leaf} (body)",
        f"ALTER TABLE {leaf} REPLICA IDENTITY USING INDEX {leaf}_body",
        "INSERT INTO @ SELECT i, 200 + i, 'row ' || i, 'x' FROM generate_series(1, 50) AS i",
        "DELETE FROM @ WHERE id = 1 AND ts = 201",
    )
    assert parted.pump().reanchored
    assert parted.is_same()


def test_a_partition_that_was_truncated_before_it_was_watched_is_compared(parted: Mirrored) -> None:
    leaf = add_leaf(parted)
    parted.sql("INSERT INTO @ SELECT i, 200 + i, 'row ' || i, 'x' FROM generate_series(1, 50) AS i")
    parted.sql(f"TRUNCATE {leaf}")
    assert parted.cycles() == [f"public.{leaf} was truncated or rewritten before it was watched"]
    assert parted.is_same()


def test_a_partition_that_cannot_be_guarded_yet_is_not_taken_for_a_watched_one(
    parted: Mirrored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pump, "_is_due", lambda _: False)
    leaf = add_leaf(parted)
    with parted.site.connect() as writer:
        writer.execute(f"LOCK TABLE {leaf} IN ROW EXCLUSIVE MODE")
        assert parted.cycle().noted == ()
    parted.sql("INSERT INTO @ SELECT i, 200 + i, 'row ' || i, 'x' FROM generate_series(1, 50) AS i")
    parted.pump()
    parted.sql(f"TRUNCATE {leaf}")
    parted.cycles()
    assert parted.is_same()


def test_an_empty_partition_is_not_compared(parted: Mirrored) -> None:
    add_leaf(parted)
    assert parted.cycles() == []


def add_leaf(table: Mirrored) -> str:
    leaf = f"leaf_{secrets.token_hex(4)}"
    table.sql(f"CREATE TABLE {leaf} PARTITION OF @ FOR VALUES FROM (200) TO (300)")
    return leaf


def test_keys_without_a_kernel_are_told_apart() -> None:
    from modak.tables.mirror.pump.buffer import _refuse_distant_roots

    keys = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"a" * 16, b"b" * 16], pa.binary(16)))
    unknown = pa.array([True, False])
    _refuse_distant_roots(pa.table({"k0": keys, "r0": keys, "u3": unknown, "c3": pa.array(["x", "y"])}))
