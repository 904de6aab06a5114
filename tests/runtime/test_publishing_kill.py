"""Real processes, killed while they tell a foreign catalog: the next one tells it, and the catalog has one truth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from modak.runtime.leader import Leader
from modak.runtime.publishing import publish
from modak.tables.registration.unregister import unregister
from tests.catalog.test_kill_aside import Place
from tests.runtime.foreign import TOKEN, Foreign, serving_foreign
from tests.runtime.test_publishing import location, published
from tests.runtime.test_withdrawing import TABLE, waits
from tests.tables.events import Events

__all__ = ["published"]

pytestmark = pytest.mark.full

PUBLISHING = ("publish.before_register", "publish.forgotten", "publish.after_register")
WITHDRAWING = ("publish.before_withdrawal", "publish.after_withdrawal")
KILLED = (*PUBLISHING, *WITHDRAWING)


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Foreign]:
    with serving_foreign(tmp_path, overwrites=False) as opened:
        yield opened


@pytest.fixture
def place(published: tuple[Events, Leader], foreign: Foreign) -> Place:
    site = published[0].site
    return Place(
        {
            "MODAK_PG_URL": site.dsn.safe(),
            "MODAK_PG_PASSWORD": site.dsn.password,
            "MODAK_WAREHOUSE": site.settings.lake.warehouse,
            "MODAK_HOME": str(site.settings.home.path),
            "MODAK_CATALOG_URI": foreign.address,
            "MODAK_CATALOG_TOKEN": TOKEN,
            "MODAK_CATALOG_WAREHOUSE": "main",
        }
    )


@pytest.mark.parametrize("point", PUBLISHING)
def test_what_a_killed_process_was_telling_is_told_by_the_next(
    place: Place, published: tuple[Events, Leader], foreign: Foreign, point: str
) -> None:
    events, leader = published
    publish(events.site, events.name)
    events.tier(leader)
    place.dies(point, "publish", events.name)
    publish(events.site, events.name)
    assert foreign.shows() == location(events)
    assert foreign.catalog.load_table(TABLE).scan().to_arrow().num_rows == 200


@pytest.mark.parametrize("point", WITHDRAWING)
def test_what_a_killed_process_was_withdrawing_leaves_with_the_next(
    place: Place, published: tuple[Events, Leader], foreign: Foreign, point: str
) -> None:
    events, _ = published
    publish(events.site, events.name)
    unregister(events.site, events.name)
    place.dies(point, "withdraw-all")
    assert waits(events) == [("events",)]
    assert place.again("withdraw-all") == 1
    assert not foreign.catalog.table_exists(TABLE)
    assert waits(events) == []
