"""Forced passes: a row in `modak.maintenance_requests` that the leader claims, works on and answers.

One request per table waits at a time, filing it again only refreshes it. Claiming is one statement under the leader's
epoch, so no two workers take the same one; a request whose leader died is taken up by the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString

from modak.catalog import operators
from modak.catalog.read import CatalogReader
from modak.catalog.write import CatalogWriter
from modak.core.errors import Refused
from modak.core.faults import reach
from modak.core.names import TableName
from modak.tables.site import Site

_FILE: LiteralString = """
    INSERT INTO modak.maintenance_requests (table_id)
    SELECT table_id FROM modak.tables WHERE schema_name = %s AND table_name = %s
    ON CONFLICT (table_id) WHERE claimed_at IS NULL
    DO UPDATE SET requested_at = clock_timestamp(), requested_by = session_user
    RETURNING request_id, xmax <> 0
"""
_CLAIM: LiteralString = """
    UPDATE modak.maintenance_requests r SET claimed_at = clock_timestamp(), claimed_epoch = %(epoch)s, progress = '{}'
    FROM modak.tables t
    WHERE t.table_id = r.table_id AND r.request_id = (
        SELECT request_id FROM modak.maintenance_requests
        WHERE finished_at IS NULL AND (claimed_at IS NULL OR claimed_epoch IS DISTINCT FROM %(epoch)s)
            AND (%(table)s::bigint IS NULL OR table_id = %(table)s::bigint)
            AND NOT EXISTS (SELECT FROM modak.pauses z WHERE z.table_id = maintenance_requests.table_id)
        ORDER BY requested_at LIMIT 1 FOR UPDATE SKIP LOCKED
    )
    RETURNING r.request_id, t.schema_name, t.table_name
"""
_WAITING: LiteralString = "SELECT 1 FROM modak.maintenance_requests WHERE finished_at IS NULL LIMIT 1"
_FINISH: LiteralString = """
    UPDATE modak.maintenance_requests
    SET finished_at = clock_timestamp(), outcome = %s, error = %s, op_id = %s
    WHERE request_id = %s AND claimed_epoch = %s AND finished_at IS NULL
"""
_FORGET: LiteralString = """
    DELETE FROM modak.maintenance_requests WHERE finished_at < clock_timestamp() - interval '7 days'
"""
_LEADER: LiteralString = "SELECT expires_at > clock_timestamp(), holder FROM modak.leader"


@dataclass(frozen=True, slots=True)
class Claimed:
    """A request that this leader works on."""

    request_id: int
    table: TableName


@dataclass(frozen=True, slots=True)
class Request:
    """How far a request has come."""

    claimed_at: datetime | None
    finished_at: datetime | None
    progress: Mapping[str, Any]
    outcome: Mapping[str, Any] | None
    error: str | None
    op_id: str | None


def file_request(site: Site, name: TableName) -> tuple[int, bool]:
    """Ask for a pass; the request's number, and whether one was waiting already."""
    reach("requests.before_file")
    with site.writer(None).step() as tx:
        record = CatalogReader(tx.conn).table(name)
        if record is not None:
            operators.refuse_if_held(tx.conn, record.table_id)
        row = tx.conn.execute(_FILE, (name.schema, name.name)).fetchone()
    reach("requests.after_file")
    if row is None:
        raise Refused(
            "catalog.not_registered",
            f"{name} is not registered.",
            hint=f"Register it with: modak-worker register --table {name} --pk … --tier-key …",
        )
    return int(row[0]), bool(row[1])


def claim(writer: CatalogWriter, table_id: int | None = None) -> Claimed | None:
    """Take the oldest request that nobody works on, of one table or of any; a table held back keeps its own."""
    assert writer.epoch is not None
    reach("requests.before_claim")
    with writer.step() as tx:
        row = tx.conn.execute(_CLAIM, {"epoch": writer.epoch.number, "table": table_id}).fetchone()
    reach("requests.after_claim")
    return None if row is None else Claimed(int(row[0]), TableName(row[1], row[2]))


def waiting(site: Site) -> bool:
    """Whether any request has not been answered; looking costs less than a try to claim."""
    with site.connect(autocommit=True) as conn:
        return conn.execute(_WAITING).fetchone() is not None


def tell(writer: CatalogWriter, request_id: int, progress: Mapping[str, Any]) -> None:
    """Let whoever waits know what is being done."""
    from psycopg.types.json import Jsonb

    with writer.step() as tx:
        tx.conn.execute(
            "UPDATE modak.maintenance_requests SET progress = %s WHERE request_id = %s",
            (Jsonb(dict(progress)), request_id),
        )


def finish(
    writer: CatalogWriter, request_id: int, outcome: Mapping[str, Any], error: str | None, op_id: str | None
) -> None:
    """Answer a request."""
    from psycopg.types.json import Jsonb

    assert writer.epoch is not None
    reach("requests.before_finish")
    with writer.step() as tx:
        tx.conn.execute(_FINISH, (Jsonb(dict(outcome)), error, op_id, request_id, writer.epoch.number))
        tx.conn.execute(_FORGET)
    reach("requests.after_finish")


def look(site: Site, request_id: int) -> Request | None:
    """How far a request has come; nothing when its table was unregistered."""
    with site.connect(autocommit=True) as conn:
        row = conn.execute(
            "SELECT claimed_at, finished_at, progress, outcome, error, op_id FROM modak.maintenance_requests"
            " WHERE request_id = %s",
            (request_id,),
        ).fetchone()
    return None if row is None else Request(*row)


def leader(site: Site) -> str | None:
    """Who leads now; nothing when nobody does."""
    with site.connect(autocommit=True) as conn:
        row = conn.execute(_LEADER).fetchone()
    return str(row[1]) if row and row[0] else None
