"""The console behind a proxy that ends TLS, and what its own routes make of bodies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
from starlette.testclient import TestClient

from modak.console.app import Console
from modak.runtime.web.app import create_app
from modak.runtime.web.bodies import MOST_BYTES
from modak.runtime.web.context import Context
from modak.runtime.web.server import listening
from tests.runtime.conftest import ADMIN, READ
from tests.runtime.test_web import calls, in_pieces

TOLD = {"Host": "modak.example", "Origin": "https://modak.example", "X-Forwarded-Proto": "https"}


@contextmanager
def served(context: Context) -> Iterator[str]:
    console = Console(context.guard, context.site.settings)
    with listening(context, 0, console.routers(), gate=console.gate) as where:
        yield where


def signed_in(where: str, headers: dict[str, str]) -> httpx.Response:
    answer = httpx.post(f"{where}/console/session", json={"token": ADMIN}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def test_who_comes_by_https_gets_a_secure_cookie_and_hsts(bare: Callable[..., Context]) -> None:
    context = bare(MODAK_API_TOKEN=ADMIN)
    console = Console(context.guard, context.site.settings)
    app = console.gate(create_app(context, console.routers()))
    for scheme, secure in (("https", True), ("http", False)):
        with TestClient(app, base_url=f"{scheme}://127.0.0.1") as client:
            answer = client.post("/console/session", json={"token": ADMIN})
            assert ("secure" in answer.headers["set-cookie"].lower()) is secure
            assert ("strict-transport-security" in answer.headers) is secure


def test_a_proxy_on_this_machine_is_believed_that_it_was_https(bare: Callable[..., Context]) -> None:
    with served(bare(MODAK_API_TOKEN=ADMIN)) as where:
        answer = signed_in(where, TOLD)
        assert "secure" in answer.headers["set-cookie"].lower()
        assert answer.headers["strict-transport-security"]
        plain = signed_in(where, {})
        assert "secure" not in plain.headers["set-cookie"].lower()
        assert "strict-transport-security" not in plain.headers


@pytest.mark.parametrize(("trusted", "believed"), [("10.0.0.0/8", False), ("10.0.0.1,127.0.0.0/8", True)])
def test_only_the_proxies_that_are_named_are_believed(
    bare: Callable[..., Context], monkeypatch: pytest.MonkeyPatch, trusted: str, believed: bool
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    with served(bare(MODAK_API_TOKEN=ADMIN)) as where:
        assert ("strict-transport-security" in signed_in(where, TOLD).headers) is believed


def test_a_proxy_that_forgets_the_name_it_was_called_by_signs_nobody_in(bare: Callable[..., Context]) -> None:
    with served(bare(MODAK_API_TOKEN=ADMIN)) as where:
        told = {name: value for name, value in TOLD.items() if name != "Host"}
        answer = httpx.post(f"{where}/console/session", json={"token": ADMIN}, headers=told)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "http.forged")


def test_bodies_that_are_too_large_are_refused_by_the_console_s_own_routes_too(bare: Callable[..., Context]) -> None:
    context = bare(MODAK_API_TOKEN=ADMIN, MODAK_API_READ_TOKEN=READ)
    console = Console(context.guard, context.site.settings)
    app = create_app(context, console.routers())
    known = calls(app)
    assert ("POST", "/console/session") in known
    json = {"Content-Type": "application/json"}
    with TestClient(console.gate(app), base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        for method, path in known:
            headers = {**json, "X-Modak-Token": ADMIN}
            assert client.request(method, path, content=b" " * (MOST_BYTES + 1), headers=headers).status_code == 413
        counted = client.post("/console/session", content=in_pieces(64 * MOST_BYTES), headers=json)
        assert (counted.status_code, counted.json()["error"]["code"]) == (413, "api.too_large")
        assert client.post("/console/session", content=b"{", headers=json).status_code == 400, (
            "whoever signs in is read"
        )


def test_a_body_that_is_refused_unread_leaves_a_connection_that_goes_on(bare: Callable[..., Context]) -> None:
    with served(bare(MODAK_API_TOKEN=ADMIN)) as where, httpx.Client(base_url=where) as client:
        large, admin = b" " * (8 * MOST_BYTES), {"X-Modak-Token": ADMIN, "Content-Type": "application/json"}
        assert client.post("/api/v1/tables/1/pause", content=large).status_code == 401
        assert client.post("/api/v1/tables/1/pause", content=large, headers=admin).status_code == 413
        assert (
            client.post("/api/v1/tables/1/pause", content=in_pieces(8 * MOST_BYTES), headers=admin).status_code == 413
        )
        assert client.get("/api/v1/overview", headers=admin).status_code == 200
