"""The HTTP API: who may call it, what it answers, and that a wrong call is told what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from starlette.testclient import TestClient

from modak.core.errors import UsageError
from modak.runtime import metrics
from modak.runtime.hosting import loads
from modak.runtime.leader import Leader
from modak.runtime.web.app import create_app
from modak.runtime.web.bodies import MOST_BYTES
from modak.runtime.web.context import Context
from modak.runtime.web.server import listening
from modak.tables.site import Site
from tests.runtime.conftest import ADMIN, READ
from tests.tables.events import Events

OPEN = {"/livez", "/readyz"}


def calls(app: Any) -> list[tuple[str, str]]:
    """Every method and path that the application routes, described or not, parameters filled in."""
    described = {(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods}
    routed = {(method, path) for path, methods in routes_of(app) for method in methods}
    assert described <= routed
    return sorted((method, re.sub(r"\{[^}]*\}", "1", path)) for method, path in routed)


def routes_of(app: Any) -> Iterator[tuple[str, set[str]]]:
    """Paths and methods of an application, of included routers too."""
    for route in app.routes:
        if hasattr(route, "methods"):
            yield route.path, route.methods
        else:
            yield from routes_of(route.original_router)


def test_every_route_but_the_probes_refuses_a_call_without_a_token_or_with_a_wrong_one(guarded: TestClient) -> None:
    known = calls(guarded.app)
    assert len(known) > 30
    for method, path in known:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"X-Modak-Token": ""}, {"Authorization": ADMIN}):
            answer = guarded.request(method, path, headers=headers)
            if path in OPEN:
                assert answer.status_code in (200, 503)
                continue
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert answer.json()["error"]["code"] == "api.unauthorised"


def test_no_route_reads_a_body_of_somebody_without_a_token(guarded: TestClient) -> None:
    for method, path in calls(guarded.app):
        if path not in OPEN:
            answer = guarded.request(method, path, content=b"{", headers={"Content-Type": "application/json"})
            assert answer.status_code == 401, (method, path)


def in_pieces(size: int) -> Iterator[bytes]:
    """A body that does not say how long it is."""
    for _ in range(0, size, 65_536):
        yield b" " * 65_536


def test_a_body_that_is_too_large_is_refused_by_every_route(guarded: TestClient) -> None:
    headers = {"X-Modak-Token": ADMIN, "Content-Type": "application/json"}
    for method, path in calls(guarded.app):
        announced = guarded.request(method, path, content=b" " * (MOST_BYTES + 1), headers=headers)
        assert announced.status_code == 413, (method, path)
        assert announced.headers["x-content-type-options"] == "nosniff"
        if method != "HEAD":
            assert announced.json()["error"]["code"] == "api.too_large"


def test_a_body_that_does_not_say_its_length_is_counted_where_it_is_read(guarded: TestClient) -> None:
    headers = {"X-Modak-Token": ADMIN, "Content-Type": "application/json"}
    paths = guarded.app.openapi()["paths"]  # type: ignore[attr-defined]
    reading = [(way, path) for path, ways in paths.items() for way in ways if "requestBody" in ways[way]]
    assert len(reading) >= 4
    for way, path in reading:
        endless = in_pieces(64 * MOST_BYTES)
        answer = guarded.request(way, re.sub(r"\{[^}]*\}", "1", path), content=endless, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "api.too_large"), path
    fits = guarded.post("/api/v1/tables/1/pause", content=in_pieces(MOST_BYTES), headers=headers)
    assert fits.status_code == 400, "it is read, and it is no JSON"


def test_stream_load_takes_bodies_by_its_own_token_and_limit(bare: Callable[..., Context]) -> None:
    context = bare(MODAK_API_TOKEN=ADMIN, MODAK_LOAD_TOKEN="token-of-loads")
    large, headers = b" " * (MOST_BYTES + 1), {"X-Modak-Token": "token-of-loads", "X-Modak-Label": "one"}
    with TestClient(create_app(context, loads(context)), base_url="http://127.0.0.1") as client:
        assert client.post("/api/load/public.nothing", content=large).status_code == 401
        answer = client.post("/api/load/public.nothing", content=large, headers=headers)
        assert (answer.status_code, answer.json()["error"]) == (404, "catalog.not_registered")


def test_what_changes_something_is_refused_to_the_token_that_reads(guarded: TestClient) -> None:
    changing = [(method, path) for method, path in calls(guarded.app) if method in ("POST", "PATCH", "PUT", "DELETE")]
    reading = {"/api/v1/query", "/api/v1/explain"}
    refused = 0
    for method, path in changing:
        if path in reading or path.startswith("/iceberg"):
            continue
        answer = guarded.request(method, path, headers={"Authorization": f"Bearer {READ}"}, json={})
        assert answer.status_code == 403, (method, path)
        refused += 1
    assert refused >= 7


def test_each_token_opens_what_it_is_for(guarded: TestClient) -> None:
    for token, scheme in ((READ, "Bearer"), (ADMIN, "bearer")):
        assert guarded.get("/api/v1/overview", headers={"Authorization": f"{scheme} {token}"}).status_code == 200
    assert guarded.get("/metrics", headers={"X-Modak-Token": READ}).status_code == 200
    answer = guarded.post("/api/v1/tables/public.nothing/pause", headers={"X-Modak-Token": ADMIN})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "catalog.not_registered")


def test_only_a_read_token_on_loopback_lets_nobody_change(bare: Callable[..., Context]) -> None:
    app = create_app(bare(MODAK_API_READ_TOKEN=READ))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        assert client.get("/api/v1/overview").status_code == 401
        answer = client.post("/api/v1/tables/1/resume", headers={"X-Modak-Token": READ})
        assert answer.status_code == 403


def test_beyond_loopback_there_is_no_start_without_a_token(bare: Callable[..., Context]) -> None:
    with pytest.raises(UsageError, match="MODAK_API_TOKEN"):
        bare(MODAK_HTTP_HOST="0.0.0.0")


def test_without_a_token_no_other_name_and_no_other_site_gets_in(bare: Callable[..., Context]) -> None:
    app = create_app(bare())
    with TestClient(app, base_url="http://evil.example") as client:
        assert client.get("/api/v1/overview").json()["error"]["code"] == "api.foreign_host"
    with TestClient(app, base_url="http://localhost:9090") as client:
        assert client.get("/api/v1/overview").status_code == 200
        crossed = client.post("/api/v1/tables/1/pause", headers={"Sec-Fetch-Site": "cross-site"})
        assert crossed.json()["error"]["code"] == "api.foreign_site"
        assert client.get("/api/v1/overview", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200
        # A browser without Fetch Metadata says only where its page is from.
        for origin in ("http://evil.example", "null", "", "http://localhost:9091", "http://localhost"):
            crossed = client.post("/api/v1/tables/1/pause", headers={"Origin": origin})
            assert (crossed.status_code, crossed.json()["error"]["code"]) == (403, "api.foreign_site"), origin
            assert client.get("/api/v1/overview", headers={"Origin": origin}).status_code == 200
        ours = client.post("/api/v1/tables/1/pause", headers={"Origin": "http://localhost:9090"})
        assert ours.json()["error"]["code"] == "catalog.not_registered"
        assert client.post("/api/v1/tables/1/pause").json()["error"]["code"] == "catalog.not_registered", "a program"


def test_an_address_of_this_machine_is_one_for_the_setting_and_for_who_calls_it(bare: Callable[..., Context]) -> None:
    with listening(bare(MODAK_HTTP_HOST="127.0.0.2"), 0) as where:
        assert where.startswith("http://127.0.0.2:")
        assert httpx.get(f"{where}/api/v1/overview").status_code == 200
        strange = httpx.get(f"{where}/api/v1/overview", headers={"Host": "127.0.0.2.evil.example"})
        assert strange.json()["error"]["code"] == "api.foreign_host"


def test_a_fault_is_an_answer_that_counts_and_carries_the_headers(bare: Callable[..., Context]) -> None:
    broken = APIRouter()

    @broken.get("/broken")
    def fail() -> None:
        raise RuntimeError("a secret of the inside")

    def counted() -> float:
        labels = {"method": "GET", "route": "/broken", "status": "500"}
        return metrics.REGISTRY.get_sample_value("modak_http_requests_total", labels) or 0.0

    before = counted()
    with TestClient(create_app(bare(), [broken]), base_url="http://127.0.0.1") as client:
        answer = client.get("/broken")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "api.crashed")
    assert "secret" not in answer.text
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert counted() == before + 1


def test_a_table_is_shown_in_full_and_in_the_lists(api: TestClient, events: Events, leader: Leader) -> None:
    events.register()
    events.tier(leader)
    shown = api.get("/api/v1/overview").json()
    assert shown["tables_total"] == 1
    [entry] = shown["tables"]
    assert (entry["table"], entry["cutline_t"], entry["cutline_t_text"]) == ("public.events", 200, "200")
    assert entry["last_kind"] == "tier"
    assert shown["leader"]["epoch"] == leader.epoch.number
    assert api.get("/api/v1/tables", params={"q": "EVENT"}).json() == shown["tables"]
    assert api.get("/api/v1/tables", params={"q": "nothing"}).json() == []
    assert entry["lag"] == "100", "from the cut-line to the end of the partition that is still filled"
    none = api.get("/api/v1/overview", params={"q": "nothing"}).json()
    assert (none["tables_total"], none["tables_found"], none["tables"]) == (1, 0, [])
    one = api.get("/api/v1/tables/public.events").json()
    assert one == api.get(f"/api/v1/tables/{one['table_id']}").json()
    assert one["status"]["cut_line"] == "200"
    assert one["registration"]["primary_key"] == ["id"]
    assert {part["state"] for part in one["partitions"]} == {"hot", "dropped"}
    assert [op["kind"] for op in api.get("/api/v1/tables/public.events/operations").json()] == ["tier", "register"]
    assert [op["kind"] for op in api.get("/api/v1/operations", params={"kind": "tier"}).json()] == ["tier"]
    assert api.get("/api/v1/operations", params={"failed": True}).json() == []
    snapshots = api.get("/api/v1/tables/public.events/snapshots").json()
    assert [each["id"] for each in snapshots["snapshots"]] == [snapshots["published"]] == [entry["cutline_s"]]
    files = api.get("/api/v1/tables/public.events/files").json()
    assert sum(each["rows"] for each in files["classes"]) == 200
    assert files["files_with_deletes"] == 0
    [columns] = api.get("/api/v1/schema").json()
    assert [column["name"] for column in columns["columns"]] == ["id", "ts", "body"]


def test_actions_take_effect_and_say_whether_they_are_new(api: TestClient, events: Events) -> None:
    events.register()
    first = api.post("/api/v1/tables/public.events/maintenance")
    assert first.status_code == 202
    again = api.post("/api/v1/tables/public.events/maintenance").json()
    assert (first.json()["new"], again["new"]) == (True, False)
    assert first.json()["request_id"] == again["request_id"]
    [asked] = api.get("/api/v1/tables/public.events/maintenance").json()
    assert (asked["requested_by"], asked["claimed_at"]) == ("api admin from testclient", None)
    shown = api.get("/api/v1/tables/public.events").json()
    assert (shown["last_request"], shown["last_pass"], shown["health"]) == (asked, None, None)
    paused = api.post("/api/v1/tables/public.events/pause", json={"reason": "a migration"}).json()
    assert (paused["new"], paused["pause"]["reason"]) == (True, "a migration")
    assert api.post("/api/v1/tables/public.events/pause").json()["new"] is False
    refused = api.post("/api/v1/tables/public.events/maintenance")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "tables.paused")
    assert "a migration" in refused.json()["error"]["message"]
    assert api.get("/api/v1/tables/public.events").json()["pause"]["reason"] == "a migration"
    assert api.post("/api/v1/tables/public.events/resume").json() == {"resumed": True}
    assert api.post("/api/v1/tables/public.events/resume").json() == {"resumed": False}


def test_errors_say_what_is_wrong_and_what_to_do(api: TestClient) -> None:
    for method, path, status, code in (
        ("GET", "/api/v1/tables/99", 404, "catalog.not_registered"),
        ("GET", "/api/v1/tables/a.b.c", 400, "usage.table_name"),
        ("GET", "/api/v1/nothing", 404, "api.not_found"),
        ("DELETE", "/api/v1/overview", 405, "api.method"),
        ("GET", "/api/v1/overview?limit=0", 400, "api.invalid"),
        ("GET", "/api/v1/series?metric=nothing", 400, "api.metric"),
        ("GET", "/api/v1/measurements/status", 409, "measurements.disabled"),
        ("GET", "/api/v1/entities/status", 409, "entities.disabled"),
        ("POST", "/api/v1/measurements/trigger", 409, "measurements.gated"),
    ):
        answer = api.request(method, path)
        assert answer.status_code == status, path
        assert answer.json()["error"]["code"] == code
        assert answer.json()["error"]["message"]


def test_the_document_describes_every_route(api: TestClient) -> None:
    document = api.get("/api/v1/openapi.json").json()
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            assert described["summary"], (method, path)
            assert described["description"], (method, path)
    named = "overview tables/{table} tables/{table}/maintenance series storage-profiles schema query explain"
    for path in ("/metrics", *(f"/api/v1/{name}" for name in named.split())):
        assert path in document["paths"]


def test_every_answer_carries_headers_against_misuse(api: TestClient) -> None:
    for path in ("/api/v1/overview", "/livez", "/api/v1/nothing"):
        headers = api.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"


def test_sql_can_be_switched_off(bare: Callable[..., Context]) -> None:
    with TestClient(create_app(bare(MODAK_CONSOLE_SQL="false")), base_url="http://127.0.0.1") as client:
        assert client.post("/api/v1/query", json={"sql": "select 1"}).status_code == 404


def test_settings_and_profiles_show_no_secret(bare: Callable[..., Context], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODAK_S3_ACCESS_KEY", "key-of-the-test")
    monkeypatch.setenv("MODAK_S3_SECRET_KEY", "secret-of-the-test")
    context = bare()
    with context.site.connect(autocommit=True) as conn:
        conn.execute('UPDATE modak.storage_profiles SET config = \'{"s3.secret-access-key": "hidden-one"}\'')
    with TestClient(create_app(context), base_url="http://127.0.0.1") as client:
        text = client.get("/api/v1/config").text + client.get("/api/v1/storage-profiles").text
    assert "MODAK_S3_SECRET_KEY" in text
    assert not [secret for secret in ("secret-of-the-test", "key-of-the-test", "hidden-one") if secret in text]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"s3.secret-access-key": "hunter2"}, "MODAK_CREDENTIALS_"),
        ({"colour": "red"}, "s3.endpoint"),
        ({"s3.endpoint": "a\0b"}, "no text"),
    ],
)
def test_a_profile_with_a_secret_or_a_strange_property_is_refused(
    api: TestClient, config: dict[str, str], says: str
) -> None:
    answer = api.post("/api/v1/storage-profiles", json={"name": "x", "warehouse": "s3://b/w", "config": config})
    assert answer.status_code == 400
    assert says in answer.text
    assert "hunter2" not in answer.text
    assert "hunter2" not in api.get("/api/v1/storage-profiles").text


def test_the_probes_tell_the_truth(api: TestClient) -> None:
    context: Context = api.app.state.context  # type: ignore[attr-defined]
    assert api.get("/readyz").json() == {"status": "ok", "reasons": []}
    context.pulse.missed("postgres.unreachable")
    answer = api.get("/readyz")
    assert (answer.status_code, answer.json()["reasons"]) == (503, ["postgres.unreachable"])
    assert api.get("/livez").status_code == 200, "a restart of ours does not bring Postgres back"
    context.pulse.heard()
    context.pulse.became("starting")
    assert api.get("/readyz").json()["reasons"] == ["daemon.starting"]
    context.pulse.became("standby")
    assert api.get("/readyz").status_code == 200
    context.pulse.jvm_alive = lambda: False
    assert api.get("/livez").json()["reasons"] == ["spark.gateway_lost"]
    assert api.get("/readyz").status_code == 503


def test_a_loop_that_hangs_is_not_alive(site: Site) -> None:
    from modak.core.clock import FrozenClock
    from modak.runtime.pulse import STUCK_SECONDS, Pulse

    clock = FrozenClock()
    pulse = Pulse(clock)
    clock.sleep(STUCK_SECONDS + 1)
    assert pulse.live().reasons == ("daemon.stuck",)
    pulse.beat()
    assert pulse.live().good
