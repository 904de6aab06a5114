"""A crash at every point of an ingest, by exception: the next pass undoes or tidies, and the same input again is right.

One table lives through all crashes, with new files each time.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modak.core import faults
from modak.core.faults import Fault, InjectedFault
from modak.runtime.leader import Leader
from modak.tables.ingest.run import Request, ingest
from modak.tables.repair import repair
from modak.tables.site import Site
from tests.tables.events import Events
from tests.tables.invariants import Invariants, Row

POINTS = (
    "ingest.before_keys",
    "ingest.keys_scanned",
    "ingest.before_rows",
    "ingest.rows_written",
    "ingest.before_adopt",
    "remote.before_copy",
    "remote.copied",
    "ingest.adopted",
    "ingest.landed",
)
SHARED = (
    "journal.after_begin",
    "files.durable",
    "landing.before_prepare",
    "landing.prepared",
    "catalog.before_commit",
    "catalog.after_commit",
    "landing.committed",
)
VISITED = POINTS


def _file(path: Path, rows: list[Row]) -> str:
    columns = list(zip(*rows, strict=True))
    pq.write_table(
        pa.table({"id": pa.array(columns[0], pa.int64()), "ts": pa.array(columns[1], pa.int64()), "body": columns[2]}),
        path,
    )
    return str(path)


def test_an_ingest_that_crashes_anywhere_happens_once(
    site: Site, events: Events, leader: Leader, warehouse: str, tmp_path: Path
) -> None:
    events.register()
    events.tier(leader)
    rows: set[Row] = {(i, i, f"row {i}") for i in range(251)}
    truth = Invariants(site.dsn, warehouse)
    for number, point in enumerate((*POINTS, *SHARED)):
        base = 1000 + 10 * number
        whole = [(base, 10, point), (base + 1, 11, point), (number, number, point)]
        wide = [(base + 2, 12, point), (base + 3, 150, point)]
        files = (_file(tmp_path / f"a{number}.parquet", whole), _file(tmp_path / f"b{number}.parquet", wide))
        request = Request(events.name, files, "parquet", rewrite=True)
        faults.arm(Fault(point))
        with pytest.raises(InjectedFault):
            ingest(site, request)
        faults.arm(None)
        repair(site, leader.epoch)
        again = ingest(site, request)
        landed = point in ("ingest.landed", "catalog.after_commit", "landing.committed")
        assert (again.rows == 0) == landed, point
        rows = {row for row in rows if row[0] != number} | set(whole) | set(wide)
        truth.check_journal()
        assert truth.everything() == rows, point
        truth.check_files()


def test_a_leader_leaves_an_ingest_alone_that_is_under_way(
    site: Site, events: Events, leader: Leader, tmp_path: Path
) -> None:
    events.register()
    events.tier(leader)

    def meanwhile(point: str) -> None:
        if point == "ingest.keys_scanned":
            faults.watch(None)
            repair(site, leader.epoch)

    faults.watch(meanwhile)
    report = ingest(site, Request(events.name, (_file(tmp_path / "a.parquet", [(1000, 10, "a")]),), "parquet"))
    assert report.rows == 1
    assert (1000, 10, "a") in set(events.lake())
