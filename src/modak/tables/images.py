"""The old image of a cold row, for an update that knows only the columns that change: as the delta has it, or the lake.

The delta's may be older than the names of the columns, and either older than a column. Texts are what Postgres reads
again as the same values. One row at a time; the lake part reads the files that may hold the key, in batches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg

from modak.catalog import delta, pk
from modak.catalog.records import Pin, TableRecord
from modak.core.errors import Refused
from modak.lake.changes import Range
from modak.lake.model import LakeColumn, LakeTable
from modak.lake.types import MappedColumn
from modak.postgres.model import PgTable
from modak.tables.columns import COLUMNS, RELID
from modak.tables.registration.preflight import map_columns
from modak.tables.site import Site

if TYPE_CHECKING:
    import pyarrow as pa

Image = dict[str, str | None]
"""A row as column → Postgres text."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row is: heap, delta (with its image), gone (deleted in the delta) or, for want of all these, lake."""

    tier: str
    pk: str
    tier_key: int
    payload: Image | None

    @property
    def identity(self) -> tuple[str, int]:
        """What tells this row from every other one."""
        return self.pk, self.tier_key


def cold_image(
    site: Site, conn: psycopg.Connection[Any], record: TableRecord, heap: PgTable, pin: Pin, place: Place
) -> Image | None:
    """The row as the delta or the lake has it; a column that is younger shows what Postgres shows for such rows."""
    if place.tier == "lake":
        image = lake_image(site, record, heap, pin, place)
    else:
        image = _delta_image(site, conn, record, heap, place)
    if image is None:
        return None
    # A NOT NULL column whose value for old rows nobody knows any more is left out, and takes its default.
    missing = {
        each.name: each.missing_value for each in heap.columns if each.missing_value is not None or not each.not_null
    }
    return {**missing, **image}


def _delta_image(
    site: Site, conn: psycopg.Connection[Any], record: TableRecord, heap: PgTable, place: Place
) -> Image | None:
    """The image under the names that its columns have now: no fold has followed a rename in it yet."""
    from modak.tables.evolve import renamed_columns

    if place.payload is None or not delta.outdated(conn, heap.oid, record.table_id, *place.identity):
        return place.payload
    lake = site.lake.load(record.lake)
    if lake is None:
        return place.payload
    waiting = delta.renames(conn, heap.oid, renamed_columns(heap, lake))
    names = [column.name for column in heap.columns]
    return delta.image_now(conn, record.table_id, *place.identity, names, waiting)


def lake_image(site: Site, record: TableRecord, heap: PgTable, pin: Pin, place: Place) -> Image | None:
    """The row as the pinned lake state holds it."""
    from modak.lake.iceberg.scan import scan_file
    from modak.lake.iceberg.vectors import read_vector
    from modak.lake.render import render_text

    lake = site.lake.load(record.lake)
    if lake is None or pin.snapshot_id is None:
        return None
    columns = _columns(heap, record, lake)
    numbers = {column.attnum: column.name for column in heap.columns}
    tier = numbers[record.tier_attnum]
    here = Range(columns[tier][1].name, place.tier_key, place.tier_key + 1)
    texts = pk.decode(place.pk, len(record.pk_attnums))
    wanted = _key_values(columns, {numbers[at]: text for at, text in zip(record.pk_attnums, texts, strict=True)})
    for found in site.lake.files(record.lake, pin.snapshot_id, column=here.column, rows=here):
        if found.foreign_deletes:
            raise Refused(
                "amend.foreign_deletes",
                f"{found.file.path} carries deletes of another tool, which have to be applied before it can be read.",
                hint="Run maintenance on the table, or give the whole row to modak_upsert.",
            )
        deleted = read_vector(found.vectors[0]) if found.vectors else None
        lake_columns = [column for _, column in columns.values()]
        for batch in scan_file(found.file.path, lake_columns, deleted=deleted, rows=here):
            at = _find(batch, list(columns), wanted, tier, place.tier_key)
            if at is not None:
                return {
                    name: render_text(mapped, batch.column(place)[at])
                    for place, (name, (mapped, _)) in enumerate(columns.items())
                }
    return None


def _columns(heap: PgTable, record: TableRecord, lake: LakeTable) -> dict[str, tuple[MappedColumn, LakeColumn]]:
    """Heap column → how it is read and its lake column, without those that the lake does not have yet."""
    mapped, problems = map_columns(heap, record.numeric_as, frozenset({*record.pk_columns, record.tier_key}))
    if problems:
        raise Refused("evolve.column_type", problems[0].message, hint=problems[0].hint)
    ours = lake.properties.get(RELID) == str(heap.oid)
    names: Mapping[str, str] = json.loads(lake.properties.get(COLUMNS, "{}")) if ours else {}
    found = {}
    for column, each in zip(heap.columns, mapped, strict=True):
        # Under the name of a new column the lake may have one that was dropped.
        name = names.get(str(column.attnum)) if names else column.name
        known = lake.column(name) if name is not None else None
        if known is not None:
            found[column.name] = (each, known)
    return found


def _key_values(columns: Mapping[str, tuple[MappedColumn, LakeColumn]], texts: Mapping[str, str]) -> dict[str, Any]:
    """The key's values in the lake's types."""
    import pyarrow as pa

    from modak.lake.parse import parse_text

    return {name: parse_text(columns[name][0], pa.array([text])) for name, text in texts.items()}


def _find(batch: pa.RecordBatch, names: list[str], wanted: Mapping[str, Any], tier: str, tier_key: int) -> int | None:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not len(batch):
        return None
    axis = batch.column(names.index(tier))
    axis = axis.cast(pa.int32()) if pa.types.is_date32(axis.type) else axis
    matches: Any = pc.equal(axis.cast(pa.int64()), tier_key)
    for name, one in wanted.items():
        column = batch.column(names.index(name))
        if isinstance(column, pa.ExtensionArray):
            column, value = column.storage, one.storage[0]
        else:
            value = one.cast(column.type)[0]
        matches = pc.and_(matches, pc.equal(column, value))
    at: int = pc.index(matches, True).as_py()
    return None if at < 0 else at
