"""What an attribute is in Arrow, in DuckDB and in Spark. Pure.

UUIDs are lower-case text, because Spark cannot open Parquet's own UUIDs; dates and moments are epoch milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from modak.entities.registry import Attribute, EntitySchema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType, StructType

_DUCKDB = {
    "text": "VARCHAR",
    "uuid": "VARCHAR",
    "smallint": "SMALLINT",
    "integer": "INTEGER",
    "bigint": "BIGINT",
    "date": "BIGINT",
    "datetime": "BIGINT",
    "bool": "BOOLEAN",
}
_SPARK = {
    "text": "string",
    "uuid": "string",
    "smallint": "smallint",
    "integer": "int",
    "bigint": "bigint",
    "date": "bigint",
    "datetime": "bigint",
    "bool": "boolean",
}


def arrow_type(attribute: Attribute) -> pa.DataType:
    """The Arrow type of an attribute's values."""
    import pyarrow as pa

    scalar = arrow_scalar(attribute)
    return pa.list_(pa.field("element", scalar)) if attribute.is_list else scalar


def arrow_scalar(attribute: Attribute) -> pa.DataType:
    """The Arrow type of one value, an item's for a list."""
    import pyarrow as pa

    if attribute.scalar == "numeric":
        return pa.decimal128(attribute.precision, attribute.scale)
    return {
        "text": pa.string(),
        "uuid": pa.string(),
        "smallint": pa.int16(),
        "integer": pa.int32(),
        "bigint": pa.int64(),
        "date": pa.int64(),
        "datetime": pa.int64(),
        "bool": pa.bool_(),
    }[attribute.scalar]


def fixed_fields() -> list[pa.Field]:
    """The columns that every file begins with."""
    import pyarrow as pa

    return [
        pa.field("schema_id", pa.int16(), nullable=False),
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("changed_at", pa.int64(), nullable=False),
        pa.field("deleted_at", pa.int64(), nullable=False),
        pa.field("ltbase_created_at", pa.int64()),
        pa.field("ltbase_updated_at", pa.int64()),
        pa.field("ltbase_deleted_at", pa.int64()),
    ]


def file_schema(schema: EntitySchema) -> pa.Schema:
    """The columns of a file: the fixed ones, then the attributes sorted by name."""
    import pyarrow as pa

    return pa.schema([*fixed_fields(), *(pa.field(each.name, arrow_type(each)) for each in schema.attributes)])


def duckdb_type(attribute: Attribute) -> str:
    """The type to which a file's column is cast."""
    inner = (
        f"DECIMAL({attribute.precision},{attribute.scale})"
        if attribute.scalar == "numeric"
        else _DUCKDB[attribute.scalar]
    )
    return f"{inner}[]" if attribute.is_list else inner


def spark_struct(attributes: Sequence[Attribute]) -> StructType:
    """The schema of a frame with these attributes."""
    from pyspark.sql.types import LongType, ShortType, StringType, StructField, StructType

    fixed = [
        StructField("schema_id", ShortType(), False),
        StructField("row_id", StringType(), False),
        StructField("changed_at", LongType(), False),
        StructField("deleted_at", LongType(), False),
        StructField("ltbase_created_at", LongType()),
        StructField("ltbase_updated_at", LongType()),
        StructField("ltbase_deleted_at", LongType()),
    ]
    return StructType([*fixed, *(StructField(each.name, _spark_type(each)) for each in attributes)])


def _spark_type(attribute: Attribute) -> DataType:
    from pyspark.sql.types import (
        ArrayType,
        BooleanType,
        DecimalType,
        IntegerType,
        LongType,
        ShortType,
        StringType,
    )

    kinds = {
        "string": StringType(),
        "smallint": ShortType(),
        "int": IntegerType(),
        "bigint": LongType(),
        "boolean": BooleanType(),
    }
    inner = (
        DecimalType(attribute.precision, attribute.scale)
        if attribute.scalar == "numeric"
        else kinds[_SPARK[attribute.scalar]]
    )
    return ArrayType(inner) if attribute.is_list else inner
