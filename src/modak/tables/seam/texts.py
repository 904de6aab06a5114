"""Values as text, made in Spark before they reach Python: there every moment and every decimal has one exact form."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

AS_JSON = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""How Spark writes moments in JSON: to the microsecond, where it would by itself stop at the millisecond."""


def texts(frame: DataFrame) -> DataFrame:
    """The frame with every value as text: lists and structures as JSON, bytes as Postgres' hex."""
    from pyspark.sql import functions
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StructType

    plain = frame.toDF(*(f"c{at}" for at in range(len(frame.columns))))
    shown = []
    for name, kind in zip(plain.columns, (column.dataType for column in frame.schema), strict=True):
        column = functions.col(name)
        if isinstance(kind, ArrayType | MapType | StructType):
            shown.append(functions.to_json(column, AS_JSON).alias(name))
        elif isinstance(kind, BinaryType):
            shown.append(functions.concat(functions.lit("\\x"), functions.lower(functions.hex(column))).alias(name))
        else:
            shown.append(column.cast("string").alias(name))
    return plain.select(*shown)
