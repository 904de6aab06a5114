"""Real servers that speak the protocols of Google Cloud Storage and of Azure, on loopback, one of each per run.

`make stores` brings their programs; without them, whoever asks for one is skipped.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from secrets import token_hex

import pytest

from tests.support.ports import free_port
from tests.support.xml_gcs import translating

CLOUDS = ("gs", "abfs")
"""What there is beside folders and S3."""
_STORES = Path(__file__).parents[1] / "build" / "stores"
_PROGRAMS = {"gs": ("fake-gcs-server",), "abfs": ("azurite-blob",)}
_PLACES = (_STORES, _STORES / "node_modules" / ".bin")
_ACCOUNT = "acme"


@dataclass(frozen=True)
class Cloud:
    """Where a server listens, and how its clients are configured, as a profile holds them."""

    scheme: str
    config: Mapping[str, str]
    credentials: Mapping[str, str]
    make: Callable[[str], str] = field(repr=False)

    @property
    def props(self) -> Mapping[str, str]:
        """All that opens it."""
        return {**self.config, **self.credentials}

    def new_root(self) -> str:
        """A bucket that nobody else uses."""
        return self.make(f"modak-{token_hex(6)}")


def program(scheme: str) -> str | None:
    """The program that serves a kind of store, if it is here."""
    name = _PROGRAMS[scheme][0]
    found = shutil.which(name) or next((str(place / name) for place in _PLACES if (place / name).is_file()), None)
    return found if scheme == "gs" or shutil.which("node") else None


@pytest.fixture(scope="session")
def gs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """Google Cloud Storage, as fake-gcs-server plays it."""
    needed = _needed("gs")
    front = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    host, behind = f"127.0.0.1:{front.server_address[1]}", free_port()
    options = ["-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(behind)]
    command = [needed, *options, "-public-host", host, "-external-url", f"http://{host}", "-log-level", "error"]

    def make(name: str) -> str:
        _post(f"http://{host}/storage/v1/b?project=modak", json.dumps({"name": name}).encode())
        return f"gs://{name}"

    with _running(command, behind, tmp_path_factory.mktemp("gcs")), translating(front, behind):
        yield Cloud("gs", {"gcs.service.host": f"http://{host}", "gcs.no-auth": "true"}, {}, make)


@pytest.fixture(scope="session")
def abfs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """Azure, as azurite plays it: blobs by its own protocol; it does not know the one of Data Lake beside it."""
    needed = _needed("abfs")
    port, key = free_port(), base64.b64encode(b"modak-secret" * 4).decode()
    address = f"http://127.0.0.1:{port}/{_ACCOUNT}"
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--disableTelemetry"]
    command = [needed, *options, "--silent", "--skipApiVersionCheck", "--blobKeepAliveTimeout", "300"]

    def make(name: str) -> str:
        _signed_put(address, name, key)
        return f"abfs://{name}@{_ACCOUNT}.dfs.core.windows.net"

    with _running(command, port, tmp_path_factory.mktemp("azurite"), AZURITE_ACCOUNTS=f"{_ACCOUNT}:{key}"):
        yield Cloud("abfs", {"adls.endpoint": address}, {"adls.auth.shared-key.account.key": key}, make)


def _needed(scheme: str) -> str:
    found = program(scheme)
    if found is None:
        pytest.skip(f"{_PROGRAMS[scheme][0]} is neither on the PATH nor in build/stores: `make stores` brings it")
    return found


@contextmanager
def _running(command: Sequence[str], port: int, folder: Path, **environ: str) -> Iterator[None]:
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env={**os.environ, **environ})
    try:
        deadline = time.monotonic() + 60
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{command[0]} does not answer: {(folder / 'log').read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def _post(url: str, body: bytes) -> None:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30):
        return


def _signed_put(address: str, container: str, key: str) -> None:
    """Make a container; obstore makes none."""
    date, version = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"), "2021-12-02"
    stamps = f"x-ms-date:{date}\nx-ms-version:{version}"
    text = "PUT" + "\n" * 12 + f"{stamps}\n/{_ACCOUNT}/{_ACCOUNT}/{container}\nrestype:container"
    mark = base64.b64encode(hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()).decode()
    headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {_ACCOUNT}:{mark}"}
    url = f"{address}/{container}?restype=container"
    request = urllib.request.Request(url, b"", {**headers, "Content-Type": ""}, method="PUT")
    with urllib.request.urlopen(request, timeout=30):
        return
