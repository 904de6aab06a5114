"""A real server that speaks S3, on loopback, one per run; a bucket of its own per test."""

from __future__ import annotations

import io
import logging
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

import pytest


@dataclass(frozen=True)
class S3Server:
    """Where the server listens, and how its clients are configured."""

    endpoint: str

    @property
    def props(self) -> Mapping[str, str]:
        """As a profile holds them."""
        return {
            "s3.endpoint": self.endpoint,
            "s3.access-key-id": "modak",
            "s3.secret-access-key": "modak-secret",
            "s3.region": "us-east-1",
            "s3.path-style-access": "true",
        }

    @property
    def environ(self) -> Mapping[str, str]:
        """As a user sets them."""
        return {
            "MODAK_S3_ENDPOINT": self.endpoint,
            "MODAK_S3_ACCESS_KEY": "modak",
            "MODAK_S3_SECRET_KEY": "modak-secret",
            "MODAK_S3_REGION": "us-east-1",
        }

    def new_bucket(self) -> str:
        """A bucket that nobody else uses."""
        bucket = f"modak-{token_hex(6)}"
        request = urllib.request.Request(f"{self.endpoint}/{bucket}", method="PUT")
        with urllib.request.urlopen(request, timeout=30):
            return bucket


@dataclass(frozen=True)
class OneByOne:
    """Requests done one after the other: a condition and the write behind it are one step, as a real store has it."""

    app: Callable[[dict[str, Any], Any], Iterable[bytes]]
    turn: threading.Lock

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if size := int(environ.get("CONTENT_LENGTH") or 0):
            # A client that sends slowly holds nobody up.
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(size))
        with self.turn:
            return list(self.app(environ, start_response))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """The server of the run."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = OneByOne(DomainDispatcherApplication(create_backend_app), threading.Lock())
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    serving = threading.Thread(target=server.serve_forever, name="s3-server", daemon=True)
    serving.start()
    host, port = server.server_address[:2]
    yield S3Server(f"http://{host!s}:{port}")
    server.shutdown()
    serving.join()
    server.server_close()
