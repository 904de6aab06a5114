"""Whether somebody has written a column of the heap anew, which Postgres does not tell in its change stream.

`ALTER COLUMN … TYPE … USING`, and types with another text for the same value, change rows although the lake's type
may stay what it is. They give a leaf another file and touch the column's entry in the catalog; VACUUM FULL and TRUNCATE
do only the first, a rename only the second. What both were is kept with the lines from look to look.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, LiteralString

import psycopg

from modak.postgres.connect import translate

ALTERED = "altered"
"""Key of the line's lake properties: the `traces` of the last look."""

Traces = Mapping[str, Mapping[str, int]]

# One statement: columns and files under one snapshot.
_TRACES: LiteralString = """
    WITH RECURSIVE tree AS (
        SELECT %(root)s::oid AS oid
        UNION ALL SELECT i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.oid
    )
    SELECT
        (SELECT coalesce(jsonb_object_agg(a.attnum, a.xmin::text::int8), '{}') FROM pg_attribute a
            WHERE a.attrelid = %(root)s AND a.attnum > 0 AND NOT a.attisdropped),
        (SELECT coalesce(jsonb_object_agg(c.oid, c.relfilenode::int8), '{}') FROM tree JOIN pg_class c USING (oid)
            WHERE c.relkind = 'r' AND c.relfilenode <> c.oid)
"""


def traces(conn: psycopg.Connection[Any], relid: int) -> Traces:
    """Which transaction last touched each column, and the leaves whose file is not the one they were made with."""
    try:
        row = conn.execute(_TRACES, {"root": relid}).fetchone()
    except psycopg.Error as error:
        raise translate(error) from error
    assert row is not None
    return {"columns": row[0], "files": row[1]}


def was_altered(known: Traces | None, now: Traces) -> bool:
    """Whether a column that was there before may have been written anew since; nothing known, nothing said. Pure."""
    if known is None or now["files"].items() <= known["files"].items():
        return False
    return any(known["columns"].get(number, xid) != xid for number, xid in now["columns"].items())
