"""Every change of state as one guarded statement, each on the caller's connection and in the caller's transaction.

`write.py` strings them together. Each is a compare-and-swap on what the caller has read: when it changes no row,
somebody else was faster, and that is a `Conflict`, never a silent success.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, LiteralString

import psycopg
from psycopg.types.json import Jsonb

from modak.catalog.lease import Epoch
from modak.catalog.records import Cutline, LakeColumns, NewPartition, TableConfig
from modak.core.axis import TierKey
from modak.core.errors import Conflict, ModakError, NotLeader, Refused
from modak.core.ids import OpId
from modak.core.states import OpPhase, PartitionState
from modak.lake.model import CATALOG, LakeName, Prepared

Conn = psycopg.Connection[Any]

_SWAP: LiteralString = """
    UPDATE modak_iceberg.iceberg_tables
    SET metadata_location = %(new)s, previous_metadata_location = %(old)s
    WHERE catalog_name = %(catalog)s AND table_namespace = %(namespace)s AND table_name = %(name)s
        AND metadata_location = %(old)s AND (iceberg_type = 'TABLE' OR iceberg_type IS NULL)
"""
_CREATE: LiteralString = """
    INSERT INTO modak_iceberg.iceberg_tables
        (catalog_name, table_namespace, table_name, metadata_location, previous_metadata_location, iceberg_type)
    VALUES (%(catalog)s, %(namespace)s, %(name)s, %(new)s, NULL, 'TABLE')
    ON CONFLICT DO NOTHING
"""
_HOLD: LiteralString = """
    SELECT 1 FROM modak_iceberg.iceberg_tables
    WHERE catalog_name = %(catalog)s AND table_namespace = %(namespace)s AND table_name = %(name)s FOR NO KEY UPDATE
"""
_UNPUBLISH: LiteralString = """
    DELETE FROM modak_iceberg.iceberg_tables
    WHERE catalog_name = %(catalog)s AND table_namespace = %(namespace)s AND table_name = %(name)s
        AND metadata_location = %(old)s
"""
_WITHDRAW: LiteralString = """
    INSERT INTO modak.withdrawals (catalog_uri, lake_namespace, lake_name, location)
    SELECT b.catalog_uri, t.lake_namespace, t.lake_name, t.location
    FROM modak.publications b JOIN modak.tables t USING (table_id) WHERE t.table_id = %s
    ON CONFLICT (catalog_uri, lake_namespace, lake_name)
    DO UPDATE SET location = excluded.location, asked_at = excluded.asked_at
"""
_LEADS: LiteralString = """
    SELECT expires_at > clock_timestamp() FROM modak.leader WHERE epoch = %s AND holder = %s FOR SHARE
"""
_ADVANCE: LiteralString = """
    UPDATE modak.cutline SET t = %(to)s, snapshot_id = %(snapshot)s, metadata_location = %(location)s
    WHERE table_id = %(table)s AND t IS NOT DISTINCT FROM %(from)s
"""
_MOVE: LiteralString = """
    UPDATE modak.cutline SET t = %(t)s, snapshot_id = %(snapshot_id)s, metadata_location = %(metadata_location)s,
        frontier = %(frontier)s::pg_lsn, retention_line = %(retention_line)s, lake_props = %(lake_props)s,
        heal_until = %(heal_until)s::pg_lsn
    WHERE table_id = %(table_id)s AND t IS NOT DISTINCT FROM %(was_t)s
        AND snapshot_id IS NOT DISTINCT FROM %(was_snapshot_id)s AND metadata_location = %(was_metadata_location)s
        AND frontier IS NOT DISTINCT FROM %(was_frontier)s::pg_lsn
        AND retention_line IS NOT DISTINCT FROM %(was_retention_line)s
        AND heal_until IS NOT DISTINCT FROM %(was_heal_until)s::pg_lsn
"""
_NOTE_COLUMNS: LiteralString = """
    INSERT INTO modak.lake_columns AS l (table_id, numbers, names) VALUES (%s, %s, %s)
    ON CONFLICT (table_id) DO UPDATE SET numbers = excluded.numbers, names = excluded.names
    WHERE (l.numbers, l.names) IS DISTINCT FROM (excluded.numbers, excluded.names)
"""
_NOTE_COLUMNS_OF: LiteralString = """
    INSERT INTO modak.lake_columns (table_id, numbers, names)
    SELECT c.table_id, %(numbers)s, %(names)s FROM modak.cutline c
    WHERE c.table_id = %(table)s AND c.metadata_location = %(location)s
    ON CONFLICT DO NOTHING
