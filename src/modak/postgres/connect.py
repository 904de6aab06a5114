"""Opening connections, and turning what Postgres says into errors with a next step.

Every connection of ours speaks the same dialect: UTC, ISO dates, shortest exact floats, hex bytea, ISO intervals, plain
money. The text of keys and payloads depends on these settings, so no flow may open a connection by another way. The
ADBC streams of `arrow.py` apply the same `SESSION`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from modak.core.errors import Conflict, ModakError
from modak.postgres.dsn import Dsn

if TYPE_CHECKING:
    import psycopg

SESSION: Mapping[str, str] = {
    "client_encoding": "UTF8",
    "TimeZone": "UTC",
    "DateStyle": "ISO, YMD",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "IntervalStyle": "iso_8601",
    "lc_monetary": "C",
}
"""Session settings that decide how a value looks as text."""

GUARDS: Mapping[str, str] = {
    "row_security": "off",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "transaction_timeout": "0",
}
"""For long reads: no timeout of a role or database may end them, and no policy may hide rows from them silently."""

TCP: Mapping[str, str] = {
    "connect_timeout": "10",
    "keepalives": "1",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "4",
    "tcp_user_timeout": "120000",
}

_AUTH_SIGNS = (
    "password authentication failed",
    "no password supplied",
    "authentication failed",
    "no pg_hba.conf entry",
    "is not permitted to log in",
    "requested authentication method",
    "permission denied for database",
)

_PREAMBLE = re.compile(r'^connection failed: |connection to server at "[^"]*"( \([^)]*\))?, port \d+ failed: |FATAL: +')
"""What libpq puts in front of its reason; the address is in our own sentence."""


def connect(dsn: Dsn, *, autocommit: bool = False, application: str = "modak") -> psycopg.Connection[tuple[Any, ...]]:
    """Open a connection with our session settings."""
    import psycopg

    try:
        conn = psycopg.connect(with_defaults(dsn, application).conninfo(), autocommit=True)
    except psycopg.Error as error:
        # The libpq text can quote the connection string, so the cause is not chained.
        raise refused_at_the_door(dsn, str(error)) from None
    try:
        conn.execute(session_sql(SESSION))
        conn.autocommit = autocommit
    except psycopg.Error as error:
        conn.close()
        raise translate(error) from error
    return conn


def with_defaults(dsn: Dsn, application: str) -> Dsn:
    """The address with our timeouts, keepalives and application name, where it does not bring its own."""
    own = {key for key, _ in dsn.options}
    extra = {"application_name": application, **TCP}
    return replace(dsn, options=(*dsn.options, *((key, value) for key, value in extra.items() if key not in own)))


def session_sql(settings: Mapping[str, str]) -> bytes:
    """One statement that applies session settings, skipping what an older server does not know.

    Names and values are constants of this code.
    """
    calls = ", ".join(
        f"CASE WHEN current_setting('{name}', true) IS NOT NULL THEN set_config('{name}', '{value}', false) END"
        for name, value in settings.items()
    )
    return f"SELECT {calls}".encode()


def translate(error: psycopg.Error) -> ModakError:
    """The `ModakError` for an error on an open connection; says whether trying again can help."""
    import psycopg

    said = (error.diag.message_primary or "").strip() or _first_line(str(error)) or type(error).__name__
    if error.sqlstate == _DEPENDED_ON and error.diag.message_detail:
        # Only here does the server's detail say what somebody has to look for.
        said = f"{said}: {', '.join(error.diag.message_detail.splitlines())}"
    if error.sqlstate is not None:
        meant = by_state(error.sqlstate, said)
        # Where we know nothing better, the server may: our own functions say there what to do.
        meant.hint = meant.hint or error.diag.message_hint or ""
        return meant
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return _CONNECTION_LOST.error(said)
    return ModakError("postgres.error", f"Postgres: {said}.")


def by_state(state: str, said: str) -> ModakError:
    """The `ModakError` for an SQLSTATE and the server's sentence."""
    if state == "40001":
        return Conflict("postgres.serialization", f"A concurrent change came first: {said}.")
    known = _BY_STATE.get(state) or _BY_STATE.get(state[:2])
    if known is not None:
        return known.error(said)
    return ModakError("postgres.error", f"Postgres: {said} (SQLSTATE {state}).")


