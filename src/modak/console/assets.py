"""The console's files: read once, served from memory with a tag, so that a browser asks again without loading again.

Only what lies in the package is known by name; a path from a request is never opened. Memory: the files, some 60 kB.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

_KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file as it is sent."""

    body: bytes
    kind: str
    tag: str


@cache
def assets() -> dict[str, Asset]:
    """Every file by its path below `static`."""
    return dict(_walk(resources.files("modak.console").joinpath("static"), ""))


def _walk(folder: Traversable, above: str) -> list[tuple[str, Asset]]:
    found: list[tuple[str, Asset]] = []
    for each in sorted(folder.iterdir(), key=lambda one: one.name):
        path = f"{above}{each.name}"
        if each.is_dir():
            found += _walk(each, f"{path}/")
        elif (kind := _KINDS.get(f".{each.name.rpartition('.')[2]}")) is not None:
            body = each.read_bytes()
            found.append((path, Asset(body, kind, f'"{hashlib.sha256(body).hexdigest()[:24]}"')))
    return found
