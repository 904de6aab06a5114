"""Files to bring into a table, and what its lake has then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from modak.tables.ingest.run import IngestReport, Request, ingest
from modak.tables.site import Site
from tests.tables.events import Events

Rows = list[tuple[int, int, str]]


def parquet(path: Path, rows: Rows, **more: Any) -> str:
    columns = list(zip(*rows, strict=True)) if rows else [(), (), ()]
    table = pa.table(
        {"id": pa.array(columns[0], pa.int64()), "ts": pa.array(columns[1], pa.int64()), "body": list(columns[2])}
    )
    for name, values in more.items():
        table = table.append_column(name, values)
    pq.write_table(table, path)
    return str(path)


def take(site: Site, events: Events, *given: str, kind: Any = "parquet", **more: Any) -> IngestReport:
    stdin = more.pop("stdin", None)
    return ingest(site, Request(events.name, given, kind, **more), stdin=stdin)


def lake(events: Events) -> set[Any]:
    rows = events.lake()
    assert len(rows) == len(set(rows))
    return set(rows)


BASE = {(i, i, f"row {i}") for i in range(200)}
