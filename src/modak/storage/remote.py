"""Single files by URI, wherever they lie: what the writers and readers of the lake use inside tasks and in the driver.

The keyring (`access.py`) opens the store of a URI; a process keeps one client per root. Reads and writes of object
stores are tried again with growing pauses. A file goes up whole when it is finished and exists whole or not at all.
Memory: one window of a file that is read, the parts of one upload.
"""

from __future__ import annotations

import io
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from modak.core.errors import Conflict, ModakError
from modak.core.faults import reach
from modak.storage.access import Key, key_of
from modak.storage.client import backend, translated, trouble
from modak.storage.retry import patiently
from modak.storage.uri import local_path, normal

WINDOW = 4 << 20
_PART = 16 << 20
_COPY_LIMIT = 5 << 30
"""What one server-side copy of S3 can carry."""

_lock = threading.Lock()
_backends: dict[str, tuple[Key, Any]] = {}
_let_in: dict[str, Key] = {}
"""The keys that their stores have taken, by root."""


def opened(uri: str) -> tuple[Any, str]:
    """The client of a URI's root, and the path of the URI below it."""
    plain = normal(uri)
    if local_path(plain) is not None:
        raise ModakError("storage.scheme", f"{uri} is a local file.")
    key = key_of(plain)
    if key.root == plain:
        # Nobody knows this place: the whole bucket, by the provider's own chain.
        scheme, _, rest = plain.partition("://")
        key = Key(f"{scheme}://{rest.partition('/')[0]}", key.props, owner=key.owner)
    with _lock:
        known = _backends.get(key.root)
        if known is None or known[0] != key:
            known = _backends[key.root] = (key, backend(key.root, key.props))
    return known[1], plain.removeprefix(f"{key.root}/")


class RemoteFile(io.RawIOBase):
    """An object as a file to read: windows of it are fetched when they are asked for."""

    def __init__(self, uri: str, window: int = WINDOW) -> None:
        super().__init__()
        self.uri = uri
        self._size = size(uri)
        self._window = window
        self._at = 0
        self._start = 0
        self._held = b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        """The bytes of the whole object; pyarrow asks for it."""
        return self._size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, wanted: int | None = -1) -> bytes:
        left = max(self._size - self._at, 0)
        length = left if wanted is None or wanted < 0 else min(wanted, left)
        if length == 0:
            return b""
        if not (self._start <= self._at and self._at + length <= self._start + len(self._held)):
            fetched = min(max(length, self._window), left)
            self._held = read_range(self.uri, self._at, fetched)
            self._start = self._at
        begin = self._at - self._start
        self._at += length
        return self._held[begin : begin + length]

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def knock(uri: str) -> None:
    """Find out whether the key of a file is there and let in; asked once per key.

    For files that Iceberg opens: it would ask the provider's own chain for a key that is missing, and asks for minutes
    again and again where it is refused.
    """
    if local_path(uri) is not None:
        return
    key = key_of(uri)
    if key.root == normal(uri) or _let_in.get(key.root) == key:
        return
    try:
        size(uri)
    except ModakError as error:
        # A file that is gone, and a store that fails, are for Iceberg to tell.
        if error.code == "storage.denied":
            raise
    _let_in[key.root] = key


def forget_who_was_let_in() -> None:
    """A key was refused: knock again."""
    _let_in.clear()


def read_range(uri: str, offset: int, length: int) -> bytes:
    """Some bytes of an object, all of them or an error."""
    import obstore

    client, key = opened(uri)

    def once() -> bytes:
        try:
            data = bytes(obstore.get_range(client, key, start=offset, length=length))
        except FileNotFoundError:
            raise gone(uri) from None
        except trouble() as error:
            raise translated(error, f"read {uri}", uri) from error
        if len(data) != length:
            raise ModakError("storage.failed", f"{uri} broke off after {len(data)} of {length} bytes.", retryable=True)
        return data

    return patiently(once)


def size(uri: str) -> int:
    """The bytes of a file."""
    return identity(uri)[0]


def identity(uri: str) -> tuple[int, str]:
    """The bytes of a file and the version that they are: its etag, or inode and time of a local one."""
    folder = local_path(uri)
    if folder is not None:
        try:
            found = os.stat(folder)
        except FileNotFoundError:
            raise gone(uri) from None
        except OSError as error:
            raise translated(error, f"look at {uri}", uri) from error
        return found.st_size, f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"
    import obstore

    client, key = opened(uri)

    def once() -> tuple[int, str]:
        try:
            meta = obstore.head(client, key)
        except FileNotFoundError:
            raise gone(uri) from None
        except trouble() as error:
            raise translated(error, f"look at {uri}", uri) from error
        return int(meta["size"]), str(meta["e_tag"] or "")

    return patiently(once)


