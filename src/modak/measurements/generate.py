"""A data set to try things on: many hosts, late data, columns that come and go, repeated rows, some corrupt files.

Everything is drawn from a seed, and whole columns at a time.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from modak.measurements.layout import Place, Stamp, check_name, raw_name
from modak.measurements.types import TAGS_KEY
from modak.measurements.windows import Level, window_of
from modak.storage.objects import Objects

_HOUR_MICROS = 3_600_000_000
_CORRUPT_EVERY = 97
_DRIFT_EVERY = 5
_LATE_EVERY = 11
_REPEAT_EVERY = 13


@dataclass(frozen=True, slots=True)
class Shape:
    """How much to make; `until` is the hour after the last."""

    database: str
    measurements: tuple[str, ...]
    until: datetime
    hours: int = 6
    files_per_hour: int = 20
    rows_per_file: int = 5_000
    hosts: int = 100
    seed: int = 1
    corrupt: bool = True


@dataclass
class Made:
    """What was written."""

    files: int = 0
    rows: int = 0
    bytes: int = 0
    corrupt: int = 0


def generate(objects: Objects, shape: Shape, on_file: Callable[[Made], None] | None = None) -> Made:
    """Write the files, hour by hour."""
    check_name("database", shape.database)
    for name in shape.measurements:
        check_name("measurement", name)
    made, random = Made(), np.random.default_rng(shape.seed)
    last = window_of(Level.HOUR, shape.until)
    number = 0
    for measurement in shape.measurements:
        for back in range(shape.hours, 0, -1):
            hour = window_of(Level.HOUR, last.start - timedelta(hours=back))
            for index in range(shape.files_per_hour):
                number += 1
                flushed = hour.start + timedelta(hours=1) * (index + 1) / shape.files_per_hour
                if number % _LATE_EVERY == 0:
                    flushed += timedelta(minutes=35)
                name = raw_name(measurement, Stamp(flushed.replace(microsecond=0), number))
                data = _file(shape, random, hour.start, drifted=number % _DRIFT_EVERY == 0, number=number)
                if shape.corrupt and number % _CORRUPT_EVERY == 0:
                    data = data[: len(data) // 2]
                    made.corrupt += 1
                else:
                    made.rows += shape.rows_per_file
                objects.put(f"{Place(shape.database, measurement, hour).folder}/{name}", data)
                made.files, made.bytes = made.files + 1, made.bytes + len(data)
                if on_file is not None:
                    on_file(made)
    return made


def _file(shape: Shape, random: np.random.Generator, start: datetime, *, drifted: bool, number: int) -> bytes:
    rows = shape.rows_per_file
    micros = int(start.timestamp()) * 1_000_000 + random.integers(0, _HOUR_MICROS, rows)
    hosts = random.integers(0, shape.hosts, rows)
    if number % _REPEAT_EVERY == 0:
        # A client that got no answer has sent its points again.
        half = rows // 2
        micros[half : 2 * half], hosts[half : 2 * half] = micros[:half], hosts[:half]
    order = np.argsort(micros, kind="stable")
    micros, hosts = micros[order], hosts[order]
    names = pa.array([f"host-{index:04d}" for index in range(shape.hosts)])
    regions = pa.array([f"region-{index % 7}" for index in range(shape.hosts)])
    load = np.round((hosts * 37 + micros // 1_000_000) % 1000 / 10, 1)
    columns = {
        "time": pa.array(micros, pa.timestamp("us", tz="UTC")),
        "host": names.take(pa.array(hosts)),
        "region": regions.take(pa.array(hosts)),
        "usage_user": pa.array(load),
        "usage_system": pa.array(np.round(load / 3, 2), pa.float32() if drifted else pa.float64()),
        "processes": pa.array((hosts + micros // 60_000_000) % 500, pa.int32() if drifted else pa.int64()),
    }
    if drifted:
        columns["temperature"] = pa.array(np.round(40 + load / 10, 1))
    table = pa.table(columns).replace_schema_metadata({TAGS_KEY: b"host,region"})
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="snappy")
    return sink.getvalue()
