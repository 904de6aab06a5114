"""A tiered table with a lake in a folder, and files to bring into it."""

from __future__ import annotations

import pytest

from modak.runtime.leader import Leader
from modak.tables.site import Site
from tests.tables.conftest import events, leader, site
from tests.tables.events import Events

__all__ = ["events", "leader", "site"]


@pytest.fixture
def cold(site: Site, events: Events, leader: Leader) -> Events:
    """Rows 0…199 in the lake and out of the heap, T = 200."""
    events.register()
    events.tier(leader)
    return events
