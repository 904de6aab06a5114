"""Which rows of several files repeat a key: one pass over the keys of all of them, spilling to disk when they are many.

Memory is bounded by DuckDB's limit; what does not fit goes to its own temporary folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

MEMORY = "512MB"
FILE, ROW = "!file", "!row"


def superseded(
    batches: Iterator[pa.RecordBatch], schema: pa.Schema, keys: Sequence[str], *, memory: str = MEMORY
) -> dict[int, list[int]]:
    """File number → rows whose key comes again later: in a later file, or further down in the same one.

    `schema` has the key columns and the numbers of file and row, and so do the batches.
    """
    import duckdb

    listed = _listed(keys)
    with tempfile.TemporaryDirectory(prefix="modak-keys-") as folder:
        duck = duckdb.connect(":memory:", config={"memory_limit": memory, "temp_directory": folder})
        try:
            duck.register("incoming", pa.RecordBatchReader.from_batches(schema, batches))
            duck.execute(f'CREATE TEMP TABLE keys AS SELECT {listed}, "{FILE}" AS f, "{ROW}" AS r FROM incoming')  # noqa: S608
            twice = f"SELECT 1 FROM keys GROUP BY {listed} HAVING count(*) > 1 LIMIT 1"  # noqa: S608
            if duck.execute(twice).fetchone() is None:
                return {}
            order = f"row_number() OVER (PARTITION BY {listed} ORDER BY f DESC, r DESC) AS n"
            late: Any = duck.execute(
                f"SELECT f, r FROM (SELECT f, r, {order} FROM keys) WHERE n > 1 ORDER BY f, r"  # noqa: S608
            )
            found: dict[int, list[int]] = {}
            while rows := late.fetchmany(100_000):
                for file, row in rows:
                    found.setdefault(file, []).append(row)
            return found
        finally:
            duck.close()


def repeated(batches: Iterator[pa.RecordBatch], schema: pa.Schema, keys: Sequence[str], *, memory: str) -> int:
    """How many rows have a key that comes again later; `schema` and the batches have the key columns and more."""
    import duckdb

    listed = _listed(keys)
    with tempfile.TemporaryDirectory(prefix="modak-keys-") as folder:
        config: dict[str, Any] = {"memory_limit": memory, "temp_directory": folder, "threads": 1}
        duck = duckdb.connect(":memory:", config=config)
        try:
            duck.register("incoming", pa.RecordBatchReader.from_batches(schema, batches))
            times = f"SELECT count(*) AS n FROM incoming GROUP BY {listed} HAVING count(*) > 1"  # noqa: S608
            row = duck.execute(f"SELECT coalesce(sum(n - 1), 0) FROM ({times})").fetchone()  # noqa: S608
            return int(row[0]) if row else 0
        finally:
            duck.close()


def _listed(keys: Sequence[str]) -> str:
    return ", ".join('"' + name.replace('"', '""') + '"' for name in keys)
