"""What a user names becomes a list of sources: files, globs, folders, standard input, URLs of the profile's store.

The order of the list is the order in which sources were named; inside a folder or a glob it is that of their paths. Of
two rows with one key the later one wins, so the order is part of the meaning.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from modak.core.errors import ModakError, UsageError
from modak.storage import access, remote
from modak.storage.access import Key
from modak.storage.store import Store
from modak.storage.uri import local_path, normal

Kind = Literal["parquet", "jsonl"]

STDIN = "-"
_MAGIC = re.compile(r"[*?\[]")
_PIECE = 8 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """One input: where it is, how large, and which version of it."""

    uri: str
    size: int
    version: str
    kind: Kind
    shown: str
    """What the user calls it."""


@contextmanager
def opened(given: Sequence[str], kind: Kind, key: Key, stdin: IO[bytes] | None = None) -> Iterator[tuple[Source, ...]]:
    """The sources of the given names, for as long as the block runs; a copy of standard input goes with it."""
    with tempfile.TemporaryDirectory(prefix="modak-ingest-") as folder:
        found: list[Source] = []
        for number, name in enumerate(given):
            if name == STDIN:
                found.append(_standard_input(Path(folder) / f"stdin-{number}", kind, stdin or sys.stdin.buffer))
            else:
                found += [_source(uri, kind, shown) for uri, shown in _expanded(name, kind, key)]
        twice = {source.uri for source in found if sum(other.uri == source.uri for other in found) > 1}
        if twice:
            raise UsageError("usage.ingest", f"{sorted(twice)[0]} is named twice.", hint="Name each file once.")
        yield tuple(found)


def _standard_input(copy: Path, kind: Kind, stream: IO[bytes]) -> Source:
    digest = hashlib.sha256()
    with copy.open("wb") as file:
        while piece := stream.read(_PIECE):
            digest.update(piece)
            file.write(piece)
    return Source(f"file://{copy}", copy.stat().st_size, f"sha256:{digest.hexdigest()}", kind, STDIN)


def _source(uri: str, kind: Kind, shown: str) -> Source:
    try:
        size, version = remote.identity(uri)
    except ModakError as error:
        if error.code != "storage.missing":
            raise
        raise UsageError("usage.ingest", f"There is no file {shown!r}.") from None
    return Source(uri, size, version, kind, shown)


def _expanded(name: str, kind: Kind, key: Key) -> list[tuple[str, str]]:
    if "://" in name and not name.startswith("file:"):
        return _remote(name, kind, key)
    path = local_path(name) if name.startswith("file:") else os.path.abspath(os.path.expanduser(name))
    assert path is not None
    if os.path.isfile(path):
        return [(normal(path), name)]
    if os.path.isdir(path):
        found = sorted(str(each) for each in Path(path).rglob(f"*.{kind}") if each.is_file())
    elif _MAGIC.search(path):
        found = sorted(each for each in glob.glob(path, recursive=True) if os.path.isfile(each))
    else:
        raise UsageError("usage.ingest", f"There is no file {name!r}.")
    if not found:
        raise UsageError("usage.ingest", f"There is no {kind} file in {name!r}.")
    return [(normal(each), each) for each in found]


def _remote(name: str, kind: Kind, key: Key) -> list[tuple[str, str]]:
    plain = normal(name)
    scheme, _, rest = plain.partition("://")
    bucket = f"{scheme}://{rest.partition('/')[0]}"
    if access.key_of(plain).root == plain:
        # Not below a profile's root: opened with the credentials of the table's own profile.
        access.use([Key(bucket, key.props, owner=key.owner)])
    known = access.key_of(plain)
    folder = name.endswith("/")
    if not folder and not _MAGIC.search(plain):
        return [(plain, name)]
    fixed = plain if folder else plain[: _MAGIC.search(plain).start()].rpartition("/")[0]  # type: ignore[union-attr]
    pattern = f"{plain}/*.{kind}" if folder else plain
    listed = Store.of(known.root, known.props).list(fixed)
    found = sorted(entry.uri for entry in listed if fnmatch.fnmatchcase(entry.uri, pattern))
    if not found:
        raise UsageError("usage.ingest", f"There is no {kind} file in {name!r}.")
    return [(uri, uri) for uri in found]


def fetched(source: Source, folder: Path) -> Path:
    """The source as a local file: itself, or a copy in the folder."""
    here = local_path(source.uri)
    if here is not None:
        return Path(here)
    target = folder / "source"
    remote.fetch(source.uri, target)
    return target
