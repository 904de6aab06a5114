"""New rows with their keys on the way into the lake: the one transaction that ingest and adopted loads share.

Keys that the lake has are located (files whose bounds exclude them are not read) and hidden by deletion vectors; older
corrections of the same keys leave the delta in the same transaction. A fold that lands meanwhile may have brought newer
corrections into the lake: then the beginning moves to now and the delta is asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
import structlog

from modak.catalog.records import TableState
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core.errors import Conflict, Refused
from modak.core.ids import OpId
from modak.core.states import OpPhase
from modak.lake.changes import Change, RowDelta, SetProperties
from modak.lake.locate import KeyFile, Located, LocatedFile, Lookup
from modak.lake.mapping import extended
from modak.lake.model import DataFile, LakeTable, Prepared
from modak.tables.ingest import overlay
from modak.tables.ingest.plan import room_of
from modak.tables.ingest.rows import Intake
from modak.tables.landing import land
from modak.tables.site import Site

if TYPE_CHECKING:
    from modak.lake.iceberg.locate import Locator

log = structlog.get_logger()

DRIVER_ROWS = 2_000_000
"""Up to so many rows this process does by itself; starting Spark would take longer."""
AGAIN = 5

Retired = tuple[list[tuple[str, int]], str]
"""Keys of the delta, and the snapshot in which they are older than the new rows."""

_FOLDED: LiteralString = """
    SELECT EXISTS (SELECT FROM modak.op_log WHERE table_id = %s AND kind = 'fold' AND xact_id IS NOT NULL
        AND NOT pg_visible_in_snapshot(xact_id, %s::pg_snapshot))
"""


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
        older: Callable[[], list[Retired]] | None = None,
    ) -> tuple[Located, Prepared, int]:
        """Commit; `older` tells which delta rows the new ones supersede, by default all older than now."""
        locator = self._locator()
        for again in range(AGAIN):
            snapshot = self._now()
            retired = older() if older is not None else [(self._superseded(snapshot), snapshot)]
            try:
                since = snapshot if older is None else None
                located, prepared = self._once(files, names, kind, phase, also, locator, retired, since)
            except Conflict as conflict:
                if conflict.code != "ingest.folded" or again == AGAIN - 1:
                    raise
                phase = OpPhase.PREPARED
                log.info("ingest.again", table=str(self.state.table.name), because=conflict.message)
                continue
            return located, prepared, sum(len(keys) for keys, _ in retired)
        raise AssertionError("unreachable")

    def _once(
        self,
        files: tuple[DataFile, ...],
        names: Sequence[str],
        kind: str,
        phase: OpPhase,
        also: Callable[[CommitTransaction], None],
        locator: Locator,
        retired: list[Retired],
        folds_since: str | None,
    ) -> tuple[Located, Prepared]:
        table = self.state.table
        landed: list[Located] = []

        def changes(lake: LakeTable, now: TableState) -> Sequence[Change]:
            self._require_room(now)
            if folds_since is not None:
                self._require_no_fold(folds_since)
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
            if folds_since is not None:
                tx.steps.append(lambda conn: self._fold_free(conn, folds_since))
            becomes = replace(now.cutline, snapshot_id=prepared.snapshot_id, metadata_location=prepared.new_location)
            tx.move(now.cutline, becomes)
            for keys, seen in retired:
                tx.retire_keys(table.table_id, keys, seen)
            also(tx)
            tx.count(rows=sum(file.rows for file in files), files=len(files), replaced=landed[0].rows)

        done = land(self.site, self.writer, table.name, self.op_id, phase, changes, within, kind)
        return landed[0], done.prepared

    def _superseded(self, snapshot: str) -> list[tuple[str, int]]:
        return overlay.superseded(self.site, self.state.table.table_id, self.intake.shape, self.keys, snapshot)

    def _require_room(self, now: TableState) -> None:
        room = room_of(now)
        for one in self.keys:
            why = room.refusal(one.lower, one.upper) if one.rows else None
            if why is not None and (one.upper >= room.upper or (room.lower is not None and one.lower < room.lower)):
                raise Refused("ingest.lines_moved", f"The lines of {now.table.name} moved meanwhile: {why}.")

    def _require_no_fold(self, snapshot: str) -> None:
        with self.site.connect(autocommit=True) as conn:
            self._fold_free(conn, snapshot)

    def _fold_free(self, conn: psycopg.Connection[Any], snapshot: str) -> None:
        """A fold since the beginning may have put newer corrections into the lake, where ours would replace them."""
        row = conn.execute(_FOLDED, (self.state.table.table_id, snapshot)).fetchone()
        if row and row[0]:
            raise Conflict("ingest.folded", "A fold has landed meanwhile.")

    def _now(self) -> str:
        with self.site.connect(autocommit=True) as conn:
            row = conn.execute("SELECT pg_current_snapshot()::text").fetchone()
        assert row is not None
        return str(row[0])

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
