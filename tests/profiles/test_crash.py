"""Crashes around uploads to an object store, and while a profile is written down."""

from __future__ import annotations

import pytest

from modak.catalog import profiles
from modak.core import faults
from modak.core.faults import Fault, InjectedFault
from modak.runtime.leader import Leader
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.repair import repair
from modak.tables.site import Site
from modak.tables.tiering.run import tier
from tests.tables.events import Events


@pytest.mark.parametrize("point", ["remote.before_upload", "remote.uploaded"])
def test_a_tiering_that_crashes_at_an_upload_is_undone_and_done_again(
    s3_lake: Site, s3_leader: Leader, point: str
) -> None:
    events = Events.create(s3_lake)
    register(s3_lake, RegisterRequest(events.name, ("id",), "ts", profile="bucket"))
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        tier(s3_lake, s3_leader.epoch, events.name)
    faults.arm(None)
    repair(s3_lake, s3_leader.epoch)
    location = s3_lake.reader.state(events.name).table.location
    assert not [entry.uri for entry in s3_lake.store.list(f"{location}/data")]
    assert tier(s3_lake, s3_leader.epoch, events.name).rows == 200


@pytest.mark.parametrize("point", ["profiles.before_create", "profiles.created"])
def test_a_profile_is_there_whole_or_not_at_all(s3_lake: Site, point: str) -> None:
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault), s3_lake.connect() as conn:
        profiles.create(conn, "other", "file:///srv/other", default=True)
    faults.arm(None)
    with s3_lake.connect() as conn:
        profiles.create(conn, "other", "file:///srv/other", default=True)
    assert [one.name for one in s3_lake.reader.profiles() if one.is_default] == ["other"]
