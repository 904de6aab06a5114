"""The read-only Iceberg REST catalog, as PyIceberg and Spark see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from starlette.testclient import TestClient

from modak.catalog import profiles
from modak.runtime.leader import Leader
from modak.runtime.web.app import create_app
from modak.runtime.web.auth import Guard
from modak.runtime.web.context import Context
from modak.runtime.web.server import listening
from modak.tables.site import Site
from tests.runtime.conftest import ADMIN, READ, led
from tests.tables.events import Events
from tests.tables.readers import load_extensions


@pytest.fixture
def address(site: Site, events: Events, leader: Leader) -> Iterator[str]:
    """A server on a free port, with `public.events` tiered up to 200."""
    events.register()
    events.tier(leader)
    with listening(led(site), 0) as where:
        yield f"{where}/iceberg"


def opened(address: str, **more: str) -> Any:
    from pyiceberg.catalog.rest import RestCatalog

    return RestCatalog("modak", uri=address, **more)


def test_pyiceberg_finds_and_reads_tables_by_name(address: str, events: Events) -> None:
    catalog = opened(address)
    assert catalog.list_namespaces() == [("modak",)]
    assert catalog.list_namespaces(("modak",)) == [("modak", "public")]
    assert catalog.list_tables(("modak", "public")) == [("modak", "public", "events")]
    assert catalog.table_exists(("modak", "public", "events"))
    assert not catalog.table_exists(("modak", "public", "nothing"))
    assert not catalog.namespace_exists(("nothing",))
    table = catalog.load_table(("modak", "public", "events"))
    assert table.metadata_location == events.site.reader.state(events.name).cutline.metadata_location
    assert sorted(table.scan().to_arrow().column("id").to_pylist()) == list(range(200))


def test_what_is_committed_next_is_seen_next(address: str, events: Events, leader: Leader) -> None:
    catalog = opened(address)
    before = catalog.load_table("modak.public.events")
    events.add_partition(300)
    events.sql("INSERT INTO public.events VALUES (350, 350, 'new')")
    events.tier(leader)
    after = catalog.load_table("modak.public.events")
    assert before.metadata_location != after.metadata_location
    assert after.scan().to_arrow().num_rows == 251


def test_nothing_can_be_changed_through_it(address: str) -> None:
    from pyiceberg.exceptions import RESTError

    catalog = opened(address)
    table = catalog.load_table("modak.public.events")
    before = table.metadata_location
    for change in (
        lambda: catalog.create_namespace("other"),
        lambda: catalog.drop_table("modak.public.events"),
        lambda: catalog.rename_table("modak.public.events", "modak.public.other"),
        lambda: table.transaction().set_properties(a="b").commit_transaction(),
    ):
        with pytest.raises((RESTError, NotImplementedError)):
            change()
    assert catalog.load_table("modak.public.events").metadata_location == before


def test_a_client_that_has_it_already_is_told_so(api: TestClient, events: Events) -> None:
    events.register()
    path = "/iceberg/v1/namespaces/modak%1Fpublic/tables/events"
    first = api.get(path)
    assert first.json()["config"] == {}
    assert api.get(path, headers={"If-None-Match": first.headers["etag"]}).status_code == 304
    assert api.get(path, params={"snapshots": "refs"}).json()["metadata"]["snapshots"] == []
    assert api.get("/iceberg/v1/namespaces/nothing").json()["error"]["type"] == "NoSuchNamespaceException"
    assert api.get(f"{path}x").json()["error"]["type"] == "NoSuchTableException"
    assert api.get("/iceberg/v1/namespaces", params={"parent": "nothing"}).status_code == 404
    assert api.post(f"{path}/metrics", json={}).status_code == 204
    assert api.delete(path).json()["error"]["type"] == "UnsupportedOperationException"


def test_no_key_leaves_unless_it_is_configured(bare: Callable[..., Context]) -> None:
    from modak.runtime.web.iceberg import access

    given = {
        "MODAK_WAREHOUSE": "s3://lake/w",
        "MODAK_S3_ENDPOINT": "127.0.0.1:9000",
        "MODAK_S3_ACCESS_KEY": "the-key",
        "MODAK_S3_SECRET_KEY": "the-secret",
        "MODAK_S3_REGION": "eu-1",
    }
    site = bare(**given, MODAK_CREDENTIALS_ELSEWHERE="s3.secret-access-key=another-secret;adls.token=a-token").site
    with site.connect() as conn:
        profiles.create(
            conn, "cold", "s3://elsewhere/w", config={"s3.endpoint": "http://127.0.0.1:9001"}, credentials="elsewhere"
        )
        conn.commit()
    default, cold = (site.key_of(site.reader.profile(name).profile_id) for name in (None, "cold"))
    assert access(default, vend=False) == {
        "s3.endpoint": "http://127.0.0.1:9000",
        "s3.path-style-access": "true",
        "client.region": "eu-1",
        "s3.region": "eu-1",
    }
    vended = access(default, vend=True)
    assert (vended["s3.access-key-id"], vended["s3.secret-access-key"]) == ("the-key", "the-secret")
    # A table in another profile is reached with what opens that one, and not with the default's.
    assert access(cold, vend=False)["s3.endpoint"] == "http://127.0.0.1:9001"
    assert not [word for word in ("secret", "token", "the-key") if word in str(access(cold, vend=False))]
    assert access(cold, vend=True)["s3.secret-access-key"] == "another-secret"


def test_a_client_needs_the_token(bare: Callable[..., Context]) -> None:
    from pyiceberg.exceptions import UnauthorizedError

    with listening(bare(MODAK_API_TOKEN=ADMIN, MODAK_API_READ_TOKEN=READ), 0) as where:
        with pytest.raises(UnauthorizedError):
            opened(f"{where}/iceberg")
        assert opened(f"{where}/iceberg", token=READ).list_namespaces() == []


@pytest.mark.spark
def test_spark_reads_through_it(address: str, site: Site) -> None:
    spark = site.spark.newSession()
    for key, value in {"": "org.apache.iceberg.spark.SparkCatalog", ".type": "rest", ".uri": address}.items():
        spark.conf.set(f"spark.sql.catalog.served{key}", value)
    assert spark.sql("SELECT count(*), sum(id) FROM served.modak.public.events").collect() == [(200, 19900)]
    assert [row.tableName for row in spark.sql("SHOW TABLES IN served.modak.public").collect()] == ["events"]


def duckdb_opened() -> Any:
    """DuckDB with its Iceberg and HTTP extensions, which come as wheels."""
    import duckdb

    folder = Path(pytest.importorskip("duckdb_extension_httpfs").__path__[0])
    conn = duckdb.connect()
    conn.execute(f"LOAD '{folder / 'extensions' / f'v{duckdb.__version__}' / 'httpfs.duckdb_extension'}'")
    load_extensions(conn)
    return conn


def test_duckdb_attaches_it(address: str) -> None:
    with duckdb_opened() as conn:
        conn.execute(f"ATTACH '' AS lake (TYPE iceberg, ENDPOINT '{address}', AUTHORIZATION_TYPE 'none')")
        assert conn.execute('SELECT count(*), sum(id) FROM lake."modak.public".events').fetchall() == [(200, 19900)]


def test_duckdb_needs_the_token(site: Site, events: Events, leader: Leader) -> None:
    import duckdb

    events.register()
    events.tier(leader)
    context = led(site)
    context.guard = Guard(SecretStr(ADMIN), SecretStr(READ), loopback=True)
    attach = "ATTACH '' AS lake (TYPE iceberg, ENDPOINT '{}/iceberg', {})"
    with listening(context, 0) as where, duckdb_opened() as conn:
        with pytest.raises(duckdb.Error, match=r"401|Unauthorized"):
            conn.execute(attach.format(where, "AUTHORIZATION_TYPE 'none'"))
        conn.execute(attach.format(where, f"TOKEN '{READ}'"))
        assert conn.execute('SELECT count(*) FROM lake."modak.public".events').fetchall() == [(200,)]


def test_the_application_is_the_same_whoever_serves_it(bare: Callable[..., Context]) -> None:
    paths = set(create_app(bare()).openapi()["paths"])
    assert {"/iceberg/v1/config", "/api/v1/overview", "/metrics", "/livez", "/readyz"} <= paths
