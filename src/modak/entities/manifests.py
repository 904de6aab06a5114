"""Reading a manifest and swapping it for the next one: the commit point of every entity flow.

A save either landed, or definitely did not, or its fate is not known. Only a failed precondition is the second, and
even that can be our own write that the client repeated; so after any other answer the manifest is read again and looked
through for the writer's id. What stays unclear is an error that keeps every file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from modak.core.clock import Clock
from modak.core.errors import Conflict, ModakError, Refused
from modak.core.faults import InjectedFault, reach
from modak.core.ids import new_op_id
from modak.entities.clients import S3FullClient
from modak.entities.config import ManifestConfig
from modak.entities.manifest import Manifest
from modak.storage.objects import Meta

Change = Callable[[Manifest], Manifest]
UNCLEAR = "entities.manifest_unclear"


@dataclass(frozen=True, slots=True)
class Held:
    """A manifest as it was read, and the version of its object; without one there was no object."""

    manifest: Manifest
    meta: Meta | None


class Manifests:
    """The manifests of a store."""

    def __init__(self, client: S3FullClient, place: ManifestConfig, clock: Clock) -> None:
        self._client = client
        self._place = place
        self._clock = clock

    def key(self, schema_id: int) -> str:
        """The path of a schema's manifest."""
        return self._place.key(schema_id)

    def load(self, schema_id: int) -> Held:
        """The current manifest; a schema without one has no files yet."""
        key = self.key(schema_id)
        try:
            found = self._client.get_object(self._place.bucket, key)
        except InjectedFault:
            raise
        except Exception as error:
            raise _unreadable(key, error) from error
        if found is None:
            return Held(Manifest(schema_id), None)
        return Held(Manifest.from_bytes(found.data, schema_id, key), found.meta)

    def save(self, held: Held, change: Change) -> Manifest:
        """Swap the manifest that was read for a changed one.

        `Conflict` means that it was not done and somebody else was faster; `entities.manifest_unclear` that nobody
        knows, and that no file may be deleted.
        """
        op_id = new_op_id(self._clock)
        following = change(held.manifest).next(op_id)
        key = self.key(held.manifest.schema_id)
        reach("manifest.before_save")
        try:
            written = self._client.put_object(self._place.bucket, key, following.to_bytes(), held.meta)
        except InjectedFault:
            raise
        except Exception as error:
            if not self._landed(key, following.schema_id, op_id):
                raise _unclear(key, error) from error
        else:
            # The client may have repeated a write that had already been done.
            if written is None and not self._landed(key, following.schema_id, op_id):
                raise Conflict("entities.manifest_conflict", f"Somebody else changed the manifest {key} first.")
        reach("manifest.saved")
        return following

    def _landed(self, key: str, schema_id: int, op_id: str) -> bool:
        """Whether a write is in the manifest; where that cannot be read either, nobody knows."""
        try:
            return op_id in self.load(schema_id).manifest.ops
        except InjectedFault:
            raise
        except Exception as error:
            raise _unclear(key, error) from error


def lost(key: str, schema_id: int) -> Refused:
    """Rows are not dirty, so they are in files or nowhere; without a manifest the store would look almost empty."""
    return Refused(
        "entities.no_manifest",
        f"Rows of schema {schema_id} are not dirty, so they should be in files, and the manifest {key} is not there.",
        hint=f"modak-worker entities init --schema {schema_id} exports everything. If that was done before, check "
        "MODAK_ENTITIES_PREFIX, MODAK_WAREHOUSE and the bucket first.",
    )


def _unreadable(key: str, error: Exception) -> ModakError:
    return ModakError(
        "entities.manifest_unreadable",
        f"The manifest {key} could not be read: {_why(error)}",
        hint="Nothing was changed; check that the store can be reached, then try again.",
        retryable=getattr(error, "retryable", True),
    )


def _why(error: Exception) -> str:
    """What went wrong; a client of the caller's own may raise anything, and say anything in it."""
    return error.message if isinstance(error, ModakError) else type(error).__name__


def _unclear(key: str, error: Exception) -> ModakError:
    return ModakError(
        UNCLEAR,
        f"Whether the manifest {key} was written is not known: {_why(error)}",
        hint="Nothing was deleted; the next run reads the manifest again and goes on from there.",
        retryable=True,
    )
