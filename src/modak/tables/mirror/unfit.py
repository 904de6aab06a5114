"""Whether the heap still has a value that the lake cannot hold, which the change stream has brought.

The stream brings a value that was corrected since again and again, so the heap itself has to be asked before the table
is compared with the lake. Only columns that can hold such values are read, the way of a copy and up to the first
one. Memory: one batch.
"""

from __future__ import annotations

import psycopg

from modak.catalog.records import TableRecord
from modak.core.errors import ModakError
from modak.lake.decode import arrow_schema, decoded
from modak.lake.types import MappedColumn, quoted_identifier, select_list
from modak.postgres.arrow import stream
from modak.postgres.connect import translate
from modak.postgres.describe import describe
from modak.tables.mirror.pump.evolve import mapped_columns
from modak.tables.site import Site

CODES = frozenset({"types.not_a_number", "types.out_of_range", "types.multidimensional", "types.null"})
"""What is said of such values, by the stream and by a copy alike."""
_ALWAYS_FIT = frozenset({"plain", "blanks", "mask"})
_PATIENCE = 10.0
"""So many times as long as a look takes, nobody looks again."""


class Unfit:
    """Looks now and then whether a table has been corrected."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._not_before = 0.0

    def is_corrected(self, record: TableRecord, error: ModakError) -> bool:
        """Whether an error was about such a value, and the heap has none any more."""
        started = self._site.clock.monotonic()
        if error.code not in CODES or started < self._not_before:
            return False
        unfit = holds_unfit(self._site, record)
        now = self._site.clock.monotonic()
        self._not_before = now + _PATIENCE * (now - started)
        return not unfit


def holds_unfit(site: Site, record: TableRecord) -> bool:
    """Look at the heap as it is now."""
    try:
        with site.connect(autocommit=True) as conn:
            heap = describe(conn, record.name, record.tier_key)
    except psycopg.Error as error:
        raise translate(error) from error
    doubtful = [each for each in mapped_columns(record, heap) if _is_doubtful(each)]
    name = f"{quoted_identifier(record.name.schema)}.{quoted_identifier(record.name.name)}"
    query = f"SELECT {select_list(doubtful)} FROM {name}"  # noqa: S608
    schema = arrow_schema([each.column for each in doubtful])
    try:
        with stream(site.dsn, query) as batches:
            for _ in decoded(batches, doubtful, schema):
                pass
    except ModakError as error:
        if error.code not in CODES:
            raise
        return True
    return False


def _is_doubtful(mapped: MappedColumn) -> bool:
    return mapped.column.required or mapped.guard is not None or mapped.decode not in _ALWAYS_FIT
