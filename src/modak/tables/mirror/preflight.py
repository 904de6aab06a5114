"""Everything that could be wrong with mirroring a table, found before anything is changed and told in one list.

`look` asks the server what only it knows, `inspect_mirror` is pure. What it returns also says how long the first copy
will take and how much WAL the server keeps meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg

from modak.core.axis import Width
from modak.core.names import quote
from modak.lake.model import LakeTable, layout_for
from modak.postgres.connect import translate
from modak.postgres.describe import PgTable, axis_of
from modak.tables.mirror.leaves import true_leaves
from modak.tables.registration.preflight import (
    EXPECTED_ROWS_PER_SECOND,
    Preflight,
    Problem,
    Shape,
    bounded,
    column_problems,
    foreign_key_problem,
    grid_problems,
    key_problems,
    lake_problems,
    map_columns,
    name_problems,
    notes,
    schema_problem,
)
from modak.tables.registration.request import RegisterRequest, length

MODE = "modak.mode"
"""Table property: which kind of life the lake table has led; a mirror has no row that its heap does not have."""
PLAIN_MIRROR = "mirrored"
RETAINING_MIRROR = "mirrored with heap retention"

_WITH_ROOT = 130_000
_WITH_GENERATED = 180_000

_FACTS = """
SELECT current_setting('server_version_num')::int, current_setting('wal_level'),
    current_setting('max_replication_slots')::int - (SELECT count(*) FROM pg_replication_slots),
    current_setting('max_wal_senders')::int - (SELECT count(*) FROM pg_stat_replication),
    pg_is_in_recovery(),
    ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = %(oid)s AND a.attgenerated = 'v')
"""
_WAL_RATE = """
SELECT wal_bytes / greatest(extract(epoch FROM clock_timestamp() - stats_reset), 1) FROM pg_stat_wal
"""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the server has left for one more mirror."""

    version: int
    wal_level: str
    free_slots: int
    free_senders: int
    standby: bool
    wal_bytes_per_second: float
    virtual_columns: tuple[str, ...] = ()
    rows: float = 0.0
    bytes: int = 0
    unlogged_leaves: tuple[str, ...] = ()
    foreign_leaves: tuple[str, ...] = ()


def look(conn: psycopg.Connection[Any], table: PgTable) -> ServerFacts:
    """Ask the server; `conn` is in autocommit mode."""
    try:
        row = conn.execute(_FACTS, {"oid": table.oid}).fetchone()
        assert row is not None
        leaves = true_leaves(conn, table.oid)
        rate = conn.execute(_WAL_RATE).fetchone() if row[0] >= 140_000 else None
    except psycopg.Error as error:
        raise translate(error) from error
    return ServerFacts(
        version=row[0],
        wal_level=row[1],
        free_slots=row[2],
        free_senders=row[3],
        standby=row[4],
        wal_bytes_per_second=float(rate[0] or 0) if rate else 0.0,
        virtual_columns=tuple(row[5]),
        rows=sum(max(leaf.rows_estimate, 0.0) for leaf in leaves),
        bytes=sum(leaf.bytes for leaf in leaves),
        unlogged_leaves=tuple(str(leaf.name) for leaf in leaves if leaf.persistence == "u"),
        foreign_leaves=tuple(str(leaf.name) for leaf in leaves if leaf.kind == "f"),
    )


def inspect_mirror(
    table: PgTable, request: RegisterRequest, existing: LakeTable | None, default_rows: bool, server: ServerFacts
) -> tuple[Preflight, Shape | None]:
    """Find everything wrong; the shape is there only when nothing is."""
    problems = [
        *_server_problems(table, server),
        *_table_problems(table, request, default_rows, server),
        *lake_problems(request, existing),
        *_takeover_problems(request, existing),
    ]
    rows = round(server.rows)
    seconds = max(1.0, rows / EXPECTED_ROWS_PER_SECOND)
    preflight = Preflight(
        tuple(problems),
        (*(notes(table, existing) if request.heap_retention else ()), *_notes(server)),
        len([leaf for leaf in table.leaves if not leaf.is_spill]),
        rows,
        server.bytes,
        round(seconds * server.wal_bytes_per_second),
    )
    return preflight, None if problems else _shape(table, request)


