"""Rows that were in the lake before a column came get the value that their column's default gives them.

Iceberg shows a constant default by itself (the column's initial default). A default that differs from row to row, or
one that its JSON cannot say (an array, a date before the year one), has to be written: the files without the column
are read, the values are made by Postgres in the name of the table's owner, and new files replace the old ones in one
commit that keeps the rows' lineage. What is due stands in the lake table's own properties, so a crash only delays it.
One file per Spark task; memory is bounded by one batch of rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import structlog

from modak.catalog.journal import Journal
from modak.catalog.records import TableState
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core.errors import ModakError, Refused
from modak.core.faults import reach
from modak.core.ids import OpId, new_op_id
from modak.core.states import OpPhase
from modak.lake.changes import Change, Rewrite, SetProperties
from modak.lake.model import DataFile, LakeColumn, LakeFile, LakeTable, Layout, Prepared, Vector, data_folder
from modak.lake.types import MappedColumn, quoted_identifier, select_list
from modak.postgres.describe import PgColumn, PgTable
from modak.postgres.dsn import Dsn
from modak.tables.landing import land
from modak.tables.site import Site
from modak.tables.tidy import give_up, tidy_landed

if TYPE_CHECKING:
    import pyarrow as pa

log = structlog.get_logger()

BACKFILL = "modak.backfill"
"""Table property: lake column → how its old rows get their value, as JSON; gone when that is done."""
ROW_ID = LakeColumn("_row_id", "long", field_id=2147483540)
SEQUENCE = LakeColumn("_last_updated_sequence_number", "long", field_id=2147483539)
BATCH_ROWS = 262_144


@dataclass(frozen=True, slots=True)
class Filling:
    """Where the values of one column come from: a constant's text, or an expression of the owner's."""

    mapped: MappedColumn
    constant: str | None
    expression: str | None


@dataclass(frozen=True, slots=True)
class Refill:
    """One task's file."""

    dsn: Dsn
    owner: str
    path: str
    vectors: tuple[Vector, ...]
    """Rows that corrections have hidden; the new file does not have them."""
    first_row_id: int | None
    sequence_number: int | None
    folder: str
    task: str
    columns: tuple[LakeColumn, ...]
    fillings: tuple[Filling, ...]
    layout: Layout
    tier_key: str
    spec_id: int
    target_bytes: int


def due(column: PgColumn, initial: str | None) -> dict[str, str] | None:
    """What old rows of a new column need, or nothing when the initial default says it."""
    if initial is not None:
        return None
    if column.missing_value is not None:
        # What old rows show stays so when the default is dropped again.
        return {"constant": column.missing_value}
    return None if column.default is None or column.default_constant else {"expression": column.default}


def backfill(
    site: Site, writer: CatalogWriter, state: TableState, heap: PgTable, mapped: Sequence[MappedColumn], lake: LakeTable
) -> LakeTable:
    """Do what the table's properties say is due; returns the lake table as it is then."""
    wanted: Mapping[str, Mapping[str, str]] = json.loads(lake.properties.get(BACKFILL, "{}"))
    if not wanted:
        return lake
    op_id = new_op_id(site.clock)
    folder = data_folder(lake.location, op_id)
    Journal(writer).begin(op_id, state.table.table_id, "backfill", {"columns": sorted(wanted)}, [folder])
    try:
        return _backfill(site, writer, state, heap, mapped, lake, op_id, wanted)
    except ModakError as error:
        give_up(site, writer, state.table.location, op_id, error)
        raise