def upload(local_file: Path, uri: str) -> int:
    """Write an object from a local file; returns its size."""
    import obstore

    client, key = opened(uri)
    length = local_file.stat().st_size

    def once() -> None:
        try:
            obstore.put(client, key, local_file, chunk_size=_PART, use_multipart=length > _PART)
        except trouble() as error:
            raise translated(error, f"write {uri}", uri) from error

    reach("remote.before_upload")
    patiently(once)
    found = size(uri)
    if found != length:
        raise ModakError("storage.failed", f"{uri} has {found} of {length} bytes after its upload.", retryable=True)
    reach("remote.uploaded")
    return length


def fetch(uri: str, local_file: Path) -> None:
    """Copy a file to a local one, window by window."""
    source = local_path(uri)
    if source is not None:
        try:
            _copy_local(source, local_file)
        except FileNotFoundError:
            raise gone(uri) from None
        except OSError as error:
            raise translated(error, f"read {uri}", uri) from error
        return
    with RemoteFile(uri, _PART) as file, local_file.open("wb") as target:
        shutil.copyfileobj(file, target, _PART)


def _copy_local(source: str, target: Path) -> None:
    """By the kernel, which lets both files share their blocks where the file system can; else byte by byte."""
    with open(source, "rb") as file, target.open("wb") as copied:
        left = os.fstat(file.fileno()).st_size
        # Not every system has it, and not between any two places.
        with suppress(OSError, AttributeError):
            while left and (done := os.copy_file_range(file.fileno(), copied.fileno(), left)):
                left -= done
    if left:
        shutil.copyfile(source, target)


def delete(uri: str) -> None:
    """Delete an object; one that is gone already is fine."""
    import obstore

    client, key = opened(uri)

    def once() -> None:
        try:
            obstore.delete(client, key)
        except FileNotFoundError:
            return
        except trouble() as error:
            raise translated(error, f"delete {uri}", uri) from error

    patiently(once)


def copy(source: str, target: str, expected: str) -> None:
    """Copy a file without its bytes passing through here where the store can; the source must be the version seen."""
    reach("remote.before_copy")
    if local_path(target) is not None:
        _copy_down(source, target)
    elif local_path(source) is not None:
        upload(Path(str(local_path(source))), target)
    else:
        _copy_inside(source, target)
    if identity(source)[1] != expected:
        raise Conflict("storage.changed", f"{source} was written to while it was copied.", retryable=False)
    reach("remote.copied")


def _copy_down(source: str, target: str) -> None:
    path = Path(str(local_path(target)))
    path.parent.mkdir(parents=True, exist_ok=True)
    fetch(source, path)
    for place in (path, path.parent):
        handle = os.open(place, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _copy_inside(source: str, target: str) -> None:
    import obstore

    (there, from_key), (here, to_key) = opened(source), opened(target)
    if there is not here or size(source) > _COPY_LIMIT:
        _carry(source, target)
        return

    def once() -> None:
        try:
            obstore.copy(here, from_key, to_key)
        except FileNotFoundError:
            raise gone(source) from None
        except trouble() as error:
            raise translated(error, f"copy {source}", source) from error

    patiently(once)


def _carry(source: str, target: str) -> None:
    """What no server copies (from store to store, or too large for one request) comes by here, a window at a time."""
    import obstore

    client, key = opened(target)
    length = size(source)

    def once() -> None:
        with RemoteFile(source, _PART) as file:
            try:
                # Not as a context: that would complete what an error has cut short.
                writer = obstore.open_writer(client, key, buffer_size=_PART)
                while piece := file.read(_PART):
                    writer.write(piece)
                writer.close()
            except trouble() as error:
                raise translated(error, f"write {target}", target) from error
        if (found := size(target)) != length:
            raise ModakError("storage.failed", f"{target} has {found} of {length} bytes.", retryable=True)

    patiently(once)


def gone(uri: str) -> ModakError:
    """There is no such file."""
    return ModakError("storage.missing", f"There is no file {uri}.", hint="Was the warehouse moved or cleaned by hand?")