def _server_problems(table: PgTable, server: ServerFacts) -> Iterator[Problem]:
    if server.standby:
        yield Problem("register.standby", "The server is a standby.", "Point MODAK_PG_URL at the primary.")
    if server.wal_level != "logical":
        yield Problem(
            "register.wal_level",
            f"wal_level is {server.wal_level}; following changes needs logical.",
            "Run ALTER SYSTEM SET wal_level = logical and restart the server.",
        )
    if server.version < _WITH_ROOT:
        yield Problem("register.version", "Mirroring needs Postgres 13 or newer.")
    if server.free_slots < 1:
        yield Problem(
            "register.slots",
            "All replication slots of the server are taken.",
            "Drop one that nobody uses, or raise max_replication_slots and restart the server.",
        )
    if server.free_senders < 1:
        yield Problem(
            "register.senders",
            "All WAL senders of the server are taken.",
            "Raise max_wal_senders and restart the server.",
        )
    if "replication" not in table.privileges:
        yield Problem(
            "register.privileges",
            "The worker's role may not make replication slots.",
            "Run: ALTER ROLE <the worker's role> REPLICATION.",
        )
    if "create_in_database" not in table.privileges:
        yield Problem(
            "register.privileges",
            "The worker's role may not make publications in this database.",
            "Run: GRANT CREATE ON DATABASE … TO <the worker's role>.",
        )


def _table_problems(
    table: PgTable, request: RegisterRequest, default_rows: bool, server: ServerFacts
) -> Iterator[Problem]:
    by_name = {column.name: column for column in table.columns}
    yield from column_problems(table, request)
    if table.relkind not in ("r", "p"):
        yield Problem("register.not_a_table", "Only tables can be mirrored, with or without partitions.")
    if request.heap_retention is not None:
        yield from grid_problems(table, request, default_rows)
        yield from foreign_key_problem(table, "Drop those foreign keys, or leave out --heap-retention.")
        yield from schema_problem(table)
    yield from key_problems(table, request, by_name)
    tier = by_name.get(request.tier_key)
    if tier is not None and not tier.not_null:
        yield Problem(
            "register.tier_key_null", f"The tier key {quote(request.tier_key)} may be NULL.", "Set it NOT NULL."
        )
    yield from map_columns(table, request.numeric_as, frozenset())[1]
    yield from name_problems(table)
    if not {"owner", "owner_of_partitions"} <= table.privileges:
        yield Problem(
            "register.privileges",
            f"The worker's role does not own {table.name} and all its partitions,"
            " so it cannot publish it or set its replica identity.",
            f"Run: GRANT {quote(table.owner)} TO <the worker's role>.",
        )
    if table.inheritance_children:
        children = ", ".join(table.inheritance_children)
        yield Problem(
            "register.inheritance",
            f"Other tables inherit from it ({children}); their rows would be in the copy, but not among its changes.",
            "Make them partitions, or register them on their own.",
        )
    unlogged = (*server.unlogged_leaves, *([str(table.name)] if table.persistence == "u" else []))
    if unlogged:
        yield Problem(
            "register.unlogged", f"Changes of unlogged tables are not in the WAL: {', '.join(sorted(set(unlogged)))}."
        )
    if server.foreign_leaves:
        yield Problem("register.partition_kind", f"Foreign tables cannot be mirrored: {server.foreign_leaves[0]}.")
    yield from _generated_problems(table, server)


def _generated_problems(table: PgTable, server: ServerFacts) -> Iterator[Problem]:
    if server.virtual_columns:
        names = ", ".join(quote(name) for name in server.virtual_columns)
        yield Problem("register.generated", f"Virtual generated columns are not in the WAL: {names}.", "Store them.")
    stored = [column.name for column in table.columns if column.generated and column.name not in server.virtual_columns]
    if stored and server.version < _WITH_GENERATED:
        names = ", ".join(quote(name) for name in stored)
        yield Problem(
            "register.generated", f"Generated columns are in the change stream from Postgres 18 on, not here: {names}."
        )


def _takeover_problems(request: RegisterRequest, existing: LakeTable | None) -> Iterator[Problem]:
    """A plain mirror shows what the heap has and no more: a lake that holds other rows must not become one."""
    if existing is None or existing.snapshot_id is None or request.heap_retention is not None:
        return
    if existing.properties.get(MODE) != PLAIN_MIRROR:
        yield Problem(
            "register.lake_differs",
            f"The lake table at {existing.location} was not left by a plain mirror: it may hold rows that are nowhere"
            " else, and mirroring would delete them.",
            "Register it as it was before, or drop that lake table first.",
        )


def _notes(server: ServerFacts) -> Iterator[str]:
    yield "REPLICA IDENTITY FULL is set: updates and deletes write the whole old row into the WAL."
    if server.free_slots == 1:
        yield "This takes the last free replication slot of the server (max_replication_slots)."


def _shape(table: PgTable, request: RegisterRequest) -> Shape:
    tier = next(column for column in table.columns if column.name == request.tier_key)
    axis = axis_of(tier.type)
    assert axis is not None
    given = length(request.partition_width, axis, "--partition-width")
    width = Width(given) if given else None
    columns, _ = map_columns(table, request.numeric_as, frozenset({*request.pk, request.tier_key}))
    floor = bounded(table)[0].lower if request.heap_retention is not None else None
    return Shape(axis, width, layout_for(axis, width, request.tier_key), tuple(columns), floor)
