"""The worker's changes of `modak.delta`, each on the caller's connection and in the caller's transaction.

Users write the delta through triggers and functions; the worker takes away what the lake has, follows renamed columns,
and sweeps what was kept for readers. `write.py` strings these together with everything else that moves.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, LiteralString, Self

import psycopg
from psycopg import sql

from modak.catalog.records import DeltaRange
from modak.core.axis import TierKey
from modak.core.errors import Conflict
from modak.core.faults import reach

Conn = psycopg.Connection[Any]

_CANCEL_SECONDS = 10.0

_READ_TUPLES: LiteralString = """
    table_id = %(table)s AND folded_generation IS NULL AND pg_visible_in_snapshot(xid, %(snapshot)s::pg_snapshot)
        AND tier_key >= %(lower)s AND (%(lower_pk)s::text IS NULL OR tier_key > %(lower)s
            OR pk COLLATE "C" >= %(lower_pk)s::text)
        AND tier_key <= %(upper)s AND (tier_key < %(upper)s OR pk COLLATE "C" < %(upper_pk)s::text)
"""
_RETIRE: LiteralString = f"DELETE FROM modak.delta WHERE {_READ_TUPLES}"  # noqa: S608
_KEEP: LiteralString = f"""
    UPDATE modak.delta SET folded_into = %(into)s, folded_generation = %(generation)s WHERE {_READ_TUPLES}
"""  # noqa: S608
_THESE_KEYS: LiteralString = """
    d.table_id = %(table)s AND d.folded_generation IS NULL AND pg_visible_in_snapshot(d.xid, %(snapshot)s::pg_snapshot)
        AND d.pk = k.pk AND d.tier_key = k.tier_key
"""
_RETIRE_KEYS: LiteralString = f"""
    DELETE FROM modak.delta d USING unnest(%(pks)s::text[], %(tier_keys)s::bigint[]) k (pk, tier_key)
    WHERE {_THESE_KEYS}
"""  # noqa: S608
_KEEP_KEYS: LiteralString = f"""
    UPDATE modak.delta d SET folded_into = %(into)s, folded_generation = %(generation)s
    FROM unnest(%(pks)s::text[], %(tier_keys)s::bigint[]) k (pk, tier_key) WHERE {_THESE_KEYS}
"""  # noqa: S608
_FREE: LiteralString = f"""
    AND ctid = ANY (ARRAY(SELECT ctid FROM modak.delta WHERE {_READ_TUPLES} FOR UPDATE SKIP LOCKED))
"""  # noqa: S608
_ASKED: LiteralString = """
    SELECT pg_try_advisory_xact_lock(modak.pin_lock_key(c.table_id)) AND NOT EXISTS (
        SELECT FROM modak.read_pins p WHERE p.table_id = c.table_id AND p.expires_at > clock_timestamp()
    ), c.snapshot_id, c.generation
    FROM modak.cutline c WHERE c.table_id = %s
"""
_PINNED: LiteralString = """
    SELECT EXISTS (SELECT FROM modak.read_pins p WHERE p.table_id = %s AND p.expires_at > clock_timestamp())
"""
_SWEEP: LiteralString = """
    DELETE FROM modak.delta WHERE ctid = ANY (ARRAY(
        SELECT d.ctid FROM modak.delta d WHERE d.table_id = %(table)s AND d.folded_generation IS NOT NULL
            AND NOT EXISTS (SELECT FROM modak.read_pins p WHERE p.table_id = %(table)s
                AND p.expires_at > clock_timestamp() AND p.generation < d.folded_generation)
        LIMIT %(most)s FOR UPDATE SKIP LOCKED))
"""
_RENAMES: LiteralString = """
    unnest(%(old)s::text[], %(new)s::text[], %(since)s::text[]::xid[], %(here)s::bool[])
        n (old_name, new_name, since, here)
"""
_OLDER: LiteralString = "(age(d.xid::xid) > age(n.since) OR (n.here AND NOT d.payload ? n.new_name))"
_RENAME_IN_DELTA: LiteralString = f"""
    UPDATE modak.delta d SET payload = (
        SELECT jsonb_object_agg(coalesce(n.new_name, e.key), e.value)
        FROM jsonb_each(d.payload) e LEFT JOIN {_RENAMES} ON n.old_name = e.key AND {_OLDER}
    )
    WHERE d.table_id = %(table)s AND d.payload ?| %(old)s::text[]
        AND EXISTS (SELECT FROM {_RENAMES} WHERE d.payload ? n.old_name AND {_OLDER})
"""  # noqa: S608
_DESCRIBED_BY: LiteralString = """
    SELECT attname, xmin::text FROM pg_attribute WHERE attrelid = %s AND attname = ANY (%s::name[]) AND NOT attisdropped
