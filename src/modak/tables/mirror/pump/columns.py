"""The table as it was at the point of the WAL that is being read: its columns by number, and how they go to the lake.

Keeps the definition from piece to piece and finds the numbers anew whenever Postgres announces the table (`align`).
Columns that the stream does not bring (generated ones that are not published) are known from the catalog. A few values
per column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from modak.catalog.records import TableRecord
from modak.core.errors import Refused
from modak.core.names import TableName
from modak.lake.parse import parse_text
from modak.lake.types import MappedColumn
from modak.postgres.changes.relation import Relation, RelationColumn
from modak.postgres.connect import translate
from modak.postgres.describe import describe
from modak.postgres.model import PgColumn, PgTable
from modak.tables.mirror.pump.definition import Attribute, Definition, align
from modak.tables.mirror.pump.events import Shape
from modak.tables.registration.preflight import map_columns
from modak.tables.site import Site

_PUBLISHES_GENERATED = 180_000
_NAME = sql.SQL(
    "SELECT n.nspname::text, c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
    " WHERE c.oid = %s"
)
_ATTRIBUTES = sql.SQL(
    "SELECT attnum, CASE WHEN NOT attisdropped THEN attname::text END, atttypid::int8, xmin::text::int8,"
    " attgenerated::text FROM pg_attribute WHERE attrelid = %s AND attnum > 0 ORDER BY attnum"
)


@dataclass(frozen=True, slots=True)
class Seen:
    """The table at a point of the WAL: as Postgres would describe it, as the lake has it, and as events have it."""

    heap: PgTable
    mapped: tuple[MappedColumn, ...]
    shape: Shape

    @property
    def names(self) -> dict[int, str]:
        """Attribute number → name, of all columns that the lake has."""
        return {column.attnum: column.name for column in self.heap.columns}

    @property
    def unpublished(self) -> tuple[PgColumn, ...]:
        """Columns of the table that no change brings."""
        here = set(self.shape.definition.numbers)
        return tuple(column for column in self.heap.columns if column.attnum not in here)


class Columns:
    """Follows the definition of one table along the WAL."""

    def __init__(self, site: Site, record: TableRecord, before: Mapping[int, str]) -> None:
        self._site = site
        self._record = record
        self.before = dict(before)
        self._announced: tuple[Relation, int] | None = None
        self.seen: Seen | None = None

    def restart(self) -> None:
        """A new session announces the table anew."""
        self._announced = None

    def at(self, relation: Relation, version: int, xid: int) -> tuple[Seen, dict[int, pa.Scalar]]:
        """The table for changes of this announcement; and what older rows show in columns that are new with it."""
        if self.seen is not None and self._announced == (relation, version):
            return self.seen, {}
        try:
            with self._site.connect(autocommit=True) as conn:
                definition = align(relation, self.before, attributes(conn, self._record.relid), xid, self._record.name)
                self._announced = (relation, version)
                same = self.seen is not None and self.seen.shape.definition == definition
                if same and self.seen is not None:
                    return self.seen, {}
                heap = describe(conn, name_of(conn, self._record), self._record.tier_key)
        except psycopg.Error as error:
            raise translate(error) from error
        seen = seen_as(self._record, heap, definition)
        new = [number for number in definition.numbers if number not in self.before]
        self.seen, self.before = seen, {**definition.names, **{c.attnum: c.name for c in seen.unpublished}}
        return seen, _shown(seen, new)


def name_of(conn: psycopg.Connection[Any], record: TableRecord) -> TableName:
    """How the table is called now."""
    row = conn.execute(_NAME, (record.relid,)).fetchone()
    if row is None:
        raise Refused(
            "mirror.table_gone",
            f"{record.name} was dropped in Postgres.",
            hint=f"Unregister it: modak-worker unregister --table {record.name}. The lake table stays.",
        )
    return TableName(row[0], row[1])


def attributes(conn: psycopg.Connection[Any], relid: int) -> list[Attribute]:
    """The columns of the catalog, dropped ones too."""
    with_generated = conn.info.server_version >= _PUBLISHES_GENERATED
    return [
        Attribute(number, name, type_oid, xid, generated == "" or (generated == "s" and with_generated))
        for number, name, type_oid, xid, generated in conn.execute(_ATTRIBUTES, (relid,))
    ]


def identity_of(record: TableRecord, heap: PgTable) -> tuple[int, ...]:
    """The attributes that identify a row: the primary key, which the registered keys cover."""
    numbers = {column.name: column.attnum for column in heap.columns}
    registered = (*record.pk_attnums, *((record.tier_attnum,) if record.tier_attnum not in record.pk_attnums else ()))
    key = tuple(numbers[name] for name in heap.primary_key)
    if not key:
        return registered
    if not set(key) <= set(registered):
        raise Refused(
            "mirror.key_changed",
            f"The primary key of {record.name} is ({', '.join(heap.primary_key)}) now; it was registered by others.",
            hint="Change it back, or unregister the table and register it with its new key.",
        )
    return key


def seen_as(record: TableRecord, now: PgTable, definition: Definition) -> Seen:
    """The table of now with the columns of a point of the WAL."""
    known = {column.attnum: column for column in now.columns}
    columns = [_column(known.get(number), number, column) for number, column in definition.pairs()]
    columns += [column for column in now.columns if column.generated and column.attnum not in definition.numbers]
    columns.sort(key=lambda column: column.attnum)
    identity = identity_of(record, now)
    names = {column.attnum: column.name for column in columns}
    heap = replace(now, columns=tuple(columns))
    keys = frozenset(names[number] for number in (*record.pk_attnums, record.tier_attnum) if number in names)
    mapped, problems = map_columns(heap, record.numeric_as, keys)
    if problems:
        raise Refused("evolve.column_type", problems[0].message, hint=problems[0].hint)
    by_name = {each.column.name: each for each in mapped}
    streamed = tuple(by_name[column.name] for column in definition.columns)
    missing = [number for number in (*identity, record.tier_attnum) if number not in definition.numbers]
    if missing:
        raise Refused(
            "mirror.key_dropped",
            f"A key column of {record.name} is not in its change stream.",
            hint="It was dropped or is generated; unregister the table and register it with another key.",
        )
    return Seen(heap, tuple(mapped), Shape(definition, streamed, identity, record.tier_attnum))


def _column(now: PgColumn | None, number: int, then: RelationColumn) -> PgColumn:
    if now is not None:
        return replace(now, name=then.name, type=then.type)
    return PgColumn(then.name, number, then.type, False, None, False, None, None, False, None)


def _shown(seen: Seen, new: list[int]) -> dict[int, pa.Scalar]:
    shown = {}
    mapped = {each.column.name: each for each in seen.mapped}
    for column in seen.heap.columns:
        if column.attnum in new and column.missing_value is not None:
            shown[column.attnum] = parse_text(mapped[column.name], pa.array([column.missing_value]))[0]
    return shown