def _backfill(
    site: Site,
    writer: CatalogWriter,
    state: TableState,
    heap: PgTable,
    mapped: Sequence[MappedColumn],
    lake: LakeTable,
    op_id: OpId,
    wanted: Mapping[str, Mapping[str, str]],
) -> LakeTable:
    Journal(writer).phase(op_id, OpPhase.PLANNED, OpPhase.WRITING)
    removed, added = _rewrite(site, state, heap, mapped, lake, op_id, wanted)

    def changes(now: LakeTable, _: TableState) -> Sequence[Change]:
        done = SetProperties(removed=frozenset({BACKFILL}))
        if not removed or lake.snapshot_id is None:
            return [done]
        return [Rewrite(tuple(removed), tuple(added), validate_from=lake.snapshot_id), done]

    def within(tx: CommitTransaction, prepared: Prepared, now: TableState) -> None:
        becomes = replace(now.cutline, metadata_location=prepared.new_location, snapshot_id=prepared.snapshot_id)
        tx.move(now.cutline, becomes)
        tx.count(files=len(added), rows=sum(file.rows for file in added))

    land(site, writer, state.table.name, op_id, OpPhase.WRITING, changes, within, "backfill")
    log.info("backfill.committed", table=str(state.table.name), columns=sorted(wanted), files=len(added))
    landed, after = site.reader.op(op_id), site.lake.load(state.table.lake)
    assert landed is not None
    assert after is not None
    tidy_landed(site, writer, site.reader.state(state.table.name), landed)
    return after


def _rewrite(
    site: Site,
    state: TableState,
    heap: PgTable,
    mapped: Sequence[MappedColumn],
    lake: LakeTable,
    op_id: OpId,
    wanted: Mapping[str, Mapping[str, str]],
) -> tuple[list[DataFile], list[DataFile]]:
    from modak.spark.distribute import distribute

    if lake.snapshot_id is None:
        return [], []
    by_name = {column.column.name: column for column in mapped}
    fillings = tuple(
        Filling(by_name[name], how.get("constant"), how.get("expression"))
        for name, how in wanted.items()
        if name in by_name
    )
    files = list(site.lake.files(lake.identifier, lake.snapshot_id))
    items = [
        _refill(site, state, heap, lake, op_id, fillings, file, f"{number:05d}") for number, file in enumerate(files)
    ]
    reach("backfill.before_tasks")
    written = distribute(site.spark, fill_file, items)
    reach("backfill.after_tasks")
    removed = [found.file for found, made in zip(files, written, strict=True) if made is not None]
    return removed, [file for made in written if made is not None for file in made]


def _refill(
    site: Site,
    state: TableState,
    heap: PgTable,
    lake: LakeTable,
    op_id: OpId,
    fillings: tuple[Filling, ...],
    found: LakeFile,
    task: str,
) -> Refill:
    if found.foreign_deletes:
        raise Refused(
            "backfill.deletes",
            f"{found.file.path} carries deletes of another tool, to be applied before a column can be filled.",
            hint="Run maintenance on the table first.",
        )
    entry: Mapping[str, Any] = json.loads(found.file.json)
    return Refill(
        dsn=site.dsn,
        owner=heap.owner,
        path=found.file.path,
        vectors=found.vectors,
        first_row_id=entry.get("first-row-id"),
        sequence_number=found.sequence_number,
        folder=data_folder(lake.location, op_id),
        task=task,
        columns=lake.schema,
        fillings=fillings,
        layout=lake.layout,
        tier_key=state.table.tier_key,
        spec_id=lake.spec_id,
        target_bytes=site.settings.lake.target_file_bytes,
    )