"""
_OUTDATED: LiteralString = """
    SELECT EXISTS (
        SELECT FROM pg_attribute a WHERE a.attrelid = %s AND a.attnum > 0 AND age(a.xmin) <= age(d.xid::xid)
    )
    FROM modak.delta d WHERE d.table_id = %s AND d.pk = %s AND d.tier_key = %s
"""


@dataclass(frozen=True, slots=True)
class Rename:
    """A column's name in older images of the delta and its name now."""

    old: str
    new: str
    since: str
    """The transaction that has described the column as it is: images of earlier ones are older than the name."""
    here: bool
    """Whether the new name is a column of the table; the values of a dropped one are nobody's."""


def renames(conn: Conn, relid: int, renamed: Mapping[str, str]) -> tuple[Rename, ...]:
    """What `rename_in_delta` goes by, as this connection sees it.

    The age of a column's description tells whether an image is older than its name: two columns may have swapped
    names, or a new column taken the name of a dropped one (whose new name is then no column of the table).
    """
    if not renamed:
        return ()
    by: dict[str, str] = dict(conn.execute(_DESCRIBED_BY, (relid, [*renamed.values(), *renamed])).fetchall())
    known = ((old, new, by.get(new, by.get(old)), new in by) for old, new in renamed.items())
    return tuple(Rename(old, new, since, here) for old, new, since, here in known if since is not None)


def image_cases(column: str, waiting: Sequence[Rename]) -> list[tuple[str, str]]:
    """When, and under which name, an image has a column: SQL conditions on `modak.delta` and keys of its payload.

    The images read as `rename_in_delta` will leave them. Text, because it travels to the connections of tasks.
    """
    cases = [(f"{_has(one.old)} AND {_older(one)}", one.old) for one in waiting if one.new == column]
    own = [_has(column), *(f"NOT {_older(one)}" for one in waiting if one.old == column)]
    return [*cases, (" AND ".join(own), column)]


def _has(name: str) -> str:
    return f"payload ? {quoted(name)}"


def _older(one: Rename) -> str:
    older = f"age(xid::xid) > age({quoted(one.since)}::xid)"
    return f"({older} OR NOT {_has(one.new)})" if one.here else f"({older})"


def quoted(text: str) -> str:
    """A text constant for SQL in which nothing can be bound."""
    return sql.Literal(text).as_string()


def retire_delta(conn: Conn, table_id: int, rows: DeltaRange, pg_snapshot: str) -> tuple[int, int]:
    """Take away exactly the delta tuples of a range that a reader under `pg_snapshot` has seen: removed, kept.

    Comes after the move of S. While a reader may need them they are kept, marked with the generation that has them in
    the lake. A tuple that somebody is just changing stays as it is: the change is newer, and without it the tuple says
    what the lake says.
    """
    asked = conn.execute(_ASKED, (table_id,)).fetchone()
    if asked is None:
        raise Conflict("catalog.not_registered", f"Table {table_id} is no longer registered.")
    alone, into, generation = asked
    values = {**_read_tuples(table_id, rows, pg_snapshot), "into": into, "generation": generation}
    # Without any lake state there is nothing that the tuples could be kept against.
    keeps = not alone and into is not None
    done = _without_waiting(conn, _KEEP if keeps else _RETIRE, values)
    return (0, done) if keeps else (done, 0)


