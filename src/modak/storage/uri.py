"""One spelling per file: engines write the same local path as `/abs`, `file:/abs` and `file:///abs`.

Paths are raw, as Iceberg's metadata holds them: nothing is percent-encoded or decoded.
"""

from __future__ import annotations

import re

from modak.core.errors import UsageError

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*):(.*)", re.DOTALL)
_SAME = {"s3a": "s3", "s3n": "s3"}


def normal(uri: str) -> str:
    """The one spelling of a URI: `file:///abs/path` for local paths, `s3://bucket/key` for the S3 dialects."""
    match = _SCHEME.fullmatch(uri)
    if match is None:
        return _local(uri, uri)
    scheme, rest = match[1].lower(), match[2]
    if scheme == "file":
        if rest.startswith("//") and not rest.startswith("///"):
            host, _, path = rest[2:].partition("/")
            if host != "localhost":
                raise UsageError("usage.uri", f"{uri!r} names a file on another machine.", hint="Write file:///path.")
            rest = f"/{path}"
        return _local(rest, uri)
    if not rest.startswith("//") or not rest[2:].partition("/")[0]:
        raise UsageError("usage.uri", f"{uri!r} is not a storage address.", hint="Write s3://bucket/path or a folder.")
    if ".." in rest.split("/"):
        raise _climbs(uri)
    return f"{_SAME.get(scheme, scheme)}:{rest.rstrip('/')}"


def _local(path: str, given: str) -> str:
    if not path.startswith("/"):
        raise UsageError("usage.uri", f"{given!r} is not an absolute path.", hint="Write /path or file:///path.")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise _climbs(given)
    return "file:///" + "/".join(parts)


def _climbs(uri: str) -> UsageError:
    return UsageError("usage.uri", f"{uri!r} climbs with '..'.", hint="Write the path that it means.")


def local_path(uri: str) -> str | None:
    """The path of a local URI, `None` for object stores."""
    plain = normal(uri)
    return plain.removeprefix("file://") if plain.startswith("file://") else None


def tail(uri: str) -> str:
    """What follows the scheme; by it one file is known in all spellings."""
    return normal(uri).partition("://")[2].lstrip("/")
