"""Files of the lake by URI: the same calls for a local folder, S3, Google Cloud Storage and Azure.

A store has a root (the warehouse, or a table's location) and touches nothing outside it. Listings are streamed in
chunks, so a folder with millions of files is never held in memory; deletes go out in batches.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from modak.core.errors import Conflict, ModakError, Refused
from modak.core.faults import reach
from modak.storage.client import backend, delete, translated, trouble
from modak.storage.retry import TRIES, patiently, pause
from modak.storage.uri import local_path, normal

Value = TypeVar("Value")

__all__ = ["Entry", "Store", "normal"]

_CHUNK = 1_000


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in a store."""

    uri: str
    size: int
    modified: datetime


class Store:
    """The files below one root URI."""

    def __init__(self, root: str, backend: Any) -> None:
        self.root = root
        self._backend = backend
        self._folder = local_path(root)
        self._inside: dict[str, bool] = {}

    @classmethod
    def of(cls, uri: str, props: Mapping[str, str] | None = None) -> Store:
        """The store whose root is a folder or a bucket path; `props` are Iceberg's FileIO properties."""
        root = normal(uri)
        folder = local_path(root)
        if folder is not None:
            from obstore.store import LocalStore

            if folder == "/":
                raise Refused("storage.root", "The root of the file system cannot be a store.")
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise translated(error, f"use {root}", root) from error
            return cls(root, LocalStore(folder))
        return cls(root, backend(root, props or {}))

    def list(self, prefix_uri: str | None = None) -> Iterator[Entry]:
        """Every file below a folder, in no order; a folder that does not exist is empty."""
        import obstore

        prefix = self._key(prefix_uri) if prefix_uri is not None else ""
        last: str | None = None
        before = ""
        tried = 1
        while True:
            try:
                for chunk in obstore.list(self._backend, prefix=prefix or None, offset=last, chunk_size=_CHUNK):
                    tried = 1
                    for meta in chunk:
                        if before and meta["path"] <= before:
                            # Not every server of Azure's protocol knows where to go on.
                            continue
                        last = meta["path"]
                        if self._is_inside(last):
                            yield Entry(f"{self.root}/{last}", meta["size"], meta["last_modified"])
                return
            except trouble() as error:
                failure = translated(error, f"list {prefix_uri or self.root}", self.root)
                if self._folder is not None or not failure.retryable or tried == TRIES:
                    raise failure from error
            # Object stores list in the order of names: what comes after the last one is still to come.
            before = last or ""
            time.sleep(pause(tried))
            tried += 1

    def folders(self, prefix_uri: str) -> Sequence[str]:
        """The folders right below a folder; itself when files lie in it too, so that together they hold all of it."""
        import obstore

        prefix = self._key(prefix_uri)
        found = self._ask(lambda: obstore.list_with_delimiter(self._backend, prefix or None), f"list {prefix_uri}")
        if found["objects"]:
            return [normal(prefix_uri)]
        return [f"{self.root}/{one}" for one in found["common_prefixes"]]

    def delete(self, uris: Iterable[str]) -> int:
        """Delete files; one that is gone already is fine. How many were there to delete (object stores: asked for)."""
        keys = map(self._key, uris)
        deleted = 0
        while chunk := tuple(islice(keys, _CHUNK)):
            reach("storage.deleting")
            work = self._delete_local if self._folder else self._delete_remote
            deleted += self._ask(partial(work, chunk), f"delete files below {self.root}")
            reach("storage.deleted")
        return deleted

    def delete_prefix(self, prefix_uri: str) -> int:
        """Delete a folder with everything in it; refuses the root itself and whatever lies outside of it."""
        prefix = self._key(prefix_uri)
        if not prefix:
            raise Refused("storage.root", f"{self.root} is the root of the store and is not deleted as a whole.")
        deleted = self.delete(entry.uri for entry in self.list(prefix_uri))
        if self._folder is not None and self._is_inside(prefix):
            _remove_empty(Path(self._folder, prefix))
        return deleted

    def exists(self, uri: str) -> bool:
        """Whether a file is there."""
        return self._head(uri) is not None

    def size(self, uri: str) -> int:
        """The size of a file in bytes."""
        meta = self._head(uri)
        if meta is None:
            raise _gone(uri)
        return int(meta["size"])

    def read(self, uri: str) -> bytes:
        """The whole of a small file."""
        import obstore

        key = self._key(uri)
        try:
            return self._ask(lambda: bytes(obstore.get(self._backend, key).bytes()), f"read {uri}")
        except FileNotFoundError:
            raise _gone(uri) from None

    def write(self, uri: str, content: bytes) -> None:
        """Create a file; `storage.exists` if there is one already."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        try:
            obstore.put(self._backend, self._key(uri), content, mode="create")
        except AlreadyExistsError:
            raise Conflict("storage.exists", f"{uri} exists already.", retryable=False) from None
        except trouble() as error:
            raise translated(error, f"write {uri}", self.root) from error

    def _key(self, uri: str) -> str:
        plain = normal(uri)
        if plain == self.root:
            return ""
        key = plain.removeprefix(f"{self.root}/")
        if key == plain:
            raise Refused("storage.outside", f"{uri} lies outside {self.root}.")
        return key

    def _head(self, uri: str) -> Any | None:
        import obstore

        key = self._key(uri)
        try:
            return self._ask(lambda: obstore.head(self._backend, key), f"look at {uri}")
        except FileNotFoundError:
            return None

    def _ask(self, work: Callable[[], Value], what: str) -> Value:
        """Ask the store for something that may be asked for twice; what is not there stays a FileNotFoundError."""

        def once() -> Value:
            try:
                return work()
            except FileNotFoundError:
                raise
            except trouble() as error:
                raise translated(error, what, self.root) from error

        return once() if self._folder is not None else patiently(once)

    def _delete_local(self, keys: Sequence[str]) -> int:
        import obstore

        deleted = 0
        for key in keys:
            if not self._is_inside(key):
                raise Refused("storage.outside", f"{key!r} leads outside {self.root} through a link.")
            try:
                obstore.delete(self._backend, key)
                deleted += 1
            except FileNotFoundError:
                continue
        return deleted

    def _delete_remote(self, keys: Sequence[str]) -> int:
        delete(self._backend, keys)
        return len(keys)

    def _is_inside(self, key: str) -> bool:
        """Local listings follow links; what a link shows elsewhere is not ours to list or delete."""
        if self._folder is None:
            return True
        parent = os.path.dirname(key)
        if parent not in self._inside:
            if len(self._inside) > 10_000:
                self._inside.clear()
            root = os.path.realpath(self._folder)
            self._inside[parent] = os.path.realpath(os.path.join(self._folder, parent)) == os.path.normpath(
                os.path.join(root, parent)
            )
        return self._inside[parent]


def _remove_empty(folder: Path) -> None:
    for path, _, _ in os.walk(folder, topdown=False):
        try:
            os.rmdir(path)
        except OSError:
            # Somebody has put a file there meanwhile; the folder stays.
            continue


def _gone(uri: str) -> ModakError:
    return ModakError("storage.not_found", f"{uri} does not exist.")
