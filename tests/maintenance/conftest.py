"""The site of the table tests, and builders for lakes that need maintenance."""

from __future__ import annotations

import pytest

from tests.maintenance.lake import Lake
from tests.tables.conftest import events, leader, site  # noqa: F401
from tests.tables.events import Events


@pytest.fixture
def lake(events: Events, leader: object) -> Lake:  # noqa: F811
    """`public.events`, registered and tiered: two bands of width 100 in the lake, one file each."""
    events.register()
    made = Lake(events, leader)  # type: ignore[arg-type]
    events.tier(leader)  # type: ignore[arg-type]
    return made
