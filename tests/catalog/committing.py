"""A tiering commit of one partition, as the tests of the one transaction make it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from modak.catalog.journal import Journal
from modak.catalog.write import CatalogWriter
from modak.core.clock import SystemClock
from modak.core.ids import OpId, new_op_id
from modak.core.states import OpPhase, PartitionState
from modak.lake.model import LakeName, Prepared
from modak.postgres.dsn import Dsn
from tests.catalog.build import Built, build
from tests.support.proxy import FaultProxy

Conn = psycopg.Connection[Any]

BASE = "file:///lake/m1.json"
NEW = "file:///lake/m2.json"


@pytest.fixture
def writer(catalog: Dsn) -> CatalogWriter:
    return CatalogWriter(catalog)


@pytest.fixture
def proxy(catalog: Dsn) -> Iterator[FaultProxy]:
    with FaultProxy(catalog.host, catalog.port) as opened:
        yield opened


@pytest.fixture
def table(conn: Conn) -> Built:
    built = build(conn, watch=[0])
    conn.execute(
        "INSERT INTO modak_iceberg.iceberg_tables VALUES ('modak', 'modak.public', %s, %s, NULL, 'TABLE')",
        (built.name.name, BASE),
    )
    for state in ("sealing", "tiering"):
        conn.execute(
            "UPDATE modak.partitions SET state = %s WHERE table_id = %s AND partition_name = %s",
            (state, built.table_id, f"{built.name.name}_0"),
        )
    return built


def prepared_op(writer: CatalogWriter, table: Built) -> OpId:
    op_id = new_op_id(SystemClock())
    journal = Journal(writer)
    journal.begin(op_id, table.table_id, "tiering", {"partitions": [0]}, ["file:///lake/data/op"])
    journal.phase(op_id, OpPhase.PLANNED, OpPhase.WRITING)
    journal.phase(op_id, OpPhase.WRITING, OpPhase.PREPARED, attempt=1, folders=["file:///lake/metadata/op"])
    return op_id


def lake_commit(table: Built, base: str | None = BASE, new: str = NEW) -> Prepared:
    name = LakeName(("modak", "public"), table.name.name)
    return Prepared(name, base, new, snapshot_id=2, base_snapshot_id=1, attempt_folder="file:///lake/metadata/op")


def tier(writer: CatalogWriter, op_id: OpId, table: Built, **changes: Any) -> None:
    """A tiering commit of partition 0."""
    with writer.transaction(op_id) as tx:
        tx.require_not_frozen(table.table_id)
        tx.publish(changes.get("prepared", lake_commit(table)))
        tx.advance(table.table_id, changes.get("from_t", 0), 100, 2, NEW)
        names = changes.get("names", [f"{table.name.name}_0"])
        tx.partitions(table.table_id, names, PartitionState.TIERING, PartitionState.TIERED)
        tx.require_no_new_pins(table.table_id, {1, *changes.get("untagged", ())} - {*changes.get("tagged", ())})
        tx.count(rows=5)
        tx.tidy_later(obsolete=["file:///lake/old.json"])


def state_of(conn: Conn, table: Built) -> tuple[Any, ...]:
    row: tuple[Any, ...] | None = conn.execute(
        "SELECT c.t, c.snapshot_id, c.metadata_location, i.metadata_location, i.previous_metadata_location, p.state"
        " FROM modak.cutline c JOIN modak.tables t USING (table_id) JOIN modak.partitions p USING (table_id)"
        " JOIN modak_iceberg.iceberg_tables i ON i.table_name = t.lake_name"
        " WHERE table_id = %s AND p.partition_name = %s",
        (table.table_id, f"{table.name.name}_0"),
    ).fetchone()
    assert row is not None
    return row


UNTOUCHED = (0, 1, BASE, BASE, None, "tiering")
LANDED = (100, 2, NEW, NEW, BASE, "tiered")


def through(dsn: Dsn, proxy: FaultProxy) -> Dsn:
    return replace(dsn, host="127.0.0.1", port=proxy.port)
