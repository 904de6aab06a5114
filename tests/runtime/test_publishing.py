"""Tables in a foreign REST catalog follow every commit, and nothing of ours waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modak.core import faults
from modak.core.errors import ModakError
from modak.core.faults import Fault, InjectedFault
from modak.postgres.dsn import Dsn
from modak.runtime import daemon
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.runtime.publishing import publish
from modak.runtime.schedule import Schedule
from tests.runtime.foreign import TOKEN, Foreign, serving_foreign
from tests.tables.conftest import settings_for
from tests.tables.events import Events

POINTS = ("publish.before_register", "publish.forgotten", "publish.after_register")
VISITED = POINTS


@pytest.fixture(params=[True, False], ids=["overwrite", "drop and register"])
def foreign(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Foreign]:
    with serving_foreign(tmp_path, overwrites=request.param) as opened:
        yield opened


@pytest.fixture
def published(
    foreign: Foreign, fresh_database: Dsn, warehouse: str, spark_home: Path, gateway: Any
) -> Iterator[tuple[Events, Leader]]:
    settings = settings_for(
        fresh_database,
        warehouse,
        spark_home,
        MODAK_CATALOG_URI=foreign.address,
        MODAK_CATALOG_TOKEN=TOKEN,
        MODAK_CATALOG_WAREHOUSE="main",
    )
    with open_site(settings) as site, Leader.campaign(site, 5) as leader:
        events = Events.create(site)
        events.register()
        yield events, leader


def location(events: Events) -> str:
    return events.site.reader.state(events.name).cutline.metadata_location


def test_every_commit_is_followed_and_the_schedule_does_it_once(
    published: tuple[Events, Leader], foreign: Foreign
) -> None:
    events, leader = published
    schedule, stop = Schedule(), threading.Event()
    for _ in range(3):
        daemon.cycle(events.site, leader, schedule, stop)
    assert foreign.shows() == location(events)
    assert foreign.catalog.load_table(("modak", "public", "events")).scan().to_arrow().num_rows == 200
    calls = len(foreign.calls)
    daemon.cycle(events.site, leader, schedule, stop)
    assert len(foreign.calls) == calls, "nothing has changed, so nothing is said"
    events.add_partition(300)
    events.sql("INSERT INTO public.events VALUES (350, 350, 'new')")
    for _ in range(3):
        daemon.cycle(events.site, leader, schedule, stop)
    assert foreign.shows() == location(events)
    assert foreign.catalog.load_table(("modak", "public", "events")).scan().to_arrow().num_rows == 251


def test_a_catalog_that_is_away_holds_up_nothing_and_is_told_later(
    published: tuple[Events, Leader], foreign: Foreign
) -> None:
    events, leader = published
    foreign.failing = 1
    with pytest.raises(ModakError) as raised:
        publish(events.site, events.name)
    assert (raised.value.code, raised.value.retryable) == ("publish.refused", True)
    assert TOKEN not in str(raised.value)
    events.tier(leader)
    publish(events.site, events.name)
    assert foreign.shows() == location(events)


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_on_the_way_is_made_good(published: tuple[Events, Leader], foreign: Foreign, point: str) -> None:
    events, leader = published
    if point == "publish.forgotten" and foreign.overwrites:
        pytest.skip("this catalog overwrites")
    publish(events.site, events.name)
    events.tier(leader)
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        publish(events.site, events.name)
    faults.arm(None)
    publish(events.site, events.name)
    assert foreign.shows() == location(events)


def test_a_wrong_token_is_told_with_what_to_do(published: tuple[Events, Leader], monkeypatch: Any) -> None:
    events, _ = published
    from modak.runtime.publishing import ForeignCatalog

    with pytest.raises(ModakError, match="401") as raised:
        ForeignCatalog(events.site.settings.lake.catalog_uri, "wrong").prefix()
    assert raised.value.hint == "Check MODAK_CATALOG_TOKEN."
    with pytest.raises(ModakError) as raised:
        ForeignCatalog("http://127.0.0.1:9", None).prefix()
    assert raised.value.code == "publish.unreachable"
