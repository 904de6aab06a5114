"""The lake's columns follow those of the WAL: what changes in its schema before the rows of a batch land.

Like `tables/evolve.py`, with what only a mirror can do: a dropped column is dropped, and a column whose values were
rewritten in the heap (another type, a default that differs from row to row) is made anew and the table compared with
the lake afterwards, because Postgres says nothing of a rewrite in its change stream. The plan is pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from modak.catalog.journal import Journal
from modak.catalog.records import Cutline, TableRecord, TableState
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core.errors import ModakError, Refused
from modak.core.ids import new_op_id
from modak.core.names import quote
from modak.core.states import OpPhase
from modak.lake.changes import Change, DropColumn, SetProperties
from modak.lake.model import LakeTable, Prepared
from modak.lake.types import MappedColumn
from modak.postgres.model import PgTable
from modak.tables.backfill import BACKFILL, backfill
from modak.tables.columns import COLUMNS, RELID, column_property
from modak.tables.evolve import plan_evolution, renamed_columns, widens
from modak.tables.landing import land
from modak.tables.mirror.leaves import REWRITTEN, rewritten_files, true_leaves
from modak.tables.registration.preflight import map_columns
from modak.tables.site import Site
from modak.tables.tidy import give_up, tidy_landed

log = structlog.get_logger()

RECOPY = "recopy"
"""Key of the line's lake properties: why the heap has to be compared with the lake."""
_METRICS = "write.metadata.metrics.column."
_KEYS = "UPDATE modak.tables SET pk_columns = %s, tier_key = %s WHERE table_id = %s"
_NAMES = "SELECT attnum, attname FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped"


@dataclass(frozen=True, slots=True)
class Follow:
    """What changes in the lake's schema, and why its rows have to be compared with the heap afterwards."""

    changes: tuple[Change, ...]
    recopy: str | None = None


def plan_follow(
    heap: PgTable, mapped: Sequence[MappedColumn], lake: LakeTable, record: TableRecord, *, rewritten: bool = False
) -> Follow:
    """The changes that give the lake the columns of `heap`, a table as it was at a point of the WAL.

    `rewritten`: a leaf was written anew, which makes Postgres forget what its old rows show in a new column.
    """
    known = known_columns(lake, heap.oid)
    here = {column.attnum: column for column in heap.columns}
    _require_keys(record, here)
    gone = [name for number, name in known.items() if number not in here and lake.column(name) is not None]
    types = {column.column.name: column.column.type for column in mapped}
    replaced = []
    for number, column in here.items():
        was = lake.column(known.get(number, "" if known else column.name))
        if was is not None and was.type != types[column.name] and not widens(was.type, types[column.name]):
            if number in (*record.pk_attnums, record.tier_attnum):
                raise Refused(
                    "mirror.key_type",
                    f"Key column {quote(column.name)} of {record.name} is {types[column.name]} now, and {was.type} in"
                    " the lake.",
                    hint="Change it back, or unregister the table and register it anew.",
                )
            if record.heap_retention is not None:
                raise Refused(
                    "evolve.type_changed",
                    f"Column {quote(column.name)} of {record.name} is {types[column.name]} now, and {was.type} in the"
                    " lake, which alone has the rows that left the heap.",
                    hint="Change it back. A column of the new type can be added beside it.",
                )
            replaced.append((number, was.name))
    dropped = [*gone, *(name for _, name in replaced)]
    left = {number: name for number, name in known.items() if name not in dropped}
    evolution = plan_evolution(heap, mapped, _without(lake, dropped, left, known=bool(known)))
    changes: list[Change] = [DropColumn(name) for name in dropped]
    # A comparison with the heap fills what the heap has; older rows need a value all the same.
    kept = record.heap_retention is not None
    changes += (change if kept else _without_backfill(change) for change in evolution.changes)
    changes += _tier_metrics(record, here[record.tier_attnum].name, lake)
    if dropped:
        changes.append(SetProperties(column_property(heap)))
    why = None
    if replaced:
        why = f"column {', '.join(name for _, name in replaced)} has another type"
    elif any(column.generated and number not in known for number, column in here.items()) and known:
        why = "a generated column is new"
    elif evolution.filled:
        why = f"column {', '.join(evolution.filled)} has a default that only the heap knows"
    elif rewritten and known:
        unsure = [each.name for number, each in here.items() if number not in known and each.missing_value is None]
        why = f"the heap was rewritten, perhaps after column {', '.join(unsure)} came" if unsure else None
    return Follow(tuple(changes), why)


def known_columns(lake: LakeTable, relid: int) -> dict[int, str]:
    """Which attribute of the Postgres table is which lake column; nothing when the lake remembers another table."""
    if lake.properties.get(RELID) != str(relid):
        return {}
    found: Mapping[str, str] = json.loads(lake.properties.get(COLUMNS, "{}"))
    return {int(number): name for number, name in found.items()}


def _rewritten(site: Site, line: Cutline, relid: int) -> bool:
    """Whether a leaf is another file than when lake and heap were last the same; asked after the columns were."""
    with site.connect(autocommit=True) as conn:
        now = rewritten_files(true_leaves(conn, relid))
    return not now.items() <= line.lake_props.get(REWRITTEN, {}).items()


