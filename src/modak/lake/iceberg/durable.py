"""What Iceberg wrote on a local disk is made to last before the pointer moves to it.

Hadoop's local file system does not wait for the disk, Postgres does: after a power cut the pointer could name metadata
that was never written, and the table would be gone. Object stores acknowledge only what is durable.
"""

from __future__ import annotations

import os
from pathlib import Path

from modak.core.errors import ModakError
from modak.storage.uri import local_path


def make_durable(folder: str, file: str) -> None:
    """Wait until everything in an attempt's folder, its metadata file and all their names are on the disk."""
    metadata = local_path(file)
    written = local_path(folder)
    if metadata is None or written is None:
        return
    try:
        if os.path.isdir(written):
            for path in Path(written).iterdir():
                _sync(path)
            _sync(Path(written))
        _sync(Path(metadata))
        # metadata, table, schema, namespace and the warehouse, any of which may be new.
        for parent in list(Path(metadata).parents)[:5]:
            _sync(parent)
    except OSError as error:
        raise ModakError(
            "lake.storage",
            f"The metadata of a commit could not be made durable at {file}: {error.strerror}.",
            hint="Look at the warehouse's disk; the commit is prepared again.",
            retryable=True,
        ) from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
