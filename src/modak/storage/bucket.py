"""Objects in a bucket: S3 and whatever speaks it, by conditional puts on the entity tag.

The client retries by itself what may pass by itself, with a limit on the time. Large files go up and come down in
parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from modak.storage.client import NO_RETRIES, RETRIES, backend, delete, translated, trouble
from modak.storage.objects import Meta, Objects, Stored, checked, gone
from modak.storage.properties import store_of
from modak.storage.retry import patiently

_PAGE = 1_000
_PART = 16 << 20


class BucketObjects(Objects):
    """The objects below a path of a bucket."""

    def __init__(self, root: str, props: Mapping[str, str], retries: Mapping[str, Any] = RETRIES) -> None:
        super().__init__(root, props)
        self._backend = backend(root, props, retries)
        self._kind = store_of(root)

    def once(self) -> Objects:
        return BucketObjects(self.root, self._props, NO_RETRIES)

    def head(self, path: str) -> Meta | None:
        import obstore

        with self._translating("look at", path):
            try:
                return _meta(obstore.head(self._backend, checked(path)))
            except FileNotFoundError:
                return None

    def get(self, path: str) -> Stored:
        import obstore

        with self._translating("read", path):
            try:
                answer = obstore.get(self._backend, checked(path))
                return Stored(bytes(answer.bytes()), _meta(answer.meta))
            except FileNotFoundError:
                raise gone(path) from None

    def tail(self, path: str, size: int) -> Stored:
        import obstore
        from obstore.exceptions import PreconditionError

        found = self.head(path)
        if found is None or found.size <= size:
            # A server refuses a range of nothing, and some a range that is longer than the object.
            return self.get(path)
        # Azure knows no range that counts from the end; what is at its place must still be what was looked at.
        options: Any = {"range": {"suffix": size}}
        if self._kind == "abfs":
            options = {"range": (found.size - size, found.size), "if_match": found.etag}
        with self._translating("read", path):
            try:
                answer = obstore.get(self._backend, checked(path), options=options)
                return Stored(bytes(answer.bytes()), _meta(answer.meta))
            except PreconditionError:
                return self.tail(path, size)
            except FileNotFoundError:
                raise gone(path) from None

    def fetch(self, path: str, local_file: Path) -> Meta:
        import obstore

        with self._translating("read", path), local_file.open("wb") as file:
            try:
                answer = obstore.get(self._backend, checked(path))
                for piece in answer.stream(min_chunk_size=_PART):
                    file.write(piece)
                return _meta(answer.meta)
            except FileNotFoundError:
                raise gone(path) from None

    def local(self, path: str) -> Path | None:
        return None

    def sweep(self, older_than: timedelta) -> int:
        """Parts of an unfinished upload are no objects; a bucket drops them by its own lifecycle rule."""
        return 0

    def _list(self, prefix: str, after: str | None) -> Iterator[Meta]:
        import obstore

        with self._translating("list", prefix or self.root):
            # The client drops a slash at the end, so the page may begin a little too early.
            start = after.rstrip("/") if after else None
            for page in obstore.list(self._backend, prefix=prefix or None, offset=start, chunk_size=_PAGE):
                yield from (_meta(found) for found in page if after is None or found["path"] > after)

    def _folders(self, prefix: str) -> tuple[str, ...]:
        import obstore

        with self._translating("list", prefix or self.root):
            return tuple(sorted(obstore.list_with_delimiter(self._backend, prefix or None)["common_prefixes"]))

    def _put(self, key: str, data: bytes) -> Meta:
        import obstore

        with self._translating("write", key):
            return _written(key, len(data), obstore.put(self._backend, key, data, use_multipart=False))

    def _create(self, key: str, data: bytes) -> Meta | None:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with self._translating("write", key):
            try:
                return _written(key, len(data), obstore.put(self._backend, key, data, mode="create"))
            except AlreadyExistsError:
                return None

    def _swap(self, key: str, data: bytes, expected: Meta) -> Meta | None:
        import obstore
        from obstore.exceptions import PreconditionError

        with self._translating("write", key):
            try:
                answer = obstore.put(self._backend, key, data, mode=self._only_over(key, expected))
                return _written(key, len(data), answer)
            except (PreconditionError, FileNotFoundError):
                return None

    def _only_over(self, key: str, expected: Meta) -> Any:
        """The condition of a put: the entity tag that was seen, on Google the number of the generation that has it."""
        import obstore
        from obstore.exceptions import PreconditionError

        if self._kind != "gs":
            return {"e_tag": expected.etag}
        found = obstore.head(self._backend, key)
        if _meta(found).etag != expected.etag:
            raise PreconditionError(f"{key} has changed")
        return {"version": found["version"]}

    def _upload(self, key: str, local_file: Path) -> Meta:
        import obstore

        with self._translating("write", key):
            size = local_file.stat().st_size
            return _written(key, size, obstore.put(self._backend, key, local_file, chunk_size=_PART))

    def _copy(self, source: str, target: str) -> Meta | None:
        import obstore

        with self._translating("copy", source):
            try:
                obstore.copy(self._backend, source, target, overwrite=True)
                return None
            except FileNotFoundError:
                raise gone(source) from None

    def _delete(self, keys: tuple[str, ...]) -> int:
        def once() -> None:
            with self._translating("delete objects of", self.root):
                delete(self._backend, keys)

        # Azure takes many deletes as one post, which the client does not repeat when the answer is lost.
        patiently(once)
        return len(keys)

    @contextlib.contextmanager
    def _translating(self, what: str, path: str) -> Iterator[None]:
        try:
            yield
        except trouble() as error:
            raise translated(error, f"{what} {path}", self.root) from error


def _meta(found: Mapping[str, Any]) -> Meta:
    return Meta(found["path"], found["size"], _etag(found), found["last_modified"])


def _written(key: str, size: int, answer: Mapping[str, Any]) -> Meta:
    """The answer to a put tells no time; this machine's own is near enough for what people look at."""
    return Meta(key, size, _etag(answer), datetime.now(UTC))


def _etag(found: Mapping[str, Any]) -> str:
    """The entity tag as headers have it; listings of Azure leave the quotes out."""
    tag = found["e_tag"] or ""
    return tag if not tag or tag.endswith('"') else f'"{tag}"'
