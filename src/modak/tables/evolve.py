"""A table's columns change while it lives; the lake follows before the next rows arrive.

The plan is pure: heap columns against lake columns, matched by attribute number (remembered in the lake table's own
properties), so that a rename is a rename and a column dropped and added again under its old name is a new column. The
change itself is a commit without rows: S stays, the pointer moves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import structlog

from modak.catalog.delta import Rename, renames
from modak.catalog.journal import Journal
from modak.catalog.records import TableRecord, TableState
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core.errors import ModakError, Refused
from modak.core.ids import new_op_id
from modak.core.names import quote
from modak.core.states import OpPhase
from modak.lake.changes import AddColumn, Change, RenameColumn, SetProperties, WidenColumn
from modak.lake.mapping import NAME_MAPPING
from modak.lake.model import LakeTable, Prepared
from modak.lake.types import MappedColumn
from modak.postgres.describe import PgColumn, PgTable
from modak.tables.backfill import BACKFILL, backfill, due
from modak.tables.columns import COLUMNS, RELID, column_property
from modak.tables.landing import land
from modak.tables.site import Site
from modak.tables.tidy import give_up, tidy_landed

log = structlog.get_logger()

_WIDER = {("int", "long"), ("float", "double")}


@dataclass(frozen=True, slots=True)
class Evolution:
    """What changes in the lake's schema."""

    changes: tuple[Change, ...]
    filled: tuple[str, ...] = ()
    """Columns whose values old rows get by a rewrite, because no initial default can say them."""


def plan_evolution(
    heap: PgTable, mapped: Sequence[MappedColumn], lake: LakeTable, *, rewritten: bool = False
) -> Evolution:
    """The schema changes that let the lake take rows of this heap; refuses what would change stored values.

    `rewritten`: the oldest rows of the heap were written anew, so Postgres no longer knows what they showed before.
    """
    ours = lake.properties.get(RELID) == str(heap.oid)
    known: dict[str, str] = json.loads(lake.properties.get(COLUMNS, "{}")) if ours else {}
    at = dict(known)
    taken = {column.name for column in lake.schema}
    changes: list[Change] = []
    fill: dict[str, dict[str, str]] = {}
    by_name = {column.column.name: column for column in mapped}
    for column in heap.columns:
        wanted, number = by_name[column.name], str(column.attnum)
        was = at.get(number) if known else column.name
        if was is not None and was in taken:
            if was != column.name:
                changes += _make_room(column.name, at, taken)
                changes.append(RenameColumn(was, column.name))
                taken = (taken - {was}) | {column.name}
                at[number] = column.name
            changes += _widened(lake, known.get(number, column.name), wanted)
            continue
        changes += _make_room(column.name, at, taken)
        initial = _initial(column, wanted, rewritten)
        changes += _added(column, wanted, initial)
        taken.add(column.name)
        needed = due(column, initial)
        if needed is not None:
            fill[column.name] = needed
    if changes or known != json.loads(column_property(heap)[COLUMNS]):
        # Iceberg would give the name of a dropped column to a new one, and adopted files their old values with it.
        mapping = {NAME_MAPPING: lake.properties[NAME_MAPPING]} if NAME_MAPPING in lake.properties else {}
        changes.append(SetProperties({**column_property(heap), **_to_fill(lake, fill), **mapping}))
    return Evolution(tuple(changes), tuple(fill))


def renamed_columns(heap: PgTable, lake: LakeTable) -> dict[str, str]:
    """Under which name a column's values are found in images of the delta that are older than its name, and now."""
    if lake.properties.get(RELID) != str(heap.oid):
        return {}
    known: dict[str, str] = json.loads(lake.properties.get(COLUMNS, "{}"))
    here = {column.name for column in lake.schema}
    renamed: dict[str, str] = {}
    for column in heap.columns:
        was = known.get(str(column.attnum))
        if was is not None and was != column.name:
            renamed[was] = column.name
        elif was is None and column.name in here:
            # The name belonged to a column that is dropped: what old images have under it is nobody's any more.
            renamed.setdefault(column.name, f"{column.name}_dropped")
    return renamed


def waiting_renames(
    site: Site, conn: psycopg.Connection[Any], record: TableRecord, heap: PgTable
) -> tuple[Rename, ...]:
    """The renames that the delta, as a snapshot shows it, has not followed: those that had not landed by then."""
    row = conn.execute("SELECT metadata_location FROM modak.cutline WHERE table_id = %s", (record.table_id,)).fetchone()
    if row is None or row[0] is None:
        return ()
    return renames(conn, heap.oid, renamed_columns(heap, site.lake.load_at(record.lake, row[0])))


