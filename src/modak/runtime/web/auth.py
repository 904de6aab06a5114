"""Who may ask for what: a token that reads, a token that also changes, and nobody without one beyond this machine.

Tokens are compared in constant time. With no token set, which is allowed on loopback only, a request must come from
this machine's own names and from no other site's page: a browser would otherwise be a way in for everybody.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from enum import IntEnum

from fastapi import Request
from pydantic import SecretStr

from modak.config import HttpSettings
from modak.core.errors import ModakError
from modak.core.loopback import is_called_loopback, is_page_of

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


class Unauthorised(ModakError):
    """There is no token, or not the right one."""


class Forbidden(ModakError):
    """The token is right, and does not allow this."""


class Scope(IntEnum):
    """What a caller may do; the larger includes the smaller."""

    NONE = 0
    READ = 1
    ADMIN = 2


@dataclass(frozen=True)
class Guard:
    """The rules of one server."""

    admin: SecretStr | None
    read: SecretStr | None
    loopback: bool

    @classmethod
    def of(cls, settings: HttpSettings) -> Guard:
        """The rules that the settings ask for."""
        return cls(settings.api_token, settings.api_read_token, settings.loopback)

    @property
    def open(self) -> bool:
        """Whether no token is asked for."""
        return self.loopback and self.admin is None and self.read is None

    def scope_of(self, token: str | None) -> Scope:
        """What a token allows."""
        given = (token or "").encode()
        # Both are compared in any case, so that the time tells nothing about which one came close.
        is_admin, is_read = _same(self.admin, given), _same(self.read, given)
        return Scope.ADMIN if is_admin else Scope.READ if is_read else Scope.NONE

    def require(self, request: Request, wanted: Scope) -> Scope:
        """The scope of a request, if it reaches as far as wanted."""
        scope = self._scope(request, wanted)
        request.state.scope = scope
        return scope

    def _scope(self, request: Request, wanted: Scope) -> Scope:
        if self.open:
            _refuse_strangers(request)
            return Scope.ADMIN
        token = token_of(request)
        scope = self.scope_of(token)
        if scope is Scope.NONE:
            raise Unauthorised(
                "api.unauthorised",
                "This call needs a token." if token is None else "The token is not right.",
                hint="Send Authorization: Bearer <token> with MODAK_API_TOKEN or, to read, MODAK_API_READ_TOKEN.",
            )
        if scope < wanted:
            raise Forbidden("api.forbidden", "This token may only read.", hint="Use the token of MODAK_API_TOKEN.")
        return scope

    def reader(self, request: Request) -> Scope:
        """A FastAPI dependency: whoever may read."""
        return self.require(request, Scope.READ)

    def admin_only(self, request: Request) -> Scope:
        """A FastAPI dependency: whoever may change."""
        return self.require(request, Scope.ADMIN)


def token_of(request: Request) -> str | None:
    """The token of a request: `Authorization: Bearer`, or `X-Modak-Token`."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and token.strip():
        return token.strip()
    return request.headers.get("x-modak-token")


def caller(request: Request) -> str:
    """How the catalog remembers who asked for something."""
    scope: Scope = request.state.scope
    address = request.client.host if request.client else "?"
    return f"api {scope.name.lower()} from {address}"


def _same(secret: SecretStr | None, given: bytes) -> bool:
    expected = secret.get_secret_value().encode() if secret is not None else b""
    return hmac.compare_digest(expected, given) and bool(expected)


def _refuse_strangers(request: Request) -> None:
    if not is_called_loopback(request.headers.get("host", "")):
        raise Forbidden(
            "api.foreign_host",
            "Without a token this server answers only to names of this machine.",
            hint="Call it as 127.0.0.1 or localhost, or set MODAK_API_TOKEN.",
        )
    if request.method not in _SAFE and _is_from_elsewhere(request):
        raise Forbidden("api.foreign_site", "A page of another site may not change anything here.")


def _is_from_elsewhere(request: Request) -> bool:
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return True
    # A browser that sends no Fetch Metadata names the page's origin; a program names none.
    origin = request.headers.get("origin")
    return origin is not None and not is_page_of(origin, request.headers.get("host", ""))
