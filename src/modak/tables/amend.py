"""Changing single rows wherever they are: plain SQL in the heap; for a cold row the old image is taken out of the delta
or the lake, changed, and written back as a correction.

A pin comes first: while it lives, no fold takes a row of the delta away unseen. The transaction is REPEATABLE READ, so
a correction of the same row that somebody else commits meanwhile makes ours fail and begin again instead of being
overwritten. One row at a time; the lake part reads the files that may hold the key, in batches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from modak.catalog import pins, pk
from modak.catalog.records import Pin, TableRecord
from modak.core.errors import Conflict, ModakError, Refused, UsageError
from modak.core.faults import reach
from modak.core.names import TableName
from modak.lake.changes import Range
from modak.lake.model import LakeColumn, LakeTable
from modak.lake.types import MappedColumn
from modak.postgres.connect import translate
from modak.postgres.describe import describe
from modak.postgres.model import PgTable
from modak.tables.registration.preflight import map_columns
from modak.tables.site import Site

if TYPE_CHECKING:
    import pyarrow as pa

TRIES = 5
PIN_SECONDS = 120.0
_JSON = frozenset({"json", "jsonb"})

Values = Mapping[str, Any]
Image = dict[str, str | None]
"""A row as column → Postgres text."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row is: heap, delta (with its image), gone (deleted in the delta) or, for want of all these, lake."""

    tier: str
    pk: str
    tier_key: int
    payload: Image | None


def update(site: Site, name: TableName, key: Values, changes: Values) -> str:
    """Change some columns of the row with this key; returns where it was found: heap or delta."""
    if not changes:
        raise UsageError("amend.nothing", "Nothing is to be changed.", hint="Give at least one column.")
    for attempt in range(1, TRIES + 1):
        try:
            return _update_once(site, name, key, changes)
        except Conflict as conflict:
            if conflict.code != "postgres.serialization" or attempt == TRIES:
                raise
        except psycopg.Error as error:
            raise translate(error) from error
    raise AssertionError("unreachable")


def _update_once(site: Site, name: TableName, key: Values, changes: Values) -> str:
    record = site.reader.state(name).table
    with _pinned(site, name) as pin, site.connect() as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        heap = describe(conn, name, record.tier_key)
        _refuse_unknown(heap, changes)
        try:
            route = _write(site, conn, record, pin, heap, key, changes)
            reach("amend.before_commit")
            conn.commit()
        except psycopg.Error as error:
            raise translate(error) from error
    reach("amend.after_commit")
    return route


def _write(
    site: Site,
    conn: psycopg.Connection[Any],
    record: TableRecord,
    pin: Pin,
    heap: PgTable,
    key: Values,
    changes: Values,
) -> str:
    place = _place(conn, pin, key)
    if place.tier == "heap":
        if _update_heap(conn, heap, key, changes):
            return "heap"
        if _place(conn, pin, key) != place:
            raise Conflict("postgres.serialization", f"The partition of {heap.name} for this row has just left.")
        raise _no_such_row(heap, key)
    image = place.payload
    if place.tier == "lake":
        image = _lake_image(site, record, heap, pin, place)
    if image is None:
        raise _no_such_row(heap, key)
    target = f"{_quoted(heap.name.schema)}.{_quoted(heap.name.name)}"
    if set(changes) & set(key):
        conn.execute("SELECT modak.modak_delete_rows(%s::regclass, %s)", (target, _jsonb([dict(key)])))
    done = conn.execute(
        "SELECT modak.modak_upsert(%s::regclass, %s::jsonb)", (target, _json(heap, image, changes))
    ).fetchone()
    assert done is not None
    return str(done[0])


def upsert(site: Site, name: TableName, row: Values) -> str:
    """Write a whole row wherever it belongs; returns the route: heap or delta."""
    return _call(site, name, "SELECT modak.modak_upsert(%s::regclass, %s)", dict(row))


def delete(site: Site, name: TableName, key: Values) -> str:
    """Delete the row with this key wherever it is; returns the route: heap or delta."""
    query: LiteralString = """
        SELECT CASE WHEN d.delta > 0 THEN 'delta' ELSE 'heap' END FROM modak.modak_delete_rows(%s::regclass, %s) d
    """
    return _call(site, name, query, [dict(key)])


