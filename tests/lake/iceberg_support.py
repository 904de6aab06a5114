"""A small lake for tests: real Postgres, real Iceberg, files written by the house's own writer, foreign readers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa

from modak.lake.changes import Change
from modak.lake.iceberg.catalog import IcebergLake
from modak.lake.iceberg.files import FileWriter
from modak.lake.iceberg.updates import Updates
from modak.lake.iceberg.vectors import vector_uri, write_vector
from modak.lake.model import DataFile, LakeColumn, LakeFile, LakeName, LakeTable, Layout, Prepared, Vector, data_folder
from modak.postgres.dsn import Dsn
from modak.spark.gateway import Gateway
from modak.storage import local_path, normal

LONG_TABLE = (LakeColumn("id", "long", required=True), LakeColumn("at", "long"), LakeColumn("note", "string"))
BY_HUNDRED = Layout("truncate", 100, "at")
_MIGRATION = Path(str(find_spec("modak.catalog").submodule_search_locations[0])) / "migrations" / "001_catalog.sql"  # type: ignore[index,union-attr]
_count = itertools.count(1)


def create_pointer_tables(dsn: Dsn) -> None:
    """Iceberg's two tables, as the migration makes them."""
    text = _MIGRATION.read_text()
    with psycopg.connect(dsn.conninfo()) as conn:
        conn.execute(text[text.index("CREATE SCHEMA modak_iceberg") :].encode())


@dataclass
class Lab:
    """A lake and everything a test does to it."""

    dsn: Dsn
    lake: IcebergLake
    _attempts: Any = field(default_factory=lambda: itertools.count(1))

    @classmethod
    def open(cls, gateway: Gateway, dsn: Dsn, warehouse: str) -> Lab:
        return cls(dsn, IcebergLake(gateway, dsn, warehouse, "modak"))

    def create(
        self,
        columns: Sequence[LakeColumn] = LONG_TABLE,
        layout: Layout = BY_HUNDRED,
        properties: Mapping[str, str] | None = None,
    ) -> LakeName:
        name = self.lake.name("public", f"t{next(_count):04d}")
        assert self.publish(self.lake.prepare_create(name, columns, layout, properties or {}, self.op()))
        return name

    def op(self) -> str:
        return f"20260101t000000000-{next(_count):08x}"

    def table(self, name: LakeName) -> LakeTable:
        table = self.lake.load(name)
        assert table is not None
        return table

    def publish(self, prepared: Prepared) -> bool:
        """The swap, as the catalog room does it, alone."""
        who = ("modak", prepared.identifier.namespace_text, prepared.identifier.name)
        with psycopg.connect(self.dsn.conninfo()) as conn:
            if prepared.base_location is None:
                done = conn.execute(
                    "INSERT INTO modak_iceberg.iceberg_tables VALUES (%s, %s, %s, %s, NULL, 'TABLE')",
                    (*who, prepared.new_location),
                )
            else:
                done = conn.execute(
                    "UPDATE modak_iceberg.iceberg_tables SET metadata_location = %s, previous_metadata_location = %s"
                    " WHERE catalog_name = %s AND table_namespace = %s AND table_name = %s AND metadata_location = %s"
                    " AND (iceberg_type = 'TABLE' OR iceberg_type IS NULL)",
                    (prepared.new_location, prepared.base_location, *who, prepared.base_location),
                )
            return done.rowcount == 1

    def commit(self, name: LakeName, *changes: Change, tag: Iterable[int] = ()) -> Prepared:
        prepared = self.lake.prepare(name, self.op(), next(self._attempts), changes, tag=tag)
        assert self.publish(prepared)
        return prepared

    def stock(self, name: LakeName, change: Change) -> None:
        """The same change through Iceberg's own commit, as a foreign tool would make it."""
        Updates(self.java, _Committing(self.java_table(name)), self.op(), None).apply(change)

    def foreign(self, name: LakeName, files: Iterable[DataFile]) -> None:
        """An append that is not ours."""
        table = self.java_table(name)
        append = table.newAppend()
        handle = self.java.method(".AppendFiles", "appendFile", ".AppendFiles", ".DataFile").bindTo(append)
        self.java.feed(list(files), table.specs(), self.java.consumer(handle))
        append.commit()

    @property
    def java(self) -> Any:
        return self.lake._java

    def java_table(self, name: LakeName) -> Any:
        return self.lake._existing(name)

    def write(self, name: LakeName, rows: Iterable[dict[str, Any]]) -> tuple[DataFile, ...]:
        table = self.table(name)
        folder = data_folder(table.location, self.op())
        writer = FileWriter(
            folder, table.schema, table.layout, task="0", tier_key=table.layout.column, spec_id=table.spec_id
        )
        writer.write(pa.RecordBatch.from_pylist(list(rows), schema=writer.schema))
        return tuple(writer.close())

    def vector(
        self, name: LakeName, positions: Iterable[int], file: DataFile, existing: Vector | None = None
    ) -> Vector:
        uri = vector_uri(data_folder(self.table(name).location, self.op()), "0")
        return write_vector(uri, positions, file, existing)

    def metadata(self, name: LakeName) -> dict[str, Any]:
        path = local_path(self.table(name).metadata_location)
        assert path is not None
        found: dict[str, Any] = json.loads(Path(path).read_text())
        return found

    def ids(self, name: LakeName) -> list[int]:
        return [snapshot["snapshot-id"] for snapshot in self.metadata(name).get("snapshots", [])]

    def pyiceberg(self, name: LakeName, snapshot_id: int | None = None) -> list[dict[str, Any]]:
        from pyiceberg.table import StaticTable

        scan = StaticTable.from_metadata(self.table(name).metadata_location).scan(snapshot_id=snapshot_id)
        return _sorted(scan.to_arrow().to_pylist())

    def duckdb(self, name: LakeName) -> list[dict[str, Any]]:
        import duckdb

        with duckdb.connect() as conn:
            for extension in ("avro", "iceberg"):
                folder = find_spec(f"duckdb_extension_{extension}").submodule_search_locations[0]  # type: ignore[index,union-attr]
                conn.execute(f"LOAD '{folder}/extensions/v{duckdb.__version__}/{extension}.duckdb_extension'")
            conn.execute("SET TimeZone = 'UTC'")
            path = local_path(self.table(name).metadata_location)
            return _sorted(conn.execute("SELECT * FROM iceberg_scan(?)", [path]).to_arrow_table().to_pylist())


