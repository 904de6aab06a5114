"""A lake table that has gathered small files, deletes and snapshots, and what must be seen in it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from modak.core import faults
from modak.lake.model import LakeFile, LakeTable
from modak.runtime.leader import Leader
from modak.storage.uri import local_path
from modak.tables.fold.run import fold
from modak.tables.load.run import LoadRequest, load
from modak.tables.load.stage import Staged
from modak.tables.maintenance.engine import engine_of
from modak.tables.maintenance.run import MaintenanceReport, PassReport, maintain
from modak.tables.repair import repair
from modak.tables.site import Site
from modak.tables.tidy import finish_expiries, finish_operations
from tests.tables.corrections import Corrections
from tests.tables.events import Events
from tests.tables.invariants import Invariants, Row


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

    def recover(self) -> None:
        """What an earlier process has left: its operations at the start, freed files by the thread of maintenance."""
        repair(self.site, self.leader.epoch)
        self.free()
        # Operations whose metadata was still needed for that; the next cycle ends them.
        finish_operations(self.site, self.site.writer(self.leader.epoch), self.site.reader.state(self.events.name))

    def free(self) -> int:
        """Delete the files that landed expiries have freed; how many expiries wait for later."""
        writer, engine = self.site.writer(self.leader.epoch), engine_of(self.site, self.engine)
        return finish_expiries(self.site, writer, self.events.name, engine)

    def stage(self, label: str, *keys: int) -> list[Path]:
        """Load rows with these tier keys, to wait for their adoption; their files."""
        lines = "".join(json.dumps({"id": 10_000 + key, "ts": key, "body": "loaded"}) + "\n" for key in keys)
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
            patched.setattr("modak.tables.load.run._Load.threshold", 1)
            body = Path(folder, "body")
            body.write_text(lines)
            assert load(self.site, LoadRequest(self.events.name, label, "jsonl"), body).state == "staged"
        rows = self.events.sql(f"SELECT files FROM modak.load_labels WHERE label = '{label}'")
        return [Path(str(local_path(uri))) for uri in Staged.of(rows[0][0]).uris]

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

    def check_files(self) -> None:
        """Every file of the warehouse is needed, metadata included, and none is missing."""
        Invariants(self.site.dsn, local_path(self.site.settings.lake.warehouse) or "").check_files()


def did(report: MaintenanceReport, name: str) -> PassReport:
    """What one step did."""
    return next(one for one in report.passes if one.name == name)


def original(*but: int) -> set[Row]:
    """The rows that the first two bands have had from the start."""
    return {(i, i, f"row {i}") for i in range(200) if i not in but}


def meanwhile(point: str, act: Callable[[], object], times: int = 1) -> list[str]:
    """Do something when the flow comes by a point, the first few times; others see nothing of it."""
    done: list[str] = []

    def watcher(reached: str) -> None:
        if reached == point and len(done) < times:
            done.append(reached)
            faults.watch(None)
            act()
            faults.watch(watcher)

    faults.watch(watcher)
    return done
