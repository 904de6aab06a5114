"""Saving a manifest where the store misbehaves on the wire: one request, and its fate is found out by reading."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from modak.core.clock import SystemClock
from modak.core.errors import Conflict, ModakError
from modak.entities.clients import ObjectsClient
from modak.entities.config import ManifestConfig
from modak.entities.manifest import Manifest
from modak.entities.manifests import Held, Manifests
from modak.storage.objects import Objects


class Wire(ThreadingHTTPServer):
    """One object behind S3's requests; `answers` are the codes of the next puts, of which 200 and 500 keep the data."""

    def __init__(self, answers: list[int]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = answers
        self.stored = b""
        self.puts = 0


class Handler(BaseHTTPRequestHandler):
    server: Wire

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        code = self.server.answers[min(self.server.puts, len(self.server.answers) - 1)]
        self.server.puts += 1
        if code in (200, 500):
            self.server.stored = data
        self._answer(code)

    def do_GET(self) -> None:
        self._answer(200 if self.server.stored else 404, self.server.stored)

    def _answer(self, code: int, data: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", '"one"')
        self.send_header("Last-Modified", "Tue, 17 Nov 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    server = Wire(request.param)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def manifests(wire: Wire) -> Manifests:
    props = {
        "s3.endpoint": f"http://127.0.0.1:{wire.server_port}",
        "s3.region": "us-east-1",
        "s3.access-key-id": "modak",
        "s3.secret-access-key": "modak-secret",
        "s3.path-style-access": "true",
    }
    return Manifests(ObjectsClient(Objects.of("s3://bucket/here", props)), ManifestConfig(), SystemClock())


def save(wire: Wire) -> Manifest:
    return manifests(wire).save(Held(Manifest(7), None), lambda now: now)


@pytest.mark.parametrize("wire", [[503]], indirect=True)
def test_a_put_that_fails_is_not_repeated_and_its_fate_is_told_as_unclear(wire: Wire) -> None:
    with pytest.raises(ModakError, match=r"Whether the manifest manifest/7\.json was written") as caught:
        save(wire)
    assert (wire.puts, caught.value.code) == (1, "entities.manifest_unclear")
    assert "modak-secret" not in str(caught.value)


@pytest.mark.parametrize("wire", [[500]], indirect=True)
def test_a_put_that_landed_before_it_failed_is_found_by_its_id(wire: Wire) -> None:
    assert save(wire).version == 1
    assert wire.puts == 1


@pytest.mark.parametrize("wire", [[412]], indirect=True)
def test_a_failed_precondition_is_a_conflict(wire: Wire) -> None:
    with pytest.raises(Conflict, match="Somebody else"):
        save(wire)
    assert wire.puts == 1
