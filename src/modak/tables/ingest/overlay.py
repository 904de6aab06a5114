"""Which corrections of the delta an ingest supersedes: those of its keys that are older than its beginning.

The delta lies over the lake, so an older correction would hide the new row for ever. Corrections made after the
beginning are newer, stay, and win. The delta's keys of the range are held in memory, the input's go by in batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, LiteralString

from psycopg import sql

from modak.catalog.records import DeltaRange
from modak.core.axis import TierKey
from modak.lake.locate import KeyFile
from modak.tables.fold.read import Shape, keys_of, select
from modak.tables.site import Site

if TYPE_CHECKING:
    import pyarrow as pa

_ANY: LiteralString = """
    SELECT EXISTS (SELECT FROM modak.delta WHERE table_id = %s AND folded_generation IS NULL
        AND tier_key >= %s AND tier_key <= %s AND pg_visible_in_snapshot(xid, %s::pg_snapshot))
"""


def superseded(
    site: Site, table_id: int, shape: Shape, keys: Iterable[KeyFile], pg_snapshot: str
) -> list[tuple[str, TierKey]]:
    """(key text, tier key) of the delta rows that are older than the snapshot and whose keys the input brings."""
    files = [one for one in keys if one.rows]
    if not files:
        return []
    low, high = min(one.lower for one in files), max(one.upper for one in files)
    with site.connect(autocommit=True) as conn:
        row = conn.execute(_ANY, (table_id, low, high, pg_snapshot)).fetchone()
    if not (row and row[0]):
        return []
    return _matching(site, table_id, shape, files, DeltaRange(low, min(high, 2**63 - 2) + 1), pg_snapshot)


def _matching(
    site: Site, table_id: int, shape: Shape, files: list[KeyFile], rows: DeltaRange, pg_snapshot: str
) -> list[tuple[str, TierKey]]:
    import pyarrow as pa

    from modak.postgres.arrow import stream

    # The text of the key comes along: it is what the delta is addressed by.
    query = select(shape, table_id, rows).replace("SELECT op,", "SELECT pk, op,", 1)
    query += f" AND pg_visible_in_snapshot(xid, {sql.Literal(pg_snapshot).as_string()}::pg_snapshot)"
    batches = list(stream(site.dsn, query))
    if not batches:
        return []
    delta = pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
    found = keys_of(delta, shape)
    columns = [found[name] for name in shape.key_names]
    hits = _hits(columns, files, shape)
    texts, places = delta.column("pk"), delta.column("tier_key")
    return [(texts[at].as_py(), places[at].as_py()) for at in hits]


def _hits(columns: list[pa.Array], files: list[KeyFile], shape: Shape) -> list[int]:
    """Rows of the delta whose keys are among the input's."""
    import pyarrow as pa

    from modak.lake.iceberg.output import mapped
    from modak.lake.match import KeySet

    hits: set[int] = set()
    for one in files:
        with mapped(one.uri) as source:
            reader = pa.ipc.open_file(source)
            for index in range(reader.num_record_batches):
                batch = reader.get_batch(index)
                here = KeySet([batch.column(name) for name in shape.key_names])
                hits.update(here.find(columns).tolist())
    return sorted(hits)
