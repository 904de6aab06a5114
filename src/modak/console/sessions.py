"""Who is signed in at the console: a cookie that only this process can sign, and the token against forged requests.

Nothing is stored: the cookie carries scope, expiry and a nonce under a keyed hash, and the token is a hash of that
nonce. A restart signs everybody out. The API's own tokens never reach the browser's storage.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

COOKIE = "modak_session"
LIFETIME_SECONDS = 12 * 3600
SCOPES = ("read", "admin")


@dataclass(frozen=True, slots=True)
class Session:
    """A signed-in person, as far as the console knows one."""

    scope: str
    expires: int
    nonce: str


class Sessions:
    """Signs and checks the cookies of one process."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._key = secrets.token_bytes(32)
        self._now = now

    def begin(self, scope: str) -> tuple[Session, str]:
        """A new session, and the value of its cookie."""
        session = Session(scope, int(self._now()) + LIFETIME_SECONDS, secrets.token_urlsafe(16))
        body = f"{session.scope}.{session.expires}.{session.nonce}"
        return session, f"{body}.{self._sign('session', body)}"

    def read(self, cookie: str | None) -> Session | None:
        """The session of a cookie; None for none, a forged one and one that is over."""
        body, _, signature = (cookie or "").rpartition(".")
        if not hmac.compare_digest(self._sign("session", body).encode(), signature.encode()):
            return None
        scope, expires, nonce = body.split(".", 2)
        if scope not in SCOPES or int(expires) < self._now():
            return None
        return Session(scope, int(expires), nonce)

    def guard(self, session: Session | None) -> str:
        """What a page must send along with everything that changes something."""
        return self._sign("guard", session.nonce if session else "")

    def guards(self, session: Session | None, given: str) -> bool:
        """Whether a page sent what it must."""
        return hmac.compare_digest(self.guard(session).encode(), given.encode())

    def _sign(self, purpose: str, body: str) -> str:
        made = hmac.new(self._key, f"{purpose}:{body}".encode(), hashlib.sha256).digest()
        return base64.urlsafe_b64encode(made).decode().rstrip("=")
