"""Objects in a local folder, with the promises that a file system makes only when it is asked for each of them.

A write goes to a temporary file, is synced, gets its name by link (create) or rename, and the folder is synced. Writes
that depend on the version that is there, and those that could slip in between, take a lock on a file (flock), so
compare-and-swap holds among all processes of this machine. Locks and temporary files live in `.modak` below the root;
listings never show it, nor anything that a link would show elsewhere.

The version of a file is its inode, its time and its size. The time is set to the nanosecond at every write of ours:
the kernel's own ticks are so far apart that a file replaced twice within one could look unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from secrets import token_hex

from modak.core.errors import ModakError, Refused
from modak.core.faults import reach
from modak.storage.objects import Meta, Objects, Stored, checked, gone

PRIVATE = ".modak"
_LOCKS = 64
_PIECE = 8 << 20


class FolderObjects(Objects):
    """The files below a folder."""

    def __init__(self, root: str, folder: Path) -> None:
        super().__init__(root, {})
        self._folder = folder
        self._real = Path(os.path.realpath(folder))
        self._drafts = folder / PRIVATE / "drafts"
        self._locks = folder / PRIVATE / "locks"
        with _translating("use", root):
            for place in (self._drafts, self._locks):
                place.mkdir(parents=True, exist_ok=True)

    def head(self, path: str) -> Meta | None:
        with _translating("look at", path):
            return self._meta(checked(path))

    def get(self, path: str) -> Stored:
        with _translating("read", path):
            try:
                # One open file is one version, also when the name goes to another one meanwhile.
                with self._at(checked(path)).open("rb") as file:
                    return Stored(file.read(), _of_stat(path, os.fstat(file.fileno())))
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                raise gone(path) from None

    def tail(self, path: str, size: int) -> Stored:
        with _translating("read", path):
            try:
                with self._at(checked(path)).open("rb") as file:
                    meta = _of_stat(path, os.fstat(file.fileno()))
                    file.seek(max(meta.size - size, 0))
                    return Stored(file.read(), meta)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                raise gone(path) from None

    def fetch(self, path: str, local_file: Path) -> Meta:
        with _translating("read", path):
            try:
                with self._at(checked(path)).open("rb") as source, local_file.open("wb") as target:
                    meta = _of_stat(path, os.fstat(source.fileno()))
                    shutil.copyfileobj(source, target, _PIECE)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                raise gone(path) from None
            return meta

    def local(self, path: str) -> Path | None:
        return self._at(checked(path))

    def sweep(self, older_than: timedelta) -> int:
        limit = time.time() - older_than.total_seconds()
        swept = 0
        with _translating("sweep", self.root):
            for draft in os.scandir(self._drafts):
                with contextlib.suppress(FileNotFoundError):
                    if draft.stat(follow_symlinks=False).st_ctime <= limit:
                        os.unlink(draft.path)
                        swept += 1
        return swept

    def _list(self, prefix: str, after: str | None) -> Iterator[Meta]:
        with _translating("list", prefix or self.root):
            if not self._inside(f"{prefix}/"):
                return
            yield from self._walk(f"{prefix}/" if prefix else "", after or "")

    def _walk(self, prefix: str, after: str) -> Iterator[Meta]:
        for name, is_folder in self._entries(prefix):
            path = prefix + name
            if is_folder:
                # Everything in a folder shares its beginning, so a folder that sorts before `after` is done with.
                if path > after or after.startswith(path):
                    yield from self._walk(path, after)
            elif path > after:
                with contextlib.suppress(FileNotFoundError):
                    yield _of_stat(path, os.stat(self._folder / path, follow_symlinks=False))

    def _entries(self, prefix: str) -> list[tuple[str, bool]]:
        """Files and folders in one folder, a folder's name ending in `/`: so sorted, paths come out in order."""
        try:
            with os.scandir(self._folder / prefix) as entries:
                found = [
                    (f"{entry.name}/", True) if entry.is_dir(follow_symlinks=False) else (entry.name, False)
                    for entry in entries
                    if (prefix or entry.name != PRIVATE)
                    and (entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False))
                ]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(found)

    def _folders(self, prefix: str) -> tuple[str, ...]:
        with _translating("list", prefix or self.root):
            if not self._inside(f"{prefix}/"):
                return ()
            start = f"{prefix}/" if prefix else ""
            return tuple(start + name[:-1] for name, is_folder in self._entries(start) if is_folder)

    def _put(self, key: str, data: bytes) -> Meta:
        with self._locked(key):
            return self._published(key, lambda draft: _write(draft, data), os.replace)

    def _create(self, key: str, data: bytes) -> Meta | None:
        if self.head(key) is not None:
            return None
        try:
            # A link fails where the name is taken, whoever took it; a rename would not.
            return self._published(key, lambda draft: _write(draft, data), os.link)
        except FileExistsError:
            return None

    def _swap(self, key: str, data: bytes, expected: Meta) -> Meta | None:
        with self._locked(key):
            found = self.head(key)
            if found is None or found.etag != expected.etag:
                return None
            return self._published(key, lambda draft: _write(draft, data), os.replace)

    def _upload(self, key: str, local_file: Path) -> Meta:
        with self._locked(key):
            return self._published(key, lambda draft: _bring(local_file, draft), os.replace)

    def _copy(self, source: str, target: str) -> Meta | None:
        path = self._at(source)
        if not path.is_file():
            raise gone(source)
        return self._upload(target, path)

    def _delete(self, keys: tuple[str, ...]) -> int:
        deleted = 0
        touched: set[Path] = set()
        for key in keys:
            with _translating("delete", key), self._locked(key):
                path = self._at(key)
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    path.unlink()
                    deleted += 1
                    touched.add(path.parent)
        for folder in touched:
            with _translating("delete files in", str(folder)):
                _sync(folder)
        return deleted

    def _published(self, key: str, fill: Callable[[Path], None], name: Callable[[Path, Path], None]) -> Meta:
        target = self._at(key)
        draft = self._drafts / token_hex(16)
        try:
            with _translating("write", key):
                fill(draft)
                stamp = time.time_ns()
                os.utime(draft, ns=(stamp, stamp))
                _sync(draft)
                meta = _of_stat(key, os.stat(draft))
                reach("objects.draft_written")
                _make_folders(target.parent)
                name(draft, target)
                reach("objects.named")
                _sync(target.parent)
                return meta
        finally:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)

    def _meta(self, key: str) -> Meta | None:
        try:
            found = os.stat(self._at(key), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _of_stat(key, found) if _is_file(found) else None

    def _at(self, key: str) -> Path:
        if not self._inside(key) or key.partition("/")[0] == PRIVATE:
            raise Refused("storage.outside", f"{key!r} leads outside {self.root}.")
        return self._folder / key

    def _inside(self, key: str) -> bool:
        """What a link inside the folder shows elsewhere is not ours."""
        parent = os.path.dirname(key)
        return os.path.realpath(self._folder / parent) == os.path.normpath(self._real / parent)

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        # The files of the locks stay for ever: taking one away while somebody waits for it would make two locks of it.
        lock = os.open(self._locks / f"{zlib.crc32(key.encode()) % _LOCKS:02x}", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _of_stat(path: str, found: os.stat_result) -> Meta:
    etag = f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"
    return Meta(path, found.st_size, etag, datetime.fromtimestamp(found.st_mtime, UTC))


def _is_file(found: os.stat_result) -> bool:
    from stat import S_ISREG

    return S_ISREG(found.st_mode)


def _write(draft: Path, data: bytes) -> None:
    with draft.open("wb") as file:
        file.write(data)


def _bring(source: Path, draft: Path) -> None:
    try:
        os.link(source, draft)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, draft)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make_folders(folder: Path) -> None:
    """Create a folder with its parents; every parent that got a new entry is synced."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    _sync(folder.parent)


@contextlib.contextmanager
def _translating(what: str, path: str) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except PermissionError as error:
        raise ModakError(
            "storage.denied", f"Storage refuses to {what} {path}.", hint="Check the rights on the folder."
        ) from error
    except OSError as error:
        raise ModakError("storage.failed", f"Storage cannot {what} {path}: {error.strerror}", retryable=True) from error
