"""The outermost layer of the daemon's HTTP: a span, a number and safe headers for every answer, also for a fault."""

from __future__ import annotations

import time

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modak.runtime import metrics
from modak.runtime.tracing import span
from modak.runtime.web.errors import crashed

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""What has a series of its own: a caller may send any word, and each would be kept for ever."""
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Measured:
    """Counts what leaves the application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, started = time.monotonic(), False
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"

        async def counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                path = str(getattr(scope.get("route"), "path", "unknown"))
                metrics.REQUESTS.labels(method, path, str(message["status"])).inc()
                metrics.REQUEST_SECONDS.labels(path).observe(time.monotonic() - began)
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            with span(f"HTTP {method}", {"http.request.method": method, "url.path": scope["path"]}):
                await self._app(scope, receive, counted)
        except Exception as error:
            if started:
                # Half an answer is out: all that is left is to end the connection.
                raise
            await (await crashed(Request(scope), error))(scope, receive, counted)
