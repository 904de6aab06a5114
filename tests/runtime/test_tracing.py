"""Traces by configuration: work and requests become spans that a collector can read."""

from __future__ import annotations

import gzip
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from modak.postgres.dsn import Dsn
from modak.runtime import tracing
from modak.runtime.opening import open_site
from tests.runtime.hosted import hosted, until
from tests.tables.conftest import settings_for
from tests.tables.events import Events


@pytest.fixture
def collector() -> Iterator[Any]:
    """Takes traces over HTTP as a real one does."""
    bodies: list[tuple[str, bytes]] = []

    class Take(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append((self.path, gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Take)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    server.server_close()


def arrived(bodies: list[tuple[str, bytes]]) -> list[Any]:
    """Every span that the collector was sent, all of them by a worker."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    assert {path for path, _ in bodies} == {"/v1/traces"}
    spans = []
    for _, body in bodies:
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            assert names["service.name"] == "modak-worker"
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    return spans


def texts(span: Any) -> dict[str, str]:
    """Its attributes."""
    return {each.key: each.value.string_value for each in span.attributes}


def test_spans_reach_the_collector_with_names_tables_and_failures(collector: Any) -> None:
    address, bodies = collector
    tracing.begin(address, "host:1:abc")
    with tracing.span("modak.tier", {"modak.table": "public.events"}):
        pass
    with pytest.raises(ValueError, match="no"), tracing.span("modak.fold"):
        raise ValueError("no")
    tracing.end()
    spans = {span.name: span for span in arrived(bodies)}
    assert set(spans) == {"modak.tier", "modak.fold"}
    assert texts(spans["modak.tier"]) == {"modak.table": "public.events"}
    assert spans["modak.fold"].status.code == 2


def test_without_an_endpoint_a_span_is_nothing() -> None:
    tracing.begin(None, "host")
    with tracing.span("modak.tier") as nothing:
        assert nothing is None
    tracing.end()


def test_a_worker_with_an_endpoint_sends_a_span_of_each_tiering_and_each_request(
    collector: Any, fresh_database: Dsn, warehouse: str, spark_home: Path, gateway: object
) -> None:
    endpoint, bodies = collector
    settings = settings_for(fresh_database, warehouse, spark_home, MODAK_OTLP_ENDPOINT=endpoint)
    with open_site(settings) as site:
        events = Events.create(site)
        events.register()
    with hosted(settings) as address:

        def shown() -> Any:
            return httpx.get(f"{address}/api/v1/tables/public.events", timeout=30).json()

        until(lambda: shown()["cutline"]["t"] == 200)
    # What still waited was sent when the worker ended.
    spans = arrived(bodies)
    tierings = [texts(span) for span in spans if span.name == "modak.tier"]
    assert {"modak.table": "public.events"} in tierings
    asked = [texts(span) for span in spans if span.name == "HTTP GET"]
    assert {"http.request.method": "GET", "url.path": "/api/v1/tables/public.events"} in asked
