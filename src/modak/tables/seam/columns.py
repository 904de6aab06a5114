"""The columns of a seam read: how each is read from the heap and the delta, and which Spark type both sides have.

Names and order are the heap's, types are what Spark shows for the lake column. Uuids are text there, so they are read
as text here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from modak.catalog.records import TableRecord
from modak.core.errors import Refused, UsageError
from modak.lake.types import MappedColumn, quoted_identifier
from modak.postgres.model import PgColumn, PgTable
from modak.tables.registration.preflight import map_columns

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType, StructType


@dataclass(frozen=True, slots=True)
class SeamColumn:
    """A column of the table, as Postgres has it and as it is read."""

    heap: PgColumn
    mapped: MappedColumn

    @property
    def name(self) -> str:
        """Its name in Postgres now."""
        return self.heap.name


@dataclass(frozen=True, slots=True)
class Shape:
    """The table as readers see it."""

    columns: tuple[SeamColumn, ...]
    pk: tuple[str, ...]
    tier_key: str

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns that identify a row: primary key and tier key."""
        return tuple(dict.fromkeys((*self.pk, self.tier_key)))

    @property
    def whole_number_key(self) -> bool:
        """Whether the primary key is one whole number, for which Spark's joins are at their best."""
        return len(self.pk) == 1 and self.named(self.pk[0]).mapped.column.type in ("int", "long")

    def of(self, names: Iterable[str]) -> tuple[SeamColumn, ...]:
        """The named columns, in the table's order."""
        wanted = set(names)
        return tuple(column for column in self.columns if column.name in wanted)

    def named(self, name: str) -> SeamColumn:
        """The column of that name, spelled as a user may spell it to Spark."""
        for column in self.columns:
            if column.name == name:
                return column
        for column in self.columns:
            if column.name.lower() == name.lower():
                return column
        known = ", ".join(column.name for column in self.columns)
        raise UsageError("seam.no_column", f"There is no column {name!r}.", hint=f"Columns are: {known}.")


def shape_of(record: TableRecord, heap: PgTable) -> Shape:
    """The readable shape of a registered table; key columns are known by number, because names change."""
    mapped, problems = map_columns(heap, record.numeric_as, frozenset())
    if problems:
        raise Refused("seam.column_type", problems[0].message, hint=problems[0].hint)
    columns = tuple(SeamColumn(column, _shown(column, each)) for column, each in zip(heap.columns, mapped, strict=True))
    names = {column.attnum: column.name for column in heap.columns}
    return Shape(columns, tuple(names[number] for number in record.pk_attnums), names[record.tier_attnum])


def struct_of(columns: Sequence[SeamColumn]) -> StructType:
    """The Spark schema of some columns."""
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(column.name, spark_type(column.mapped.column.type)) for column in columns])


def spark_type(lake_type: str) -> DataType:
    """What Spark makes of a lake type."""
    from pyspark.sql import types

    if lake_type.startswith("list<"):
        return types.ArrayType(spark_type(lake_type[5:-1]))
    if lake_type.startswith("decimal("):
        precision, scale = lake_type[8:-1].split(",")
        return types.DecimalType(int(precision), int(scale))
    return {
        "boolean": types.BooleanType(),
        "int": types.IntegerType(),
        "long": types.LongType(),
        "float": types.FloatType(),
        "double": types.DoubleType(),
        "string": types.StringType(),
        "binary": types.BinaryType(),
        "date": types.DateType(),
        "timestamp": types.TimestampNTZType(),
        "timestamptz": types.TimestampType(),
    }[lake_type]


def by_name(name: str) -> Column:
    """A column of a frame by its very name, dots and all."""
    from pyspark.sql import functions

    return functions.col(backticked(name))


def backticked(name: str) -> str:
    """An identifier for Spark."""
    return "`" + name.replace("`", "``") + "`"


def _shown(column: PgColumn, mapped: MappedColumn) -> MappedColumn:
    quoted = quoted_identifier(column.name)
    lake = replace(mapped.column, required=False)
    if lake.type == "uuid":
        return MappedColumn(replace(lake, type="string"), f"{quoted}::text", "plain")
    if lake.type == "list<uuid>":
        return replace(mapped, column=replace(lake, type="list<string>"), select=f"{quoted}::text[]")
    return replace(mapped, column=lake)
