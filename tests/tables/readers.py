"""The engines that read our lake beside us, each by its own way in, brought to one form so that their rows compare."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any
from urllib.parse import quote

from modak.core.names import TableName
from modak.storage.uri import local_path
from modak.tables.site import Site

Rows = list[dict[str, Any]]


def by_spark(site: Site, name: TableName, where: str = "true") -> Rows:
    table = site.spark.sql(f"SELECT * FROM modak.modak.{name.schema}.{name.name} WHERE {where}")
    return plain(table.toArrow())


def by_pyiceberg(site: Site, name: TableName, where: str | None = None) -> Rows:
    from pyiceberg.catalog.sql import SqlCatalog

    dsn = site.dsn
    catalog = SqlCatalog(
        "modak",
        uri=f"postgresql+psycopg2://{dsn.user}:{quote(dsn.password)}@{dsn.host}:{dsn.port}/{dsn.dbname}"
        "?options=-csearch_path%3Dmodak_iceberg",
        warehouse=site.settings.lake.warehouse,
        init_catalog_tables="false",
    )
    try:
        table = catalog.load_table(("modak", name.schema, name.name))
        return plain(table.scan(**({"row_filter": where} if where else {})).to_arrow())
    finally:
        catalog.close()


def by_duckdb(site: Site, name: TableName, where: str = "true") -> Rows:
    location = site.reader.state(name).cutline.metadata_location
    return duckdb_rows(location, where)


def duckdb_rows(metadata_location: str, where: str = "true") -> Rows:
    import duckdb

    with duckdb.connect() as conn:
        load_extensions(conn)
        conn.execute("SET TimeZone = 'UTC'")
        query = f"SELECT * FROM iceberg_scan('{local_path(metadata_location)}') WHERE {where}"
        return plain(conn.execute(query).to_arrow_table())


def load_extensions(conn: Any) -> None:
    """The extensions come as wheels, so that tests need no network."""
    import duckdb

    for extension in ("avro", "iceberg"):
        folder = import_module(f"duckdb_extension_{extension}").__path__[0]
        conn.execute(f"LOAD '{folder}/extensions/v{duckdb.__version__}/{extension}.duckdb_extension'")


def static_rows(metadata_location: str, snapshot_id: int | None = None) -> Rows:
    """PyIceberg without a catalog: by metadata file."""
    from pyiceberg.table import StaticTable

    return plain(StaticTable.from_metadata(metadata_location).scan(snapshot_id=snapshot_id).to_arrow())


def plain(table: Any) -> Rows:
    """Rows in the order of their ids, with values that compare across engines."""
    rows = [{key: _value(value) for key, value in row.items()} for row in table.to_pylist()]
    return sorted(rows, key=lambda row: (row["id"], str(sorted(map(str, row.items())))))


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(item) for item in value]
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    # Uuids are text to Spark and DuckDB, and objects to PyIceberg.
    return str(value) if type(value).__name__ == "UUID" else value
