"""The two faces of an object store that capture needs, and the one that our own stores show.

A program can bring its own client; without one the store of the settings is used. Keys are paths inside the bucket (or
the folder), and an answer of `None` to a conditional put is a definite «somebody was faster».
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import structlog

from modak.core.faults import InjectedFault, reach
from modak.storage.objects import Meta, Objects, Stored

log = structlog.get_logger()


@runtime_checkable
class S3ObjectClient(Protocol):
    """Copies and deletes objects: what a flush needs to move a file to its final key."""

    def copy_object(self, bucket: str, source: str, target: str) -> None:
        """Copy an object inside the bucket."""

    def delete_object(self, bucket: str, key: str) -> None:
        """Delete an object; one that is gone is fine."""


@runtime_checkable
class S3FullClient(S3ObjectClient, Protocol):
    """Also reads and conditionally writes small objects: what a manifest needs."""

    def get_object(self, bucket: str, key: str) -> Stored | None:
        """The object and its version, `None` where there is none."""

    def put_object(self, bucket: str, key: str, data: bytes, expected: Meta | None) -> Meta | None:
        """Write in place of the expected version, or where nothing is (`None`); `None` says that it has changed."""


class ObjectsClient:
    """Our own stores as a client."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def copy_object(self, bucket: str, source: str, target: str) -> None:
        """Copy inside the store: by a link in a folder, by the server itself in a bucket."""
        self._objects.copy(source, target)

    def delete_object(self, bucket: str, key: str) -> None:
        """Delete an object; one that is gone is fine."""
        self._objects.delete([key])

    def get_object(self, bucket: str, key: str) -> Stored | None:
        """The object and its version, `None` where there is none."""
        return self._objects.find(key)

    def put_object(self, bucket: str, key: str, data: bytes, expected: Meta | None) -> Meta | None:
        """Write in place of the expected version, or where nothing is; a request is never repeated on the quiet."""
        once = self._objects.once()
        return once.create(key, data) if expected is None else once.swap(key, data, expected)


def copy_tmp_to_final(client: S3ObjectClient, bucket: str, tmp_key: str, final_key: str) -> None:
    """Copy a Parquet file from its temporary key to its final one, then delete the temporary one.

    The copy must succeed. A temporary file that stays is left to gc.
    """
    reach("entities.before_copy")
    client.copy_object(bucket, tmp_key, final_key)
    reach("entities.copied")
    remove_quietly(client, bucket, [tmp_key])
    reach("entities.tmp_deleted")


def remove_quietly(client: S3ObjectClient, bucket: str, keys: list[str]) -> None:
    """Delete files that nothing refers to; what cannot be deleted now is left to gc."""
    for key in keys:
        try:
            client.delete_object(bucket, key)
        except InjectedFault:
            raise
        except Exception as error:
            log.warning("entities.left_to_gc", path=key, because=type(error).__name__)
