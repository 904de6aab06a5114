"""A proxy between S3 clients and the S3 server that breaks some of the requests: the store on a bad day.

Faults are drawn by a seeded chance: throttling, failing servers, connections that end before, in the middle of or after
the work, answers of half a body, slow ones, and (when asked for) none at all. What was broken is counted.

The server behind checks no keys and keeps every promise, so the proxy does the rest: with `owners` it lets only the key
that owns a bucket in, and with `deaf_to` it takes headers away before the server sees them.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

FAULTS = ("throttle", "error", "reset", "half_request", "lost_answer", "half_answer", "slow")
_SLOW_DOWN = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
_INTERNAL = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>Try again.</Message></Error>"
_DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
_KEY = re.compile(r"AWS4-HMAC-SHA256 Credential=([^/,]+)/")
_HOP = frozenset({"connection", "transfer-encoding", "content-length", "keep-alive"})


class StoreProxy:
    """Listens on loopback while the block runs; of the requests that `only` matches, the share `rate` is broken."""

    def __init__(
        self,
        endpoint: str,
        *,
        seed: int,
        rate: float = 0.2,
        faults: tuple[str, ...] = FAULTS,
        most: int | None = None,
        only: str = "",
        owners: Mapping[str, str] | None = None,
        deaf_to: tuple[str, ...] = (),
    ) -> None:
        self.upstream = urlsplit(endpoint).netloc
        self.rate = rate
        self.faults = faults
        self.most = most
        self.only = re.compile(only)
        self.owners = None if owners is None else dict(owners)
        self.deaf_to = deaf_to
        self.broken: Counter[str] = Counter()
        self.served: Counter[tuple[str, str]] = Counter()
        """Requests that were let in, by bucket and key."""
        self.denied: Counter[tuple[str, str]] = Counter()
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def draw(self, request: str) -> str | None:
        if not self.only.search(request):
            return None
        with self._lock:
            if self._chance.random() >= self.rate or self.broken.total() == self.most:
                return None
            fault = self._chance.choice(self.faults)
            self.broken[fault] += 1
            return fault

    def admits(self, key: str, buckets: set[str]) -> bool:
        """Whether a key may touch buckets; counted."""
        if self.owners is None:
            return True
        with self._lock:
            allowed = all(self.owners.get(bucket) == key for bucket in buckets)
            (self.served if allowed else self.denied).update((bucket, key) for bucket in buckets)
            return allowed

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    owner: StoreProxy
    protocol_version = "HTTP/1.1"

    def _any(self) -> None:
        fault = self.owner.draw(f"{self.command} {self.path}")
        length = int(self.headers.get("Content-Length") or 0)
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        if fault == "half_request":
            self.rfile.read(length // 2)
            self._cut()
            return
        body = self.rfile.read(length) if length else b""
        if not self.owner.admits(*self._asks()):
            self._answer(403, {"Content-Type": "application/xml"}, _DENIED)
            return
        if fault in ("throttle", "error"):
            text = _SLOW_DOWN if fault == "throttle" else _INTERNAL
            self._answer(503 if fault == "throttle" else 500, {"Content-Type": "application/xml"}, text)
            return
        if fault in ("reset", "stall"):
            time.sleep(5 if fault == "stall" else 0)
            self._cut()
            return
        self._forwarded(fault, body)

    def _asks(self) -> tuple[str, set[str]]:
        """The key that has signed the request, and the buckets that it would touch."""
        signed = _KEY.match(self.headers.get("Authorization", ""))
        paths = filter(None, (self.path, self.headers.get("x-amz-copy-source")))
        return signed[1] if signed else "", {re.split(r"[/?]", path.lstrip("/"))[0] for path in paths}

    def _forwarded(self, fault: str | None, body: bytes) -> None:
        upstream = http.client.HTTPConnection(self.owner.upstream, timeout=60)
        try:
            dropped = ("connection", "expect", *self.owner.deaf_to)
            headers = {key: value for key, value in self.headers.items() if key.lower() not in dropped}
            upstream.request(self.command, self.path, body=body, headers=headers)
            answer = upstream.getresponse()
            data = answer.read()
        finally:
            upstream.close()
        if fault == "lost_answer":
            self._cut()
            return
        kept = {key: value for key, value in answer.getheaders() if key.lower() not in _HOP}
        size = answer.getheader("Content-Length") if self.command == "HEAD" else None
        if fault == "half_answer" and len(data) > 1:
            self._answer(answer.status, kept, data[: len(data) // 2], length=len(data))
            self._cut()
            return
        if fault == "slow":
            time.sleep(0.3)
        self._answer(answer.status, kept, data, length=int(size) if size else None)

    def _answer(self, status: int, headers: dict[str, str], data: bytes, length: int | None = None) -> None:
        with contextlib.suppress(OSError):
            self.send_response_only(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data) if length is None else length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)
                self.wfile.flush()

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(2)

    def log_message(self, *_: Any) -> None:
        return

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any  # noqa: N815 - names of the library
