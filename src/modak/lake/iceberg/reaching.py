"""Which files the snapshots of a table reach, and which of them nothing reaches any more once snapshots have expired.

Manifest lists are read a few at a time, beside each other because an object store takes its time for each, and
manifests a chunk of paths at a time: memory is bounded by the number of manifests, never by that of files. Paths are
compared by what follows the scheme: engines write one local path in several ways.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

from modak.core.errors import Refused
from modak.lake.iceberg.java import Java, JavaFailure, plainly
from modak.lake.iceberg.read import next_chunk
from modak.storage.uri import normal, tail

AT_ONCE = 100_000
"""So many paths are held while those that something still reaches are taken out of them."""
READERS = 8
"""So many threads read manifest lists."""
LISTS_AT_ONCE = 16
"""So many manifest lists one of them reads before it is asked whether more are needed."""

_TEXT = "java.lang.String"
_STREAM = "java.util.stream.Stream"


@dataclass(frozen=True)
class Freed:
    """What the metadata `before` reaches and `now` does not; both are locations of metadata files."""

    before: str
    now: str
    snapshots: frozenset[int]
    """Those that `now` has."""
    metadata: tuple[str, ...]
    """Manifests, manifest lists and statistics: the last to go, because they tell of the other files."""
    java: Java
    io: Any
    gone: Any
    """The manifests among them, a Java list."""
    gone_specs: Any
    """What they were written by; another tool may have cleaned the table of specs that nothing needs any more."""
    kept: Any
    """The manifests that are still reached, a Java list; none where nothing is gone."""
    kept_specs: Any

    def files(self) -> Iterator[str]:
        """Data and delete files, found in this process; some may come more than once."""
        rest = self._candidates()
        while part := {tail(path): path for path in islice(rest, AT_ONCE)}:
            for path in self._reached():
                part.pop(tail(path), None)
                if not part:
                    break
            yield from map(normal, part.values())

    def _candidates(self) -> Iterator[str]:
        for manifest in self.gone:
            try:
                with self.java.failures():
                    yield from _paths(self.java, manifest, self.io, self.gone_specs)
            except JavaFailure as failure:
                # Whoever has removed it, another expiry or another tool, has removed its files before it.
                if _is_there(self.java, self.io, manifest.path()):
                    raise plainly(failure, "listing files of expired snapshots") from failure

    def _reached(self) -> Iterator[str]:
        with self.java.doing("listing reachable files"):
            for manifest in self.kept:
                yield from _paths(self.java, manifest, self.io, self.kept_specs)


def freed(java: Java, table: Any, before: str) -> Freed:
    """Compare an older metadata file with the table as it is now; reads metadata, and no list of files yet."""
    io, now = table.io(), table.operations().current()
    with java.doing(f"reading {before}"):
        then = java.iceberg.TableMetadataParser.read(io, before)
    if str(then.uuid()) != str(now.uuid()):
        raise Refused("lake.another_table", f"{before} is not of the table that now has its name.")
    with java.doing("comparing snapshots"):
        staying = set(_ids(java, now))
        gone = [then.snapshots().get(place) for place, each in enumerate(_ids(java, then)) if each not in staying]
        left = java.jvm.java.util.LinkedHashSet()
        for found in _beside(lambda snapshot: _manifests_left(java, snapshot, io), gone):
            left.addAll(found)
        kept = _take_reached(java, now, io, left)
        manifests = java.jvm.java.util.ArrayList(left)
        lists = java.texts(java.objects(gone), java.method(".Snapshot", "manifestListLocation", _TEXT))
        statistics = set(_statistics(java, then)) - set(_statistics(java, now))
        metadata = {*java.texts(manifests, java.method(".ManifestFile", "path", _TEXT)), *lists, *statistics}
        return Freed(
            before=before,
            now=now.metadataFileLocation(),
            snapshots=frozenset(map(int, staying)),
            metadata=tuple(sorted(map(normal, metadata))),
            java=java,
            io=io,
            gone=manifests,
            gone_specs=then.specsById(),
            kept=java.jvm.java.util.ArrayList(kept),
            kept_specs=now.specsById(),
        )


def _take_reached(java: Java, now: Any, io: Any, left: Any) -> Any:
    """Take out of a Java set the manifests that a table reaches, and return them; none when nothing is left."""
    snapshots, sets = now.snapshots(), java.jvm.java.util
    size, kept = snapshots.size(), sets.HashSet()

    def part(start: int) -> Any:
        some = sets.ArrayList(snapshots.subList(start, min(size, start + LISTS_AT_ONCE)))
        return sets.HashSet(_manifests(java, some.stream(), io))

    # The oldest first: they have the most in common with what came before them.
    with closing(_beside(part, range(0, size, LISTS_AT_ONCE))) as parts:
        while not left.isEmpty():
            if (found := next(parts, None)) is None:
                return kept
            left.removeAll(found)
            kept.addAll(found)
    return sets.HashSet()


def _beside(read: Callable[[Any], Any], items: Iterable[Any]) -> Generator[Any]:
    """The results for all items in their order, made by a few threads; no more begin once they are not asked for."""
    rest = iter(items)
    with ThreadPoolExecutor(READERS, thread_name_prefix="modak-manifests") as pool:
        running = deque(pool.submit(read, item) for item in islice(rest, READERS))
        try:
            while running:
                yield running.popleft().result()
                running.extend(pool.submit(read, item) for item in islice(rest, 1))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def reachable(java: Java, table: Any) -> Iterator[str]:
    """Every data and delete file that any snapshot of a table reaches, streamed; some come more than once."""
    with java.doing("listing reachable files"):
        io, specs = table.io(), table.specs()
        for manifest in _manifests(java, java.stream(table.snapshots()), io):
            yield from _paths(java, manifest, io, specs)


def _manifests(java: Java, snapshots: Any, io: Any) -> Any:
    """The manifests of a Java stream of snapshots, each once."""
    # Of a copy of each snapshot: the original would remember all its manifests for as long as the table lives.
    copy = java.after(
        java.static(".SnapshotParser", "toJson", _TEXT, ".Snapshot"),
        java.static(".SnapshotParser", "fromJson", ".Snapshot", _TEXT),
    )
    read = java.bind(java.method(".Snapshot", "allManifests", "java.util.List", ".io.FileIO"), 1, io)
    each = java.function(java.after(copy, read, java.method("java.util.List", "stream", _STREAM)))
    return snapshots.flatMap(each).distinct().toList()


def _manifests_left(java: Java, snapshot: Any, io: Any) -> Any:
    try:
        with java.failures():
            return _manifests(java, java.objects([snapshot]).stream(), io)
    except JavaFailure as failure:
        if _is_there(java, io, snapshot.manifestListLocation()):
            raise plainly(failure, "listing manifests of expired snapshots") from failure
        # The list is the last of a snapshot's files to be removed.
        return java.objects(())


def _is_there(java: Java, io: Any, location: str) -> bool:
    """Asked after a failure: each store has a failure of its own for a file that is missing."""
    with java.doing(f"looking for {location}"):
        return bool(io.newInputFile(location).exists())


def _paths(java: Java, manifest: Any, io: Any, specs: Any) -> Iterator[str]:
    files, deletes = java.iceberg.ManifestFiles, str(manifest.content()) == "DELETES"
    reader = files.readDeleteManifest(manifest, io, specs) if deletes else files.read(manifest, io, specs)
    path = java.method(".ContentFile", "location", _TEXT)
    with closing(reader.select(java.objects(["file_path"]))), closing(reader.iterator()) as iterator:
        while chunk := next_chunk(java, iterator):
            yield from java.texts(chunk, path)


def _ids(java: Java, metadata: Any) -> list[str]:
    return java.texts(metadata.snapshots(), java.method(".Snapshot", "snapshotId", "long"))


def _statistics(java: Java, metadata: Any) -> Iterable[str]:
    yield from java.texts(metadata.statisticsFiles(), java.method(".StatisticsFile", "path", _TEXT))
    yield from java.texts(metadata.partitionStatisticsFiles(), java.method(".PartitionStatisticsFile", "path", _TEXT))
