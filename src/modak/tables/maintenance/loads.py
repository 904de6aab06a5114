"""Staged files of loads that failed are deleted after the grace period, whether or not maintenance is on.

Driven by the load journal: exactly the files that we staged ourselves, and nothing by listing.
"""

from __future__ import annotations

from typing import LiteralString

import structlog

from modak.catalog.write import CatalogWriter
from modak.core.errors import ModakError
from modak.core.faults import reach
from modak.tables.maintenance.observe import uris_of
from modak.tables.maintenance.policy import of
from modak.tables.site import Site

log = structlog.get_logger()

_FAILED: LiteralString = """
    SELECT label, files FROM modak.load_labels
    WHERE table_id = %s AND state = 'failed' AND files <> '[]'
        AND updated_at < clock_timestamp() - make_interval(hours => %s)
    ORDER BY label LIMIT 1000
"""
_FORGET: LiteralString = """
    UPDATE modak.load_labels SET files = '[]' WHERE table_id = %s AND label = %s AND state = 'failed' AND files = %s
"""


def clean_failed_loads(site: Site, writer: CatalogWriter) -> int:
    """Delete what failed loads have left; how many files."""
    from psycopg.types.json import Jsonb

    removed = 0
    for record in site.reader.tables():
        grace = of(site, record)["orphan_grace_hours"]
        with site.connect(autocommit=True) as conn:
            rows = conn.execute(_FAILED, (record.table_id, grace)).fetchall()
        for label, files in rows:
            try:
                reach("loads.before_delete")
                gone = site.store.delete(uris_of(files))
                reach("loads.after_delete")
            except ModakError as error:
                log.warning("loads.not_cleaned", table=str(record.name), label=label, because=error.message)
                continue
            with writer.step() as tx:
                tx.conn.execute(_FORGET, (record.table_id, label, Jsonb(files)))
            removed += gone
            log.info("loads.cleaned", table=str(record.name), label=label, files=gone)
    return removed
