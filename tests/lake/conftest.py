"""A small lake for the tests of this room."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from modak.postgres.dsn import Dsn

if TYPE_CHECKING:
    from modak.spark.gateway import Gateway
    from tests.lake.iceberg_support import Lab


@pytest.fixture(scope="module")
def pointers(database: Dsn) -> Dsn:
    """A database with Iceberg's two tables."""
    from tests.lake.iceberg_support import create_pointer_tables

    create_pointer_tables(database)
    return database


@pytest.fixture
def lab(gateway: Gateway, pointers: Dsn, warehouse: str) -> Iterator[Lab]:
    """A lake with nothing in it."""
    from tests.lake.iceberg_support import Lab

    made = Lab.open(gateway, pointers, warehouse)
    yield made
    made.lake.close()
