"""What is there now: the heap's leaves, the catalog's partitions and the pins of one table, as one planner state.

Each cycle begins here. `sync` first brings `modak.partitions` in line with what users did (new leaves, dropped ones,
renames), then `observe` returns the pure values that the planners work on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
import structlog
from psycopg import sql

from modak.catalog import spill
from modak.catalog.records import NewPartition, PartitionRecord, TableRecord
from modak.catalog.records import TableState as CatalogState
from modak.catalog.steps import StepTransaction
from modak.catalog.write import CatalogWriter
from modak.core.errors import Refused
from modak.core.faults import reach
from modak.core.names import TableName
from modak.core.states import PartitionState
from modak.postgres.describe import Leaf, PgTable, describe, high_water
from modak.tables.columns import lake_columns
from modak.tables.site import Site
from modak.tables.tiering.plan import Partition, TableState

log = structlog.get_logger()

Conn = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Observed:
    """One table at one moment: as the catalog knows it, as Postgres has it, as the planners see it."""

    catalog: CatalogState
    heap: PgTable
    state: TableState
    leaves: Mapping[str, Leaf]
    records: Mapping[str, PartitionRecord]

    @property
    def record(self) -> TableRecord:
        """The registration."""
        return self.catalog.table


def observe(site: Site, conn: Conn, name: TableName) -> Observed:
    """Look at a registered table; changes nothing."""
    catalog = site.reader.state(name)
    record = catalog.table
    heap = _described(conn, record)
    known = {part.leaf_oid: part for part in catalog.living()}
    leaves = {leaf.name: leaf for leaf in heap.leaves if not leaf.is_spill}
    attached = {leaf.oid for leaf in leaves.values()}
    diverts = spill.diverts(conn, record.table_id)
    partitions = [_partition(conn, leaf, known.get(leaf.oid), diverts) for leaf in leaves.values()]
    # A leaf that was detached on its way out is no longer below the table, but still has to be dropped.
    detached = (part for part in catalog.living() if part.leaf_oid not in attached)
    gone = [part for part in detached if part.state is PartitionState.TIERED]
    if record.keep_heap:
        gone += [part for part in catalog.partitions if part.state is PartitionState.DROPPED]
    partitions += [Partition(p.name, p.lower, p.upper, p.state, attached=False) for p in gone]
    state = TableState(
        table=name,
        axis=record.axis,
        cut_line=catalog.cutline.t or 0,
        high_water=high_water(conn, heap, record.tier_key),
        partitions=tuple(partitions),
        keep_heap=record.keep_heap,
        frozen=_frozen(record),
        pinned_cut_lines=tuple(pin.t for pin in catalog.pins if pin.t is not None),
    )
    return Observed(catalog, heap, state, leaves, {part.name: part for part in catalog.living()})


def sync(site: Site, conn: Conn, writer: CatalogWriter, name: TableName) -> None:
    """Take new leaves into the catalog, follow renames, forget hot leaves that are gone, and finish lost drops."""
    catalog = site.reader.state(name)
    record = catalog.table
    heap = _described(conn, record)
    _note_columns(site, conn, writer, catalog)
    known = {part.leaf_oid: part for part in catalog.living()}
    here = {leaf.oid: leaf for leaf in heap.leaves if not leaf.is_spill and not leaf.is_default}
    new = [leaf for oid, leaf in here.items() if oid not in known]
    gone = [part for oid, part in known.items() if oid not in here]
    moved = [(known[oid], leaf) for oid, leaf in here.items() if oid in known and _differs(known[oid], leaf)]
    if not (new or gone or moved):
        return
    reach("partitions.before_sync")
    with writer.step() as tx:
        for part in gone:
            _let_go(tx, record, part)
        for part, leaf in moved:
            tx.update_partition(record.table_id, leaf.oid, leaf.name, leaf.schema, leaf.lower, leaf.upper)
            log.info("partition.changed", table=str(name), partition=leaf.name, was=part.name)
        tx.add_partitions(record.table_id, [new_partition(leaf) for leaf in new])
    reach("partitions.after_sync")
    for leaf in new:
        log.info("partition.found", table=str(name), partition=leaf.name)


def _note_columns(site: Site, conn: Conn, writer: CatalogWriter, catalog: CatalogState) -> None:
    """Write the lake's names down for a table that was registered before each commit did so."""
    record = catalog.table
    if conn.execute("SELECT FROM modak.lake_columns WHERE table_id = %s", (record.table_id,)).rowcount:
        return
    location = catalog.cutline.metadata_location
    lake = site.lake.load_at(record.lake, location)
    columns = lake_columns(lake.properties, [column.name for column in lake.schema], record.relid)
    with writer.step() as tx:
        tx.note_columns(record.table_id, columns, location)


