"""How many requests may be under way: beyond that an answer is 503, but the probes are always answered.

A supervisor that got no answer from a probe would restart a worker that is only busy, and the next would be as busy.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from modak.core.errors import Refused
from modak.runtime.web.errors import answer_to

MOST_REQUESTS = 200
_ALWAYS = frozenset({"/livez", "/readyz"})


class Room:
    """The layer that counts what is under way. One event loop drives it, so a plain number will do."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _ALWAYS:
            await self._app(scope, receive, send)
            return
        if self._inside >= MOST_REQUESTS:
            full = Refused("api.full", f"{MOST_REQUESTS} requests are under way already.", hint="Try again soon.")
            await (await answer_to(Request(scope), full))(scope, receive, send)
            return
        self._inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside -= 1
