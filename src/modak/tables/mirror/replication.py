"""What a mirrored table needs in Postgres: replica identity, publication, slot. Made, replaced and taken away here.

No DDL of ours queues behind a user's transaction: each statement waits for milliseconds and is tried again for some
seconds. Everything is looked for before it is made, so a cut-short attempt is simply repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg
import structlog
from psycopg import sql

from modak.catalog.records import Cutline, TableRecord
from modak.catalog.write import CatalogWriter
from modak.core.errors import Conflict, ModakError
from modak.core.faults import reach
from modak.core.names import TableName
from modak.postgres import ddl
from modak.postgres.changes.publication import create_publication, drop_publication, find_publications
from modak.postgres.changes.slot import (
    PLUGIN,
    NewSlot,
    SlotState,
    created_slot,
    drop_slot,
    evict,
    slot_state,
    wal_history,
)
from modak.postgres.connect import translate
from modak.tables.mirror.identity import ensure_identity, remove_guards
from modak.tables.mirror.names import publication_name, slot_name, slot_pattern
from modak.tables.site import Site

log = structlog.get_logger()

Conn = psycopg.Connection[Any]
Hold = Callable[[Conn], None]
"""Stops whoever does not lead any more; until the transaction ends nobody else takes over."""

PUBLISHED = "published"
"""Key of the line's lake properties: the mark of the publication from which the slot reads."""
HISTORY = "history"
"""Key of the line's lake properties: the server and timeline on whose WAL F is a position."""
TRIES = 60
PAUSE_SECONDS = 0.25

_WAS = "SELECT relid, identity::text, index_name FROM modak.mirror_identities WHERE table_id = %s"
_SLOTS = """
SELECT slot_name::text FROM pg_replication_slots
WHERE slot_name = %(own)s
    OR (database = current_database() AND plugin = %(plugin)s AND NOT temporary AND slot_name ~ %(pattern)s)
"""
"""The slot of a table, and those that it had when the database had another name."""
_FULL = """
SELECT c.oid, n.nspname::text, c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relreplident = 'f'
    AND c.oid IN (SELECT b.relid FROM modak.relations_below(%(root)s) b UNION SELECT unnest(%(known)s::oid[]))
"""


def slot_of(site: Site, record: TableRecord) -> str:
    """The slot's name."""
    return slot_name(record.table_id, site.dsn.dbname)


def look_at_slot(site: Site, record: TableRecord) -> SlotState | None:
    """The slot as the server shows it."""
    with site.connect(autocommit=True) as conn:
        return slot_state(conn, slot_of(site, record))


def history_of(site: Site) -> str | None:
    """The server and timeline whose WAL is being written, where the server tells."""
    with site.connect(autocommit=True) as conn:
        return wal_history(conn)


def publish(site: Site, writer: CatalogWriter, record: TableRecord) -> None:
    """Set the replica identity and publish the table, before its slot is made: a slot knows no earlier publication.

    A slot from before goes, unless the publication is the one that was noted for it.
    """
    name = publication_name(record.table_id)
    with site.connect(autocommit=True) as conn:
        try:
            reach("mirror.before_note")
            conn.execute("SELECT modak.note_identities(%s)", (record.table_id,))
            reach("mirror.after_note")
        except psycopg.Error as error:
            raise translate(error) from error
        patiently(site, record.name, lambda: not ensure_identity(conn, record))
        line, found = _line(site, record), find_publications(conn, [name]).get(name)
        right = found is not None and found.whole and found.relids == (record.relid,)
        if found and right and marks_of(line) == {name: found.mark}:
            return
        # What was changed meanwhile no slot from before will bring, and after a crash nobody could tell.
        _drop(site, record.name, conn, record.table_id, slot_of(site, record), writer.hold)
        if not right:
            patiently(site, record.name, lambda: drop_publication(conn, name))
            patiently(site, record.name, lambda: create_publication(conn, name, [record.name]))
            found = find_publications(conn, [name]).get(name)
    if found is None:
        raise Conflict("mirror.publication_gone", f"Somebody dropped the publication {name} as soon as it was made.")
    reach("mirror.before_mark")
    with writer.step() as tx:
        tx.move(line, replace(line, lake_props={**line.lake_props, PUBLISHED: found.mark}))
    reach("mirror.after_mark")


def marks_of(line: Cutline) -> dict[str, str]:
    """The publication as it was when the slot was made; whoever changes it may keep changes from us."""
    mark = line.lake_props.get(PUBLISHED)
    return {publication_name(line.table_id): mark} if mark else {}