"""
_TELL_PINS: LiteralString = """
    UPDATE modak.read_pins p SET lake_columns = to_jsonb(l) FROM modak.lake_columns l
    WHERE l.table_id = %(table)s AND p.table_id = l.table_id AND p.lake_columns IS NULL
        AND p.metadata_location = %(location)s
"""
_NEW_PINS: LiteralString = """
    SELECT count(*) FROM modak.read_pins
    WHERE table_id = %s AND snapshot_id = ANY (%s) AND expires_at > clock_timestamp()
"""
_ADD_PARTITION: LiteralString = """
    INSERT INTO modak.partitions
        (table_id, partition_name, lower_bound, upper_bound, state, leaf_oid, leaf_schema, relfilenode, problem,
        attachment)
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
"""
_REGISTER: LiteralString = """
    INSERT INTO modak.tables (schema_name, table_name, relid, mode, pk_columns, pk_attnums, tier_key, tier_attnum, axis,
        partition_width, width_months, width_zone, layout, keep_heap, heap_retention, lake_retention, chunk_rows,
        profile_id, lake_namespace, lake_name, location, numeric_as)
    VALUES (%(schema)s, %(name)s, %(relid)s, %(mode)s, %(pk_columns)s, %(pk_attnums)s, %(tier_key)s, %(tier_attnum)s,
        %(axis)s, %(width)s, %(months)s, %(zone)s, %(layout)s, %(keep_heap)s, %(heap_retention)s, %(lake_retention)s,
        %(chunk_rows)s, %(profile_id)s, %(lake_namespace)s, %(lake_name)s, %(location)s, %(numeric_as)s)
    ON CONFLICT DO NOTHING
    RETURNING table_id
"""


def hold_epoch(conn: Conn, epoch: Epoch) -> None:
    """Stop unless this process still leads; until the transaction ends nobody else can take over."""
    row = conn.execute(_LEADS, (epoch.number, epoch.holder)).fetchone()
    if row is None or not row[0]:
        raise NotLeader(
            "lease.lost",
            f"The lease of epoch {epoch.number} has ended; nothing was changed.",
            hint="Another worker goes on from the journal.",
        )


def hold_op(conn: Conn, op_id: OpId, phase: OpPhase) -> None:
    """Lock the journal row and stop unless the operation is in the expected phase."""
    row = conn.execute("SELECT phase FROM modak.op_log WHERE op_id = %s FOR UPDATE", (op_id,)).fetchone()
    found = row[0] if row else "missing"
    if found != phase:
        raise Conflict(
            "journal.moved_on", f"Operation {op_id} is {found}, not {phase}: somebody else has dealt with it."
        )


def hold_pointer(conn: Conn, name: LakeName) -> None:
    """Make every other commit to a lake table wait until the transaction ends."""
    conn.execute(_HOLD, {"catalog": CATALOG, "namespace": name.namespace_text, "name": name.name})


def publish(conn: Conn, prepared: Prepared) -> None:
    """Make a prepared lake commit visible: the pointer moves from its base to the new metadata, or is created."""
    where = {
        "catalog": CATALOG,
        "namespace": prepared.identifier.namespace_text,
        "name": prepared.identifier.name,
        "new": prepared.new_location,
        "old": prepared.base_location,
    }
    done = conn.execute(_CREATE if prepared.base_location is None else _SWAP, where).rowcount
    if done != 1:
        raise Conflict(
            "lake.pointer_moved",
            f"Somebody else has committed to {prepared.identifier} since {prepared.base_location or 'we looked'}.",
        )


def unpublish(conn: Conn, name: LakeName, metadata_location: str) -> None:
    """Take a table out of the lake's catalog, if it still is where it was read."""
    where = {"catalog": CATALOG, "namespace": name.namespace_text, "name": name.name, "old": metadata_location}
    if conn.execute(_UNPUBLISH, where).rowcount != 1:
        raise Conflict("lake.pointer_moved", f"{name} is gone or has moved on from {metadata_location}.")


def advance(
    conn: Conn, table_id: int, from_t: TierKey | None, to_t: TierKey, *, snapshot_id: int | None, metadata_location: str
) -> None:
    """Move T from the value read, together with S and its pointer."""
    change = {"table": table_id, "from": from_t, "to": to_t, "snapshot": snapshot_id, "location": metadata_location}
    if conn.execute(_ADVANCE, change).rowcount != 1:
        raise Conflict("catalog.cutline_moved", f"The cut-line of table {table_id} is no longer at {from_t}.")


