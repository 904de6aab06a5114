"""Files that last: what a lake writer has closed is on the disk or in the store, and so is its name.

The rows of a data file leave Postgres soon after the commit that names it, so the file must be durable before anything
refers to it. A local file is synced with its folder. A file for an object store grows in a scratch file on local disk
and goes up whole when it is closed, so nobody ever sees half of one and memory stays that of one upload's parts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from modak.core.errors import ModakError
from modak.storage import remote, uri


class Output:
    """One file being written. `stream` takes the bytes, `commit` makes them last, `discard` removes them."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._local = is_local(uri)
        with storage_errors(uri):
            if self._local:
                self._path = local_path(uri)
                _make_folder(self._path.parent)
            else:
                handle, name = tempfile.mkstemp(prefix="modak-upload-")
                os.close(handle)
                self._path = Path(name)
            self.stream: Any = pa.OSFile(str(self._path), "wb")

    def commit(self) -> int:
        """Close the file, wait until file and name last, and say how many bytes it has."""
        with storage_errors(self.uri):
            self.stream.close()
            if self._local:
                _sync(self._path)
                _sync(self._path.parent)
                return self._path.stat().st_size
            try:
                return remote.upload(self._path, self.uri)
            finally:
                self._path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the file, whatever state it is in."""
        with contextlib.suppress(OSError):
            self.stream.close()
        if not self._local:
            self._path.unlink(missing_ok=True)
        remove(self.uri)


def open_output(uri: str) -> Output:
    """Begin a new file at a URI; its folder is made when it is missing."""
    return Output(uri)


def read_range(uri: str, offset: int, length: int) -> bytes:
    """Some bytes of a file."""
    if not is_local(uri):
        return remote.read_range(uri, offset, length)
    with storage_errors(uri), local_path(uri).open("rb") as file:
        file.seek(offset)
        return file.read(length)


def remove(uri: str) -> None:
    """Remove a file; one that is gone already is fine."""
    if not is_local(uri):
        remote.delete(uri)
        return
    with storage_errors(uri):
        local_path(uri).unlink(missing_ok=True)


def size_of(uri: str) -> int:
    """The bytes of a file."""
    with storage_errors(uri):
        return local_path(uri).stat().st_size if is_local(uri) else remote.size(uri)


def parquet_file(uri: str) -> pq.ParquetFile:
    """A Parquet file to read, wherever it lies; ranges of a remote one are fetched as they are asked for."""
    if is_local(uri):
        return pq.ParquetFile(local_path(uri), buffer_size=1 << 20)
    return pq.ParquetFile(pa.PythonFile(remote.RemoteFile(uri), mode="r"))


@contextlib.contextmanager
def mapped(uri: str) -> Iterator[pa.NativeFile]:
    """A whole file for reading: mapped from the disk, or fetched from a store into memory."""
    with storage_errors(uri):
        if is_local(uri):
            with pa.memory_map(str(local_path(uri))) as source:
                yield source
            return
        yield pa.BufferReader(remote.read_range(uri, 0, remote.size(uri)))


def is_local(address: str) -> bool:
    """Whether a URI is a file of this machine."""
    return uri.local_path(address) is not None


def local_path(uri: str) -> Path:
    """The path behind `file:///a`, `file:/a` or `/a`. Lake URIs are not percent-encoded."""
    path = uri.removeprefix("file:")
    if path.startswith("//"):
        path = "/" + path.lstrip("/")
    if not path.startswith("/"):
        raise ModakError(
            "storage.scheme",
            f"{uri} is not a local file.",
            hint="Use a warehouse of the form file:///path.",
        )
    return Path(path)


@contextlib.contextmanager
def storage_errors(uri: str) -> Iterator[None]:
    """Turn the operating system's refusals into errors that tell the next step."""
    try:
        yield
    except OSError as error:
        raise _translated(error, uri) from error


def _translated(error: OSError, uri: str) -> ModakError:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return ModakError(
                "storage.no_space",
                f"No space left for {uri}.",
                hint="Free space on the warehouse's disk, or move the warehouse; the work is tried again.",
                retryable=True,
            )
        case errno.EROFS | errno.EACCES | errno.EPERM:
            return ModakError(
                "storage.read_only",
                f"Cannot write {uri}.",
                hint="Make the warehouse writable for the user that runs Spark; the work is tried again.",
                retryable=True,
            )
        case errno.ENOENT:
            return ModakError(
                "storage.missing", f"There is no file {uri}.", hint="Was the warehouse moved or cleaned by hand?"
            )
        case _:
            return ModakError(
                "storage.failed",
                f"Storage failed at {uri}: {error.strerror or error}.",
                hint="Look at the disk.",
                retryable=True,
            )


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents, each of them durable in its own parent."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    _sync(folder.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
