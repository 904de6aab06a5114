"""A lake table that has gathered small files, deletes and snapshots, and what must be seen in it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from modak.lake.model import LakeFile, LakeTable
from modak.runtime.leader import Leader
from modak.tables.fold.run import fold
from modak.tables.maintenance.run import MaintenanceReport, PassReport, maintain
from modak.tables.site import Site
from tests.tables.corrections import Corrections
from tests.tables.events import Events
from tests.tables.invariants import Row


@dataclass
class Lake:
    """`public.events` in the lake."""

    events: Events
    leader: Leader
    engine: str = "embedded"

    @property
    def site(self) -> Site:
        return self.events.site

    @property
    def table(self) -> LakeTable:
        found = self.site.lake.load(self.site.reader.state(self.events.name).table.lake)
        assert found is not None
        return found

    def files(self) -> list[LakeFile]:
        table = self.table
        assert table.snapshot_id is not None
        return list(self.site.lake.files(table.identifier, table.snapshot_id, column="ts"))

    def policy(self, **values: Any) -> None:
        """The table's own policy; nothing else is in it."""
        with self.site.connect(autocommit=True) as conn:
            conn.execute("UPDATE modak.tables SET maintenance_policy = %s", (json.dumps(values),))

    def maintain(self, engine: str | None = None) -> MaintenanceReport:
        report = maintain(self.site, self.leader.epoch, self.events.name, engine=engine or self.engine)
        assert not report.failed, report.failed
        return report

    def fold(self) -> None:
        fold(self.site, self.leader.epoch, self.events.name)

    def add(self, *keys: int, body: str = "added") -> None:
        """One more file per band: rows with these tier keys."""
        for key in keys:
            Corrections(self.events).upsert(10_000 + key, key, body)
        self.fold()

    def correct(self, *keys: int, body: str = "corrected") -> None:
        """Rows hidden by vectors, and their new images in new files."""
        for key in keys:
            Corrections(self.events).upsert(key, key, body)
        self.fold()

    def delete(self, *keys: int) -> None:
        """Rows hidden by vectors."""
        for key in keys:
            Corrections(self.events).delete(key, key)
        self.fold()

    def rows(self) -> set[Row]:
        """What the published snapshot shows, each row once."""
        found = self.events.lake()
        assert len(found) == len(set(found)), "a row is in the lake twice"
        return set(found)


def did(report: MaintenanceReport, name: str) -> PassReport:
    """What one step did."""
    return next(one for one in report.passes if one.name == name)


def original(*but: int) -> set[Row]:
    """The rows that the first two bands have had from the start."""
    return {(i, i, f"row {i}") for i in range(200) if i not in but}
