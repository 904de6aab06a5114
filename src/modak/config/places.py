"""Where things are: folders, lake roots, web addresses and the Postgres URL, brought to one form each.

A local warehouse is `file:///abs/path` everywhere in Modak, and a Postgres URL that has passed here carries no
credentials: user and password travel in fields of their own, of which the password is never shown.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from modak.config.kinds import Kind
from modak.config.pairs import Malformed

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_BUCKETS = {"s3": "s3", "s3a": "s3", "gs": "gs", "abfs": "abfs", "abfss": "abfss"}
_WEB = re.compile(r"(?:https?://)?[A-Za-z0-9_.\[\]:-]+(?:/[^\s?#@]*)?", re.ASCII)
_CATALOG = re.compile(r"https?://[A-Za-z0-9_.\[\]:-]+(?:/[^\s?#@]*)?", re.ASCII)
_POSTGRES = re.compile(
    r"(?P<scheme>(?:jdbc:)?postgres(?:ql)?)://(?:(?P<user>[^:@/?#]*)(?::(?P<password>[^@/?#]*))?@)?"
    r"(?P<hosts>[^@/?#\s]*)(?:/(?P<database>[^@/?#\s]*))?(?:\?(?P<query>[^#\s]*))?"
)
_PORTED = re.compile(r"(?:\[[0-9A-Fa-f:.%]*\]|[^:]*)(?::\d*)?", re.ASCII)
_SECRET_PARAMETERS = frozenset({"sslpassword", "oauth_client_secret"})


def read_folder(text: str) -> Path:
    """A local folder as an absolute path, `~` expanded."""
    path = text.strip()
    if not path or "\0" in path:
        raise Malformed
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise Malformed("no such home folder")
    return Path(os.path.abspath(expanded))


def local_uri(folder: Path) -> str:
    """The one form in which a local folder is written down: `file:///abs/path`, not percent-encoded."""
    return "file://" + folder.as_posix()


def read_warehouse(text: str) -> str:
    """A lake root: a local folder becomes `file:///abs/path`, object stores keep their URI without a trailing slash."""
    place = text.strip()
    match = _SCHEME.match(place)
    if match is None:
        return _local(place)
    scheme, rest = match[1].lower(), place[match.end() :]
    if scheme == "file":
        path = rest.removeprefix("//localhost") if rest.startswith("//localhost/") else rest
        if path.startswith("//") and not path.startswith("///"):
            raise Malformed("a file: URI cannot name another machine")
        return _local("/" + path.lstrip("/"))
    if scheme not in _BUCKETS or not rest.startswith("//"):
        raise Malformed
    bucket, _, path = rest[2:].partition("/")
    if not bucket or re.search(r"[\s?#]", rest):
        raise Malformed("the bucket is missing" if not bucket else "")
    if ":" in bucket:
        raise Malformed("credentials do not belong here")
    return f"{_BUCKETS[scheme]}://{bucket}/{path}".rstrip("/")


def _local(text: str) -> str:
    folder = read_folder(text)
    if folder == Path(folder.anchor):
        raise Malformed("the root of the file system is not a lake")
    return local_uri(folder)


def _read_web(pattern: re.Pattern[str], text: str) -> str:
    address = text.strip()
    if not pattern.fullmatch(address):
        raise Malformed("credentials do not belong here" if "@" in address else "")
    return address.rstrip("/")


@dataclass(frozen=True)
class PostgresUrl:
    """A Postgres URL taken apart: the address free of credentials, and the credentials it carried."""

    address: str
    user: str | None
    password: str | None

    def __repr__(self) -> str:
        return f"PostgresUrl({self.address!r})"


def split_postgres_url(text: str) -> PostgresUrl:
    """Take user and password out of a `postgresql://…` or `jdbc:postgresql://…` URL, from wherever they stand in it."""
    match = _POSTGRES.fullmatch(text.strip())
    if match is None or not all(_PORTED.fullmatch(host) for host in match["hosts"].split(",")):
        raise _odd_url(text)
    user, password = match["user"], match["password"]
    kept: list[str] = []
    for parameter in filter(None, (match["query"] or "").split("&")):
        key, _, value = parameter.partition("=")
        if key in _SECRET_PARAMETERS:
            raise Malformed(f"{key} is not taken from the URL")
        if key == "user":
            user = user or value
        elif key == "password":
            password = password or value
        elif "@" in parameter:
            # An unescaped ? in the password would move its tail to here.
            raise _odd_url(text)
        else:
            kept.append(parameter)
    address = f"{match['scheme']}://{match['hosts']}"
    if match["database"] is not None:
        address += f"/{match['database']}"
    if kept:
        address += "?" + "&".join(kept)
    return PostgresUrl(address, unquote(user) if user else None, unquote(password) if password else None)


def _odd_url(text: str) -> Malformed:
    return Malformed("characters such as @ : / ? # in a password are written as %XX" if "@" in text else "")


def _read_postgres_address(text: str) -> str:
    url = split_postgres_url(text)
    if url.user or url.password:
        raise Malformed("user and password have fields of their own")
    return url.address


def _read_files(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    return tuple(name if _SCHEME.match(name) else str(read_folder(name)) for name in names)


FILES = Kind("files or URIs with commas between", _read_files, ",".join)
FOLDER = Kind("a folder", read_folder)
WAREHOUSE = Kind(
    "a folder, or a URI that begins with s3://, gs://, abfs:// or file:/", read_warehouse, confidential=True
)
ENDPOINT = Kind("host:port or an http(s):// address", lambda text: _read_web(_WEB, text), confidential=True)
CATALOG_URI = Kind("an http(s):// address", lambda text: _read_web(_CATALOG, text), confidential=True)
POSTGRES_URL = Kind(
    "postgresql://user:password@host:port/database or jdbc:postgresql://host:port/database",
    _read_postgres_address,
    confidential=True,
)
