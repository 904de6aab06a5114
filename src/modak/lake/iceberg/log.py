"""Which metadata files nobody needs any more: those that have fallen out of a table's metadata log.

Iceberg can delete them itself (`write.metadata.delete-after-commit.enabled`), but then a foreign commit deletes a file
that a pinned reader still opens, because only our catalog knows the pins. So the property is off and a commit of ours
removes what fell out, pin-aware, also what foreign commits have pushed out since our last one: each of ours leaves its
name in the table's properties, and from the present the logs of older files lead back to it. One file is read per
`previous-versions-max` foreign commits; memory is bounded by one file and the names found.
"""

from __future__ import annotations

from typing import Any

from modak.lake.iceberg.java import Java, JavaFailure, plainly
from modak.storage.uri import normal

OURS = "modak.own-metadata"
"""Table property: the metadata file that our latest commit wrote, by name without extension."""


def fallen(java: Java, io: Any, base: Any, metadata: Any) -> tuple[str, ...]:
    """Metadata files that `metadata`, prepared on `base`, no longer lists and that nobody has removed yet."""
    known = _logged(java, base)
    ours = base.property(OURS, None)
    gone = set(known)
    if not _is(ours, base.metadataFileLocation()):
        gone.update(_pushed_out(java, io, known, ours))
    return tuple(sorted(map(normal, gone - set(_logged(java, metadata)))))


def _pushed_out(java: Java, io: Any, known: list[str], ours: str | None) -> set[str]:
    """What older logs list, back to the commit of ours after which the table was tidy."""
    found: set[str] = set()
    while known:
        last = next((file for file in known if _is(ours, file)), None)
        older = _log_of(java, io, last or known[0])
        found.update(older)
        if last is not None:
            break
        known = older
    return found


def _log_of(java: Java, io: Any, location: str) -> list[str]:
    try:
        with java.failures():
            return _logged(java, java.iceberg.TableMetadataParser.read(io, location))
    except JavaFailure as failure:
        if failure.simple_name == "NotFoundException":
            # Whoever removed it has removed everything before it.
            return []
        raise plainly(failure, f"reading {location}") from failure


def _is(ours: str | None, location: str) -> bool:
    return ours is not None and location.rpartition("/")[2].startswith(f"{ours}.")


def _logged(java: Java, metadata: Any) -> list[str]:
    file = java.method(".TableMetadata$MetadataLogEntry", "file", "java.lang.String")
    return java.texts(metadata.previousFiles(), file)
