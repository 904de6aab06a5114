"""The console on a real site: served by uvicorn, looked at with a real browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from modak.runtime.leader import Leader
from tests.console.looking import served
from tests.runtime.conftest import bare, events, leader, led, site
from tests.tables.events import Events

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["bare", "events", "leader", "site"]

SHOTS = Path(__file__).parents[2] / "build" / "screenshots"
_QUIET = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync"
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium of this machine. Without one there is nothing to look with; `make test` says so at its start."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=found, args=_QUIET.split())
        yield opened
        opened.close()


@pytest.fixture
def keep() -> Callable[[str], str]:
    """Where a screenshot of that name goes."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    assert os.access(SHOTS, os.W_OK)
    return lambda name: str(SHOTS / f"{name}.png")


@pytest.fixture
def address(events: Events, leader: Leader) -> Iterator[str]:
    """A console over a table that has been tiered."""
    events.register()
    events.tier(leader)
    with served(led(events.site)) as found:
        yield found
