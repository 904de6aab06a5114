"""History beside a DEFAULT partition: nothing leaves the heap while later rows of its range would be hidden.

Without the trigger that diverts them, Postgres puts rows for a dropped partition into the DEFAULT one, where no read
looks for them, and says nothing. Tiering and heap retention ask here before they drop.
"""

from __future__ import annotations

from typing import Any

import psycopg
import structlog

from modak.catalog import spill
from modak.catalog.records import TableRecord
from modak.catalog.write import CatalogWriter
from modak.tables.site import Site
from modak.tables.tidy import open_spill
from modak.tables.tiering.plan import Finding

log = structlog.get_logger()


def astray(site: Site, conn: psycopg.Connection[Any], writer: CatalogWriter, record: TableRecord) -> Finding | None:
    """Send history to the delta where that was asked for; what is in the way when that cannot be done now."""
    if not spill.is_astray(conn, record.table_id):
        return None
    error = open_spill(site, writer, record.name)
    if error is None or not spill.is_astray(conn, record.table_id):
        return None
    said = (
        f"Historical rows do not reach the delta, so no partition leaves the heap: {error.message.rstrip('.')}.",
        error.hint,
        f"To do without, and drop partitions all the same: SELECT modak_disable_transparent_writes('{record.name}')",
    )
    found = Finding("spill.astray", " ".join(part for part in said if part))
    tell(site, record, found)
    return found


def tell(site: Site, record: TableRecord, finding: Finding) -> None:
    """Say a finding in the log, once."""
    if (record.table_id, finding.message) not in site.told:
        site.told.add((record.table_id, finding.message))
        log.warning("grid.finding", table=str(record.name), code=finding.code, finding=finding.message)
