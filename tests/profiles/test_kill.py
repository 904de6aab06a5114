"""A real process, killed around an upload to an object store: what lies there in part or for nothing goes."""

from __future__ import annotations

import pytest

from modak.runtime.leader import Leader
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.repair import repair
from modak.tables.site import Site
from modak.tables.tiering.run import tier
from tests.catalog.test_kill_aside import Place
from tests.profiles.conftest import credentials
from tests.s3_fixtures import S3Server
from tests.tables.events import Events

pytestmark = pytest.mark.full

KILLED = ("remote.before_upload", "remote.uploaded")


@pytest.mark.parametrize("point", KILLED)
def test_a_tiering_that_is_killed_at_an_upload_is_undone_and_done_again(
    s3_lake: Site, s3_server: S3Server, point: str
) -> None:
    events = Events.create(s3_lake)
    register(s3_lake, RegisterRequest(events.name, ("id",), "ts", profile="bucket"))
    place = Place(
        {
            "MODAK_PG_URL": s3_lake.dsn.safe(),
            "MODAK_PG_PASSWORD": s3_lake.dsn.password,
            "MODAK_WAREHOUSE": s3_lake.settings.lake.warehouse,
            "MODAK_HOME": str(s3_lake.settings.home.path),
            "MODAK_LEASE_SECONDS": "2",
            "MODAK_CAMPAIGN_INTERVAL_SECONDS": "1",
            **credentials(s3_server.endpoint),
        }
    )
    place.dies(point, "tier", events.name)
    with Leader.campaign(s3_lake, 60) as leader:
        repair(s3_lake, leader.epoch)
        location = s3_lake.reader.state(events.name).table.location
        assert not [entry.uri for entry in s3_lake.store.list(f"{location}/data")]
        assert tier(s3_lake, leader.epoch, events.name).rows == 200
