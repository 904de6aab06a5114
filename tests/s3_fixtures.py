"""A real server that speaks S3, on loopback, one per run; a bucket of its own per test."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from secrets import token_hex

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


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """The server of the run."""
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield S3Server(f"http://{host}:{port}")
    server.stop()