def _line(site: Site, record: TableRecord) -> Cutline:
    line = site.reader.cutline(record.table_id)
    if line is None:
        raise Conflict("mirror.unregistered", f"{record.name} has just been unregistered.")
    return line


@contextmanager
def fresh_slot(site: Site, writer: CatalogWriter, record: TableRecord) -> Iterator[NewSlot]:
    """A new slot in place of whatever there was, with its snapshot while entered.

    Whoever has lost the lead takes no slot away: another worker may follow it, and would not see what it then misses.
    """
    name = slot_of(site, record)
    with site.connect(autocommit=True) as conn:
        _drop(site, record.name, conn, record.table_id, name, writer.hold)
        with conn.transaction():
            # Not held any longer: the server waits for every open transaction before it makes a slot.
            writer.hold(conn)
    with created_slot(site.dsn, name) as slot:
        log.info("mirror.slot_made", table=str(record.name), slot=name, at=slot.consistent_lsn)
        yield slot


def plan_withdrawal(site: Site, record: TableRecord) -> dict[str, Any]:
    """All that has to be known to take the replication objects away when the catalog has forgotten the table."""
    with site.connect(autocommit=True) as conn:
        rows = conn.execute(_WAS, (record.table_id,)).fetchall()
    return {
        "table_id": record.table_id,
        "table": str(record.name),
        "relid": record.relid,
        "slot": slot_of(site, record),
        "identities": {str(relid): [identity, index] for relid, identity, index in rows},
    }


def withdraw(site: Site, plan: Mapping[str, Any]) -> None:
    """Take slot, publication, guards and replica identity away again, as far as they are there."""
    table = str(plan["table"])
    with site.connect(autocommit=True) as conn:
        _drop(site, table, conn, plan["table_id"], str(plan["slot"]), lambda _: None)
        patiently(site, table, lambda: drop_publication(conn, publication_name(plan["table_id"])))
        patiently(site, table, lambda: remove_guards(conn, plan["table_id"]))
        patiently(site, table, lambda: _restore_identities(conn, plan))


def patiently(site: Site, table: object, step: Callable[[], bool]) -> None:
    """Try a step that gives way to others until it gets its lock."""
    for _ in range(TRIES):
        if step():
            return
        site.clock.sleep(PAUSE_SECONDS)
    raise ModakError(
        "postgres.busy",
        f"{table} was in use the whole time, so that its definition could not be changed.",
        hint="An open transaction is in the way; run the same command again when it has ended.",
        retryable=True,
    )


def _drop(site: Site, table: object, conn: Conn, table_id: int, own: str, hold: Hold) -> None:
    """Drop the slots of a table, those under a former name of the database too."""
    wanted = {"own": own, "plugin": PLUGIN, "pattern": slot_pattern(table_id)}
    try:
        found = [name for (name,) in conn.execute(_SLOTS, wanted).fetchall()]
    except psycopg.Error as error:
        raise translate(error) from error

    def step(name: str) -> bool:
        try:
            with conn.transaction():
                hold(conn)
                evict(conn, name)
                drop_slot(conn, name)
        except ModakError as error:
            if error.code != "postgres.busy":
                raise
            return False
        return True

    for name in found:
        patiently(site, table, partial(step, name))


def _restore_identities(conn: Conn, plan: Mapping[str, Any]) -> bool:
    was = plan["identities"]
    try:
        rows = conn.execute(_FULL, {"root": plan["relid"], "known": [int(each) for each in was]}).fetchall()
    except psycopg.Error as error:
        raise translate(error) from error
    done = [_restore(conn, TableName(schema, name), *was.get(str(oid), ("d", None))) for oid, schema, name in rows]
    return all(done)


def _restore(conn: Conn, table: TableName, was: str, index: str | None) -> bool:
    if was == "f":
        return True
    how: sql.Composable = sql.SQL("NOTHING" if was == "n" else "DEFAULT")
    if was == "i" and index is not None:
        how = sql.SQL("USING INDEX {}").format(sql.Identifier(index.rpartition(".")[2].strip('"')))
    reach("mirror.before_restore")
    done = ddl.attempt(
        conn,
        sql.SQL("ALTER TABLE ONLY {} REPLICA IDENTITY {}").format(sql.Identifier(table.schema, table.name), how),
    )
    reach("mirror.after_restore")
    return done
