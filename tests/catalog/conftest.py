"""A migrated database per module, and a builder of registered tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from modak.catalog.migrate import migrate
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn

Conn = psycopg.Connection[Any]


@pytest.fixture(scope="module")
def catalog(database: Dsn) -> Dsn:
    """The address of a migrated database."""
    with connect(database) as conn:
        migrate(conn)
    return database


@pytest.fixture
def conn(catalog: Dsn) -> Iterator[Conn]:
    """An autocommit connection to it."""
    with connect(catalog, autocommit=True) as opened:
        yield opened
