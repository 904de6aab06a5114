"""Changing single rows wherever they are: plain SQL in the heap; for a cold row the old image is taken out of the delta
or the lake (`images.py`), changed, and written back as a correction. What is not changed goes back as it was found,
through a table of the same columns: JSON would lose the letters of a document, and cannot tell its null from none.

A pin comes first: while it lives, no fold takes a row of the delta away unseen. The transaction is REPEATABLE READ, so
a correction of the same row that somebody else commits meanwhile makes ours fail and begin again instead of being
overwritten. One row at a time; the lake part reads the files that may hold the key, in batches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from modak.catalog import pins
from modak.catalog.records import Pin, TableRecord
from modak.core.errors import Conflict, ModakError, Refused, UsageError
from modak.core.faults import reach
from modak.core.names import TableName
from modak.postgres.connect import translate
from modak.postgres.describe import describe
from modak.postgres.model import PgTable
from modak.tables.images import Place, cold_image, lake_image
from modak.tables.site import Site

TRIES = 5
PIN_SECONDS = 120.0
_ROW = sql.Identifier("pg_temp", "modak_row")

Values = Mapping[str, Any]


def update(site: Site, name: TableName, key: Values, changes: Values) -> str:
    """Change some columns of the row with this key; returns where it is then: heap or delta."""
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
        _refuse_senseless(heap, key, changes)
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
    place = goal = _place(conn, pin, key)
    new_key = {name: changes.get(name, value) for name, value in key.items()}
    if set(changes) & set(key):
        goal = _place(conn, pin, new_key)
    stays_hot = place.tier == goal.tier == "heap"
    if not stays_hot and not _take_row(site, conn, record, pin, heap, key, place, changes):
        raise _not_found(conn, pin, heap, key, place)
    moves = goal.identity != place.identity
    if moves and _is_there(site, conn, record, pin, heap, new_key, goal):
        raise Refused(
            "amend.key_taken",
            f"{heap.name} already has a row with {_shown(new_key)}.",
            hint="An update overwrites no other row: delete that one first, or choose another key.",
        )
    if stays_hot:
        if not _update_heap(conn, heap, key, changes):
            raise _not_found(conn, pin, heap, key, place)
        return "heap"
    if moves:
        conn.execute("SELECT modak.modak_delete_rows(%s::regclass, %s)", (_target(heap.name), _jsonb([dict(key)])))
    return _put_row(conn, heap, changes)


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
    try:
        with site.connect() as conn:
            row = conn.execute(query, (_target(name), _jsonb(argument))).fetchone()
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
    sets = sql.SQL(", ").join(sql.SQL("{0} = n.{0}").format(sql.Identifier(column)) for column in changes)
    done = conn.execute(
        sql.SQL(
            "UPDATE {0} t SET {1} FROM jsonb_populate_record(NULL::{0}, %s) n, jsonb_populate_record(NULL::{0}, %s) k"
            " WHERE {2}"
        ).format(_table(heap), sets, _same(key)),
        (_jsonb(dict(changes)), _jsonb(dict(key))),
    )
    return done.rowcount > 0


def _is_there(
    site: Site,
    conn: psycopg.Connection[Any],
    record: TableRecord,
    pin: Pin,
    heap: PgTable,
    key: Values,
    place: Place,
) -> bool:
    """Whether there is a row at this place."""
    if place.tier == "lake":
        return lake_image(site, record, heap, pin, place) is not None
    if place.tier != "heap":
        return place.tier == "delta"
    found = conn.execute(
        sql.SQL("SELECT FROM {0} t, jsonb_populate_record(NULL::{0}, %s) k WHERE {1}").format(_table(heap), _same(key)),
        (_jsonb(dict(key)),),
    )
    return found.fetchone() is not None


def _take_row(
    site: Site,
    conn: psycopg.Connection[Any],
    record: TableRecord,
    pin: Pin,
    heap: PgTable,
    key: Values,
    place: Place,
    changes: Values,
) -> bool:
    """Copy the row from its place into a table of its own; False when it is not there."""
    own = [column.name for column in heap.columns if not column.generated]
    if place.tier == "heap":
        _open_row(conn, heap, own)
        copied = conn.execute(
            sql.SQL(
                "INSERT INTO {0} SELECT {1} FROM {2} t, jsonb_populate_record(NULL::{2}, %s) k WHERE {3}"
                " FOR UPDATE OF t"
            ).format(_ROW, _listed(own, "t"), _table(heap), _same(key)),
            (_jsonb(dict(key)),),
        )
        return copied.rowcount > 0
    image = cold_image(site, conn, record, heap, pin, place)
    if image is None:
        return False
    own = [name for name in own if name in image or name in changes]
    _open_row(conn, heap, own)
    values = sql.SQL(", ").join(sql.Placeholder() * len(own))
    conn.execute(sql.SQL("INSERT INTO {0} VALUES ({1})").format(_ROW, values), [image.get(name) for name in own])
    return True


def _open_row(conn: psycopg.Connection[Any], heap: PgTable, columns: Sequence[str]) -> None:
    conn.execute(
        sql.SQL("CREATE TEMP TABLE modak_row ON COMMIT DROP AS SELECT {0} FROM {1} t WITH NO DATA").format(
            _listed(columns, "t"), _table(heap)
        )
    )


def _put_row(conn: psycopg.Connection[Any], heap: PgTable, changes: Values) -> str:
    """Write the row that was taken, with its changes, wherever it belongs."""
    conn.execute(
        sql.SQL("UPDATE {0} r SET ({1}) = (SELECT {2} FROM jsonb_populate_record(r, %s) n)").format(
            _ROW, sql.SQL(", ").join(map(sql.Identifier, changes)), _listed(changes, "n")
        ),
        (_jsonb(dict(changes)),),
    )
    done = conn.execute(
        "SELECT delta FROM modak.modak_upsert_from(%s::regclass, 'pg_temp.modak_row')", (_target(heap.name),)
    ).fetchone()
    assert done is not None
    return "delta" if done[0] else "heap"


def _jsonb(value: Any) -> Jsonb:
    return Jsonb(value, dumps=_dumps)


def _dumps(value: Any) -> str:
    """JSON in which moments, decimals, uuids, bytes and numbers that are none are the texts that Postgres reads."""
    return json.dumps(
        _finite(value),
        ensure_ascii=False,
        default=lambda odd: f"\\x{odd.hex()}" if isinstance(odd, bytes) else str(odd),
    )


def _finite(value: Any) -> Any:
    """The same with NaN and the infinities as text, for which JSON has no numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _refuse_senseless(heap: PgTable, key: Values, changes: Values) -> None:
    for name, value in changes.items():
        column = heap.column(name)
        if column is None:
            known = ", ".join(column.name for column in heap.columns)
            raise UsageError("amend.column", f"{heap.name} has no column {name!r}.", hint=f"Its columns are {known}.")
        if column.generated:
            raise UsageError("amend.generated", f"Column {name!r} of {heap.name} is generated; it follows the others.")
        if name in key and value is None:
            raise UsageError("amend.key_null", f"Column {name!r} of {heap.name} is part of the key and cannot be NULL.")


