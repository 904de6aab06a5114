"""Changes of the catalog that come without a lake commit: each is a statement in a short transaction of the writer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from modak.catalog import delta, expiry, moves
from modak.catalog.records import Cutline, LakeColumns, NewPartition
from modak.core.axis import TierKey
from modak.core.states import PartitionState

Conn = psycopg.Connection[Any]


@dataclass(frozen=True)
class StepTransaction:
    """A short transaction without a lake commit; each change happens at once, on `conn`."""

    conn: Conn

    def partitions(
        self, table_id: int, names: Collection[str], from_state: PartitionState, to_state: PartitionState
    ) -> None:
        """Take partitions one step, all or none."""
        moves.step_partitions(self.conn, table_id, names, from_state, to_state)

    def add_partitions(self, table_id: int, partitions: Sequence[NewPartition]) -> None:
        """Take new leaves into the catalog."""
        moves.add_partitions(self.conn, table_id, partitions)

    def update_partition(
        self, table_id: int, leaf_oid: int, name: str, schema: str, lower: TierKey | None, upper: TierKey | None
    ) -> None:
        """Follow a leaf that its owner has renamed, or given other bounds while it was hot."""
        moves.update_partition(self.conn, table_id, leaf_oid, name=name, schema=schema, lower=lower, upper=upper)

    def forget_partition(self, table_id: int, leaf_oid: int) -> None:
        """Forget a leaf that its owner has dropped or detached before the lake had it."""
        moves.forget_partition(self.conn, table_id, leaf_oid)

    def note_leaf(
        self, table_id: int, name: str, leaf_oid: int, relfilenode: int | None, trigger_oid: int | None
    ) -> None:
        """Journal which file and which trigger the export of a partition relies on."""
        moves.note_leaf(self.conn, table_id, name, leaf_oid, relfilenode=relfilenode, trigger_oid=trigger_oid)

    def note_problem(self, table_id: int, name: str, problem: str | None) -> bool:
        """Show a partition's problem in the status, or take it away; whether that is news."""
        return moves.note_problem(self.conn, table_id, name, problem)

    def note_columns(self, table_id: int, columns: LakeColumns, metadata_location: str) -> None:
        """Write down the names that a metadata file has, where none are known and readers are given this file."""
        moves.note_columns_of(self.conn, table_id, columns, metadata_location)

    def move(self, was: Cutline, becomes: Cutline) -> None:
        """Move any of T, S, F, R from exactly the lines read."""
        moves.move_cutline(self.conn, was, becomes)

    def sweep_delta(self, table_id: int, most: int) -> int:
        """Remove folded delta tuples that no pin needs any more; returns how many."""
        return delta.sweep_delta(self.conn, table_id, most)

    def expire_delta(self, table_id: int, below: TierKey) -> int:
        """Remove the delta rows below the retention line; returns how many."""
        return expiry.expire_delta(self.conn, table_id, below)

    def publish_foreign(self, was: Cutline, snapshot_id: int | None, metadata_location: str) -> None:
        """Take a foreign lake state as S."""
        moves.move_cutline(self.conn, was, replace(was, snapshot_id=snapshot_id, metadata_location=metadata_location))

    def freeze(self, table_id: int, foreign: Mapping[str, Any] | None) -> None:
        """Freeze publication because of a foreign snapshot, or (None) let it go on."""
        moves.set_frozen(self.conn, table_id, foreign)

    def unregister(self, table_id: int) -> None:
        """Forget a table."""
        moves.unregister(self.conn, table_id)