@dataclass(frozen=True, slots=True)
class _Meaning:
    code: str
    lead: str
    hint: str = ""
    retryable: bool = False

    def error(self, said: str) -> ModakError:
        return ModakError(self.code, f"{self.lead}: {said}.", hint=self.hint, retryable=self.retryable)


_CONNECTION_LOST = _Meaning(
    "postgres.connection_lost",
    "The connection to Postgres was lost",
    "It is tried again; if it stays, look into the server's log.",
    retryable=True,
)
_BUSY = _Meaning(
    "postgres.busy",
    "Postgres is busy",
    "It is tried again; an open transaction of somebody else may be in the way.",
    retryable=True,
)
_AUTH = _Meaning("postgres.auth", "Postgres does not let us in", "Check MODAK_PG_USER and MODAK_PG_PASSWORD.")
_DEPENDED_ON = "2BP01"
_BY_STATE: Mapping[str, _Meaning] = {
    _DEPENDED_ON: _Meaning(
        "postgres.depended_on",
        "Postgres keeps it",
        "Drop what depends on it, or let it depend on the whole table; the next pass goes on from here.",
    ),
    "42501": _Meaning(
        "postgres.privilege",
        "Postgres refuses",
        "Grant the right to the user of MODAK_PG_URL, or use the owner of the table.",
    ),
    **dict.fromkeys(("55P03", "40P01", "57014", "53300", "55006"), _BUSY),
    "53100": _Meaning("postgres.disk_full", "Postgres has no space", "Free space on the server.", retryable=True),
    "53": _Meaning("postgres.resources", "Postgres is out of resources", "Look into its log.", retryable=True),
    "58": _Meaning("postgres.system", "Postgres meets a system error", "Look into its log.", retryable=True),
    "25006": _Meaning(
        "postgres.read_only", "Postgres accepts no writes", "Point MODAK_PG_URL at the primary.", retryable=True
    ),
    **dict.fromkeys(("42P01", "3F000"), _Meaning("postgres.no_such_table", "Postgres does not know it")),
    "3D000": _Meaning("postgres.no_database", "Postgres does not have it"),
    "28": _AUTH,
    **dict.fromkeys(("08", "57P01", "57P02", "57P03", "57P05", "25P03", "25P04"), _CONNECTION_LOST),
}


def refused_at_the_door(dsn: Dsn, text: str) -> ModakError:
    """The `ModakError` for a connection that could not be opened."""
    # libpq gives no SQLSTATE for a failed connection, only text.
    said = dsn.scrub(_PREAMBLE.sub("", _first_line(text)).rstrip("."))
    low = said.lower()
    if "does not exist" in low and "database" in low:
        return ModakError(
            "postgres.no_database",
            f"There is no database {dsn.dbname!r} at {dsn.safe()}.",
            hint="Create it, or name another one in MODAK_PG_URL.",
        )
    if any(sign in low for sign in _AUTH_SIGNS) or ("role" in low and "does not exist" in low):
        return ModakError(
            "postgres.auth",
            f"Postgres at {dsn.safe()} does not let {dsn.user!r} in: {said}.",
            hint="Check MODAK_PG_USER and MODAK_PG_PASSWORD.",
        )
    if "too many" in low or "remaining connection slots" in low:
        return ModakError(
            "postgres.busy",
            f"Postgres at {dsn.safe()} has no free connection: {said}.",
            hint="It is tried again; raise max_connections if it stays.",
            retryable=True,
        )
    return ModakError(
        "postgres.unreachable",
        f"Postgres at {dsn.safe()} cannot be reached: {said}.",
        hint="Check that it runs and that MODAK_PG_URL names the right host and port.",
        retryable=True,
    )


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else ""