def mapped_columns(record: TableRecord, heap: PgTable) -> Sequence[MappedColumn]:
    """How the columns of the table as it is now go to the lake; the keys may have other names than in the record."""
    keys = {*record.pk_attnums, record.tier_attnum}
    names = frozenset(column.name for column in heap.columns if column.attnum in keys)
    mapped, problems = map_columns(heap, record.numeric_as, names)
    if problems:
        raise Refused("evolve.column_type", problems[0].message, hint=problems[0].hint)
    return mapped


def columns_differ(record: TableRecord, heap: PgTable, lake: LakeTable | None) -> bool:
    """Whether the lake has other columns than the table has now, or the table such as the lake cannot have."""
    try:
        return lake is None or bool(plan_follow(heap, mapped_columns(record, heap), lake, record).changes)
    except Refused:
        return True


def follow(
    site: Site,
    writer: CatalogWriter,
    state: TableState,
    heap: PgTable,
    mapped: Sequence[MappedColumn],
    lake: LakeTable,
) -> LakeTable:
    """Bring the lake's columns to those of a point of the WAL; the frontier stays."""
    record = state.table
    rewritten = _rewritten(site, state.cutline, record.relid)
    if not plan_follow(heap, mapped, lake, record, rewritten=rewritten).changes:
        return backfill(site, writer, state, heap, mapped, lake)
    renamed = renamed_columns(_as_named_now(site, heap), lake)
    op_id = new_op_id(site.clock)
    planned: list[Follow] = []
    Journal(writer).begin(op_id, record.table_id, "evolve", {"columns": [column.name for column in heap.columns]})

    def changes(current: LakeTable, _: TableState) -> Sequence[Change]:
        planned[:] = [plan_follow(heap, mapped, current, record, rewritten=rewritten)]
        return planned[0].changes

    def within(tx: CommitTransaction, prepared: Prepared, now: TableState) -> None:
        why = planned[0].recopy
        becomes = replace(
            now.cutline,
            metadata_location=prepared.new_location,
            snapshot_id=prepared.snapshot_id,
            lake_props={**now.cutline.lake_props, RECOPY: why} if why else now.cutline.lake_props,
        )
        tx.move(now.cutline, becomes)
        # What has left the heap is corrected in the delta, and a fold no longer sees a rename that is followed here.
        tx.rename_in_delta(record.table_id, heap.oid, renamed)
        names = {column.attnum: column.name for column in heap.columns}
        keys = [names[number] for number in record.pk_attnums]
        tx.change("following renamed keys", _KEYS, (keys, names[record.tier_attnum], record.table_id))
        tx.count(changes=len(planned[0].changes))

    try:
        land(site, writer, record.name, op_id, OpPhase.PLANNED, changes, within, "evolve")
    except ModakError as error:
        give_up(site, writer, record.location, op_id, error)
        raise
    log.info("mirror.columns_followed", table=str(record.name), changes=[repr(each) for each in planned[0].changes])
    landed = site.reader.op(op_id)
    assert landed is not None
    tidy_landed(site, writer, site.reader.state(record.name), landed)
    after = site.lake.load(record.lake)
    assert after is not None
    return backfill(site, writer, state, heap, mapped, after)


def _as_named_now(site: Site, heap: PgTable) -> PgTable:
    """The columns of a point of the WAL under the names that a fold will ask for."""
    with site.connect(autocommit=True) as conn:
        names = dict(conn.execute(_NAMES, (heap.oid,)).fetchall())
    return replace(heap, columns=tuple(replace(each, name=names.get(each.attnum, each.name)) for each in heap.columns))


def _require_keys(record: TableRecord, here: Mapping[int, object]) -> None:
    for number, name in zip(
        (*record.pk_attnums, record.tier_attnum), (*record.pk_columns, record.tier_key), strict=True
    ):
        if number not in here:
            raise Refused(
                "mirror.key_dropped",
                f"Key column {quote(name)} of {record.name} was dropped; its rows cannot be followed any more.",
                hint=f"Unregister it (modak-worker unregister --table {record.name}) and register it with its new key.",
            )


def _without(lake: LakeTable, names: Sequence[str], left: Mapping[int, str], *, known: bool) -> LakeTable:
    """The lake table as it is once columns are dropped."""
    schema = tuple(column for column in lake.schema if column.name not in names)
    properties = dict(lake.properties)
    if known:
        properties[COLUMNS] = json.dumps({str(number): name for number, name in left.items()})
    return replace(lake, schema=schema, properties=properties)


def _without_backfill(change: Change) -> Change:
    if isinstance(change, SetProperties) and BACKFILL in change.values:
        return replace(change, values={key: value for key, value in change.values.items() if key != BACKFILL})
    return change


def _tier_metrics(record: TableRecord, name: str, lake: LakeTable) -> list[Change]:
    """Seam reads decide by the tier key's bounds, which must stay whole when it is renamed."""
    if name == record.tier_key or f"{_METRICS}{record.tier_key}" not in lake.properties:
        return []
    return [SetProperties({f"{_METRICS}{name}": "full"}, frozenset({f"{_METRICS}{record.tier_key}"}))]
