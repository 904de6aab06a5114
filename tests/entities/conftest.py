"""A fresh store per test, on a folder, and on a bucket where a test asks for both."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg import sql

from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.postgres.embedded import EmbeddedServer
from modak.storage.objects import Objects
from tests.entities.world import World
from tests.s3_fixtures import S3Server, s3_server
from tests.support.role import way_in

__all__ = ["s3_server"]


@pytest.fixture
def fresh_database(server: EmbeddedServer, database: Dsn) -> Dsn:
    """The database of the module, emptied: much faster than making one for every test."""
    with connect(server.dsn(database.dbname), autocommit=True) as conn:
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
        found = conn.execute(
            "SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema'"
        ).fetchall()
        for (name,) in found:
            conn.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(name)))
        conn.execute("CREATE SCHEMA public")
    return way_in(server, database.dbname)


def made(kind: str, request: pytest.FixtureRequest, dsn: Dsn, folder: Path) -> World:
    if kind == "folder":
        return World(dsn, Objects.of(str(folder / "store")))
    server: S3Server = request.getfixturevalue("s3_server")
    return World(dsn, Objects.of(f"s3://{server.new_bucket()}/here", server.props), access=server.environ)


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.full)])
def world(request: pytest.FixtureRequest, fresh_database: Dsn, tmp_path: Path) -> World:
    """A store in a folder; in the full run every test has one in a bucket too."""
    return made(request.param, request, fresh_database, tmp_path)


@pytest.fixture(params=["folder", "bucket"])
def either(request: pytest.FixtureRequest, fresh_database: Dsn, tmp_path: Path) -> World:
    """A store in a folder and one in a bucket, in every run."""
    return made(request.param, request, fresh_database, tmp_path)
