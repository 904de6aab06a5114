"""Repairing the lake from the heap, through the delta: the next fold carries it into files.

Only keys of partitions that are attached and locked by the verification's point are touched: there the heap is the
truth, and no drop can take a partition away between the look and the write. For each key the heap row is read at the
moment of writing, by the very expressions of the capture trigger: a row becomes an upsert, no row a tombstone. Nothing
is locked against users. A key whose delta row is another one than the verification saw has been written meanwhile, and
the writer's own image is right, so it is left alone. Memory is bounded by one batch of keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import structlog
from psycopg import sql

from modak.core.errors import ModakError
from modak.core.faults import reach
from modak.core.names import TableName
from modak.core.states import PartitionState
from modak.postgres.connect import GUARDS, connect, session_sql, translate
from modak.tables.verify.compare import Differing
from modak.tables.verify.fingerprint import axis_values
from modak.tables.verify.run import View, ask_for
from modak.tables.verify.shape import Shape

log = structlog.get_logger()

BATCH_KEYS = 1_000
TRIES = 5
_LOCK_MILLIS = 300
"""Shorter than the second after which Postgres looks for a deadlock: we give way, never a user."""

_EXPRESSIONS = "SELECT i.pk, i.tier_key, i.payload FROM modak.image_sql(%s, %s::int2[], %s::int2, %s) i"
_TYPES = """
    SELECT a.attname, format_type(a.atttypid, a.atttypmod) FROM pg_attribute a
    WHERE a.attrelid = %s AND a.attname = ANY (%s) AND NOT a.attisdropped
"""
_SEEN = """
    SELECT k.pk, k.tier_key, d.version FROM ({wanted}) w
    CROSS JOIN LATERAL (SELECT {pk} AS pk, {tier} AS tier_key FROM (SELECT w.*) r) k
    LEFT JOIN modak.delta d ON d.table_id = %(table)s AND d.pk = k.pk AND d.tier_key = k.tier_key
    ORDER BY w.n
"""
_WRITE = """
    INSERT INTO modak.delta AS d (table_id, pk, tier_key, op, payload, version)
    SELECT %(table)s, s.pk, s.tier_key, CASE WHEN h.payload IS NULL THEN 2 ELSE 1 END, h.payload,
        coalesce(s.version, nextval('modak.delta_version'))
    FROM ({wanted}) w
    JOIN unnest(%(pks)s::text[], %(tiers)s::bigint[], %(versions)s::bigint[])
        WITH ORDINALITY s (pk, tier_key, version, n) ON s.n = w.n
    LEFT JOIN LATERAL (SELECT {payload} AS payload FROM ONLY {leaf} r WHERE {same}) h ON true
    ORDER BY s.pk, s.tier_key
    ON CONFLICT (table_id, pk, tier_key) DO UPDATE SET
        op = excluded.op, payload = excluded.payload, version = nextval('modak.delta_version'),
        xid = pg_current_xact_id(), updated_at = clock_timestamp(), folded_into = NULL, folded_generation = NULL
    WHERE d.version = excluded.version
"""
# The version that was seen travels in as the new row's own: where none was seen a fresh one does, which no row has.


@dataclass(frozen=True, slots=True)
class _Writing:
    """The statements for one partition, made of the expressions that its trigger uses."""

    seen: sql.Composed
    write: sql.Composed
    columns: tuple[str, ...]


def repair_differing(view: View, differing: Sequence[Differing]) -> int:
    """Write the heap's rows of all differing keys into the delta; how many delta rows were written."""
    written = 0
    # A partition that was attached below the cut-line later is not watched: its rows would only be right for a moment.
    watched = {TableName(p.leaf_schema, p.name) for p in view.state.living() if p.state is PartitionState.TIERED}
    compared = {band.index: band.leaf for band in view.bands.chosen if band.leaf is not None and band.leaf in watched}
    with connect(view.site.dsn, autocommit=True, application="modak repair") as conn:
        # With row security in the way a row would look like a deleted one: the query must fail instead.
        conn.execute(session_sql({**GUARDS, "lock_timeout": f"{_LOCK_MILLIS}ms"}))
        for portion in differing:
            for leaf, keys in _keys(view, portion, compared):
                for at in range(0, len(keys), BATCH_KEYS):
                    # Locks and pin must have held until now, or the heap may not be the truth any more.
                    view.point.check()
                    written += _patiently(view, conn, leaf, keys.slice(at, BATCH_KEYS))
    log.info("verify.repaired", table=str(view.state.table.name), rows=written)
    return written


def _keys(view: View, portion: Differing, compared: dict[int, TableName]) -> Iterator[tuple[TableName, pa.Table]]:
    """The key columns of differing rows, each key once, by partition."""
    answers = ask_for(view, portion.keys, "reading keys")
    tables = [one.rows for one in answers if one.rows is not None]
    if not tables:
        return
    rows = _plain(pa.concat_tables(tables))
    distinct = rows.group_by(rows.column_names).aggregate([])
    tier = distinct.column(view.shape.tier_column.name).combine_chunks()
    places = [view.bands.at(int(key)) for key in axis_values(tier)]
    leaves = pa.array([str(compared[at]) if at in compared else None for at in places], pa.string())
    by_name = {str(leaf): leaf for leaf in compared.values()}
    for name in pc.unique(leaves.drop_null()).to_pylist():
        yield by_name[name], distinct.filter(pc.fill_null(pc.equal(leaves, name), False))