def move_cutline(conn: Conn, was: Cutline, becomes: Cutline) -> None:
    """Move any of T, S, F, R from exactly the values read."""
    if becomes.table_id != was.table_id:
        raise ModakError("catalog.cutline", "A cut-line cannot move to another table.")
    names = ("t", "snapshot_id", "metadata_location", "frontier", "retention_line", "heal_until")
    change = {name: getattr(becomes, name) for name in names} | {f"was_{name}": getattr(was, name) for name in names}
    change |= {"table_id": was.table_id, "lake_props": Jsonb(dict(becomes.lake_props))}
    if conn.execute(_MOVE, change).rowcount != 1:
        raise Conflict(
            "catalog.cutline_moved", f"The lines of table {was.table_id} are no longer those that were read."
        )


def note_columns(conn: Conn, table_id: int, columns: LakeColumns) -> None:
    """Write down the names that the lake has now, for readers that cannot look into its metadata."""
    conn.execute(_NOTE_COLUMNS, (table_id, Jsonb(dict(columns.numbers)), list(columns.names)))


def note_columns_of(conn: Conn, table_id: int, columns: LakeColumns, metadata_location: str) -> None:
    """The same for a table of which none were written down, unless a commit does so first; its pins get to know."""
    values = {"table": table_id, "numbers": Jsonb(dict(columns.numbers)), "names": list(columns.names)}
    values["location"] = metadata_location
    if conn.execute(_NOTE_COLUMNS_OF, values).rowcount:
        conn.execute(_TELL_PINS, values)


def step_partitions(
    conn: Conn, table_id: int, names: Collection[str], from_state: PartitionState, to_state: PartitionState
) -> None:
    """Take all the named partitions one step; all of them or none."""
    done = conn.execute(
        "UPDATE modak.partitions SET state = %s WHERE table_id = %s AND state = %s AND partition_name = ANY (%s)",
        (to_state, table_id, from_state, list(names)),
    ).rowcount
    if done != len(set(names)):
        raise Conflict(
            "catalog.partition_moved", f"{done} of {len(set(names))} partitions of table {table_id} were {from_state}."
        )


def add_partitions(conn: Conn, table_id: int, partitions: Sequence[NewPartition]) -> None:
    """Take new leaves into the catalog."""
    rows = [
        (table_id, p.name, p.lower, p.upper, p.state, p.leaf_oid, p.leaf_schema, p.relfilenode, p.problem, p.attachment)
        for p in partitions
    ]
    with conn.cursor() as cursor:
        cursor.executemany(_ADD_PARTITION, rows)


def note_leaf(
    conn: Conn, table_id: int, name: str, leaf_oid: int, *, relfilenode: int | None, trigger_oid: int | None
) -> None:
    """Journal on a partition which file and which trigger its export relies on."""
    done = conn.execute(
        "UPDATE modak.partitions SET relfilenode = %s, trigger_oid = %s"
        " WHERE table_id = %s AND partition_name = %s AND leaf_oid = %s AND state <> 'dropped'",
        (relfilenode, trigger_oid, table_id, name, leaf_oid),
    ).rowcount
    if done != 1:
        raise Conflict("catalog.partition_moved", f"Partition {name} of table {table_id} is gone.")


def update_partition(
    conn: Conn, table_id: int, leaf_oid: int, *, name: str, schema: str, lower: TierKey | None, upper: TierKey | None
) -> None:
    """Follow a leaf that its owner has renamed, or detached and attached with other bounds while it was hot."""
    done = conn.execute(
        "UPDATE modak.partitions SET partition_name = %(name)s, leaf_schema = %(schema)s, lower_bound = %(lower)s,"
        " upper_bound = %(upper)s WHERE table_id = %(table)s AND leaf_oid = %(leaf)s AND state <> 'dropped'"
        " AND (state = 'hot' OR (lower_bound, upper_bound) IS NOT DISTINCT FROM"
        " (%(lower)s::bigint, %(upper)s::bigint))",
        {"name": name, "schema": schema, "lower": lower, "upper": upper, "table": table_id, "leaf": leaf_oid},
    ).rowcount
    if done != 1:
        raise Conflict(
            "catalog.partition_moved", f"Leaf {leaf_oid} of table {table_id} is gone or has other bounds than exported."
        )


def note_problem(conn: Conn, table_id: int, name: str, problem: str | None) -> bool:
    """Show a problem of a partition in the status, or take it away; whether that is news."""
    done = conn.execute(
        "UPDATE modak.partitions SET problem = %(problem)s WHERE table_id = %(table)s AND partition_name = %(name)s"
        " AND state <> 'dropped' AND problem IS DISTINCT FROM %(problem)s",
        {"problem": problem, "table": table_id, "name": name},
    )
    return done.rowcount > 0


