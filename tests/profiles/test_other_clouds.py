"""The whole life of a tiered table on Google Cloud Storage and on Azure, by servers that speak their protocols.

What the servers lack and the clouds have: fake-gcs-server takes no writes in XML (`tests/support/xml_gcs.py` hands
them on in JSON) and asks nobody who they are. Azurite knows the protocol of blobs and not the one of Data Lake beside
it, by which Iceberg would list; Modak lists by obstore.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from modak.catalog import profiles
from modak.core.errors import Refused
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.runtime.reading import snapshot
from modak.spark.credentials import azure_props
from modak.storage.access import Key
from modak.tables.checking import check
from modak.tables.fold.run import fold
from modak.tables.profiles import properties_of
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.registration.unregister import unregister
from modak.tables.site import Site
from modak.tables.tiering.run import tier
from modak.tables.verify.run import verify
from tests.cloud_fixtures import Cloud, abfs_server, gs_server
from tests.tables.conftest import settings_for, through_spark
from tests.tables.events import Events

__all__ = ["abfs_server", "gs_server", "through_spark"]


@contextmanager
def _lake(cloud: Cloud, database: Dsn, warehouse: str, home: Path) -> Iterator[Site]:
    """A site with a profile `cloud`, as a user writes it: what is open as --config, what is secret by name."""
    secret = ";".join(f"{name}={value}" for name, value in cloud.credentials.items())
    settings = settings_for(database, warehouse, home, **({"MODAK_CREDENTIALS_TEST": secret} if secret else {}))
    with open_site(settings) as site:
        with site.connect() as conn:
            root = f"{cloud.new_root()}/lake"
            config = properties_of(cloud.config, root)
            profiles.create(conn, "cloud", root, config=config, credentials="test" if secret else None)
        _ = site.spark
        yield site


@pytest.fixture
def gs_lake(gs_server: Cloud, spark: object, fresh_database: Dsn, warehouse: str, spark_home: Path) -> Iterator[Site]:
    """A site with a profile on Google Cloud Storage."""
    with _lake(gs_server, fresh_database, warehouse, spark_home) as site:
        yield site


@pytest.fixture
def abfs_lake(
    abfs_server: Cloud, spark: object, fresh_database: Dsn, warehouse: str, spark_home: Path
) -> Iterator[Site]:
    """A site with a profile on Azure."""
    with _lake(abfs_server, fresh_database, warehouse, spark_home) as site:
        yield site


@pytest.mark.full
def test_a_tiered_table_lives_on_google_cloud_storage(gs_lake: Site, through_spark: None) -> None:
    _life(gs_lake, "gs")


@pytest.mark.full
def test_a_tiered_table_lives_on_azure(abfs_lake: Site, through_spark: None) -> None:
    _life(abfs_lake, "abfs")


def _life(site: Site, scheme: str) -> None:
    """Registered, tiered, read, corrected, folded, verified and let go."""
    key = next(key for key in site.keys.values() if key.root.startswith(f"{scheme}:"))
    assert [step.problem for step in check(key) if step.problem] == []
    events = Events.create(site, name="events")
    register(site, RegisterRequest(events.name, ("id",), "ts", profile="cloud"))
    with Leader.campaign(site, 5) as leader:
        assert tier(site, leader.epoch, events.name).rows == 200
        location = site.reader.state(events.name).table.location
        assert location.startswith(f"{scheme}://")
        assert [entry for entry in site.store.list(location) if entry.uri.endswith(".parquet")]
        events.sql('SELECT modak_upsert(\'public.events\', \'{"id": 150, "ts": 150, "body": "new"}\')')
        assert fold(site, leader.epoch, events.name).replaced == 1
    rows = {(i, i, "new" if i == 150 else f"row {i}") for i in range(251)}
    with snapshot(site.spark, settings=site.settings) as point:
        assert {tuple(row) for row in point.read(str(events.name)).collect()} == rows
    report = verify(site, events.name)
    assert (report.differing_rows, report.findings) == (0, ())
    unregister(site, events.name, drop_lake=True)
    assert list(site.store.list(location)) == []


def test_what_opens_azure_is_given_to_icebergs_file_io_for_all_accounts_at_once() -> None:
    host = "dfs.core.windows.net"
    one = Key(f"abfs://box@one.{host}/w", {"adls.auth.shared-key.account.key": "k", "adls.endpoint": "https://e"})
    beside = Key(f"abfs://other@one.{host}/w", {"adls.auth.shared-key.account.key": "k"})
    two = Key(f"abfss://box@two.{host}/w", {"adls.sas-token.two": "s", "adls.token": "t"})
    assert azure_props([Key("s3://b/w", {"s3.access-key-id": "x"}), one, beside, two]) == {
        "adls.auth.shared-key.account.name": "one",
        "adls.auth.shared-key.account.key": "k",
        f"adls.connection-string.one.{host}": "https://e",
        f"adls.sas-token.two.{host}": "s",
    }
    assert azure_props([Key("gs://b/w", {"gcs.no-auth": "true"})]) == {}


def test_different_keys_for_two_accounts_of_azure_are_refused_for_icebergs_sake() -> None:
    keys = [
        Key(f"abfs://box@{name}.dfs.core.windows.net/w", {"adls.auth.shared-key.account.key": name})
        for name in ("one", "two")
    ]
    with pytest.raises(Refused, match="one for all accounts") as refused:
        azure_props(keys)
    assert "adls.sas-token.<account>" in str(refused.value.hint)