class Retiring:
    """`retire_delta` in a thread of its own: the removal of a million tuples takes a second, and somebody else's core.

    For a transaction that is open while its lake commit is still being prepared. Nobody may be pinned when it begins or
    when it has ended; otherwise nothing was removed, and `retire_delta` has to do it in its turn.
    """

    def __init__(self, conn: Conn, table_id: int, rows: DeltaRange, pg_snapshot: str) -> None:
        self._conn = conn
        self._table_id = table_id
        self._values = _read_tuples(table_id, rows, pg_snapshot)
        self._removed: int | None = None
        self._thread = threading.Thread(target=self._retire, name="modak retire", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._thread.is_alive():
            with suppress(psycopg.Error):
                self._conn.cancel_safe(timeout=_CANCEL_SECONDS)
        self._thread.join()

    def removed(self) -> int | None:
        """Wait for the end: how many tuples are gone if this transaction commits; None when it has removed nothing."""
        self._thread.join()
        reach("delta.retired_early")
        with suppress(psycopg.Error):
            if self._removed is not None and self._alone():
                return self._removed
        with suppress(psycopg.Error):
            self._conn.rollback()
        return None

    def _retire(self) -> None:
        # Whatever goes wrong here is met again, and told, when the tuples are removed in their turn.
        with suppress(psycopg.Error):
            pinned = self._conn.execute(_PINNED, (self._table_id,)).fetchone()
            if pinned and not pinned[0]:
                self._removed = _without_waiting(self._conn, _RETIRE, self._values)

    def _alone(self) -> bool:
        asked = self._conn.execute(_ASKED, (self._table_id,)).fetchone()
        return bool(asked and asked[0])


def _read_tuples(table_id: int, rows: DeltaRange, pg_snapshot: str) -> dict[str, Any]:
    return {
        "table": table_id,
        "snapshot": pg_snapshot,
        "lower": rows.lower,
        "lower_pk": rows.lower_pk,
        "upper": rows.upper,
        "upper_pk": rows.upper_pk,
    }


def _without_waiting(conn: Conn, statement: LiteralString, values: Mapping[str, Any]) -> int:
    """Run a change of read tuples; those that somebody holds are left out rather than waited for."""
    patience = conn.execute("SELECT current_setting('lock_timeout')").fetchone()
    try:
        with conn.transaction():
            conn.execute("SELECT set_config('lock_timeout', '200ms', true)")
            done = conn.execute(statement, values).rowcount
            conn.execute("SELECT set_config('lock_timeout', %s, true)", patience)
    except psycopg.errors.LockNotAvailable:
        done = conn.execute(statement + _FREE, values).rowcount
    return done


def retire_keys(conn: Conn, table_id: int, keys: Sequence[tuple[str, TierKey]], pg_snapshot: str) -> tuple[int, int]:
    """Take away the delta tuples of these (key text, tier key) that are older than a snapshot: removed, kept.

    Comes after the move of S; the lake has newer rows for them now. As `retire_delta`, while a reader may need them
    they are kept, marked with the generation that supersedes them.
    """
    asked = conn.execute(_ASKED, (table_id,)).fetchone()
    if asked is None:
        raise Conflict("catalog.not_registered", f"Table {table_id} is no longer registered.")
    alone, into, generation = asked
    keeps = not alone and into is not None
    values = {
        "table": table_id,
        "snapshot": pg_snapshot,
        "pks": [pk for pk, _ in keys],
        "tier_keys": [key for _, key in keys],
        "into": into,
        "generation": generation,
    }
    done = conn.execute(_KEEP_KEYS if keeps else _RETIRE_KEYS, values).rowcount
    return (0, done) if keeps else (done, 0)


def sweep_delta(conn: Conn, table_id: int, most: int) -> int:
    """Remove folded delta tuples that no pin needs any more; none while a reader is pinning."""
    quiet = conn.execute("SELECT pg_try_advisory_xact_lock(modak.pin_lock_key(%s))", (table_id,)).fetchone()
    if not (quiet and quiet[0]):
        return 0
    return conn.execute(_SWEEP, {"table": table_id, "most": most}).rowcount


def rename_in_delta(conn: Conn, table_id: int, relid: int, renamed: Mapping[str, str]) -> int:
    """Give the images written before columns were renamed the new names; returns how many changed."""
    known = renames(conn, relid, renamed)
    if not known:
        return 0
    values = {
        "table": table_id,
        "old": [one.old for one in known],
        "new": [one.new for one in known],
        "since": [one.since for one in known],
        "here": [one.here for one in known],
    }
    return conn.execute(_RENAME_IN_DELTA, values).rowcount


def outdated(conn: Conn, relid: int, table_id: int, pk: str, tier_key: TierKey) -> bool:
    """Whether a column of the table was described anew since the image of this row was written."""
    row = conn.execute(_OUTDATED, (relid, table_id, pk, tier_key)).fetchone()
    return bool(row and row[0])


def image_now(
    conn: Conn, table_id: int, pk: str, tier_key: TierKey, columns: Sequence[str], waiting: Sequence[Rename]
) -> dict[str, str | None] | None:
    """The image of this row as `rename_in_delta` will leave it; columns that it does not have are left out."""
    cases = (
        " ".join(f"WHEN {case} THEN {quoted(key)}" for case, key in image_cases(column, waiting)) for column in columns
    )
    names = ", ".join(f"CASE {each} END" for each in cases).replace("%", "%%")
    query = f"SELECT payload, ARRAY[{names}]::text[] FROM modak.delta WHERE op = 1"  # noqa: S608
    found = conn.execute(
        f"{query} AND table_id = %s AND pk = %s AND tier_key = %s".encode(), (table_id, pk, tier_key)
    ).fetchone()
    if found is None:
        return None
    payload, keys = found
    return {column: payload[key] for column, key in zip(columns, keys, strict=True) if key is not None}
