"""Objects by path with conditional writes: the same promises on a local folder and on an S3 bucket.

An `Objects` has a root and sees nothing outside of it; paths are relative to the root, with `/` between their parts.
Listings come sorted by path and in pages, writes are durable when they return, and nobody ever sees half an object.
`create` and `swap` are the two primitives on which claims and commit points are built: of many who try, one wins.

An answer may get lost on its way back from a bucket, and the client asks again: then a `create` or `swap` that did
happen says `None`. Whoever must know puts a token of its own into the data and reads it back.

Memory: a page of a listing on a bucket, the names of one folder at a time on disk, the data of `get` and `put`.
"""

from __future__ import annotations

import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import TypeVar

from modak.core.errors import ModakError, Refused
from modak.core.faults import reach
from modak.storage.uri import local_path, normal

__all__ = ["Meta", "Objects", "Stored"]

DELETE_PAGE = 1_000
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Meta:
    """One version of an object; `etag` differs between any two versions whose data differ."""

    path: str
    size: int
    etag: str
    modified: datetime


@dataclass(frozen=True, slots=True)
class Stored:
    """An object as it was read: the data and the version that they are."""

    data: bytes
    meta: Meta


def checked(path: str) -> str:
    """The path itself, if it can name the same object everywhere; one that could be read in two ways is refused."""
    parts = path.split("/")
    if not all(parts) or {".", ".."} & set(parts):
        raise Refused("storage.path", f"{path!r} is not a path below the root.")
    if _CONTROL.search(path) or "\\" in path or not unicodedata.is_normalized("NFC", path):
        raise Refused("storage.path", f"{path!r} has characters that not every store keeps as they are.")
    return path


def gone(path: str) -> ModakError:
    """Somebody asked for an object that is not there."""
    return ModakError("storage.not_found", f"{path} does not exist.")


_Written = TypeVar("_Written", Meta, Meta | None)


class Objects(ABC):
    """The objects below one root."""

    def __init__(self, root: str, props: Mapping[str, str]) -> None:
        self.root = root
        self._props = dict(props)

    @staticmethod
    def of(uri: str, props: Mapping[str, str] | None = None) -> Objects:
        """The objects of a folder or a bucket path; `props` are named as Iceberg's FileIO names them."""
        root = normal(uri)
        folder = local_path(root)
        if folder == "/":
            raise Refused("storage.root", "The root of the file system cannot be a store.")
        if folder is not None:
            from modak.storage.folder import FolderObjects

            return FolderObjects(root, Path(folder))
        from modak.storage.bucket import BucketObjects

        return BucketObjects(root, props or {})

    def __reduce__(self) -> tuple[object, ...]:
        # Objects travel into tasks by where they are; the connection is made anew over there.
        return (Objects.of, (self.root, self._props))

    def __repr__(self) -> str:
        return f"Objects({self.root!r})"

    def once(self) -> Objects:
        """The same objects by a client that repeats no request by itself: writers find out what became of it."""
        return self

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[Meta]:
        """Every object in a folder and below, sorted by path, from behind `after` on; no folder, no objects."""
        return self._list(checked(prefix) if prefix else "", after)

    def folders(self, prefix: str = "") -> tuple[str, ...]:
        """The paths of the folders directly inside a folder, sorted."""
        return self._folders(checked(prefix) if prefix else "")

    @abstractmethod
    def head(self, path: str) -> Meta | None:
        """The current version of an object, `None` where there is none."""

    @abstractmethod
    def get(self, path: str) -> Stored:
        """The whole of a small object; `storage.not_found` where there is none."""

    def find(self, path: str) -> Stored | None:
        """As `get`, with `None` where there is none."""
        try:
            return self.get(path)
        except ModakError as error:
            if error.code != "storage.not_found":
                raise
            return None

    @abstractmethod
    def tail(self, path: str, size: int) -> Stored:
        """The last bytes of an object, the whole of one that has fewer; `storage.not_found` where there is none."""

    def put(self, path: str, data: bytes) -> Meta:
        """Write an object, whatever was there."""
        return self._writing(path, lambda key: self._put(key, data))

    def create(self, path: str, data: bytes) -> Meta | None:
        """Write an object where there is none; `None` says that there is one already."""
        return self._writing(path, lambda key: self._create(key, data))

    def swap(self, path: str, data: bytes, expected: Meta) -> Meta | None:
        """Write an object in place of the version that was seen; `None` says that it has changed or gone meanwhile."""
        return self._writing(path, lambda key: self._swap(key, data, expected))

    def upload(self, path: str, local_file: Path) -> Meta:
        """Write an object from a file, which may not be written to afterwards: it may be linked and not copied."""
        return self._writing(path, lambda key: self._upload(key, local_file))

    def copy(self, source: str, target: str) -> None:
        """Copy an object inside the store, whatever was at the target; `storage.not_found` without a source."""
        origin = checked(source)
        self._writing(target, lambda key: self._copy(origin, key))

    @abstractmethod
    def fetch(self, path: str, local_file: Path) -> Meta:
        """Copy an object into a local file, in pieces; `storage.not_found` where there is none."""

    @abstractmethod
    def local(self, path: str) -> Path | None:
        """Where the object lies on this machine, `None` on a bucket."""

    def delete(self, paths: Iterable[str]) -> int:
        """Delete objects; one that is gone already is fine. How many were deleted (on a bucket: asked for)."""
        keys = map(checked, paths)
        deleted = 0
        while page := tuple(islice(keys, DELETE_PAGE)):
            reach("objects.deleting")
            deleted += self._delete(page)
            reach("objects.deleted")
        return deleted

    @abstractmethod
    def sweep(self, older_than: timedelta) -> int:
        """Remove what writers that were killed left half written and untouched for a while; how many there were."""

    def _writing(self, path: str, write: Callable[[str], _Written]) -> _Written:
        key = checked(path)
        reach("objects.writing")
        written = write(key)
        reach("objects.written")
        return written

    @abstractmethod
    def _list(self, prefix: str, after: str | None) -> Iterator[Meta]: ...

    @abstractmethod
    def _folders(self, prefix: str) -> tuple[str, ...]: ...

    @abstractmethod
    def _put(self, key: str, data: bytes) -> Meta: ...

    @abstractmethod
    def _create(self, key: str, data: bytes) -> Meta | None: ...

    @abstractmethod
    def _swap(self, key: str, data: bytes, expected: Meta) -> Meta | None: ...

    @abstractmethod
    def _upload(self, key: str, local_file: Path) -> Meta: ...

    @abstractmethod
    def _copy(self, source: str, target: str) -> Meta | None: ...

    @abstractmethod
    def _delete(self, keys: tuple[str, ...]) -> int: ...
