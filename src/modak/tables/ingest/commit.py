"""New rows with their keys on the way into the lake: the one transaction that ingest and adopted loads share.

Keys that the lake has are located (files whose bounds exclude them are not read) and hidden by deletion vectors; older
corrections of the same keys leave the delta in the same transaction. A fold that lands meanwhile has brought only older
ones into the lake, where they are located like all other rows: see `fold/run.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from modak.catalog.records import TableState
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core.errors import Refused
from modak.core.ids import OpId
from modak.core.states import OpPhase
from modak.lake.changes import Change, RowDelta, SetProperties
from modak.lake.locate import KeyFile, Located, LocatedFile, Lookup
from modak.lake.mapping import extended
from modak.lake.model import DataFile, LakeTable, Prepared
from modak.tables.ingest.plan import room_of
from modak.tables.ingest.rows import Intake
from modak.tables.landing import land
from modak.tables.site import Site

if TYPE_CHECKING:
    from modak.lake.iceberg.locate import Locator

DRIVER_ROWS = 2_000_000
"""Up to so many rows this process does by itself; starting Spark would take longer."""

Retired = tuple[list[tuple[str, int]], str]
"""Keys of the delta, and the snapshot in which they are older than the new rows."""


@dataclass(frozen=True, slots=True)
class Landing:
    """New rows with their keys, on the way into the lake: shared by ingest and the adoption of staged loads."""

    site: Site
    writer: CatalogWriter
    state: TableState
    intake: Intake
    op_id: OpId
    folder: str
    keys: Sequence[KeyFile]

    def land(
        self,
        files: tuple[DataFile, ...],
        names: Sequence[str],
        kind: str,
        phase: OpPhase,
        also: Callable[[CommitTransaction], None],
        older: Callable[[], list[Retired]],
    ) -> tuple[Located, Prepared, int]:
        """Commit; `older` tells which delta rows the new ones supersede, whatever the number of attempts."""
        retired = older()
        locator = self._locator()
        table = self.state.table
        landed: list[Located] = []

        def changes(lake: LakeTable, now: TableState) -> Sequence[Change]:
            self._require_room(now)
            located = locator.at(lake.snapshot_id)
            landed[:] = [located]
            made: list[Change] = []
            mapping = extended(lake.properties, lake.schema, names) if names else {}
            if mapping:
                made.append(SetProperties(mapping))
            made.append(
                RowDelta(
                    rows=files,
                    vectors=located.vectors,
                    removed_vectors=located.replaced,
                    validate_from=lake.snapshot_id,
                )
            )
            return made

        def within(tx: CommitTransaction, prepared: Prepared, now: TableState) -> None:
            becomes = replace(now.cutline, snapshot_id=prepared.snapshot_id, metadata_location=prepared.new_location)
            tx.move(now.cutline, becomes)
            for keys, seen in retired:
                tx.retire_keys(table.table_id, keys, seen)
            also(tx)
            tx.count(rows=sum(file.rows for file in files), files=len(files), replaced=landed[0].rows)

        done = land(self.site, self.writer, table.name, self.op_id, phase, changes, within, kind)
        return landed[0], done.prepared, sum(len(keys) for keys, _ in retired)

    def _require_room(self, now: TableState) -> None:
        room = room_of(now)
        for one in self.keys:
            why = room.refusal(one.lower, one.upper) if one.rows else None
            if why is not None and (one.upper >= room.upper or (room.lower is not None and one.lower < room.lower)):
                raise Refused("ingest.lines_moved", f"The lines of {now.table.name} moved meanwhile: {why}.")

    def _locator(self) -> Locator:
        from modak.lake.iceberg.locate import Locator
        from modak.spark.conf import cores

        shape = self.intake.shape
        small = sum(one.rows for one in self.keys) <= DRIVER_ROWS
        return Locator(
            self.site.lake,
            self.state.table.lake,
            self.keys,
            shape.keys,
            shape.tier_key,
            self.folder,
            self._look_up,
            least_tasks=1 if small else cores(),
        )

    def _look_up(self, tasks: Sequence[Lookup]) -> Sequence[tuple[LocatedFile, ...]]:
        from modak.lake.iceberg.locate import look_up

        if sum(task.rows for task in tasks) <= 2 * DRIVER_ROWS:
            return [look_up(task) for task in tasks]
        from modak.spark.distribute import distribute

        return distribute(self.site.spark, look_up, tasks)
