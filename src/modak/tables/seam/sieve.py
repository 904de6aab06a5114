"""Which lake rows the delta replaces, told by a filter instead of a join: for deltas whose keys fit into the plan.

A join costs more per row than reading the row, because it stands between the scan and the writing of rows. So the keys
of the delta set bits in a small map, at a place that the key's own bits name; a row whose bit is not set is not among
them. For the few others the identity is looked for in its bucket, a short list, so the answer is exact. Map and buckets
are carried by the plan, about fifty bytes a key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

BITS_PER_KEY = 32
"""So that one row in thirty-two is looked for in vain."""
LEAST_BITS = 1 << 12
MOST_BITS = 1 << 26
KEYS_PER_BUCKET = 4
MOST_IN_BUCKET = 64
"""Keys that crowd more than this are left to a join: a bucket is looked through from its beginning."""
_FOLDS = (16, 32)
"""High bits are folded over the low ones, which alone would say little of keys that end in zeros."""


@dataclass(frozen=True, slots=True)
class Sieve:
    """A set of identities: one whole-number key, and the tier key unless it is that key."""

    words: DataFrame
    buckets: DataFrame
    mask: int
    bucket_mask: int

    def holds(self, key: Column, tier: Column | None) -> Column:
        """Whether the row with this identity is in the set; never NULL."""
        from pyspark.sql import functions

        number = key.cast("long")
        spread = number
        for fold in _FOLDS:
            spread = spread.bitwiseXOR(functions.shiftright(number, fold))
        place = spread.bitwiseAND(functions.lit(self.mask).cast("long"))
        word = functions.get(self.words.scalar(), functions.shiftright(place, 6).cast("int"))
        # A shift by a long is none; Java takes the lower six bits of an int.
        bit = functions.call_function("shiftright", word, place.cast("int")).bitwiseAND(functions.lit(1))
        bucket = spread.bitwiseAND(functions.lit(self.bucket_mask).cast("long")).cast("int")
        identity = number if tier is None else functions.struct(number.alias("key"), tier.alias("tier"))
        found = functions.array_contains(functions.get(self.buckets.scalar(), bucket), identity)
        return functions.coalesce(functions.when(bit == 1, found), functions.lit(False))


def sieve_of(spark: SparkSession, identities: pa.Table) -> Sieve | None:
    """The sieve of some identities, (key) or (key, tier key); nothing if their keys crowd into a few buckets."""
    import pyarrow as pa

    spread = _spread(identities.column(0))
    buckets = buckets_of(identities, spread)
    if buckets is None:
        return None
    words = words_of(spread)
    return Sieve(
        _one_row(spark, pa.array([words], pa.list_(pa.int64()))),
        _one_row(spark, pa.ListArray.from_arrays(pa.array([0, len(buckets)], pa.int32()), buckets)),
        64 * len(words) - 1,
        len(buckets) - 1,
    )


def words_of(spread: Any) -> Any:
    """Words of 64 bits (numpy, signed): bit `spread & mask` is set for every key."""
    import numpy as np

    wanted = max(LEAST_BITS, len(spread) * BITS_PER_KEY)
    size = min(MOST_BITS, _power(wanted))
    marks = np.zeros(size, np.uint8)
    marks[spread & (size - 1)] = 1
    return np.packbits(marks, bitorder="little").view(np.int64)


def buckets_of(identities: pa.Table, spread: Any) -> pa.ListArray | None:
    """The identities in lists, by the lowest bits of their keys; nothing if one list is too long."""
    import numpy as np
    import pyarrow as pa

    count = _power(max(1, len(spread) // KEYS_PER_BUCKET))
    place = spread & (count - 1)
    sizes = np.bincount(place, minlength=count)
    if sizes.max() > MOST_IN_BUCKET:
        return None
    ordered = identities.take(pa.array(np.argsort(place, kind="stable"))).combine_chunks()
    arrays = [_plain(ordered.column(0)).cast(pa.int64()), *map(_plain, ordered.columns[1:])]
    offsets = pa.array(np.concatenate([[0], np.cumsum(sizes)]), pa.int32())
    values = pa.StructArray.from_arrays(arrays, ["key", "tier"]) if len(arrays) > 1 else arrays[0]
    return pa.ListArray.from_arrays(offsets, values)


def _spread(keys: pa.ChunkedArray) -> Any:
    import numpy as np

    values = np.asarray(keys).astype(np.int64)
    spread = values
    for fold in _FOLDS:
        spread = spread ^ (values >> fold)
    return spread


def _plain(column: pa.ChunkedArray) -> pa.Array:
    import pyarrow as pa

    return column.chunk(0) if column.num_chunks else pa.array([], column.type)


def _one_row(spark: SparkSession, array: pa.Array) -> DataFrame:
    import pyarrow as pa

    return spark.createDataFrame(pa.table({"value": array}))


def _power(least: int) -> int:
    """The first power of two from there on."""
    return 1 << (least - 1).bit_length()
