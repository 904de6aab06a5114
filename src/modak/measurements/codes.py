"""Text columns that repeat their values, as codes: sorting small integers takes a third of the time that texts take.

Codes are given in the order of the texts, so rows sorted by code are sorted by text; a missing text has no code and
stays missing. Whether it is worth it, a look into a few files tells; all values are then found in one pass over these
columns alone. Where there are too many of them after all, texts stay texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from modak.measurements.engine import columns, quoted
from modak.measurements.types import Group, Unified

_REPEATED = 8
"""How often a value comes at least, on average, in a sample."""
_MOST_VALUES = 1 << 15
_SAMPLE_ROWS = 100_000
_SAMPLE_FILES = 32
_ROWS_OF_A_FILE = 500
"""In files with fewer rows than this, opening each once more costs more than it saves."""
Files = Callable[[Sequence[str]], list[str]]


def rows_of(groups: Sequence[Group], want: pa.Schema) -> str:
    """The rows of files of several schemas under one; every group's files are a parameter."""
    return " UNION ALL ".join(
        f"SELECT {columns(group.schema, want)} FROM read_parquet(${number}, hive_partitioning=false)"  # noqa: S608 - quoted names
        for number, group in enumerate(groups, start=1)
    )


def coded_types(engine: duckdb.DuckDBPyConnection, unified: Unified, files: Files, group_rows: int) -> dict[str, str]:
    """Types of codes for the text columns that are worth it, by the names of the columns.

    A batch of rows carries the texts of its codes, so there are never more of them than rows in a group.
    """
    texts = [each for each in unified.schema if pa.types.is_string(each.type)]
    count = sum(len(group.paths) for group in unified.groups)
    if not texts or unified.rows < count * _ROWS_OF_A_FILE:
        return {}
    most = min(_MOST_VALUES, group_rows)
    chosen = _repeating(engine, unified.groups[0], files, pa.schema(texts), most)
    if not chosen.names:
        return {}
    names = [quoted(name) for name in chosen.names]
    sets = ", ".join(f"({name})" for name in names)
    statement = (
        f"SELECT {', '.join(names)} FROM ({rows_of(unified.groups, chosen)})"  # noqa: S608 - quoted names
        f" GROUP BY GROUPING SETS ({sets}) LIMIT {most * len(names) + 1}"
    )
    found = engine.execute(statement, [files(group.paths) for group in unified.groups]).to_arrow_table()
    if found.num_rows > most * len(names):
        return {}
    types = {}
    for number, name in enumerate(chosen.names):
        values = found[name].drop_null()
        # The engine writes types as SQL to itself, and a zero byte ends its SQL.
        if 0 < len(values) <= most and not pc.any(pc.match_substring(values, "\0")).as_py():
            types[name] = f"modak_code_{number}"
            engine.register("modak_values", pa.table({"value": values}))
            engine.execute(f"CREATE TYPE {types[name]} AS ENUM (SELECT value FROM modak_values ORDER BY value)")  # noqa: S608
            engine.unregister("modak_values")
    return types


def _repeating(engine: duckdb.DuckDBPyConnection, group: Group, files: Files, texts: pa.Schema, most: int) -> pa.Schema:
    """The text columns that repeat their values in the first files of a group."""
    wanted = min(-(-_SAMPLE_ROWS * len(group.paths) // max(group.rows, 1)), _SAMPLE_FILES)
    counts = ", ".join(f"count(DISTINCT {quoted(name)}), count({quoted(name)})" for name in texts.names)
    statement = f"SELECT {counts} FROM ({rows_of([group], texts)})"  # noqa: S608 - quoted names
    told = engine.execute(statement, [files(group.paths[: max(wanted, 1)])]).fetchone() or ()
    pairs = zip(texts, told[::2], told[1::2], strict=True)
    return pa.schema([text for text, values, rows in pairs if 0 < values * _REPEATED <= rows and values <= most])
