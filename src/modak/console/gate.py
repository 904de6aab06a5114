"""What stands between a browser and the daemon's routes: headers that lock a page in, and who may ask from where.

A program sends a bearer token and passes untouched. A browser brings the session's cookie; here it becomes the bearer
token of its scope, so that the API knows one kind of credential. Whatever changes something must carry the guard that
only our own pages can read. On loopback without tokens the same guard, and the name under which the daemon was called,
keep other sites in the same browser out.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any

from modak.console.sessions import COOKIE, Session, Sessions
from modak.core.loopback import is_called_loopback, is_page_of

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

GUARD = "x-modak-csrf"
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
        " form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Gate:
    """The outermost layer of the daemon's HTTP application when it has a console."""

    def __init__(self, app: App, sessions: Sessions, tokens: dict[str, str]) -> None:
        self._app = app
        self._sessions = sessions
        self._tokens = tokens
        """The bearer token of each scope; none at all where the daemon trusts its own machine."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        session = self._sessions.read(_cookie(headers.get("cookie")))
        refused = self._refusal(scope, headers, session)
        if refused is not None:
            await _refuse(refused, _locked(send, scope))
            return
        if session is not None and "authorization" not in headers and session.scope in self._tokens:
            bearer = f"Bearer {self._tokens[session.scope]}".encode("latin-1")
            scope = {**scope, "headers": [*scope["headers"], (b"authorization", bearer)]}
        await self._app(scope, receive, _locked(send, scope))

    def _refusal(self, scope: Scope, headers: dict[str, str], session: Session | None) -> str | None:
        """Why a request may not pass; None lets it."""
        if "authorization" in headers or "x-modak-token" in headers:
            return None
        if not self._tokens and not is_called_loopback(headers.get("host", "")):
            return "This daemon answers only to the names of its own machine."
        if scope["method"] in _SAFE or not (session or _is_browser(headers)):
            return None
        return self._forged(scope, headers, session)

    def _forged(self, scope: Scope, headers: dict[str, str], session: Session | None) -> str | None:
        """Why a change that a browser asks for may not come from a page of ours."""
        origin = headers.get("origin")
        if origin is not None and not is_page_of(origin, headers.get("host", "")):
            return "The request comes from another site."
        # Signing in is how a page gets its first guard.
        signs_in = scope["path"] == "/console/session" and scope["method"] == "POST"
        if not signs_in and not self._sessions.guards(session, headers.get(GUARD, "")):
            return "The page that asks for this is out of date. Load it again."
        return None


def _cookie(header: str | None) -> str | None:
    try:
        found = SimpleCookie(header or "").get(COOKIE)
    except CookieError:
        return None
    return found.value if found else None


def _is_browser(headers: dict[str, str]) -> bool:
    return "origin" in headers or "sec-fetch-site" in headers


def _locked(send: Send, scope: Scope) -> Send:
    extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
    if scope.get("scheme") == "https":
        extra.append((b"strict-transport-security", b"max-age=31536000"))

    async def locked(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            known = {name.lower() for name, _ in message["headers"]}
            added = [pair for pair in extra if pair[0] not in known]
            if b"cache-control" not in known:
                added.append((b"cache-control", b"no-store"))
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return locked


async def _refuse(why: str, send: Send) -> None:
    body = json.dumps({"error": {"code": "http.forged", "message": why, "hint": None}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})
