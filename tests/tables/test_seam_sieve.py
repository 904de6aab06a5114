"""The sieve in front of the lake: a filter that says exactly which identities are in the delta."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession, functions

from modak.tables.seam.sieve import MOST_IN_BUCKET, sieve_of

COLUMNS = {"key": pa.int64(), "tier": pa.int64()}


def held(spark: SparkSession, identities: pa.Table, rows: pa.Table) -> list[bool]:
    """What the sieve says of every row, in the order of the rows."""
    sieve = sieve_of(spark, identities)
    assert sieve is not None
    tier = functions.col("tier") if identities.num_columns > 1 else None
    numbered = rows.append_column("at", pa.array(range(rows.num_rows), pa.int64()))
    frame = spark.createDataFrame(numbered).select("at", sieve.holds(functions.col("key"), tier).alias("held"))
    return [row["held"] for row in sorted(frame.collect())]


def pairs(values: Any, schema: dict[str, pa.DataType]) -> pa.Table:
    keys, tiers = zip(*values, strict=True)
    return pa.table({"key": pa.array(keys, schema["key"]), "tier": pa.array(tiers, schema["tier"])})


@pytest.mark.parametrize("spacing", [1, 100, 1 << 16, 1 << 22, 1 << 33])
def test_it_holds_exactly_its_identities(spark: SparkSession, spacing: int) -> None:
    """Keys that follow each other, keys far apart, and keys that end in zeros."""
    inside = [((at - 2_000) * spacing, at) for at in range(0, 6_000, 3)]
    asked = [((at - 2_000) * spacing + off, at) for at in range(6_000) for off in (0, 1)]
    there = set(inside)
    assert held(spark, pairs(inside, COLUMNS), pairs(asked, COLUMNS)) == [each in there for each in asked]


def test_keys_of_the_ends_and_keys_at_random(spark: SparkSession) -> None:
    numbers = np.random.default_rng(4).integers(-(2**63), 2**63 - 1, 20_000).tolist()
    ends = [-(2**63), -1, 0, 1, 2**63 - 1]
    inside = pa.table({"key": pa.array([*numbers[:10_000], *ends[::2]], pa.int64())})
    asked = pa.table({"key": pa.array([*numbers, *ends], pa.int64())})
    there = set(inside.column(0).to_pylist())
    assert held(spark, inside, asked) == [each in there for each in asked.column(0).to_pylist()]


@pytest.mark.parametrize("kind", [pa.int32(), pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC")], ids=str)
@pytest.mark.parametrize("zone", ["UTC", "America/St_Johns"])
def test_a_key_acts_only_on_its_own_tier_key(spark: SparkSession, kind: pa.DataType, zone: str) -> None:
    """Hazard 4: a key that moved is there under several tier keys, and each hides only its own row."""
    raw = pa.int32() if kind == pa.date32() else kind
    schema = {"key": pa.int32(), "tier": raw if raw == pa.int32() else pa.int64()}
    inside = [(7, 20_000), (7, 20_001), (7, 20_002), (8, -1), (9, 20_000)]
    asked = [(key, tier) for key in (6, 7, 8, 9) for tier in (-1, 0, 20_000, 20_001, 20_002)]

    def typed(values: list[tuple[int, int]]) -> pa.Table:
        plain = pairs(values, schema)
        return plain.set_column(1, "tier", plain.column(1).cast(kind))

    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        assert held(spark, typed(inside), typed(asked)) == [each in set(inside) for each in asked]
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def test_a_missing_key_is_in_no_set(spark: SparkSession) -> None:
    """A filter must not lose a row of which it knows nothing."""
    asked = pairs([(None, 1), (1, None), (None, None), (1, 1)], COLUMNS)
    assert held(spark, pairs([(1, 1), (0, 0)], COLUMNS), asked) == [False, False, False, True]


def test_an_empty_set_holds_nothing(spark: SparkSession) -> None:
    assert held(spark, pairs([(1, 1)], COLUMNS).slice(1), pairs([(0, 0), (1, 1)], COLUMNS)) == [False, False]


def test_keys_that_crowd_are_left_to_a_join(spark: SparkSession) -> None:
    crowded = pairs([(5, tier) for tier in range(MOST_IN_BUCKET + 1)], COLUMNS)
    assert sieve_of(spark, crowded) is None
    assert sieve_of(spark, crowded.slice(1)) is not None
