"""A real Iceberg table of format 3 in a folder, made with the Java API, and the three readers that must agree on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa

from modak.lake.iceberg.java import Java
from modak.lake.iceberg.schema import columns_of, schema_json, spec_of
from modak.lake.model import DataFile, LakeColumn, Layout, Vector


class Lakehouse:
    """One table."""

    def __init__(self, java: Java, folder: str, columns: Sequence[LakeColumn], layout: Layout) -> None:
        self.java = java
        self.location = f"file://{folder}/table"
        schema = java.iceberg.SchemaParser.fromJson(schema_json(columns))
        tables = java.iceberg.hadoop.HadoopTables(java.jvm.org.apache.hadoop.conf.Configuration())
        properties = java.jvm.java.util.HashMap()
        properties.put("format-version", "3")
        self.table = tables.create(schema, spec_of(java, schema, layout), properties, self.location)

    @property
    def columns(self) -> tuple[LakeColumn, ...]:
        return columns_of(json.loads(self.java.iceberg.SchemaParser.toJson(self.table.schema())))

    def append(self, files: Sequence[DataFile]) -> None:
        update = self.table.newAppend()
        self.java.feed(files, self.table.specs(), self._consumer(update, ".AppendFiles", "appendFile", ".DataFile"))
        update.commit()

    def delete(self, vectors: Sequence[Vector], removed: Sequence[Vector] = ()) -> None:
        update = self.table.newRowDelta().validateFromSnapshot(self.table.currentSnapshot().snapshotId())
        specs = self.table.specs()
        self.java.feed(vectors, specs, self._consumer(update, ".RowDelta", "addDeletes", ".DeleteFile"))
        if removed:
            self.java.feed(removed, specs, self._consumer(update, ".RowDelta", "removeDeletes", ".DeleteFile"))
        update.commit()

    def _consumer(self, update: Any, owner: str, method: str, takes: str) -> Any:
        handle = self.java.method(owner, method, owner, takes)
        return self.java.consumer(self.java.bind(handle, 0, update))

    @property
    def metadata(self) -> str:
        return max(
            str(path) for path in Path(self.location.removeprefix("file://"), "metadata").glob("v*.metadata.json")
        )

    def by_spark(self, spark: Any, order: str, where: str = "true") -> pa.Table:
        return spark.read.format("iceberg").load(self.location).where(where).orderBy(order).toArrow()

    def by_duckdb(self, order: str, where: str = "true") -> pa.Table:
        return self.duckdb(f"SELECT * FROM iceberg_scan('{self.metadata}') WHERE {where} ORDER BY {order}")

    def duckdb(self, sql: str) -> pa.Table:
        import duckdb

        with duckdb.connect() as conn:
            for extension in ("avro", "iceberg"):
                folder = import_module(f"duckdb_extension_{extension}").__path__[0]
                conn.execute(f"LOAD '{folder}/extensions/v{duckdb.__version__}/{extension}.duckdb_extension'")
            conn.execute("SET TimeZone = 'UTC'")
            return conn.execute(sql).to_arrow_table()

    def by_pyiceberg(self, order: str, where: str | None = None) -> pa.Table:
        from pyiceberg.table import StaticTable

        scan = StaticTable.from_metadata(self.metadata).scan(**({"row_filter": where} if where else {}))
        return scan.to_arrow().sort_by(order)
