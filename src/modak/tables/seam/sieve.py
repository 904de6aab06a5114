"""A sieve in front of the anti-join: nearly all lake rows are not in the delta, and one bit each is enough to tell.

Asking Spark's hash table costs more per row than reading the row. So the keys of the delta set bits in a small map, at
the place that their low bits name; a row whose bit is not set becomes a NULL key, for which a join asks nothing. A set
bit proves nothing, the join still decides. The map is carried by the plan; it is bounded by `MOST_BITS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

BITS_PER_KEY = 64
"""So that one row in sixty-four is asked for in vain."""
LEAST_BITS = 1 << 12
MOST_BITS = 1 << 26


class Sieve:
    """The bits of one set of whole-number keys."""

    def __init__(self, spark: SparkSession, keys: pa.ChunkedArray) -> None:
        import pyarrow as pa

        words = bits_of(keys)
        self._mask = 64 * len(words) - 1
        self._words: DataFrame = spark.createDataFrame(
            pa.table({"words": pa.array([words], pa.list_(pa.int64()))}), "words array<bigint>"
        )

    def suspects(self, key: Column) -> Column:
        """The key of a row whose bit is set, NULL for all others."""
        from pyspark.sql import functions

        place = key.cast("long").bitwiseAND(functions.lit(self._mask))
        word = functions.get(self._words.scalar(), functions.shiftright(place, 6).cast("int"))
        # A shift by a long is none; Java takes the lower six bits of an int.
        bit = functions.call_function("shiftright", word, place.cast("int")).bitwiseAND(functions.lit(1))
        return functions.when(bit == 1, key)


def bits_of(keys: pa.ChunkedArray) -> Any:
    """Words of 64 bits (numpy, signed): bit `key & mask` is set for every key."""
    import numpy as np

    values = np.asarray(keys).astype(np.int64)
    wanted = max(LEAST_BITS, len(values) * BITS_PER_KEY)
    size = min(MOST_BITS, 1 << (wanted - 1).bit_length())
    marks = np.zeros(size, np.uint8)
    marks[values & (size - 1)] = 1
    return np.packbits(marks, bitorder="little").view(np.int64)
