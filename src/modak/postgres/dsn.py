"""Where a Postgres is and who we are to it.

One value carries the address from the settings (or the embedded server) to every client: psycopg and ADBC through
libpq, Spark and Iceberg through JDBC. The password is masked in every form that a person or a log can see. Standard
library only, so that it is cheap to import and travels into Spark tasks.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from modak.core.errors import UsageError

_JDBC_TO_LIBPQ = {
    "ApplicationName": "application_name",
    "connectTimeout": "connect_timeout",
    "sslmode": "sslmode",
    "sslrootcert": "sslrootcert",
    "sslcert": "sslcert",
    "sslkey": "sslkey",
    "sslpassword": "sslpassword",
    "channelBinding": "channel_binding",
    "gssEncMode": "gssencmode",
    "targetServerType": "target_session_attrs",
}
_LIBPQ_TO_JDBC = {
    "connect_timeout": "connectTimeout",
    "sslmode": "sslmode",
    "sslrootcert": "sslrootcert",
    "sslcert": "sslcert",
    "sslkey": "sslkey",
    "channel_binding": "channelBinding",
    "gssencmode": "gssEncMode",
}
# What a JDBC driver does with its own statements and sockets means nothing to libpq.
_JDBC_ONLY = frozenset(
    {
        "reWriteBatchedInserts",
        "prepareThreshold",
        "preparedStatementCacheQueries",
        "defaultRowFetchSize",
        "socketTimeout",
        "loginTimeout",
        "tcpKeepAlive",
        "stringtype",
        "binaryTransfer",
    }
)
_TARGETS = {"primary": "read-write", "master": "read-write", "any": "any", "secondary": "standby"}
_SECRET = frozenset({"sslpassword"})
_FORM = "Write postgresql://user@host:5432/database."


@dataclass(frozen=True)
class Dsn:
    """The address of a database and the credentials to enter it."""

    host: str
    port: int
    dbname: str
    user: str
    password: str = field(default="", repr=False)
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @classmethod
    def parse(cls, url: str, user: str | None = None, password: str | None = None) -> Dsn:
        """Read `postgresql://`, `postgres://` or `jdbc:postgresql://`; separate credentials win over the URL's."""
        jdbc = url.startswith("jdbc:")
        parts, port = _split(url.removeprefix("jdbc:"))
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        options = _from_jdbc(given) if jdbc else given
        who = user or options.pop("user", None) or unquote(parts.username or "") or getpass.getuser()
        secret = password if password is not None else options.pop("password", None)
        options.pop("user", None)
        options.pop("password", None)
        host = options.pop("host", None) or unquote(parts.hostname or "") or "localhost"
        dbname = options.pop("dbname", None) or unquote(parts.path.lstrip("/")) or who
        asked = options.pop("port", None)
        _refuse_several(host, asked or "", options.get("hostaddr", ""))
        return cls(
            host,
            _port(asked) if asked else port or 5432,
            dbname,
            who,
            secret if secret is not None else unquote(parts.password or ""),
            tuple(sorted(options.items())),
        )

    def conninfo(self) -> str:
        """The libpq form, key='value', with the password."""
        pairs = [
            ("host", self.host),
            ("port", str(self.port)),
            ("dbname", self.dbname),
            ("user", self.user),
            *([("password", self.password)] if self.password else []),
            *self.options,
        ]
        return " ".join(f"{key}={_libpq_value(value)}" for key, value in pairs)

    def uri(self) -> str:
        """The libpq URI with the password, every part percent-encoded."""
        credentials = quote(self.user, safe="") + (f":{quote(self.password, safe='')}" if self.password else "")
        query = urlencode(self.options, quote_via=quote)
        where = f"postgresql://{credentials}@{_netloc(self.host, self.port)}/{quote(self.dbname, safe='')}"
        return f"{where}?{query}" if query else where

    def jdbc(self, params: Mapping[str, str] | None = None) -> str:
        """The JDBC URL without credentials; TLS options travel along, `params` are added."""
        if self.host.startswith("/"):
            raise UsageError(
                "postgres.socket_only",
                f"Postgres is given by the socket folder {self.host}, but Spark reaches it over TCP only.",
                hint="Give a host name and port in MODAK_PG_URL.",
            )
        carried = {_LIBPQ_TO_JDBC[key]: value for key, value in self.options if key in _LIBPQ_TO_JDBC}
        query = urlencode({**carried, **(params or {})}, quote_via=quote)
        where = f"jdbc:postgresql://{_netloc(self.host, self.port)}/{quote(self.dbname, safe='')}"
        return f"{where}?{query}" if query else where

    def safe(self) -> str:
        """The address for people: no password."""
        return f"postgresql://{quote(self.user, safe='')}@{_netloc(self.host, self.port)}/{quote(self.dbname, safe='')}"

    def with_database(self, name: str) -> Dsn:
        """The same server and user, another database."""
        return replace(self, dbname=name)

    def scrub(self, text: str) -> str:
        """A text that may quote the connection string, with the secrets taken out."""
        secrets = [self.password, *(value for key, value in self.options if key in _SECRET)]
        for secret in secrets:
            for form in {secret, quote(secret, safe="")} - {""}:
                text = text.replace(form, "***")
        return text

    def __str__(self) -> str:
        return self.safe()


def _split(url: str) -> tuple[SplitResult, int | None]:
    # The URL may hold a password, so no message quotes it.
    try:
        _refuse_several(urlsplit(url).netloc.rpartition("@")[2])
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError("usage.pg_url", "The Postgres URL cannot be read.", hint=_FORM) from error
    if parts.scheme not in ("postgresql", "postgres"):
        raise UsageError("usage.pg_url", f"{parts.scheme or 'No scheme'!r} is not a Postgres URL.", hint=_FORM)
    return parts, port


def _refuse_several(*where: str) -> None:
    # libpq would try one after the other; the JDBC drivers of Spark and Iceberg read the same list otherwise.
    if any("," in each for each in where):
        raise UsageError(
            "usage.pg_url",
            "The Postgres URL names several hosts.",
            hint="Give one address that follows the primary: a DNS name, a virtual IP address or a proxy.",
        )


def _port(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,4}", text, re.ASCII):
        raise UsageError("usage.pg_url", "The port of the Postgres URL is not a number.", hint=_FORM)
    return int(text)


def _from_jdbc(given: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, value in given.items():
        if key in ("user", "password"):
            options[key] = value
        elif key == "ssl":
            if value.lower() != "false":
                options.setdefault("sslmode", "verify-full")
        elif key == "currentSchema":
            options["options"] = f"-csearch_path={value}"
        elif key == "targetServerType":
            options["target_session_attrs"] = _TARGETS.get(value, value)
        elif key in _JDBC_TO_LIBPQ:
            options[_JDBC_TO_LIBPQ[key]] = value
        elif key not in _JDBC_ONLY:
            raise UsageError(
                "usage.pg_url",
                f"The JDBC parameter {key!r} has no meaning here.",
                hint="Leave it out of MODAK_PG_URL.",
            )
    return options


def _netloc(host: str, port: int) -> str:
    if host.startswith("/"):
        return f"{quote(host, safe='')}:{port}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _libpq_value(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
