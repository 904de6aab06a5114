"""A whole site on real parts for mirrored tables, as for tiered ones; the role that mirrors may replicate."""

from __future__ import annotations

import pytest

from modak.postgres.dsn import Dsn
from modak.postgres.embedded import EmbeddedServer
from tests.mirror.world import ground, make
from tests.support.role import may_replicate
from tests.tables.conftest import leader, site

__all__ = ["ground", "leader", "make", "site"]


@pytest.fixture(scope="module", name="database")
def _database(server: EmbeddedServer, database: Dsn) -> Dsn:
    return may_replicate(server, database)


@pytest.fixture(name="fresh_database")
def _fresh_database(server: EmbeddedServer, fresh_database: Dsn) -> Dsn:
    return may_replicate(server, fresh_database)
