"""Generated columns that the change stream does not bring: Postgres computes them again from the columns that it does.

Servers before 18 do not publish stored ones. (Virtual ones are refused at registration: no server takes updates of a
table with them and whole-row identity.) Their expressions depend on nothing but their own row, so the values of a batch
follow from its rows: those columns that an expression names go into a temporary table, and the results come back, both
as CSV that Arrow writes and reads. The expression runs in the name of the table's owner. Memory: the named columns of
one part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import sql
from pyarrow import csv

from modak.core.errors import Refused
from modak.lake.parse import parse_text
from modak.postgres.connect import translate
from modak.postgres.model import PgColumn
from modak.tables.mirror.pump.columns import Seen
from modak.tables.mirror.pump.events import image_name
from modak.tables.site import Site

_TYPES = sql.SQL(
    "SELECT attnum, attname::text, format_type(atttypid, atttypmod) FROM pg_attribute"
    " WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped"
)


def with_generated(site: Site, seen: Seen, rows: pa.Table) -> pa.Table:
    """The rows with the columns that no change brings."""
    wanted = seen.unpublished
    if not wanted or not len(rows):
        return rows
    try:
        with site.connect() as conn:
            texts = _computed(conn, seen, wanted, rows)
    except psycopg.Error as error:
        raise translate(error) from error
    mapped = {each.column.name: each for each in seen.mapped}
    for at, column in enumerate(wanted):
        values = parse_text(mapped[column.name], texts.column(at).combine_chunks())
        rows = rows.append_column(image_name(column.attnum), values)
    return rows


def _computed(conn: psycopg.Connection[Any], seen: Seen, wanted: Sequence[PgColumn], rows: pa.Table) -> pa.Table:
    types = {number: (name, kind) for number, name, kind in conn.execute(_TYPES, (seen.heap.oid,))}
    named = " ".join(column.default or "" for column in wanted)
    needed = [
        number
        for number in seen.shape.definition.numbers
        if number in types and types[number][0] in named and image_name(number) in rows.column_names
    ]
    columns = sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(types[number][0]), sql.SQL(types[number][1])) for number in needed
    )
    conn.execute(sql.SQL("CREATE TEMPORARY TABLE modak_rows (modak_n bigint, {}) ON COMMIT DROP").format(columns))
    sent = pa.table(
        [pa.array(np.arange(len(rows))), *(_sendable(rows, number) for number in needed)],
        names=[str(at) for at in range(len(needed) + 1)],
    )
    sink = pa.BufferOutputStream()
    csv.write_csv(sent, sink, csv.WriteOptions(include_header=False))
    with conn.cursor() as cursor:
        with cursor.copy("COPY pg_temp.modak_rows FROM STDIN (FORMAT csv)") as copy:
            copy.write(memoryview(sink.getvalue()))
        conn.execute(sql.SQL("GRANT SELECT ON pg_temp.modak_rows TO {}").format(sql.Identifier(seen.heap.owner)))
        conn.execute(sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(seen.heap.owner)))
        results = sql.SQL(", ").join(
            sql.SQL("({})::text").format(sql.SQL(column.default or "NULL")) for column in wanted
        )
        query = sql.SQL("COPY (SELECT {}, 1 FROM pg_temp.modak_rows ORDER BY modak_n) TO STDOUT (FORMAT csv)")
        with cursor.copy(query.format(results)) as copy:
            answer = b"".join(bytes(part) for part in copy)
    conn.rollback()
    names = [f"g{at}" for at in range(len(wanted))]
    return csv.read_csv(
        pa.BufferReader(answer),
        csv.ReadOptions(column_names=[*names, "end"]),
        csv.ParseOptions(newlines_in_values=True),
        csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )


def _sendable(rows: pa.Table, number: int) -> pa.ChunkedArray:
    column = rows[image_name(number)]
    if pa.types.is_list(column.type) or pa.types.is_binary(column.type) or isinstance(column.type, pa.ExtensionType):
        raise Refused(
            "mirror.generated",
            f"A generated column that is not published depends on attribute {number} of type {column.type}.",
            hint="Make the column STORED (on Postgres 18 or later it is published then), or drop it.",
        )
    return column