def forget_partition(conn: Conn, table_id: int, leaf_oid: int) -> None:
    """Take a leaf out of the catalog that its owner has dropped or detached before the lake had it."""
    done = conn.execute(
        "DELETE FROM modak.partitions WHERE table_id = %s AND leaf_oid = %s AND state IN ('hot', 'sealing', 'tiering')",
        (table_id, leaf_oid),
    )
    if done.rowcount != 1:
        raise Conflict("catalog.partition_moved", f"Leaf {leaf_oid} of table {table_id} is unknown or in the lake.")


def require_no_new_pins(conn: Conn, table_id: int, untagged: Collection[int]) -> None:
    """Stop when a reader has pinned, or is pinning, a snapshot that neither the table nor a tag of ours will name.

    Readers hold the lock shared until their pin is committed. It is only tried: a reader who keeps a transaction open
    must not hold up commits, and the next attempt keeps all tags. Those who come later see the new snapshot.
    """
    if not untagged:
        return
    quiet = conn.execute("SELECT pg_try_advisory_xact_lock(modak.pin_lock_key(%s))", (table_id,)).fetchone()
    row = conn.execute(_NEW_PINS, (table_id, list(untagged))).fetchone()
    if not (quiet and quiet[0]) or (row and row[0]):
        raise Conflict("catalog.new_pin", "A reader has pinned a snapshot meanwhile: prepare it with a tag.")


def set_frozen(conn: Conn, table_id: int, foreign: Mapping[str, Any] | None) -> None:
    """Stop publication of a table because of a foreign snapshot, or let it go on."""
    value = None if foreign is None else Jsonb(dict(foreign))
    if conn.execute("UPDATE modak.tables SET frozen = %s WHERE table_id = %s", (value, table_id)).rowcount != 1:
        raise Conflict("catalog.not_registered", f"Table {table_id} is no longer registered.")


def require_not_frozen(conn: Conn, table_id: int) -> None:
    """Stop when a foreign snapshot has frozen publication."""
    row = conn.execute("SELECT frozen FROM modak.tables WHERE table_id = %s FOR SHARE", (table_id,)).fetchone()
    if row is None:
        raise Conflict("catalog.not_registered", f"Table {table_id} is no longer registered.")
    if row[0] is not None:
        raise Refused("lake.frozen", f"Publication is frozen by a foreign snapshot: {row[0]}.")


def register(conn: Conn, config: TableConfig) -> int:
    """Write down a table; returns its id. A table that is already there is a conflict."""
    width = config.width
    row = conn.execute(
        _REGISTER,
        {
            "schema": config.name.schema,
            "name": config.name.name,
            "relid": config.relid,
            "mode": config.mode,
            "pk_columns": list(config.pk_columns),
            "pk_attnums": list(config.pk_attnums),
            "tier_key": config.tier_key,
            "tier_attnum": config.tier_attnum,
            "axis": config.axis,
            "width": width.amount if width else None,
            "months": width.months if width else False,
            "zone": width.zone if width else "UTC",
            "layout": Jsonb(dict(config.layout)),
            "keep_heap": config.keep_heap,
            "heap_retention": config.heap_retention,
            "lake_retention": config.lake_retention,
            "chunk_rows": config.chunk_rows,
            "profile_id": config.profile_id,
            "lake_namespace": config.lake.namespace_text,
            "lake_name": config.lake.name,
            "location": config.location,
            "numeric_as": config.numeric_as,
        },
    ).fetchone()
    if row is None:
        raise Conflict("catalog.registered", f"{config.name} has been registered meanwhile.")
    return int(row[0])


def begin_cutline(conn: Conn, line: Cutline) -> None:
    """Set the first lines of a table."""
    conn.execute(
        "INSERT INTO modak.cutline"
        " (table_id, t, snapshot_id, metadata_location, frontier, retention_line, first_floor, lake_props)"
        " VALUES (%s, %s, %s, %s, %s::pg_lsn, %s, %s, %s)",
        (
            line.table_id,
            line.t,
            line.snapshot_id,
            line.metadata_location,
            line.frontier,
            line.retention_line,
            line.first_floor,
            Jsonb(dict(line.lake_props)),
        ),
    )


def unregister(conn: Conn, table_id: int) -> None:
    """Forget a table and everything the catalog holds about it, the journal excepted.

    Where it may stand in a foreign catalog, it waits to be taken out there.
    """
    # Nobody may announce a publication between the look at them and the end of the table.
    conn.execute("SELECT FROM modak.tables WHERE table_id = %s FOR UPDATE", (table_id,))
    conn.execute(_WITHDRAW, (table_id,))
    if conn.execute("DELETE FROM modak.tables WHERE table_id = %s", (table_id,)).rowcount != 1:
        raise Conflict("catalog.not_registered", f"Table {table_id} is no longer registered.")