def _not_found(conn: psycopg.Connection[Any], pin: Pin, heap: PgTable, key: Values, place: Place) -> ModakError:
    if place.tier == "heap" and _place(conn, pin, key) != place:
        return Conflict("postgres.serialization", f"The partition of {heap.name} for this row has just left.")
    return Refused("amend.no_row", f"{heap.name} has no row with {_shown(key)}.", hint="Look with: modak-worker sql")


def _shown(key: Values) -> str:
    return ", ".join(f"{name} = {value}" for name, value in key.items())


@contextmanager
def _pinned(site: Site, name: TableName) -> Iterator[Pin]:
    pin = pins.begin(site.dsn, name, PIN_SECONDS)
    try:
        yield pin
    finally:
        with site.connect(autocommit=True) as conn:
            pins.end(conn, pin.pin_id)


def _table(heap: PgTable) -> sql.Identifier:
    return sql.Identifier(heap.name.schema, heap.name.name)


def _listed(columns: Iterable[str], source: str) -> sql.Composed:
    return sql.SQL(", ").join(sql.Identifier(source, column) for column in columns)


def _same(key: Values) -> sql.Composed:
    return sql.SQL(" AND ").join(sql.SQL("t.{0} = k.{0}").format(sql.Identifier(column)) for column in key)


def _target(name: TableName) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in (name.schema, name.name))
