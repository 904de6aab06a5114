"""What a table looks like to Postgres, read once and turned into values that planners can reason about.

Everything comes from the system catalogs. Measuring sizes takes a weak lock per leaf, so the whole reading carries a
lock timeout: a status page must not hang behind somebody's ALTER TABLE.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import Any

import psycopg
from psycopg import sql

from modak.core.axis import Axis
from modak.core.errors import Refused
from modak.core.names import TableName
from modak.postgres.bounds import RangeBound, edge_or_open, parse_bound, to_axis
from modak.postgres.connect import translate
from modak.postgres.model import Leaf, PgColumn, PgTable, PgType, axis_of

__all__ = [
    "Leaf",
    "PgColumn",
    "PgTable",
    "PgType",
    "axis_of",
    "catalog_query",
    "describe",
    "high_water",
    "pg_type",
]

_LOCK_WAIT = "5s"
_SPILL = "_modak_spill"
_STRATEGIES = {"r": "range", "l": "list", "h": "hash"}
_KINDS = {"e": "enum", "c": "composite", "r": "range", "m": "range", "b": "scalar"}
_SAFE_NODES = frozenset({"CONST", "FUNCEXPR", "OPEXPR", "RELABELTYPE", "ARRAYEXPR"})
_FIRST_USER_OID = 16_384

Connection = psycopg.Connection[Any]


def describe(conn: Connection, name: TableName, tier_key: str | None = None) -> PgTable:
    """The table as it is now; bounds are axis values of the tier key if the table is ranged by it."""
    try:
        with _patient(conn):
            return _describe(conn, name, tier_key)
    except psycopg.Error as error:
        raise translate(error) from error


def high_water(conn: Connection, table: PgTable, tier_key: str) -> int | None:
    """The largest finite tier key, read from the topmost leaf that has rows; DEFAULT and spill do not count."""
    column = table.column(tier_key)
    axis = axis_of(column.type) if column else None
    if axis is None:
        raise Refused("postgres.tier_key", f"{tier_key!r} cannot be the tier key of {table.name}.")
    try:
        with _patient(conn):
            if table.partition_strategy is None:
                return _largest(conn, table.name, tier_key, axis)
            counted = [leaf for leaf in table.leaves if not leaf.is_default and not leaf.is_spill]
            for leaf in sorted(counted, key=lambda leaf: (leaf.upper is None, leaf.upper or 0), reverse=True):
                found = _largest(conn, leaf.table_name, tier_key, axis)
                if found is not None:
                    return found
            return None
    except psycopg.Error as error:
        raise translate(error) from error


def _describe(conn: Connection, name: TableName, tier_key: str | None) -> PgTable:
    row = conn.execute(catalog_query("describe.sql"), (name.schema, name.name)).fetchone()
    if row is None:
        raise Refused(
            "postgres.no_such_table",
            f"There is no table {name}.",
            hint="Check the schema and the spelling; unquoted names are lower case.",
        )
    (oid, owner, relkind, persistence, strategy, partition_columns, primary_key, inbound, privileges, *rest) = row
    row_security, relfilenode, pages, size, rows, time_zone = rest
    columns = _columns(conn, oid)
    ranged_by = tier_key if strategy == "r" and partition_columns == [tier_key] else None
    kind = next((column.type for column in columns if column.name == ranged_by), None)
    children = conn.execute(catalog_query("leaves.sql"), (oid,)).fetchall()
    return PgTable(
        name=name,
        oid=oid,
        owner=owner,
        relkind=relkind,
        persistence=persistence,
        partition_strategy=_STRATEGIES[strategy] if strategy else None,
        # An expression in the partition key has no column name.
        partition_columns=tuple(column or "(expression)" for column in partition_columns),
        columns=columns,
        primary_key=tuple(primary_key),
        leaves=_leaves(conn, [child for child in children if child[3]], axis_of(kind) if kind else None),
        inheritance_children=tuple(str(TableName(child[1], child[2])) for child in children if not child[3]),
        inbound_foreign_keys=tuple(inbound),
        privileges=frozenset(privileges),
        row_security=row_security,
        relfilenode=relfilenode,
        pages=pages,
        bytes=size,
        rows_estimate=rows,
        time_zone=time_zone,
    )


def _leaves(conn: Connection, children: list[tuple[Any, ...]], axis: Axis | None) -> tuple[Leaf, ...]:
    bounds = [parse_bound(child[4] or "") for child in children]
    values = _axis_values(conn, axis, [bound for bound in bounds if bound]) if axis else {}
    leaves = []
    for child, bound in zip(children, bounds, strict=True):
        oid, schema, name, _, text, relfilenode, pages, size, rows, detach_pending, kind = child
        lower = values.get(bound.lower[0]) if bound and bound.lower[0] is not None else None
        upper = values.get(bound.upper[0]) if bound and bound.upper[0] is not None else None
        leaves.append(
            Leaf(
                oid=oid,
                schema=schema,
                name=name,
                lower=None if lower is None else edge_or_open(lower, upper=False),
                upper=None if upper is None else edge_or_open(upper, upper=True),
                is_default=text == "DEFAULT",
                relfilenode=relfilenode,
                pages=pages,
                bytes=size,
                rows_estimate=rows,
                detach_pending=detach_pending,
                kind=kind,
                is_spill=name.endswith(_SPILL) and bound is not None and bound.lower[0] is None,
            )
        )
    return tuple(sorted(leaves, key=_place))


def _place(leaf: Leaf) -> tuple[bool, bool, int, str]:
    return (leaf.is_default, leaf.lower is not None, leaf.lower or 0, leaf.name)


def _axis_values(conn: Connection, axis: Axis, bounds: list[RangeBound]) -> dict[str, int]:
    edges = (edge for bound in bounds for edge in (bound.lower[0], bound.upper[0]) if edge is not None)
    texts = list(dict.fromkeys(edges))
    return dict(zip(texts, to_axis(conn, axis, texts), strict=True)) if texts else {}


def _columns(conn: Connection, oid: int) -> tuple[PgColumn, ...]:
    rows = conn.execute(catalog_query("columns.sql"), {"oid": oid}).fetchall()
    types = {row[0]: row for row in conn.execute(catalog_query("types.sql"), ([row[2] for row in rows],))}
    constant = _constant_defaults(conn, [row for row in rows if row[5] is not None and not row[8]])
    columns = []
    for row in rows:
        name, attnum, typid, typmod, not_null, default, _, missing, generated, n_distinct, deterministic, _ = row
        columns.append(
            PgColumn(
                name=name,
                attnum=attnum,
                type=pg_type(types, typid, typmod, deterministic),
                not_null=not_null,
                default=default,
                default_constant=attnum in constant,
                default_value=constant.get(attnum),
                missing_value=missing,
                generated=generated,
                n_distinct=n_distinct,
            )
        )
    return tuple(columns)


def pg_type(types: Mapping[int, tuple[Any, ...]], oid: int, typmod: int, deterministic: bool) -> PgType:
    """The type of a number and a modifier, by the rows of `types.sql`; a domain is what it is made of."""
    _, name, typtype, base, base_typmod, element = types[oid]
    if typtype == "d":
        return pg_type(types, base, base_typmod if base_typmod != -1 else typmod, deterministic)
    if element:
        inner = pg_type(types, element, typmod, deterministic)
        return PgType(name, "array", element=inner, collation_deterministic=deterministic)
    precision, scale = _typmod(name, typmod)
    kind = _KINDS.get(typtype, "other")
    return PgType(name, kind, precision, scale, None, deterministic)  # type: ignore[arg-type]


def _typmod(name: str, typmod: int) -> tuple[int | None, int | None]:
    if typmod < 0:
        return None, None
    match name:
        case "numeric":
            # Eleven bits of the scale are signed since Postgres 15: numeric(3, -2) exists.
            scale = (typmod - 4) & 0x7FF
            return ((typmod - 4) >> 16) & 0xFFFF, scale - 0x800 if scale >= 0x400 else scale
        case "varchar" | "bpchar":
            return typmod - 4, None
        case "timestamp" | "timestamptz" | "time" | "timetz" | "bit" | "varbit":
            return typmod, None
        case _:
            return None, None


def _constant_defaults(conn: Connection, rows: list[tuple[Any, ...]]) -> dict[int, str | None]:
    """The columns whose default always gives the same value, with that value as text."""
    safe = [row for row in rows if _is_constant(conn, row[6])]
    if not safe:
        return {}
    # The shown expression hides implicit casts, such as the one that rounds to the scale of a numeric.
    each = (sql.SQL("(({})::{})::text").format(sql.SQL(row[5]), sql.SQL(row[11])) for row in safe)
    values = conn.execute(sql.SQL("SELECT {}").format(sql.SQL(", ").join(each))).fetchone()
    return dict(zip((row[1] for row in safe), values or (), strict=True))


def _is_constant(conn: Connection, tree: str) -> bool:
    functions = [int(found) for found in re.findall(r":(?:funcid|opfuncid) (\d+)", tree)]
    # A function that a user wrote would run with our rights when we ask for its value.
    if not set(re.findall(r"\{([A-Z_]+)", tree)) <= _SAFE_NODES or not all(
        0 < function < _FIRST_USER_OID for function in functions
    ):
        return False
    volatile = conn.execute(
        "SELECT EXISTS (SELECT FROM pg_proc WHERE oid = ANY(%s::oid[]) AND provolatile <> 'i')", (functions,)
    ).fetchone()
    return volatile == (False,)


def _largest(conn: Connection, table: TableName, tier_key: str, axis: Axis) -> int | None:
    key = sql.Identifier(tier_key)
    finite = sql.SQL("") if axis is Axis.INTEGER else sql.SQL(" WHERE isfinite({})").format(key)
    query = sql.SQL("SELECT max({})::text FROM {}{}").format(key, sql.Identifier(table.schema, table.name), finite)
    row = conn.execute(query).fetchone()
    return to_axis(conn, axis, [row[0]])[0] if row and row[0] is not None else None


@contextmanager
def _patient(conn: Connection) -> Iterator[None]:
    with conn.transaction():
        before = conn.execute("SELECT current_setting('lock_timeout')").fetchone()
        conn.execute("SELECT set_config('lock_timeout', %s, true)", (_LOCK_WAIT,))
        yield
        # Inside a caller's transaction the local setting would outlive this block.
        conn.execute("SELECT set_config('lock_timeout', %s, true)", before)


@cache
def catalog_query(name: str) -> bytes:
    """One of the queries over the system catalogs that lie beside this module."""
    return files("modak.postgres").joinpath(name).read_bytes()
