"""What other tools do to our lake tables: equality deletes by a stock commit, Spark's procedures, files grown old."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from modak.lake.iceberg.output import is_local, open_output, size_of
from modak.lake.model import EqualityDeletes
from modak.storage.uri import normal
from modak.tables.foreign import accept
from tests.maintenance.lake import Lake

DAY = 86_400


def equality_delete(lake: Lake, keys: Sequence[Sequence[int]], band: int | None = 0, *, accepted: bool = True) -> None:
    """Delete rows by id, one delete file per entry of `keys`, in one foreign commit; `band` None: nothing is there."""
    java, table = lake.site.lake._java, lake.site.lake.java_table(lake.table.identifier)
    update = table.newRowDelta()
    handle = java.bind(java.method(".RowDelta", "addDeletes", ".RowDelta", ".DeleteFile"), 0, update)
    java.feed(list(_written(lake, keys, band)), table.specs(), java.consumer(handle))
    update.commit()
    if accepted:
        accept(lake.site, lake.events.name)


def _written(lake: Lake, keys: Sequence[Sequence[int]], band: int | None) -> Iterable[EqualityDeletes]:
    table = lake.table
    column = table.column("id")
    assert column is not None
    folder = f"{normal(table.location)}/data/foreign-{time.monotonic_ns()}"
    field = pa.field("id", pa.int64(), metadata={b"PARQUET:field_id": str(column.field_id).encode()})
    for number, wanted in enumerate(keys):
        output = open_output(f"{folder}/eq-{number:05d}.parquet")
        rows = pa.table({"id": pa.array(wanted, pa.int64())}, pa.schema([field]))
        pq.write_table(rows, output.stream, store_schema=False)
        output.stream.close()
        # Thousands of them: on the disk of a test nothing has to outlive a power cut.
        size = size_of(output.uri) if is_local(output.uri) else output.commit()
        entry = {
            "spec-id": table.spec_id,
            "content": "equality-deletes",
            "file-path": output.uri,
            "file-format": "parquet",
            "partition": [] if band is None else [band],
            "file-size-in-bytes": size,
            "record-count": len(wanted),
            "equality-ids": [column.field_id],
            "sort-order-id": 0,
        }
        yield EqualityDeletes(json.dumps(entry), len(wanted), size, output.uri, 0, (), table.spec_id, ())


def grow_old(folder: str, days: float = 30) -> None:
    """Every file below a folder was last written so long ago."""
    then = time.time() - days * DAY
    for parent, _, names in os.walk(folder):
        for name in names:
            os.utime(os.path.join(parent, name), (then, then))


def expire_snapshots(site: Any, name: str = "events") -> None:
    """Spark's own expiry, as greedy as it can be."""
    site.spark.sql(
        f"CALL modak.system.expire_snapshots(table => 'modak.modak.public.{name}',"
        " older_than => timestamp '2999-01-01 00:00:00', retain_last => 1)"
    ).collect()


def remove_orphan_files(site: Any, name: str = "events") -> list[str]:
    """Spark's own sweep, as greedy as it lets itself be: everything older than a day."""
    limit = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time.time() - 1.1 * DAY))
    rows = site.spark.sql(
        f"CALL modak.system.remove_orphan_files(table => 'modak.modak.public.{name}',"
        f" older_than => timestamp '{limit}')"
    ).collect()
    return [row[0] for row in rows]
