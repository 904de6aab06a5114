"""Which lake partition a row belongs to: Iceberg's transforms over a whole column of tier keys.

A file registered in the wrong bucket loses its rows to pruning, so these agree with Iceberg on negative numbers too:
divisions round towards minus infinity, months and years count from 1970 in UTC. An unpartitioned table has buckets
too: its files are cut at the bounds of the Postgres partitions, so that retention can remove whole files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from modak.core.errors import ModakError
from modak.lake.model import Layout

_DAY = 86_400_000_000
_HOUR = 3_600_000_000
_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One lake partition, or one stretch between cuts of an unpartitioned table. No value: rows without a tier key."""

    value: int | None

    def partition(self, layout: Layout) -> list[object]:
        """The partition tuple as ContentFileParser JSON has it."""
        if layout.transform is None:
            return []
        if layout.transform == "day" and self.value is not None:
            return [_iso_date(self.value)]
        return [self.value]

    def folder(self, layout: Layout) -> str:
        """A folder name for people; readers take the partition from the metadata only."""
        if layout.transform is None:
            return "all" if self.value is None else f"cut={self.value}"
        column = re.sub(r"[^A-Za-z0-9_]", "_", layout.column or "key")
        value = self.partition(layout)[0]
        return f"{column}_{layout.transform}={'null' if value is None else value}"


def split(
    batch: pa.RecordBatch, keys: pa.Array | None, layout: Layout, cut: Sequence[int]
) -> Iterator[tuple[Bucket, pa.RecordBatch]]:
    """The rows of a batch by bucket, in their order; rows of a batch that has one bucket are not copied."""
    if keys is None or (layout.transform is None and not cut) or not len(batch):
        yield Bucket(None), batch
        return
    missing = np.asarray(keys.is_null()) if keys.null_count else None
    axis = _axis(keys)
    if missing is None:
        # Buckets are ordered like their keys: where the ends meet there is nothing to split.
        ends = _of(np.array([axis.min(), axis.max()]), layout, cut)
        if ends[0] == ends[1]:
            yield Bucket(int(ends[0])), batch
            return
    values = _of(axis, layout, cut)
    if missing is not None:
        yield Bucket(None), batch.take(pa.array(np.flatnonzero(missing)))
        kept = np.flatnonzero(~missing)
        if not len(kept):
            return
        batch, values = batch.take(pa.array(kept)), values[kept]
    order = np.argsort(values, kind="stable")
    distinct, starts = np.unique(values[order], return_index=True)
    for value, rows in zip(distinct, np.split(order, starts[1:]), strict=True):
        yield Bucket(int(value)), _picked(batch, rows)


def _picked(batch: pa.RecordBatch, rows: Any) -> pa.RecordBatch:
    """Some rows of a batch; a copy, because a small slice would keep the whole batch in memory while it waits."""
    first, count = int(rows[0]), len(rows)
    if int(rows[-1]) - first + 1 == count and 2 * count >= len(batch):
        return batch.slice(first, count)
    return batch.take(pa.array(rows))


def _axis(keys: pa.Array) -> Any:
    kind = keys.type
    if pa.types.is_date32(kind):
        keys = keys.cast(pa.int32())
    elif pa.types.is_timestamp(kind):
        keys = keys.cast(pa.int64())
    elif not pa.types.is_integer(kind):
        raise ModakError("lake.tier_key", f"A column of type {kind} cannot be the tier key of a lake table.")
    return np.asarray(keys.fill_null(0) if keys.null_count else keys)


def _of(keys: Any, layout: Layout, cut: Sequence[int]) -> Any:
    daily = keys.dtype == np.int32
    match layout.transform:
        case None:
            return np.searchsorted(np.asarray(cut, np.int64), keys, side="right")
        case "truncate":
            # In the column's own width, so that the lowest keys wrap exactly as they do in Iceberg.
            return keys - np.mod(keys, keys.dtype.type(layout.width or 1))
        case "hour":
            return _fits(np.floor_divide(keys, _HOUR))
        case "day":
            return keys if daily else np.floor_divide(keys, _DAY)
        case "month":
            return _calendar(keys, "M", daily=daily)
        case "year":
            return _calendar(keys, "Y", daily=daily)


def _calendar(keys: Any, unit: str, *, daily: bool) -> Any:
    days = keys.astype(np.int64) if daily else np.floor_divide(keys, _DAY)
    return days.astype("datetime64[D]").astype(f"datetime64[{unit}]").astype(np.int64)


def _fits(hours: Any) -> Any:
    if hours.min() < _INT32.min or hours.max() > _INT32.max:
        raise ModakError(
            "lake.partition_range",
            "A tier key is infinite or too far from 1970 for a table partitioned by hour.",
            hint="Correct those rows in Postgres, or register the table with partitions of a day or more.",
        )
    return hours


def _iso_date(days: int) -> str:
    # numpy pads no negative year, and Java wants a sign before years of more than four digits.
    year, month, day = str(np.datetime64(days, "D")).rsplit("-", 2)
    number = int(year)
    sign = "-" if number < 0 else "+" if number > 9999 else ""
    return f"{sign}{abs(number):04d}-{month}-{day}"


def one_bucket(lower: int, upper: int, lake_type: str, layout: Layout, cut: Sequence[int]) -> Bucket | None:
    """The bucket of all tier keys from `lower` to `upper` (both included), if it is one."""
    if layout.transform is None and not cut:
        return Bucket(None)
    kind = np.int32 if lake_type in {"int", "date"} else np.int64
    ends = _of(np.array([lower, upper], kind), layout, cut)
    return Bucket(int(ends[0])) if ends[0] == ends[1] else None