def evolve(
    site: Site, writer: CatalogWriter, state: TableState, heap: PgTable, mapped: Sequence[MappedColumn], lake: LakeTable
) -> LakeTable:
    """Bring the lake's schema up to the heap's; returns the lake table as it is then."""
    rewritten = _rewritten(state, heap)
    evolution = plan_evolution(heap, mapped, lake, rewritten=rewritten)
    if not evolution.changes:
        return backfill(site, writer, state, heap, mapped, lake)
    renamed = renamed_columns(heap, lake)
    op_id = new_op_id(site.clock)
    Journal(writer).begin(op_id, state.table.table_id, "evolve", {"changes": [repr(c) for c in evolution.changes]})

    def within(tx: CommitTransaction, prepared: Prepared, now: TableState) -> None:
        becomes = replace(now.cutline, metadata_location=prepared.new_location, snapshot_id=prepared.snapshot_id)
        tx.move(now.cutline, becomes)
        tx.rename_in_delta(now.table.table_id, heap.oid, renamed)
        tx.count(changes=len(evolution.changes))

    def changes(current: LakeTable, _: TableState) -> Sequence[Change]:
        return plan_evolution(heap, mapped, current, rewritten=rewritten).changes

    try:
        land(site, writer, state.table.name, op_id, OpPhase.PLANNED, changes, within, "evolve")
    except ModakError as error:
        give_up(site, writer, state.table.location, op_id, error)
        raise
    log.info("evolve.committed", table=str(state.table.name), changes=len(evolution.changes))
    # Only this operation: the tiering that asked for the new columns is under way, and unfinished too.
    landed = site.reader.op(op_id)
    assert landed is not None
    tidy_landed(site, writer, site.reader.state(state.table.name), landed)
    after = site.lake.load(state.table.lake)
    assert after is not None
    return backfill(site, writer, state, heap, mapped, after)


def _to_fill(lake: LakeTable, fill: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    before = json.loads(lake.properties.get(BACKFILL, "{}"))
    return {BACKFILL: json.dumps({**before, **fill}, sort_keys=True)} if fill else {}


def _rewritten(state: TableState, heap: PgTable) -> bool:
    """Whether the oldest partition is another file than when it was found: its rows hold their defaults then."""
    known = {part.leaf_oid: part.relfilenode for part in state.living()}
    leaves = [leaf for leaf in heap.leaves if leaf.oid in known and leaf.lower is not None]
    oldest = min(leaves, key=lambda leaf: leaf.lower or 0, default=None)
    return oldest is not None and known[oldest.oid] != oldest.relfilenode


def _make_room(name: str, at: dict[str, str], taken: set[str]) -> Iterator[Change]:
    """Who holds the name steps aside: for good when its heap column was dropped, else until its own turn comes."""
    if name in taken:
        number = next((attnum for attnum, column in at.items() if column == name), "0")
        aside = f"{name}_dropped_{number}"
        at[number] = aside
        taken.remove(name)
        taken.add(aside)
        yield RenameColumn(name, aside)


def _added(column: PgColumn, wanted: MappedColumn, initial: str | None) -> Iterator[Change]:
    yield AddColumn(column.name, wanted.column.type, initial)
    if initial is not None and wanted.column.type.startswith("decimal"):
        # Iceberg's vectorised reader fails on a decimal with an initial default in files that have the column.
        yield SetProperties({"read.parquet.vectorization.enabled": "false"})


def _widened(lake: LakeTable, name: str, wanted: MappedColumn) -> Iterator[Change]:
    column = lake.column(name)
    assert column is not None
    if column.type == wanted.column.type:
        return
    if widens(column.type, wanted.column.type):
        yield WidenColumn(wanted.column.name, wanted.column.type)
        return
    raise Refused(
        "evolve.type_changed",
        f"Column {quote(wanted.column.name)} is {wanted.column.type} in Postgres now, but {column.type} in the lake.",
        hint="Change it back, or add a column of the new type beside it and drop this one.",
    )


def widens(old: str, new: str) -> bool:
    """Whether every value of a lake type is one of another, so that old files stay readable."""
    return (old, new) in _WIDER or _more_digits(old, new)


def _more_digits(old: str, new: str) -> bool:
    if not (old.startswith("decimal(") and new.startswith("decimal(")):
        return False
    (old_p, old_s), (new_p, new_s) = (map(int, t[8:-1].split(",")) for t in (old, new))
    return new_s == old_s and new_p > old_p


def _initial(column: PgColumn, wanted: MappedColumn, rewritten: bool) -> str | None:
    """What rows from before the column show. A default that was set later is none of theirs."""
    from modak.lake.parse import initial_default

    shown = column.default_value if column.missing_value is None and rewritten else column.missing_value
    return None if shown is None else initial_default(wanted, shown)
