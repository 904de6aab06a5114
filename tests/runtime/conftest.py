"""A site as the flows' tests have it, and an HTTP client on an application over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from modak.postgres.dsn import Dsn
from modak.runtime.opening import open_site
from modak.runtime.pulse import Pulse
from modak.runtime.web.app import create_app
from modak.runtime.web.asked import Asked
from modak.runtime.web.context import Context
from modak.runtime.web.queries import Queries, Question
from modak.tables.site import Site
from tests.tables.conftest import events, leader, settings_for, site, through_spark

__all__ = ["events", "leader", "site", "through_spark"]

ADMIN, READ = "admin-token-of-the-tests", "read-token-of-the-tests"

Opened = Callable[..., TestClient]


def led(site: Site) -> Context:
    """A context whose process believes that it leads and has just heard of Postgres."""
    context = Context(site, Pulse(site.clock))
    context.pulse.became("leading", 1)
    context.pulse.heard()
    return context


class Here(Queries):
    """Queries without children: what a child does, where a test looks inside or has a database of its own."""

    @classmethod
    def of(cls, site: Site) -> Here:
        """By the limits of the site's settings."""
        return cls(site, site.settings.http.query_timeout_seconds, site.settings.http.query_max_rows)

    def _answer(self, question: Question) -> bytes:
        return Asked(self._site).answer(question)


@pytest.fixture
def api(site: Site) -> Iterator[TestClient]:
    """The API without a token, as on loopback."""
    context = led(site)
    with TestClient(create_app(context), base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client
    context.queries.close()


@pytest.fixture
def bare(fresh_database: Dsn, warehouse: str, tmp_path: Path) -> Iterator[Callable[..., Context]]:
    """Contexts on a fresh catalog with settings of the test's own; no Java."""
    with ExitStack() as stack:

        def opened(**more: str) -> Context:
            settings: Any = settings_for(fresh_database, warehouse, tmp_path / "home", **more)
            return led(stack.enter_context(open_site(settings)))

        yield opened


@pytest.fixture
def guarded(bare: Callable[..., Context]) -> Iterator[TestClient]:
    """The API with both tokens set."""
    context = bare(MODAK_API_TOKEN=ADMIN, MODAK_API_READ_TOKEN=READ)
    with TestClient(create_app(context), base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client
