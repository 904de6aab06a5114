"""`modak.update`, `modak.upsert` and `modak.delete`: corrections of single rows from a program, hot or cold.

Settings come from `MODAK_*`, or as an argument. A program that has a Spark session passes it, so that looking into the
lake needs no second JVM; a row that is hot, or that the delta has, needs none at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from modak.core.names import TableName
from modak.runtime.opening import open_site
from modak.tables import amend
from modak.tables.site import Site

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from modak.config import Settings

Values = Mapping[str, Any]


def update(
    table: str,
    key: Values,
    changes: Values,
    *,
    spark: SparkSession | None = None,
    settings: Settings | None = None,
) -> str:
    """Change columns of the row with this key (primary key and tier key); the rest stays. Returns heap or delta."""
    with _site(spark, settings) as site:
        return amend.update(site, TableName.parse(table), key, changes)


def upsert(table: str, row: Values, *, settings: Settings | None = None) -> str:
    """Write a whole row, whatever tier it belongs to. Returns heap or delta."""
    with _site(None, settings) as site:
        return amend.upsert(site, TableName.parse(table), row)


def delete(table: str, key: Values, *, settings: Settings | None = None) -> str:
    """Delete the row with this key (primary key and tier key), whatever tier it is in. Returns heap or delta."""
    with _site(None, settings) as site:
        return amend.delete(site, TableName.parse(table), key)


@contextmanager
def _site(spark: SparkSession | None, settings: Settings | None) -> Iterator[Site]:
    from modak import config

    with open_site(settings or config.load()) as site:
        if spark is not None:
            site.use(spark)
        yield site
