"""The hash of texts and bytes: a kernel for tasks, 64 bits a value, whole columns at a time.

DuckDB does it at memory speed where numpy has nothing for values of different lengths. The numbers are the same on
every machine that runs the same release and are never stored. Memory is bounded by the columns handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


def hash_bytes(columns: Sequence[pa.Array]) -> list[Any]:
    """A numpy array of uint64 for each column of binary values; what stands for a NULL means nothing."""
    import pyarrow as pa

    if not columns or not len(columns[0]):
        import numpy as np

        return [np.zeros(0, np.uint64) for _ in columns]
    names = [f"c{at}" for at in range(len(columns))]
    table = pa.table(dict(zip(names, columns, strict=True)))
    each = ", ".join(f"coalesce(hash({name}), 0) AS {name}" for name in names)
    found = _connection().from_arrow(table).project(each).fetchnumpy()
    return [found[name] for name in names]


@cache
def _connection() -> Any:
    """One connection per worker process, which runs one task at a time."""
    import duckdb

    return duckdb.connect(config={"threads": 1, "memory_limit": "256MB"})
