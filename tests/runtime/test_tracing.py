"""Traces by configuration: work and requests become spans that a collector can read."""

from __future__ import annotations

import gzip
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from modak.runtime import tracing


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


def test_spans_reach_the_collector_with_names_tables_and_failures(collector: Any) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    address, bodies = collector
    tracing.begin(address, "host:1:abc")
    with tracing.span("modak.tier", {"modak.table": "public.events"}):
        pass
    with pytest.raises(ValueError, match="no"), tracing.span("modak.fold"):
        raise ValueError("no")
    tracing.end()
    assert {path for path, _ in bodies} == {"/v1/traces"}
    spans = {}
    for _, body in bodies:
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            assert names["service.name"] == "modak-worker"
            spans.update({span.name: span for scope in resource.scope_spans for span in scope.spans})
    assert set(spans) == {"modak.tier", "modak.fold"}
    assert spans["modak.tier"].attributes[0].value.string_value == "public.events"
    assert spans["modak.fold"].status.code == 2


def test_without_an_endpoint_a_span_is_nothing() -> None:
    tracing.begin(None, "host")
    with tracing.span("modak.tier") as nothing:
        assert nothing is None
    tracing.end()
