"""A tiered table behind a real HTTP server on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.load.adopt import Adopted, adopt
from modak.tables.site import Site
from tests.tables.conftest import settings_for
from tests.tables.events import Events

TOKEN = "load-token-of-the-tests"


@dataclass
class Api:
    """The door of Stream Load, as a client sees it."""

    url: str

    def post(self, body: Any, label: str, table: str = "public.events", **more: Any) -> httpx.Response:
        headers = {"X-Modak-Token": TOKEN, "X-Modak-Label": label, **more.pop("headers", {})}
        return httpx.post(f"{self.url}/api/load/{table}", content=body, headers=headers, timeout=120, **more)


@pytest.fixture
def site(fresh_database: Dsn, warehouse: str, spark_home: Path, gateway: object) -> Iterator[Site]:
    settings = settings_for(
        fresh_database,
        warehouse,
        spark_home,
        MODAK_LOAD_TOKEN=TOKEN,
        MODAK_LOAD_SPOOL_THRESHOLD="10",
        MODAK_LOAD_MAX_BYTES="1MiB",
    )
    with open_site(settings) as opened:
        yield opened


@pytest.fixture
def leader(site: Site) -> Iterator[Leader]:
    with Leader.campaign(site, 5) as held:
        yield held


@pytest.fixture
def events(site: Site, leader: Leader) -> Events:
    """Rows 0…199 in the lake, 200…250 in the heap."""
    made = Events.create(site)
    made.register()
    made.tier(leader)
    return made


@pytest.fixture
def api(site: Site, events: Events) -> Iterator[Api]:
    with serving(site) as url:
        yield Api(url)


class serving:  # noqa: N801 - used as a context
    """Uvicorn in a thread, with only the load routes."""

    def __init__(self, site: Site) -> None:
        import uvicorn
        from fastapi import FastAPI

        from modak.runtime.web.load import router

        app = FastAPI()
        app.include_router(router(site))
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        until = time.monotonic() + 60
        while not self._server.started:
            assert time.monotonic() < until
            time.sleep(0.02)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)


def adopted(site: Site, leader: Leader, events: Events) -> Adopted:
    return adopt(site, leader.epoch, events.name)
