"""What is settled before a body is read: whether its sender has a token at all, and how large it may be.

FastAPI reads a body into memory before it asks the guard. This layer stands in front of it: where a token is needed it
is looked at first (what the token allows is still the route's own question), and a body ends at a limit, announced or
counted. Stream Load is let through: it writes to disk while it reads, with a token and a limit of its own.
"""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as Call

from modak.core.errors import ModakError
from modak.runtime.web.auth import Guard, Scope
from modak.runtime.web.context import API
from modak.runtime.web.errors import answer_to

MOST_BYTES = 1 << 20
_STREAMED = "/api/load/"
_GUARDED = (f"{API}/", "/iceberg/", "/metrics")


class Bodies:
    """The layer around all routes."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Call, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_STREAMED):
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        try:
            if scope["path"].startswith(_GUARDED):
                self._guard.require(request, Scope.READ)
            length = request.headers.get("content-length", "")
            _limit(int(length) if length.isdecimal() else 0)
        except (ModakError, HTTPException) as refused:
            await (await answer_to(request, refused))(scope, receive, send)
            return
        await self._app(scope, _counted(receive), send)


def _counted(receive: Receive) -> Receive:
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        _limit(seen)
        return message

    return counted


def _limit(size: int) -> None:
    if size > MOST_BYTES:
        # FastAPI calls whatever else fails while it reads a body a wrong request.
        raise HTTPException(413, f"A body may have {MOST_BYTES} bytes here; only Stream Load takes larger ones.")
