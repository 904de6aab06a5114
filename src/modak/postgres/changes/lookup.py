"""What the numbers of types mean, by the catalog of now.

A type that has been dropped since the change was made is not there any more; its values then stay text. Memory: one
small row per type that a followed table has had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from modak.postgres.connect import translate
from modak.postgres.describe import catalog_query, pg_type
from modak.postgres.model import PgType


class CatalogTypes:
    """Looks types up in the catalog, once for each; a new one costs one query."""

    def __init__(self, open_connection: Callable[[], psycopg.Connection[Any]]) -> None:
        self._open = open_connection
        self._rows: dict[int, tuple[Any, ...]] = {}

    def __call__(self, wanted: Sequence[tuple[int, int]]) -> Sequence[PgType]:
        """The types of numbers and modifiers."""
        if any(oid not in self._rows for oid, _ in wanted):
            self._read([oid for oid, _ in wanted])
        return [self._type(oid, typmod) for oid, typmod in wanted]

    def _read(self, oids: list[int]) -> None:
        try:
            with self._open() as conn:
                self._rows.update((row[0], row) for row in conn.execute(catalog_query("types.sql"), (oids,)))
        except psycopg.Error as error:
            raise translate(error) from error

    def _type(self, oid: int, typmod: int) -> PgType:
        if oid not in self._rows:
            return PgType(f"dropped_{oid}", "other")
        return pg_type(self._rows, oid, typmod, True)