def _call(site: Site, name: TableName, query: LiteralString, argument: Any) -> str:
    target = f"{_quoted(name.schema)}.{_quoted(name.name)}"
    try:
        with site.connect() as conn:
            row = conn.execute(query, (target, _jsonb(argument))).fetchone()
            reach("amend.before_call")
    except psycopg.Error as error:
        raise translate(error) from error
    reach("amend.after_call")
    assert row is not None
    return str(row[0])


def _place(conn: psycopg.Connection[Any], pin: Pin, key: Values) -> Place:
    row = conn.execute(
        "SELECT tier, pk, tier_key, payload FROM modak.modak_read_row(%s, %s)", (pin.pin_id, _jsonb(dict(key)))
    ).fetchone()
    assert row is not None
    return Place(*row)


def _update_heap(conn: psycopg.Connection[Any], heap: PgTable, key: Values, changes: Values) -> bool:
    table = sql.Identifier(heap.name.schema, heap.name.name)
    sets = sql.SQL(", ").join(sql.SQL("{0} = n.{0}").format(sql.Identifier(column)) for column in changes)
    same = sql.SQL(" AND ").join(sql.SQL("t.{0} = k.{0}").format(sql.Identifier(column)) for column in key)
    done = conn.execute(
        sql.SQL(
            "UPDATE {0} t SET {1} FROM jsonb_populate_record(NULL::{0}, %s) n, jsonb_populate_record(NULL::{0}, %s) k"
            " WHERE {2}"
        ).format(table, sets, same),
        (_jsonb(dict(changes)), _jsonb(dict(key))),
    )
    return done.rowcount > 0


def _lake_image(site: Site, record: TableRecord, heap: PgTable, pin: Pin, place: Place) -> Image | None:
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
    """Heap column → how it is read and its lake column; one that the lake does not have yet shows its missing value."""
    from modak.lake.parse import initial_default
    from modak.tables.evolve import COLUMNS

    mapped, problems = map_columns(heap, record.numeric_as, frozenset({*record.pk_columns, record.tier_key}))
    if problems:
        raise Refused("evolve.column_type", problems[0].message, hint=problems[0].hint)
    names: Mapping[str, str] = json.loads(lake.properties.get(COLUMNS, "{}"))
    found = {}
    for column, each in zip(heap.columns, mapped, strict=True):
        known = lake.column(names.get(str(column.attnum), column.name))
        if known is None:
            shown = column.missing_value
            known = LakeColumn(
                column.name, each.column.type, initial_default=None if shown is None else initial_default(each, shown)
            )
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


def _json(heap: PgTable, image: Mapping[str, str | None], changes: Values) -> str:
    """The new row for modak_upsert: documents stand in it as they are, everything else as text for its type to read."""
    parts = []
    for column in heap.columns:
        if column.generated or (column.name not in image and column.name not in changes):
            continue
        if column.name in changes:
            value = _dumps(changes[column.name])
        else:
            text = image[column.name]
            document = column.type.name in _JSON and text is not None
            value = text if document and text is not None else json.dumps(text, ensure_ascii=False)
        parts.append(f"{json.dumps(column.name, ensure_ascii=False)}: {value}")
    return "{" + ", ".join(parts) + "}"


def _jsonb(value: Any) -> Jsonb:
    return Jsonb(value, dumps=_dumps)


def _dumps(value: Any) -> str:
    """JSON in which moments, decimals, uuids and bytes are the texts that Postgres reads."""
    return json.dumps(
        value, ensure_ascii=False, default=lambda odd: f"\\x{odd.hex()}" if isinstance(odd, bytes) else str(odd)
    )


def _refuse_unknown(heap: PgTable, changes: Values) -> None:
    for name in changes:
        column = heap.column(name)
        if column is None:
            known = ", ".join(column.name for column in heap.columns)
            raise UsageError("amend.column", f"{heap.name} has no column {name!r}.", hint=f"Its columns are {known}.")
        if column.generated:
            raise UsageError("amend.generated", f"Column {name!r} of {heap.name} is generated; it follows the others.")


def _no_such_row(heap: PgTable, key: Values) -> ModakError:
    shown = ", ".join(f"{name} = {value}" for name, value in key.items())
    return Refused("amend.no_row", f"{heap.name} has no row with {shown}.", hint="Look with: modak-worker sql")


@contextmanager
def _pinned(site: Site, name: TableName) -> Iterator[Pin]:
    pin = pins.begin(site.dsn, name, PIN_SECONDS)
    try:
        yield pin
    finally:
        with site.connect(autocommit=True) as conn:
            pins.end(conn, pin.pin_id)


def _quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'