def fill_file(item: Refill) -> list[DataFile] | None:
    """Inside a task: write a file anew with the missing columns; None when it has them already."""
    from pyroaring import BitMap64

    from modak.lake.iceberg.files import FileWriter
    from modak.lake.iceberg.output import parquet_file
    from modak.lake.iceberg.scan import sorted_positions, without_deleted
    from modak.lake.iceberg.vectors import read_vector

    source = parquet_file(item.path)
    present: dict[int | None, str] = {_field_id(field): field.name for field in source.schema_arrow}
    if set(present) == {None}:
        # Adopted: no ids, but names that the table's mapping knows.
        names = [(column.field_id, column.file_names or (column.name,)) for column in item.columns]
        present = {number: name for number, several in names for name in several if name in source.schema_arrow.names}
    ids = {column.name: column.field_id for column in item.columns}
    missing = [filling for filling in item.fillings if ids[filling.mapped.column.name] not in present]
    if not missing:
        return None
    filled = {filling.mapped.column.name for filling in missing}
    columns = [column for column in item.columns if column.field_id in present or column.name in filled]
    writer = FileWriter(
        item.folder,
        [*columns, *([ROW_ID, SEQUENCE] if item.first_row_id is not None else [])],
        item.layout,
        tier_key=item.tier_key,
        spec_id=item.spec_id,
        target_bytes=item.target_bytes,
        task=item.task,
    )
    gone = sorted_positions(BitMap64().union(*map(read_vector, item.vectors)))
    with writer:
        at = 0
        for batch in source.iter_batches(BATCH_ROWS):
            writer.write(without_deleted(_filled(item, batch, at, missing, columns, present, writer.schema), gone, at))
            at += len(batch)
        return writer.close()


def _filled(
    item: Refill,
    batch: pa.RecordBatch,
    at: int,
    missing: Sequence[Filling],
    columns: Sequence[LakeColumn],
    present: Mapping[int | None, str],
    schema: pa.Schema,
) -> pa.RecordBatch:
    import pyarrow as pa

    values = dict(_values(item, missing, len(batch)))
    arrays = [
        values[column.name] if column.name in values else batch.column(present[column.field_id]) for column in columns
    ]
    if item.first_row_id is not None:
        arrays += _lineage(item, batch, at, present)
    arrays = [_as(array, field.type) for array, field in zip(arrays, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _values(item: Refill, missing: Sequence[Filling], rows: int) -> Iterator[tuple[str, pa.Array]]:
    import pyarrow as pa

    from modak.lake.decode import arrow_schema, decoded
    from modak.lake.parse import parse_text
    from modak.postgres.arrow import stream

    # A default may call the owner's functions: they run with the owner's rights, never with ours.
    owner = replace(item.dsn, options=(*item.dsn.options, ("options", f"-c role={_escaped(item.owner)}")))
    for filling in missing:
        name = filling.mapped.column.name
        if filling.constant is not None:
            one = parse_text(filling.mapped, pa.array([filling.constant]))
            yield name, pa.concat_arrays([one] * rows) if rows else one.slice(0, 0)
            continue
        inner = f"SELECT ({filling.expression}) AS {quoted_identifier(name)} FROM generate_series(1, {rows})"  # noqa: S608
        query = f"SELECT {select_list([filling.mapped])} FROM ({inner}) AS made"  # noqa: S608
        schema = arrow_schema([filling.mapped.column])
        batches = list(decoded(stream(owner, query), [filling.mapped], schema))
        made = pa.Table.from_batches(batches, schema).column(0).combine_chunks()
        if len(made) != rows:
            raise ModakError(
                "backfill.values", f"The default of column {name} gave {len(made)} values for {rows} rows."
            )
        yield name, made


def _lineage(item: Refill, batch: pa.RecordBatch, at: int, present: Mapping[int | None, str]) -> list[pa.Array]:
    """Row id and last change of every row: what the file says itself, else what it inherits."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    assert item.first_row_id is not None
    ids = pa.array(np.arange(len(batch), dtype=np.int64) + (item.first_row_id + at))
    changed = pa.array(np.full(len(batch), item.sequence_number or 0, dtype=np.int64))
    inherited = []
    for column, array in ((ROW_ID, ids), (SEQUENCE, changed)):
        own = present.get(column.field_id)
        inherited.append(array if own is None else pc.coalesce(batch.column(own), array))
    return inherited


def _as(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return array if array.type == kind else array.cast(kind)


def _field_id(field: pa.Field) -> int | None:
    text = (field.metadata or {}).get(b"PARQUET:field_id")
    return int(text) if text is not None else None


def _escaped(role: str) -> str:
    """A value inside libpq's `options`, where a backslash protects blanks and itself."""
    return role.replace("\\", "\\\\").replace(" ", "\\ ")