def _sorted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: str(row["id"]).rjust(20))


class _Committing:
    """A Java table in the place of a transaction: every update is committed for good."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def table(self) -> Any:
        return self._table

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)


def shape(lab: Lab, name: LakeName) -> dict[str, Any]:
    """All that two tables with the same history must have in common; ids become ordinals, paths and times go."""
    metadata = lab.metadata(name)
    order = {snapshot["snapshot-id"]: index for index, snapshot in enumerate(metadata.get("snapshots", []))}
    dropped = ("modak.op-id",)
    snapshots = [
        {
            "id": order[entry["snapshot-id"]],
            "parent": order.get(entry.get("parent-snapshot-id", 0)),
            "first-row-id": entry.get("first-row-id"),
            "added-rows": entry.get("added-rows"),
            "sequence-number": entry["sequence-number"],
            "schema-id": entry.get("schema-id"),
            "summary": {key: value for key, value in entry["summary"].items() if key not in dropped},
        }
        for entry in metadata.get("snapshots", [])
    ]
    same: tuple[str, ...] = (
        "format-version",
        "last-sequence-number",
        "last-column-id",
        "schemas",
        "current-schema-id",
    )
    same += ("partition-specs", "default-spec-id", "last-partition-id", "sort-orders", "next-row-id")
    files = []
    if (current := metadata.get("current-snapshot-id")) not in (None, -1):
        for file in lab.lake.files(name, current, column="at"):
            entry = json.loads(file.file.json)
            vectors = [vector.rows for vector in file.vectors]
            row_id = entry.get("first-row-id")
            files.append((file.lower, file.upper, file.file.rows, file.sequence_number, row_id, vectors))
    properties = {key: value for key, value in metadata["properties"].items() if key != "modak.own-metadata"}
    return {
        **{key: metadata.get(key) for key in same},
        "properties": properties,
        "snapshots": snapshots,
        "refs": {
            ref.replace(str(entry["snapshot-id"]), str(order[entry["snapshot-id"]])): {
                **entry,
                "snapshot-id": order[entry["snapshot-id"]],
            }
            for ref, entry in metadata.get("refs", {}).items()
        },
        "files": sorted(files, key=str),
    }


def exists(uri: str) -> bool:
    path = local_path(normal(uri))
    assert path is not None
    return Path(path).exists()


def rows(*keys: int, note: str = "x") -> list[dict[str, Any]]:
    return [{"id": key, "at": key, "note": f"{note}{key}"} for key in keys]


def only(lab: Lab, name: LakeName) -> list[LakeFile]:
    """The live files of the current snapshot."""
    current = lab.table(name).snapshot_id
    assert current is not None
    return list(lab.lake.files(name, current, column="at"))


def table_folder(lab: Lab, name: LakeName) -> set[str]:
    """Every file below a table's location."""
    path = local_path(lab.table(name).location)
    assert path is not None
    return {normal(str(file)) for file in Path(path).rglob("*") if file.is_file()}
