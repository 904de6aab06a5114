"""Rows of a store out of Postgres: which SQL reads them, in portions that memory can hold.

Two queries under one snapshot. The first gives the keys with the fixed columns and those of `entity_main`, the second
the rows of `eav_data`, both in the order in which the heap has them: an order or a grouping by Postgres would cost six
times as much as `pivot.py` needs to bring them together. Several connections can share the pages of a table.
Memory is bounded by `PORTION_BYTES` of each, shared by its connections: keys that have more are halved.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psycopg import sql

from modak.core.errors import ModakError
from modak.entities.address import Address
from modak.entities.pivot import Rows, bound_to_columns, in_key_order, pivot, row_ids_of
from modak.entities.plan import KeyRange
from modak.entities.registry import Attribute, EntitySchema
from modak.entities.tables import EntityTables, identifier
from modak.postgres.arrow import stream

if TYPE_CHECKING:
    import pyarrow as pa

PORTION_BYTES = 1 << 30
"""What each of the two queries may bring for one portion, in all its lanes; keys that have more are halved."""
_MOST_MILLIS = 2**31 - 1
"""The longest limit of a statement that Postgres takes."""
_NATIVE = frozenset({"smallint", "integer", "bigint"})


@dataclass(frozen=True, slots=True)
class Listed:
    """Dirty rows by their ids, with commas between them: what a delta file holds."""

    row_ids: str

    def halves(self) -> tuple[Listed, ...]:
        """The same rows in two; nothing where there is only one."""
        ids = self.row_ids.split(",")
        middle = len(ids) // 2
        return (Listed(",".join(ids[:middle])), Listed(",".join(ids[middle:]))) if middle else ()


@dataclass(frozen=True, slots=True)
class Dirty:
    """All dirty rows with ids in a range: what a read adds to the files."""

    within: KeyRange


@dataclass(frozen=True, slots=True)
class Live:
    """All live rows with ids in a range: what a base file holds. `settled` leaves out those that are dirty."""

    within: KeyRange
    settled: bool = False


@dataclass(frozen=True, slots=True)
class Lanes:
    """How many connections read a table at once, each its share of the pages; without pages one reads all of them."""

    count: int = 1
    main_pages: int = 0
    eav_pages: int = 0

    def shares(self, pages: int) -> list[tuple[int, int | None]]:
        """Page ranges, the last one open: a table that is partitioned or grows is still read whole."""
        count = self.count if pages >= self.count else 1
        edges = [pages * lane // count for lane in range(count)]
        return list(zip(edges, [*edges[1:], None], strict=True))


Keys = Listed | Dirty | Live


@dataclass(frozen=True, slots=True)
class Source:
    """Where rows are read: a database, a snapshot in it, the tables and the schema."""

    address: Address
    snapshot: str
    tables: EntityTables
    schema: EntitySchema
    timeout_seconds: float = 0.0
    """How long one query may take; 0 means as long as it takes."""
    lanes: Lanes = Lanes()


class _Room:
    """How many bytes a query may still bring, whichever of its lanes they come through."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """Whether there is room for so many bytes more; where there is none, there is none for the other lanes."""
        with self._lock:
            self._left -= size
            return self._left >= 0


class _TooMuch(Exception):
    """More bytes than one portion may hold; `row_ids` are those of the rows that had arrived."""

    def __init__(self, row_ids: Any) -> None:
        super().__init__()
        self.row_ids = row_ids


def rows_of(source: Source, keys: Keys, limit: int = PORTION_BYTES) -> Iterator[Rows]:
    """The rows of some keys, in portions that fit into memory, sorted throughout."""
    try:
        rows = _portion(source, keys, limit)
        if rows is not None:
            yield rows
        return
    except _TooMuch as much:
        halves = _halves(keys, much.row_ids)
    # A single row is taken whole, whatever it holds.
    for part in halves or (keys,):
        yield from rows_of(source, part, limit if halves else 64 * limit)


def _portion(source: Source, keys: Keys, limit: int) -> Rows | None:
    main = in_key_order(_main(source, keys, limit))
    if main.num_rows == 0:
        return None
    loose = [each for each in source.schema.attributes if each.column is None]
    query = eav_query(source.tables, source.schema, keys) if loose else ""
    queries = _by_pages(query, "ctid", source.lanes.shares(source.lanes.eav_pages)) if loose else []
    room = _Room(limit)
    try:
        return pivot(source.schema, main, [_batches(source, each, room) for each in queries])
    except _TooMuch:
        raise _TooMuch(row_ids_of(main.column("key"))) from None


def _main(source: Source, keys: Keys, limit: int) -> pa.Table:
    import pyarrow as pa

    query = main_query(source.tables, source.schema, keys)
    queries = _by_pages(query, "m.ctid", source.lanes.shares(source.lanes.main_pages))
    room = _Room(limit)
    with ThreadPoolExecutor(len(queries)) as pool:
        found = list(pool.map(lambda each: _fetched(source, each, room), queries))
    table = pa.concat_tables(part for part, _ in found)
    if not all(whole for _, whole in found):
        # What all lanes have seen of the keys tells best where their middle is.
        raise _TooMuch(row_ids_of(table.column("key")))
    return table


def _by_pages(query: str, column: str, shares: Sequence[tuple[int, int | None]]) -> list[str]:
    """A query that ends in its conditions, for each share of the pages."""
    if len(shares) == 1:
        return [query]
    return [
        f"{query} AND {column} >= '({low},0)'::tid" + (f" AND {column} < '({high},0)'::tid" if high is not None else "")
        for low, high in shares
    ]


def main_query(tables: EntityTables, schema: EntitySchema, keys: Keys) -> str:
    """The SQL of the keys and everything but `eav_data`. Text, because it travels to an ADBC connection in a task."""
    bound = [sql.SQL("{} AS {}").format(_wire(each), _name(at)) for at, each in enumerate(bound_to_columns(schema))]
    number = sql.Literal(schema.schema_id)
    if isinstance(keys, Live):
        settled = (
            sql.SQL(
                " AND NOT EXISTS (SELECT FROM {log} c WHERE c.schema_id = {schema} AND c.flushed_at = 0"
                " AND c.row_id = m.ltbase_row_id)"
            ).format(log=identifier(tables.log), schema=number)
            if keys.settled
            else sql.SQL("")
        )
        query = sql.SQL(
            "SELECT m.ltbase_row_id AS key, m.ltbase_created_at AS created, m.ltbase_updated_at AS updated{bound}"
            " FROM {main} m WHERE m.ltbase_schema_id = {schema}"
            " AND m.ltbase_deleted_at IS NULL{within}{settled}"
        ).format(
            bound=_more(bound),
            main=identifier(tables.main),
            schema=number,
            within=_within("m.ltbase_row_id", keys.within),
            settled=settled,
        )
        return query.as_string()
    query = sql.SQL(
        "SELECT c.row_id AS key, greatest(c.changed_at, last.at + 1) AS changed_at,"
        " CASE WHEN m.ltbase_row_id IS NULL OR m.ltbase_deleted_at IS NOT NULL THEN"
        " greatest(coalesce(m.ltbase_deleted_at, c.deleted_at, greatest(c.changed_at, last.at + 1)), 1)"
        " ELSE 0 END AS deleted_at,"
        " m.ltbase_created_at AS created, m.ltbase_updated_at AS updated, m.ltbase_deleted_at AS deleted{bound}"
        " FROM {log} c LEFT JOIN {main} m ON m.ltbase_schema_id = {schema} AND m.ltbase_row_id = c.row_id"
        " LEFT JOIN {last} ON last.row_id = c.row_id WHERE c.schema_id = {schema} AND c.flushed_at = 0{chosen}"
    ).format(
        bound=_more(bound),
        log=identifier(tables.log),
        main=identifier(tables.main),
        schema=number,
        last=_last(tables, schema, keys),
        chosen=_chosen("c.row_id", keys),
    )
    return query.as_string()


def _last(tables: EntityTables, schema: EntitySchema, keys: Listed | Dirty) -> sql.Composed:
    """When the rows were flushed last: for a list in one go, for a range, which few of its rows are in, one by one."""
    query = (
        "(SELECT p.row_id, max(p.changed_at) AS at FROM {log} p WHERE p.schema_id = {schema} AND p.flushed_at <> 0"
        "{chosen} GROUP BY p.row_id) last"
        if isinstance(keys, Listed)
        else "LATERAL (SELECT c.row_id, max(p.changed_at) AS at FROM {log} p WHERE p.schema_id = {schema}"
        " AND p.flushed_at <> 0 AND p.row_id = c.row_id) last"
    )
    chosen = _chosen("p.row_id", keys) if isinstance(keys, Listed) else sql.SQL("")
    return sql.SQL(query).format(log=identifier(tables.log), schema=sql.Literal(schema.schema_id), chosen=chosen)


_INDEXED = sql.SQL("attr_id, nullif(array_indices, '') AS at")
_PLAIN = sql.SQL("CASE WHEN array_indices <> '' THEN -attr_id ELSE attr_id END AS attr_id")


def eav_query(tables: EntityTables, schema: EntitySchema, keys: Keys) -> str:
    """The SQL of the attribute rows: key, attribute, index and the one value that counts for the attribute's type.

    Every column on the wire costs both sides, so Postgres chooses between the two of a value; and where no attribute is
    a list, a number below zero says of an index that it is there, which is all that counts.
    """
    loose = [each for each in schema.attributes if each.column is None]
    number = sql.Literal(schema.schema_id)
    among = (
        sql.SQL(
            " AND row_id IN (SELECT c.row_id FROM {log} c WHERE c.schema_id = {schema} AND c.flushed_at = 0{within})"
        ).format(log=identifier(tables.log), schema=number, within=_within("c.row_id", keys.within))
        if isinstance(keys, Dirty)
        else sql.SQL("")
    )
    query = sql.SQL(
        "SELECT row_id AS key, {attribute}, {value} AS value"
        " FROM {eav} WHERE schema_id = {schema}{chosen}{among}{wanted}"
    ).format(
        eav=identifier(tables.eav),
        schema=number,
        attribute=_INDEXED if any(each.is_list or each.id < 1 for each in loose) else _PLAIN,
        value=_value(loose),
        wanted=_wanted([each.id for each in loose]),
        chosen=_chosen("row_id", keys),
        among=among,
    )
    return query.as_string()


def _fetched(source: Source, query: str, room: _Room) -> tuple[pa.Table, bool]:
    """What a query brings, and whether that is all of it."""
    import pyarrow as pa

    batches: list[pa.RecordBatch] = []
    try:
        batches.extend(_batches(source, query, room))
    except _TooMuch:
        return pa.Table.from_batches(batches), False
    return pa.Table.from_batches(batches), True


def _batches(source: Source, query: str, room: _Room) -> Iterator[pa.RecordBatch]:
    """What a query brings, at least one batch; the one that is too much is the last."""
    import pyarrow as pa

    seconds = source.timeout_seconds
    until = time.monotonic() + seconds if seconds else math.inf
    millis = min(math.ceil(seconds * 1000), _MOST_MILLIS)
    try:
        with stream(source.address.fresh(), query, snapshot=source.snapshot, statement_millis=millis) as opened:
            yield pa.RecordBatch.from_pylist([], opened.schema)
            for batch in opened:
                yield batch
                if not room.take(batch.nbytes):
                    raise _TooMuch(None)
                if time.monotonic() > until:
                    raise _late(seconds)
    except ModakError:
        if time.monotonic() <= until:
            raise
        # Postgres itself ends a query that brings nothing for so long.
        raise _late(seconds) from None


def _late(seconds: float) -> ModakError:
    return ModakError(
        "entities.timeout",
        f"Reading rows took longer than {seconds:g} s.",
        hint="Raise MODAK_ENTITIES_QUERY_TIMEOUT, or lower the batch size.",
        retryable=True,
    )


def _halves(keys: Keys, row_ids: Any) -> Sequence[Keys]:
    """The same keys in two, cut in the middle of the ids that are known; nothing where there is only one."""
    if isinstance(keys, Listed):
        return keys.halves()
    import pyarrow.compute as pc

    known = pc.unique(row_ids)
    if len(known) < 2:
        return ()
    middle = known[pc.sort_indices(known)[len(known) // 2].as_py()].as_py()
    parts = (KeyRange(keys.within.lower, middle), KeyRange(middle, keys.within.upper))
    if isinstance(keys, Dirty):
        return tuple(map(Dirty, parts))
    return tuple(Live(part, keys.settled) for part in parts)


def _wire(attribute: Attribute) -> sql.Composed:
    column = sql.Identifier("m", attribute.column or "")
    family = (attribute.column or "").partition("_")[0]
    if family in _NATIVE and attribute.scalar != "numeric":
        return sql.SQL("{}").format(column)
    if family == "double":
        # A number's shortest text is exact; its own cast to numeric keeps fifteen digits.
        return sql.SQL("{}::text::numeric::text").format(column)
    return sql.SQL("{}::text").format(column)


def _name(at: int) -> sql.Identifier:
    return sql.Identifier(f"b{at}")


def _more(columns: Sequence[sql.Composed]) -> sql.Composed:
    return sql.Composed([part for column in columns for part in (sql.SQL(", "), column)])


def _chosen(column: str, keys: Keys) -> sql.Composed:
    if isinstance(keys, Listed):
        among: Any = f" AND {column} = ANY({{}}::uuid[])"
        return sql.SQL(among).format(sql.Literal(f"{{{keys.row_ids}}}"))
    return _within(column, keys.within)


# Milliseconds are in value_numeric. A text such as 20260101 must not pass for some, so it is made one that never fits.
_DATED = "CASE WHEN {} AND value_text NOT LIKE '____-%' THEN '?' || value_text ELSE value_text END"


def _value(loose: Sequence[Attribute]) -> sql.Composed:
    """Texts for texts, else numbers, and texts only where there is no number."""
    texts = [each.id for each in loose if each.scalar in ("text", "uuid")]
    moments = [each.id for each in loose if each.scalar in ("date", "datetime")]
    worded = sql.SQL(_DATED).format(_one_of(moments)) if moments else sql.SQL("value_text")
    number = sql.SQL("coalesce(value_numeric::text, {})").format(worded)
    if not texts:
        return sql.Composed([number])
    if len(texts) == len(loose):
        return sql.Composed([sql.SQL("value_text")])
    return sql.SQL("CASE WHEN {} THEN value_text ELSE {} END").format(_one_of(texts), number)


def _wanted(ids: Sequence[int]) -> sql.Composed:
    """The attributes that are read."""
    return sql.SQL(" AND {}").format(_one_of(ids))


def _one_of(ids: Sequence[int]) -> sql.Composed:
    """Whether an attribute is one of some; Postgres compares two numbers faster than it looks into a list."""
    low, high = min(ids), max(ids)
    if high - low + 1 == len(set(ids)):
        return sql.SQL("attr_id BETWEEN {}::int2 AND {}::int2").format(sql.Literal(low), sql.Literal(high))
    return sql.SQL("attr_id = ANY({}::int2[])").format(sql.Literal(list(ids)))


def _within(column: str, within: KeyRange) -> sql.Composed:
    parts: list[sql.Composed] = []
    for sign, bound in ((">=", within.lower), ("<", within.upper)):
        if bound is not None:
            text: Any = f" AND {column} {sign} {{}}::uuid"
            parts.append(sql.SQL(text).format(sql.Literal(bound)))
    return sql.Composed(parts)
