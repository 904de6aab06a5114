"""The one transaction of a flush: rows, deletion vectors, S and F together; only then the server may forget its WAL.

Positions are good for the snapshot in which they were found. When somebody else has committed meanwhile, the keys are
looked for again in what is there now, before the next attempt (`landing.py`). A batch on disk is not kept in memory
for that: it is applied again from the start. Memory: one bitmap per file that loses rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from modak.catalog.records import Cutline, TableState
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core.errors import Conflict
from modak.core.faults import reach
from modak.core.ids import OpId
from modak.core.states import OpPhase
from modak.lake.changes import Change, DeleteRange, Overwrite, RowDelta
from modak.lake.iceberg.vectors import read_vector, vector_uri, write_vector
from modak.lake.model import LakeFile, LakeTable, Prepared, Vector
from modak.postgres.changes.lsn import read_lsn, write_lsn
from modak.tables.landing import Landed, land
from modak.tables.mirror.pump.find import Hit, Wanted
from modak.tables.mirror.pump.write import Applied
from modak.tables.site import Site

DEFINITION = "definition"
"""Key of the line's lake properties: the columns by attribute number, as they were at F."""

Locate = Callable[[LakeTable, Sequence[Wanted]], tuple[Sequence[Hit], Mapping[str, LakeFile]]]


@dataclass(frozen=True, slots=True)
class Flush:
    """A batch that is ready to land."""

    state: TableState
    frontier: int
    """The end of the last transaction in it."""
    changes: int
    applied: Applied
    truncated: bool
    files: Mapping[str, LakeFile]
    """The files of the snapshot in which rows were looked for."""
    snapshot_id: int | None
    folder: str
    columns: Mapping[int, str]
    identity: tuple[int, ...]
    """The attributes by which rows are found."""
    replayable: bool
    """Whether the keys are at hand to be looked for again."""

    @property
    def changes_rows(self) -> bool:
        """Whether the lake changes at all."""
        return bool(self.applied.files or self.applied.gone or (self.truncated and self.files))


def moved_line(line: Cutline, frontier: int, columns: Mapping[int, str]) -> Cutline:
    """The line once everything up to `frontier` is in the lake."""
    at = write_lsn(frontier)
    definition = {"at": at, "columns": {str(number): name for number, name in columns.items()}}
    healed = line.heal_until is not None and read_lsn(line.heal_until) <= frontier
    return replace(
        line,
        frontier=at,
        heal_until=None if healed else line.heal_until,
        lake_props={**line.lake_props, DEFINITION: definition},
    )


def move_frontier(writer: CatalogWriter, line: Cutline, frontier: int, columns: Mapping[int, str]) -> Cutline:
    """Move F alone: nothing in the lake changes."""
    becomes = moved_line(line, frontier, columns)
    reach("pump.before_frontier")
    with writer.step() as tx:
        tx.move(line, becomes)
    reach("pump.frontier_moved")
    return becomes


def commit(
    site: Site, writer: CatalogWriter, op_id: OpId, flush: Flush, locate: Locate
) -> tuple[Landed, tuple[Vector, ...]]:
    """Land a flush; gives the vectors with it."""
    record = flush.state.table
    found: dict[str, Any] = {"snapshot": flush.snapshot_id, "vectors": None, "removed": (), "times": 0}

    def changes(lake: LakeTable, now: TableState) -> Sequence[Change]:
        if now.cutline.frontier != flush.state.cutline.frontier:
            raise Conflict("mirror.frontier_moved", f"The frontier of {record.name} is no longer where it was read.")
        if flush.truncated:
            return _emptied(record.tier_key, flush, lake)
        if found["vectors"] is None or found["snapshot"] != lake.snapshot_id:
            files = flush.files
            if lake.snapshot_id != flush.snapshot_id:
                files = _looked_again(flush, lake, locate)
            found["vectors"], found["removed"] = _vectors(flush, files)
            found["snapshot"] = lake.snapshot_id
            found["times"] += 1
        return [
            RowDelta(
                rows=flush.applied.files,
                vectors=found["vectors"],
                removed_vectors=found["removed"],
                validate_from=lake.snapshot_id,
            )
        ]

    def within(tx: CommitTransaction, prepared: Prepared, now: TableState) -> None:
        line = moved_line(now.cutline, flush.frontier, flush.columns)
        tx.move(now.cutline, replace(line, snapshot_id=prepared.snapshot_id, metadata_location=prepared.new_location))
        vectors = found["vectors"] or ()
        tx.count(
            rows=flush.changes,
            upserts=flush.applied.upserts,
            removed=flush.applied.removed,
            files=len(flush.applied.files),
            vectors=len(vectors),
        )
        if flush.replayable and found["times"] <= 1:
            # Written here, by one process and once: nothing stray can lie in the folder.
            tx.tidy_later(exact=True)

    reach("pump.before_commit")
    landed = land(site, writer, record.name, op_id, OpPhase.PLANNED, changes, within, "pump")
    reach("pump.committed")
    return landed, found["vectors"] or ()


def _emptied(tier_key: str, flush: Flush, lake: LakeTable) -> Sequence[Change]:
    if flush.applied.files:
        return [Overwrite(tier_key, None, None, flush.applied.files, validate_from=lake.snapshot_id)]
    return [DeleteRange(tier_key, None, None)]


def _looked_again(flush: Flush, lake: LakeTable, locate: Locate) -> Mapping[str, LakeFile]:
    if not flush.replayable:
        raise Conflict("mirror.again", "Somebody has committed to the lake table while a large batch was prepared.")
    hits, files = locate(lake, flush.applied.wanted)
    flush.applied.gone.clear()
    flush.applied.remove(hits)
    return files


def _vectors(flush: Flush, files: Mapping[str, LakeFile]) -> tuple[tuple[Vector, ...], tuple[Vector, ...]]:
    """New vectors of the files that lose rows, and those that they take the place of."""
    made: list[Vector] = []
    old: list[Vector] = []
    for path, positions in flush.applied.gone.items():
        found = files[path]
        merged = positions
        for vector in found.vectors[1:]:
            merged = merged | read_vector(vector)
        existing = found.vectors[0] if found.vectors else None
        made.append(write_vector(vector_uri(flush.folder, "pump"), merged, found.file, existing))
        old += found.vectors
    return tuple(made), tuple(old)


def live_after(
    files: Mapping[str, LakeFile], truncated: bool, added: Iterable[LakeFile], vectors: Sequence[Vector]
) -> dict[str, LakeFile]:
    """The live files once a flush has landed on `files`."""
    after = {} if truncated else dict(files)
    for vector in vectors:
        after[vector.data_file] = replace(after[vector.data_file], vectors=(vector,))
    after |= {each.file.path: each for each in added}
    return after
