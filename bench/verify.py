"""How fast heap and lake are proved equal: `verify` against the plain Spark way and against what Postgres can COPY out.

One table, wholly tiered, with its rows still in the heap; one row in a hundred was corrected afterwards. Every
contestant runs in a process of its own on it, first cold, then warm. Ours is the whole verification: pin, snapshot,
every column of every row, report. The rival `jdbc_except` reads the heap with Spark's partitioned JDBC reader and the
lake with Iceberg's own, and takes `exceptAll` both ways. The limit is COPY … TO '/dev/null' in binary form on as many
connections as cores.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.contest import contest, rates
from bench.report import Line, Report
from bench.tiering import _fill, _settings, limit

ROWS = 10_000_000
NAME = ("public", "events")
LAKE = "modak.modak.public.events"


def main(options: list[str]) -> None:
    """Set up once, let every contestant run, publish."""
    contest("verify", options, ROWS, CONTESTANTS, _fill, _publish)


def _publish(found: dict[str, dict[str, dict[str, float]]], rows: int) -> None:
    prepared = found.pop("prepare")
    lines = [
        Line(f"{name} ({heat})", run["rate"], run.get("per_cpu_second"), run.get("peak_rss_mb"))
        for name, runs in found.items()
        for heat, run in runs.items()
    ]
    mine, rival, most = (found[name] for name in ("ours", "jdbc_except", "limit"))
    Report(
        bench="verify",
        ours=mine["warm"]["rate"],
        rivals={"jdbc_except": rival["warm"]["rate"]},
        limit=most["warm"]["rate"],
        peak_rss_mb=mine["warm"]["peak_rss_mb"],
        per_cpu_second=mine["warm"]["per_cpu_second"],
        lines=lines,
        more={
            "rows": rows,
            **prepared,
            "cold": {
                "ours": round(mine["cold"]["rate"]),
                "jdbc_except": round(rival["cold"]["rate"]),
                "vs_jdbc_except": round(mine["cold"]["rate"] / rival["cold"]["rate"], 3),
            },
        },
    ).publish()


def prepare(home: Path, rows: int) -> dict[str, object]:
    """Tier everything, correct one row in a hundred, and fold the corrections."""
    from modak.core.names import TableName
    from modak.runtime.leader import Leader
    from modak.runtime.opening import open_site
    from modak.tables.fold.run import fold
    from modak.tables.registration.register import register
    from modak.tables.registration.request import RegisterRequest
    from modak.tables.tiering.run import tier

    name = TableName(*NAME)
    with open_site(_settings(home)) as site, Leader.campaign(site, wait_seconds=5) as leader:
        _ = site.spark
        register(site, RegisterRequest(name, ("id",), "occurred_at"))
        assert tier(site, leader.epoch, name).rows == rows
        with site.connect(autocommit=True) as conn:
            conn.execute(
                "UPDATE public.events SET amount = amount + 1 WHERE id %% 100 = 0 AND occurred_at < %s", (rows,)
            )
            conn.execute("VACUUM (ANALYZE) public.events")
        assert fold(site, leader.epoch, name).left == 0
    return {"corrected": rows // 100}


def ours(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """Our verification, from its pin to its report."""
    from modak.core.names import TableName
    from modak.runtime.opening import open_site
    from modak.tables.verify.run import verify

    name = TableName(*NAME)
    with open_site(_settings(home)) as site:
        _ = site.spark

        def run() -> None:
            report = verify(site, name)
            assert report.sound, report
            assert report.compared_rows == rows, report

        return rates(run, rows)


def jdbc_except(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """Both sides as DataFrames, and what one has and the other lacks, both ways."""
    from modak.runtime.opening import open_site
    from modak.spark.conf import cores

    with open_site(_settings(home)) as site:
        spark = site.spark
        where = f"occurred_at < {rows}"
        options = {
            "url": site.dsn.jdbc(),
            "user": site.dsn.user,
            "password": site.dsn.password,
            "dbtable": f"(SELECT * FROM public.events WHERE {where}) AS events",
            "partitionColumn": "id",
            "lowerBound": "0",
            "upperBound": str(rows),
            "numPartitions": str(2 * cores()),
            "fetchsize": "20000",
            "driver": "org.postgresql.Driver",
        }

        def run() -> None:
            heap = spark.read.format("jdbc").options(**options).load()
            lake = spark.sql(f"SELECT * FROM {LAKE} WHERE {where}").select(*heap.columns)
            heap = heap.select(*(heap[f.name].cast(f.dataType) for f in lake.schema.fields))
            assert heap.exceptAll(lake).count() == 0
            assert lake.exceptAll(heap).count() == 0

        return rates(run, rows)


CONTESTANTS = {"prepare": prepare, "limit": limit, "jdbc_except": jdbc_except, "ours": ours}

if __name__ == "__main__":
    main(sys.argv[1:])