def _plain(rows: pa.Table) -> pa.Table:
    """The same without extension types, which Arrow cannot group by."""
    columns = (rows.column(name).combine_chunks() for name in rows.column_names)
    arrays = [column.storage if isinstance(column, pa.ExtensionArray) else column for column in columns]
    return pa.Table.from_arrays(arrays, names=rows.column_names)


def _patiently(view: View, conn: psycopg.Connection[Any], leaf: TableName, keys: pa.Table) -> int:
    for attempt in range(1, TRIES + 1):
        try:
            return _write(view, conn, leaf, keys)
        except ModakError as error:
            if error.code != "postgres.busy" or attempt == TRIES:
                raise
            view.site.clock.sleep(0.2 * attempt)
    raise AssertionError("unreachable")


def _write(view: View, conn: psycopg.Connection[Any], leaf: TableName, keys: pa.Table) -> int:
    writing = _statements(view, conn, leaf)
    texts = {name: castable(keys.column(name).combine_chunks()) for name in writing.columns}
    given: dict[str, Any] = {f"k{at}": texts[name] for at, name in enumerate(writing.columns)}
    given["table"] = view.state.table.table_id
    try:
        seen = view.point.conn.execute(writing.seen, given).fetchall()
        given |= {"pks": [row[0] for row in seen], "tiers": [row[1] for row in seen], "versions": [r[2] for r in seen]}
        reach("verify.before_repair")
        written = conn.execute(writing.write, given).rowcount
        reach("verify.after_repair")
    except psycopg.Error as error:
        raise translate(error) from error
    return written


def _statements(view: View, conn: psycopg.Connection[Any], leaf: TableName) -> _Writing:
    record, shape = view.state.table, view.shape
    # Names are the same in the root and in its partitions, numbers need not be.
    row = conn.execute(
        _EXPRESSIONS, (record.relid, list(record.pk_attnums), record.tier_attnum, str(record.axis))
    ).fetchone()
    assert row is not None
    pk, tier, payload = (sql.SQL(_for_psycopg(text)) for text in row)
    names = tuple(shape.columns[at].name for at in shape.keys)
    types = dict(conn.execute(_TYPES, (record.relid, list(names))).fetchall())
    wanted = _wanted(shape, names, types)
    same = sql.SQL(" AND ").join(sql.SQL("r.{0} = w.{0}").format(sql.Identifier(name)) for name in names)
    place = sql.Identifier(leaf.schema, leaf.name)
    return _Writing(
        sql.SQL(_SEEN).format(wanted=wanted, pk=pk, tier=tier),
        sql.SQL(_WRITE).format(wanted=wanted, payload=payload, leaf=place, same=same),
        names,
    )


def _wanted(shape: Shape, names: Sequence[str], types: dict[str, str]) -> sql.Composed:
    """The keys as a relation of the table's own types, numbered by n."""
    given, casts = [], []
    for at, name in enumerate(names):
        column = next(one for one in shape.columns if one.name == name)
        kind = sql.SQL(types[name])
        text = sql.SQL("u.{}").format(sql.Identifier(f"k{at}"))
        if column.type in ("date", "timestamp", "timestamptz"):
            # Numbers, because the calendar of Postgres is wider than that of Python.
            text = sql.SQL("modak.axis_literal({}, {}::bigint)").format(sql.Literal(column.type), text)
        casts.append(sql.SQL("{}::{} AS {}").format(text, kind, sql.Identifier(name)))
        given.append(sql.SQL("{}::text[]").format(sql.Placeholder(f"k{at}")))
    aliases = sql.SQL(", ").join([*(sql.Identifier(f"k{at}") for at in range(len(names))), sql.SQL("n")])
    return sql.SQL("SELECT {}, u.n FROM unnest({}) WITH ORDINALITY u ({})").format(
        sql.SQL(", ").join(casts), sql.SQL(", ").join(given), aliases
    )


def castable(column: pa.Array) -> list[str]:
    """Key values as texts that Postgres casts to the column's own type; moments as numbers on their axis."""
    kind = column.type
    if pa.types.is_fixed_size_binary(kind):
        return [value.hex() for value in column.to_pylist()]
    if pa.types.is_binary(kind):
        return ["\\x" + value.hex() for value in column.to_pylist()]
    if pa.types.is_temporal(kind):
        return [str(value) for value in axis_values(column).tolist()]
    return list(column.cast(pa.string()).to_pylist())


def _for_psycopg(expression: str) -> str:
    """An expression of ours inside a statement with placeholders, where a percent sign stands twice."""
    return expression.replace("%", "%%")
