"""A libpq password file next to the embedded server, so that psql asks for nothing and shows nothing."""

from __future__ import annotations

import os
from pathlib import Path

from modak.postgres.dsn import Dsn


def write(home: Path, dsn: Dsn) -> Path:
    """Put the password of the embedded server into a 0600 file and return its path."""
    path = home.expanduser() / "pgpass"
    entry = ":".join(_escaped(part) for part in (dsn.host, str(dsn.port), "*", dsn.user, dsn.password)) + "\n"
    if path.is_file() and path.stat().st_mode & 0o077 == 0 and path.read_text() == entry:
        return path
    partial = path.with_name(f"pgpass.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(entry)
    partial.replace(path)
    return path


def _escaped(part: str) -> str:
    return part.replace("\\", "\\\\").replace(":", "\\:")
