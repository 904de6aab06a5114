"""What must hold of a tiered table whenever no operation is under way, whoever crashed before.

Looks with PyIceberg and psycopg only: no code of ours reads the lake here, and no JVM is needed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from modak.catalog.read import CatalogReader
from modak.catalog.records import TableState
from modak.core.names import TableName
from modak.core.states import OpPhase, PartitionState
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn

Row = tuple[Any, ...]

EVENTS = TableName("public", "events")
_COLD = {PartitionState.TIERED, PartitionState.DROPPED}


@dataclass(frozen=True)
class Invariants:
    """A table in a database and a warehouse that holds nothing else."""

    dsn: Dsn
    warehouse: str
    name: TableName = EVENTS

    def check(self, rows: set[Row] | frozenset[Row]) -> None:
        """Everything that must hold of a registered table with these rows."""
        self.check_journal()
        assert self.everything() == rows
        self.check_snapshots()
        self.check_partitions()
        self.check_files()

    def check_journal(self) -> None:
        """No operation is under way; one that tagged a snapshot for a reader waits for the end of the pin."""
        pinned = {pin.snapshot_id for pin in self.state.pins}
        for op in self.reader.unfinished_ops():
            assert op.phase is OpPhase.COMMITTED, op
            assert pinned & set(op.cleanup["tagged"]), op

    def check_gone(self) -> None:
        """Nothing is left of the table but its heap."""
        assert self.reader.unfinished_ops() == ()
        assert self.reader.tables() == []
        assert set(self.files()) == set()
        assert not self.sql("SELECT 1 FROM modak_iceberg.iceberg_tables")
        assert not self.sql("SELECT tgname FROM pg_trigger WHERE tgname LIKE '%modak%'")
        assert not self.sql("SELECT relname FROM pg_class WHERE relname LIKE '%modak_spill%'")

    def check_snapshots(self) -> None:
        """Every moving operation that landed made one snapshot, and the newest snapshot is the published one."""
        state, lake = self.state, self._lake()
        (pointer,) = self.sql("SELECT metadata_location FROM modak_iceberg.iceberg_tables")
        assert pointer[0] == state.cutline.metadata_location
        assert lake.metadata.current_snapshot_id == state.cutline.snapshot_id
        made = Counter(snapshot.summary["modak.op-id"] for snapshot in lake.metadata.snapshots)
        assert set(made.values()) <= {1}, made
        query = (
            "SELECT op_id FROM modak.op_log WHERE phase IN ('committed', 'done') AND (kind IN ('tier', 'retier')"
            " OR (kind = 'fold' AND (counters->>'files')::int + (counters->>'vectors')::int > 0))"
        )
        assert set(made) == {op for (op,) in self.sql(query)}

    def check_partitions(self) -> None:
        """The catalog and Postgres agree on which partitions there are, which are watched and which are cold."""
        state = self.state
        leaves = self.oids(f"SELECT inhrelid FROM pg_inherits WHERE inhparent = {state.table.relid}")
        spills = self.oids("SELECT spill_oid FROM modak.spills")
        assert len(spills) == 1
        assert spills < leaves
        assert {part.leaf_oid for part in state.living()} == leaves - spills
        watched = self.oids("SELECT tgrelid FROM pg_trigger WHERE tgname = '!modak_capture'")
        assert watched == {part.leaf_oid for part in state.living() if part.state is not PartitionState.HOT}
        for part in state.partitions:
            assert state.cutline.t is not None
            assert part.upper is not None
            assert (part.state in _COLD) == (part.upper <= state.cutline.t), part
            if part.state is PartitionState.DROPPED:
                assert not self.sql(f"SELECT 1 FROM pg_class WHERE oid = {part.leaf_oid}"), part
        floor = min(part.lower for part in state.living() if part.lower is not None)
        assert self.sql("SELECT upper_bound FROM modak.spills") == [(floor,)]

    def check_files(self) -> None:
        """Every file of the warehouse is referenced by the table's metadata, and every referenced file is there."""
        assert set(self.files()) == self.referenced()

    def everything(self) -> set[Row]:
        """The whole table, across the seam."""
        state = self.state
        cold = self.lake_rows()
        assert len(cold) == len(set(cold)), "a row is in the lake twice"
        assert all(row[1] < (state.cutline.t or 0) for row in cold)
        delta = self.sql(f"SELECT pk, tier_key, op, payload FROM modak.delta WHERE tier_key < {state.cutline.t}")
        hidden = {(int(pk), key) for pk, key, _, _ in delta}
        images = [image if isinstance(image, dict) else json.loads(image) for _, _, op, image in delta if op == 1]
        corrected = {(int(image["id"]), int(image["ts"]), *list(image.values())[2:]) for image in images}
        heap = self.sql(f"SELECT * FROM {self.name} WHERE ts >= {state.cutline.t}")
        return {row for row in cold if row[:2] not in hidden} | corrected | set(heap)

    def lake_rows(self) -> list[Row]:
        """Rows of the published snapshot."""
        snapshot = self.state.cutline.snapshot_id
        if snapshot is None:
            return []
        table = self._lake().scan(snapshot_id=snapshot).to_arrow()
        return list(zip(*(column.to_pylist() for column in table.columns), strict=True))

    def files(self) -> Iterator[str]:
        """Every file below the warehouse, hidden ones too."""
        for folder, _, names in os.walk(self.warehouse):
            yield from (os.path.join(folder, name) for name in names)

    def referenced(self, pointer: str | None = None) -> set[str]:
        """What the metadata needs: the JSON files of its log, every snapshot's lists, manifests and files."""
        lake = self._lake(pointer)
        found = {lake.metadata_location, *(entry.metadata_file for entry in lake.metadata.metadata_log)}
        for snapshot in lake.metadata.snapshots:
            found.add(snapshot.manifest_list)
            for manifest in snapshot.manifests(lake.io):
                found.add(manifest.manifest_path)
                found |= {entry.data_file.file_path for entry in manifest.fetch_manifest_entry(lake.io)}
        return {"/" + uri.removeprefix("file:").lstrip("/") for uri in found}

    @property
    def reader(self) -> CatalogReader:
        """The catalog."""
        return CatalogReader(self.dsn)

    @property
    def state(self) -> TableState:
        """The table as the catalog knows it."""
        return self.reader.state(self.name)

    def sql(self, statement: str) -> list[Row]:
        """What Postgres answers."""
        with connect(self.dsn, autocommit=True) as conn:
            cursor = conn.execute(statement)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def oids(self, query: str) -> set[int]:
        """One column as a set."""
        return {row[0] for row in self.sql(query)}

    def _lake(self, pointer: str | None = None) -> Any:
        from pyiceberg.table import StaticTable

        return StaticTable.from_metadata(pointer or self.state.cutline.metadata_location)
