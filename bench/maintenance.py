"""Paying off a lake's debt: our debt pass and bin-pack against Iceberg's stock `rewrite_data_files` on the same table.

Two kinds of wear, made anew before every run and outside the clock: a tenth of the rows of every file hidden by
deletion vectors, and every file cut into many small ones. Ours is the whole step (plan, rewrite in Spark tasks, the one
transaction, tidying), the rival `stock` is the procedure with the same target size. Rates are rows of the table per
second. Afterwards the same query runs on the maintained table and on a freshly tiered one. Every contestant runs in a
process of its own, first cold, then warm.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from bench.contest import contest
from bench.measure import measured
from bench.report import Line, Report
from bench.tiering import _fill, _settings

ROWS = 4_000_000
RUNS = 3
SMALL = 40
"""Small files that each data file is cut into."""
HIDDEN = 0.1
TARGET = 128 << 20
QUERY = "SELECT kind, count(*), sum(amount), max(created), avg(user_id) FROM modak.modak.public.events GROUP BY kind"
POLICY = {
    "debt": '{"rewrite_enabled": false, "manifest_rewrite_enabled": false, "snapshot_expiry_enabled": false}',
    "pack": '{"delete_compaction_enabled": false, "manifest_rewrite_enabled": false, "snapshot_expiry_enabled": false,'
    ' "rewrite_min_input_files": 2}',
}
STOCK = (
    "CALL modak.system.rewrite_data_files(table => 'modak.modak.public.events', options => map("
    f"'target-file-size-bytes', '{TARGET}', 'min-input-files', '2', 'delete-file-threshold', '1',"
    " 'max-concurrent-file-group-rewrites', '2'))"
)


def main(options: list[str]) -> None:
    """Set up once, let every contestant run, publish."""
    contest("maintenance", options, ROWS, CONTESTANTS, _fill, _publish)


def _publish(found, rows: int) -> None:
    lines = [
        Line(f"{who} {kind} ({heat})", run["rate"], run["per_cpu_second"], run["peak_rss_mb"])
        for who in ("ours", "stock")
        for kind in ("debt", "pack")
        for heat, run in found[who][kind].items()
    ]
    ours, stock = found["ours"], found["stock"]
    more = {
        kind: {
            "vs_stock": round(ours[kind]["warm"]["rate"] / stock[kind]["warm"]["rate"], 3),
            "vs_stock_cold": round(ours[kind]["cold"]["rate"] / stock[kind]["cold"]["rate"], 3),
            "bytes_written": {who: round(found[who][kind]["warm"]["bytes"]) for who in ("ours", "stock")},
            "peak_rss_mb": {who: round(found[who][kind]["warm"]["peak_rss_mb"]) for who in ("ours", "stock")},
            "deletes_left": {who: round(found[who][kind]["warm"]["deletes"]) for who in ("ours", "stock")},
        }
        for kind in ("debt", "pack")
    }
    Report(
        bench="maintenance",
        ours=ours["debt"]["warm"]["rate"],
        rivals={"stock": stock["debt"]["warm"]["rate"]},
        limit=0,
        peak_rss_mb=max(ours[kind]["warm"]["peak_rss_mb"] for kind in ("debt", "pack")),
        per_cpu_second=ours["debt"]["warm"]["per_cpu_second"],
        lines=lines,
        more={
            "rows": rows,
            **more,
            "query_after_pass_vs_fresh": round(ours["query"]["maintained"] / ours["query"]["fresh"], 3),
        },
    ).publish()


def _anew(site, leader) -> None:
    """The table in the lake as tiering leaves it."""
    from modak.core.names import TableName
    from modak.tables.registration.register import register
    from modak.tables.registration.request import RegisterRequest
    from modak.tables.registration.unregister import unregister
    from modak.tables.tiering.run import tier

    name = TableName("public", "events")
    if site.reader.table(name) is not None:
        unregister(site, name, drop_lake=True)
    register(site, RegisterRequest(name, ("id",), "occurred_at"))
    tier(site, leader.epoch, name)


def _commit(site, leader, change) -> None:
    from modak.catalog.journal import Journal
    from modak.core.ids import new_op_id
    from modak.core.names import TableName
    from modak.core.states import OpPhase
    from modak.tables.landing import land

    name = TableName("public", "events")
    writer, op_id = site.writer(leader.epoch), new_op_id(site.clock)
    Journal(writer).begin(op_id, site.reader.state(name).table.table_id, "wear", {})

    def within(tx, prepared, now) -> None:
        line = replace(now.cutline, metadata_location=prepared.new_location, snapshot_id=prepared.snapshot_id)
        tx.move(now.cutline, line)

    land(site, writer, name, op_id, OpPhase.PLANNED, lambda _lake, _state: [change], within, "wear")
    with site.connect(autocommit=True) as conn:
        conn.execute("UPDATE modak.op_log SET phase = 'done' WHERE op_id = %s", (op_id,))


def _files(site):
    from modak.core.names import TableName

    lake = site.lake.load(site.reader.state(TableName("public", "events")).table.lake)
    return lake, list(site.lake.files(lake.identifier, lake.snapshot_id, column="occurred_at"))


def _hide(site, leader) -> None:
    """A tenth of the rows of every file under a vector."""
    from modak.lake.changes import RowDelta
    from modak.lake.iceberg.vectors import vector_uri, write_vector

    lake, files = _files(site)
    chance = random.Random(7)
    vectors = []
    for found in files:
        picked = chance.sample(range(found.file.rows), int(found.file.rows * HIDDEN))
        vectors.append(write_vector(vector_uri(f"{lake.location}/data/worn", "hidden"), picked, found.file))
    _commit(site, leader, RowDelta(vectors=tuple(vectors), validate_from=lake.snapshot_id))


def _cut(site, leader) -> None:
    """Every file as many small ones."""
    from modak.lake.changes import Rewrite
    from modak.lake.iceberg.files import FileWriter
    from modak.lake.iceberg.scan import scan_file

    lake, files = _files(site)
    made = []
    for number, found in enumerate(files):
        step = -(-found.file.rows // SMALL)
        for part, batch in enumerate(scan_file(found.file.path, lake.schema, batch_rows=step)):
            out = FileWriter(
                f"{lake.location}/data/worn",
                lake.schema,
                lake.layout,
                task=f"{number}-{part}",
                tier_key="occurred_at",
                low_cardinality=frozenset({"kind"}),
            )
            out.write(batch)
            made += out.close()
    removed = tuple(found.file for found in files)
    _commit(site, leader, Rewrite(removed, tuple(made), validate_from=lake.snapshot_id))


WEAR = {"debt": _hide, "pack": _cut}


def _contestant(home: Path, rows: int, act, *, queried: bool):
    from modak.runtime.leader import Leader
    from modak.runtime.opening import open_site

    results = {}
    with open_site(_settings(home)) as site, Leader.campaign(site, wait_seconds=30) as leader:
        _ = site.spark
        for kind, wear in WEAR.items():
            runs = []
            for _ in range(RUNS):
                _anew(site, leader)
                wear(site, leader)
                _, before = _files(site)
                known = {found.file.path for found in before}
                _, used = measured(lambda kind=kind: act(site, leader, kind))
                _, after = _files(site)
                new = [found for found in after if found.file.path not in known]
                assert new, "nothing was rewritten"
                runs.append(
                    {
                        "rate": rows / used.seconds,
                        "per_cpu_second": rows / (used.cpu_seconds or 1e-9),
                        "peak_rss_mb": used.peak_rss_mb,
                        "bytes": sum(found.file.bytes for found in new),
                        "deletes": sum(found.deletes for found in after),
                    }
                )
            results[kind] = {"cold": runs[0], "warm": max(runs[1:], key=lambda run: run["rate"])}
        if queried:
            maintained = _query(site)
            _anew(site, leader)
            results["query"] = {"maintained": maintained, "fresh": _query(site)}
    return results


def _query(site) -> float:
    seconds = []
    for _ in range(7):
        started = time.perf_counter()
        site.spark.sql(QUERY).collect()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


def ours(home: Path, rows: int):
    """Our step, in Spark tasks."""
    from modak.core.names import TableName
    from modak.tables.maintenance.run import maintain

    name = TableName("public", "events")

    def act(site, leader, kind: str) -> None:
        with site.connect(autocommit=True) as conn:
            conn.execute("UPDATE modak.tables SET maintenance_policy = %s", (POLICY[kind],))
        report = maintain(site, leader.epoch, name, engine="spark")
        assert not report.failed, report.failed

    return _contestant(home, rows, act, queried=True)


def stock(home: Path, rows: int):
    """Iceberg's own procedure."""
    return _contestant(home, rows, lambda site, _leader, _kind: site.spark.sql(STOCK).collect(), queried=False)


CONTESTANTS = {"stock": stock, "ours": ours}

if __name__ == "__main__":
    main(sys.argv[1:])
