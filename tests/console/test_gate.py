"""Who gets through to the console's routes, from where, and with what; without a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from starlette.testclient import TestClient

from modak.console.app import Console
from modak.console.assets import assets
from modak.console.gate import HEADERS
from modak.console.sessions import COOKIE, LIFETIME_SECONDS, Sessions
from modak.runtime.hosting import loads
from modak.runtime.web.app import create_app
from modak.runtime.web.context import Context
from tests.runtime.conftest import ADMIN, READ
from tests.runtime.test_web import calls

PAGE = {"Origin": "http://127.0.0.1", "Sec-Fetch-Site": "same-origin"}


def serve(context: Context) -> TestClient:
    console = Console(context.guard, context.site.settings)
    app = console.gate(create_app(context, console.routers()))
    return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)


@pytest.fixture
def guarded(bare: Callable[..., Context]) -> Iterator[TestClient]:
    """A console with both tokens set."""
    with serve(bare(MODAK_API_TOKEN=ADMIN, MODAK_API_READ_TOKEN=READ)) as client:
        yield client


@pytest.fixture
def trusting(bare: Callable[..., Context]) -> Iterator[TestClient]:
    """A console on loopback without tokens."""
    with serve(bare()) as client:
        yield client


def sign_in(client: TestClient, token: str) -> str:
    answer = client.post("/console/session", json={"token": token}, headers=PAGE)
    assert answer.status_code == 200, answer.text
    csrf: str = answer.json()["csrf"]
    return csrf


def test_pages_and_assets_are_served_with_headers_that_lock_them_in(guarded: TestClient) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/static/console.css", "text/css"),
        ("/static/js/main.js", "text/javascript"),
    ):
        answer = guarded.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        assert all(answer.headers[name] == value for name, value in HEADERS.items())
        again = guarded.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    policy = HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert "http" not in policy


def test_behind_the_console_every_route_refuses_who_has_not_signed_in(bare: Callable[..., Context]) -> None:
    context = bare(MODAK_API_TOKEN=ADMIN, MODAK_API_READ_TOKEN=READ, MODAK_LOAD_TOKEN="token-of-loads")
    console = Console(context.guard, context.site.settings)
    app = create_app(context, [*console.routers(), *loads(context)])
    known = calls(app)
    assert ("POST", "/api/load/1") in known
    opened = {"/", "/livez", "/readyz", "/console/session", *(f"/static/{path}" for path in assets())}
    with TestClient(console.gate(app), base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        for method, path in known:
            if path in opened:
                continue
            for headers in ({}, {"Cookie": f"{COOKIE}=forged"}, {"Authorization": "Bearer wrong"}):
                assert client.request(method, path, headers=headers).status_code == 401, (method, path)
            from_a_page = client.request(method, path, headers=PAGE).status_code
            assert from_a_page in ((401,) if method in ("GET", "HEAD") else (401, 403)), (method, path)
        assert client.get("/console/session").json()["signed_in"] is False


def test_nothing_outside_of_the_package_is_an_asset(guarded: TestClient) -> None:
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/js/", "/static//etc/passwd", "/static/app.py"):
        assert guarded.get(path).status_code == 404


def test_assets_fetch_nothing_from_elsewhere() -> None:
    from modak.console.assets import assets

    for path, asset in assets().items():
        text = asset.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text.replace("http://127.0.0.1", ""), path


def test_signing_in_opens_the_api_to_the_cookie_and_signing_out_closes_it(guarded: TestClient) -> None:
    assert guarded.get("/console/session").json()["signed_in"] is False
    assert guarded.get("/api/v1/overview").status_code == 401
    csrf = sign_in(guarded, ADMIN)
    assert guarded.get("/console/session").json()["scope"] == "admin"
    assert guarded.get("/api/v1/overview").status_code == 200
    assert guarded.delete("/console/session", headers={**PAGE, "X-Modak-Csrf": csrf}).status_code == 204
    assert guarded.get("/api/v1/overview").status_code == 401


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites_and_holds_no_token(guarded: TestClient) -> None:
    answer = guarded.post("/console/session", json={"token": ADMIN}, headers=PAGE)
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert ADMIN not in cookie
    assert ADMIN not in answer.text


def test_a_wrong_token_signs_nobody_in(guarded: TestClient) -> None:
    answer = guarded.post("/console/session", json={"token": "guess"}, headers=PAGE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "console.token")
    assert COOKIE not in answer.cookies


def test_somebody_who_may_only_read_changes_nothing(guarded: TestClient) -> None:
    csrf = sign_in(guarded, READ)
    assert guarded.get("/api/v1/overview").status_code == 200
    answer = guarded.post("/api/v1/tables/1/pause", headers={**PAGE, "X-Modak-Csrf": csrf}, json={})
    assert answer.status_code == 403, answer.text


@pytest.mark.parametrize(
    "headers",
    [
        PAGE,
        {**PAGE, "X-Modak-Csrf": "guess"},
        {"Origin": "http://elsewhere.example", "Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "cross-site"},
        {},
    ],
)
def test_a_change_without_the_guard_of_our_own_page_is_refused(guarded: TestClient, headers: dict[str, str]) -> None:
    sign_in(guarded, ADMIN)
    answer = guarded.post("/api/v1/tables/1/pause", headers=headers, json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "http.forged")


def test_a_program_with_a_token_needs_no_guard(guarded: TestClient) -> None:
    answer = guarded.post("/api/v1/tables/1/resume", headers={"Authorization": f"Bearer {ADMIN}"})
    assert answer.status_code == 404


def test_without_tokens_other_sites_and_other_names_are_kept_out(trusting: TestClient) -> None:
    assert trusting.get("/api/v1/overview").status_code == 200
    assert trusting.get("/", headers={"Host": "elsewhere.example:9090"}).status_code == 403
    foreign = {"Origin": "http://elsewhere.example", "Sec-Fetch-Site": "cross-site"}
    assert trusting.post("/api/v1/tables/1/resume", headers=foreign).status_code == 403
    assert trusting.post("/api/v1/tables/1/resume", headers=PAGE).status_code == 403
    csrf = trusting.get("/console/session").json()["csrf"]
    assert trusting.post("/api/v1/tables/1/resume", headers={**PAGE, "X-Modak-Csrf": csrf}).status_code == 404
    assert trusting.post("/api/v1/tables/1/resume").status_code == 404


def test_the_sql_page_goes_with_its_setting(bare: Callable[..., Context]) -> None:
    with serve(bare(MODAK_CONSOLE_SQL="false")) as client:
        assert client.get("/console/session").json()["sql"] is False
        csrf = client.get("/console/session").json()["csrf"]
        headers = {**PAGE, "X-Modak-Csrf": csrf}
        assert client.post("/api/v1/query", json={"sql": "select 1"}, headers=headers).status_code == 404


def test_a_session_ends_and_cannot_be_forged_or_carried_over() -> None:
    now = 1_000_000.0
    ours, theirs = Sessions(lambda: now), Sessions(lambda: now)
    _, cookie = ours.begin("read")
    held = ours.read(cookie)
    assert held is not None
    assert held.scope == "read"
    assert theirs.read(cookie) is None
    assert ours.read(cookie.replace("read", "admin")) is None
    assert all(ours.read(text) is None for text in (None, "", "...", cookie[:-1], "admin.99999999999.x."))
    now += LIFETIME_SECONDS + 1
    assert ours.read(cookie) is None
