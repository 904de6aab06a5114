"""Lakes on a real S3 server, beside lakes in folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from modak.catalog import profiles
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.site import Site
from tests.s3_fixtures import S3Server, s3_server
from tests.tables.conftest import settings_for

__all__ = ["s3_server"]

SECRET = "modak-secret"


def credentials(endpoint: str) -> dict[str, str]:
    """The environment of a worker that has the credentials `test`."""
    return {
        "MODAK_CREDENTIALS_TEST": f"s3.endpoint={endpoint};s3.access-key-id=modak;s3.secret-access-key={SECRET}"
        ";s3.region=us-east-1;s3.path-style-access=true"
    }


@pytest.fixture
def s3_lake(
    fresh_database: Dsn, warehouse: str, spark_home: Path, s3_server: S3Server, request: pytest.FixtureRequest
) -> Iterator[Site]:
    """A site whose default lake is a folder, with a profile `bucket` on S3."""
    with_spark = request.node.get_closest_marker("spark") is not None
    request.getfixturevalue("spark" if with_spark else "gateway")
    settings = settings_for(fresh_database, warehouse, spark_home, **credentials(s3_server.endpoint))
    with open_site(settings) as site:
        with site.connect() as conn:
            root = f"s3://{s3_server.new_bucket()}/lake"
            profiles.create(conn, "bucket", root, credentials="test")
        if with_spark:
            _ = site.spark
        yield site


@pytest.fixture
def s3_leader(s3_lake: Site) -> Iterator[Leader]:
    with Leader.campaign(s3_lake, 5) as held:
        yield held