def _described(conn: Conn, record: TableRecord) -> PgTable:
    heap = describe(conn, record.name, record.tier_key)
    if heap.oid != record.relid:
        raise Refused(
            "table.another",
            f"{record.name} is not the table that was registered: it was dropped and created again.",
            hint=f"Unregister it first (modak-worker unregister --table {record.name}); the lake table stays.",
        )
    return heap


def _let_go(tx: StepTransaction, record: TableRecord, part: PartitionRecord) -> None:
    still_there = tx.conn.execute("SELECT 1 FROM pg_class WHERE oid = %s", (part.leaf_oid,)).fetchone()
    if part.state is PartitionState.TIERED:
        # Detached but not yet dropped is a step of our own reclaim; gone means that the drop was not written down.
        if not still_there:
            tx.partitions(record.table_id, (part.name,), PartitionState.TIERED, PartitionState.DROPPED)
        return
    tx.forget_partition(record.table_id, part.leaf_oid)
    event = "partition.detached" if still_there else "partition.gone"
    log.warning(event, table=str(record.name), partition=part.name, state=str(part.state))


def _differs(part: PartitionRecord, leaf: Leaf) -> bool:
    if part.state is not PartitionState.HOT:
        return part.name != leaf.name or part.leaf_schema != leaf.schema
    return (part.name, part.leaf_schema, part.lower, part.upper) != (leaf.name, leaf.schema, leaf.lower, leaf.upper)


def new_partition(leaf: Leaf) -> NewPartition:
    """A leaf as the catalog first knows it."""
    return NewPartition(
        name=leaf.name,
        lower=leaf.lower,
        upper=leaf.upper,
        leaf_oid=leaf.oid,
        leaf_schema=leaf.schema,
        relfilenode=leaf.relfilenode,
    )


def _partition(conn: Conn, leaf: Leaf, part: PartitionRecord | None, diverts: bool) -> Partition:
    return Partition(
        name=leaf.name,
        lower=leaf.lower,
        upper=leaf.upper,
        state=part.state if part else PartitionState.HOT,
        bytes=leaf.bytes,
        rows=round(max(leaf.rows_estimate, 0)),
        is_default=leaf.is_default,
        has_rows=leaf.is_default and holds_rows(conn, leaf),
        diverts=leaf.is_default and diverts,
        journaled=(part.lower, part.upper) if part is not None and part.state is not PartitionState.HOT else None,
    )


def holds_rows(conn: Conn, leaf: Leaf) -> bool:
    """Whether a leaf has at least one row."""
    query = sql.SQL("SELECT EXISTS (SELECT FROM ONLY {})").format(sql.Identifier(leaf.schema, leaf.name))
    row = conn.execute(query).fetchone()
    return bool(row and row[0])


def _frozen(record: TableRecord) -> str | None:
    if record.frozen is None:
        return None
    what = ", ".join(f"{key} {value}" for key, value in record.frozen.items())
    then = f"modak-worker accept --table {record.name}"
    return f"a foreign snapshot changed rows in the lake ({what}); look at it, then: {then}"
