"""The console as a guest of the daemon's HTTP server: its pages, its sign-in, and the gate in front of all routes.

`modak-console` is `modak-worker` whose `run` hosts this too. The pages show what `/api/v1` says and nothing else, so
whatever the console can do, a program can do as well.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Cookie, Request, Response
from pydantic import BaseModel, Field

from modak.config import Settings
from modak.console.assets import assets
from modak.console.gate import App, Gate
from modak.console.sessions import COOKIE, LIFETIME_SECONDS, Session, Sessions
from modak.runtime.web.auth import Guard, Scope, Unauthorised

_NAMES = {Scope.READ: "read", Scope.ADMIN: "admin"}
_REFUSED_SECONDS = 0.5
"""A wrong token costs its giver so long; guessing is hopeless anyway, and so it is also loud."""


class Token(BaseModel):
    """What somebody signs in with."""

    token: str = Field(min_length=1, max_length=4096)


class Console:
    """The console of one server."""

    def __init__(self, guard: Guard, settings: Settings) -> None:
        self._guard = guard
        self._settings = settings
        self._sessions = Sessions(time.time)

    def gate(self, app: App) -> App:
        """The application behind the checks that browsers need."""
        secrets = {"admin": self._guard.admin, "read": self._guard.read}
        return Gate(app, self._sessions, {scope: token.get_secret_value() for scope, token in secrets.items() if token})

    def routers(self) -> Sequence[APIRouter]:
        """The pages and the sign-in."""
        routes = APIRouter(include_in_schema=False)
        routes.add_api_route("/", self._file("index.html"), methods=["GET", "HEAD"])
        for path in assets():
            routes.add_api_route(f"/static/{path}", self._file(path), methods=["GET", "HEAD"])

        @routes.get("/console/session")
        def session(modak_session: Annotated[str | None, Cookie(alias=COOKIE)] = None) -> dict[str, Any]:
            return self._told(self._sessions.read(modak_session))

        @routes.post("/console/session")
        def begin(given: Token, request: Request, response: Response) -> dict[str, Any]:
            scope = self._guard.scope_of(given.token)
            if scope is Scope.NONE:
                time.sleep(_REFUSED_SECONDS)
                raise Unauthorised(
                    "console.token", "The token is not right.", hint="It is the value of MODAK_API_TOKEN."
                )
            session, cookie = self._sessions.begin(_NAMES[scope])
            response.set_cookie(
                COOKIE,
                cookie,
                max_age=LIFETIME_SECONDS,
                httponly=True,
                samesite="strict",
                secure=request.url.scheme == "https",
            )
            return self._told(session)

        @routes.delete("/console/session", status_code=204)
        def end(response: Response) -> None:
            response.delete_cookie(COOKIE, httponly=True, samesite="strict")

        return [routes]

    def _told(self, session: Session | None) -> dict[str, Any]:
        everyone = self._guard.open
        return {
            "needs_login": not everyone,
            "signed_in": everyone or session is not None,
            "scope": "admin" if everyone else session.scope if session else None,
            "sql": self._settings.http.console_sql,
            "limits": {
                "rows": self._settings.http.query_max_rows,
                "seconds": self._settings.http.query_timeout_seconds,
            },
            "stores": {
                "measurements": self._settings.measurements.enabled,
                "entities": self._settings.entities.enabled,
            },
            "csrf": self._sessions.guard(session),
        }

    def _file(self, path: str) -> Any:
        asset = assets()[path]

        def send(request: Request) -> Response:
            headers = {"ETag": asset.tag, "Cache-Control": "no-cache"}
            if request.headers.get("if-none-match") == asset.tag:
                return Response(status_code=304, headers=headers)
            return Response(asset.body, media_type=asset.kind, headers=headers)

        return send
