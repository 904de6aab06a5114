"""How fast rows move: one tiering pass against the plain Spark way and against what Postgres can COPY out.

Every contestant runs in a process of its own on the same table, first cold (the first job of its session), then warm.
Ours is the whole pass: seal, export, commit, cut-line. The rival `spark_jdbc` reads with Spark's partitioned JDBC
reader and appends with Iceberg's own writer. The limit is what Postgres can COPY out: COPY … TO STDOUT in binary form
on as many connections as cores, to clients in C that drop every row. `server_only` is the same without a client (TO
'/dev/null'): rows that are read and formatted but never leave the server.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.contest import WARM_RUNS, contest, rates
from bench.measure import measured
from bench.report import Line, Report

ROWS = 10_000_000
PARTITIONS = 4

_CREATE = """
CREATE TABLE public.events (
    id bigint NOT NULL, occurred_at bigint NOT NULL, user_id integer NOT NULL, kind text NOT NULL,
    amount numeric(12,2) NOT NULL, ok boolean NOT NULL, created timestamptz NOT NULL,
    PRIMARY KEY (id, occurred_at)
) PARTITION BY RANGE (occurred_at)
"""
_FILL = """
INSERT INTO public.events
SELECT i, i, (i * 7919) %% 100000, (ARRAY['view','click','buy','return'])[1 + i %% 4], (i %% 1000000)::numeric / 100,
       i %% 3 = 0, timestamptz '2026-01-01' + i * interval '1 second'
FROM generate_series(%s::bigint, %s::bigint) AS i
"""


def main(options: list[str]) -> None:
    """Set up once, let every contestant run, publish."""
    contest("tiering", options, ROWS, CONTESTANTS, _fill, _publish)


def _publish(found: dict[str, dict[str, dict[str, float]]], rows: int) -> None:
    lines = [
        Line(f"{name} ({heat})", run["rate"], run.get("per_cpu_second"), run.get("peak_rss_mb"))
        for name, runs in found.items()
        for heat, run in runs.items()
    ]
    ours, rival, limit, server_only = (found[name] for name in ("ours", "spark_jdbc", "limit", "server_only"))
    Report(
        bench="tiering",
        ours=ours["warm"]["rate"],
        rivals={"spark_jdbc": rival["warm"]["rate"]},
        limit=limit["warm"]["rate"],
        peak_rss_mb=ours["warm"]["peak_rss_mb"],
        per_cpu_second=ours["warm"]["per_cpu_second"],
        lines=lines,
        more={
            "rows": rows,
            "server_only": {
                "rate": round(server_only["warm"]["rate"]),
                "ratio": round(ours["warm"]["rate"] / server_only["warm"]["rate"], 3),
            },
            "cold": {
                "ours": round(ours["cold"]["rate"]),
                "spark_jdbc": round(rival["cold"]["rate"]),
                "vs_spark_jdbc": round(ours["cold"]["rate"] / rival["cold"]["rate"], 3),
            },
        },
    ).publish()


def _fill(dsn, rows: int) -> None:
    from modak.postgres.connect import connect

    width = rows // PARTITIONS
    print(f"filling public.events with {rows:,} rows …", file=sys.stderr)
    with connect(dsn, autocommit=True) as conn:
        conn.execute(_CREATE)
        for at in range(PARTITIONS + 1):
            low = at * width
            conn.execute(
                f"CREATE TABLE public.events_p{at} PARTITION OF public.events"
                f" FOR VALUES FROM ({low}) TO ({low + width})"
            )
        for at in range(PARTITIONS):
            conn.execute(_FILL, (at * width, (at + 1) * width - 1))
        # One row in the last partition makes all others old enough.
        conn.execute(_FILL, (PARTITIONS * width, PARTITIONS * width))
        conn.execute("VACUUM (ANALYZE) public.events")
        conn.execute("CHECKPOINT")


def _settings(home: Path):
    from modak import config

    return config.load({"MODAK_HOME": str(home), "MODAK_RECLAIM_LAG": str(2**62), "MODAK_PREMAKE_PARTITIONS": "0"})


def ours(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """Our whole pass; between runs the table is registered anew, outside the clock."""
    from modak.core.names import TableName
    from modak.runtime.leader import Leader
    from modak.runtime.opening import open_site
    from modak.tables.registration.register import register
    from modak.tables.registration.request import RegisterRequest
    from modak.tables.registration.unregister import unregister
    from modak.tables.tiering.run import tier

    name = TableName("public", "events")
    request = RegisterRequest(name, ("id",), "occurred_at")
    results = []
    with open_site(_settings(home)) as site, Leader.campaign(site, wait_seconds=5) as leader:
        _ = site.spark
        for _attempt in range(1 + WARM_RUNS):
            register(site, request)
            report, used = measured(lambda: tier(site, leader.epoch, name))
            assert report.rows == rows, (report.rows, rows)
            unregister(site, name, drop_lake=True)
            results.append(
                {
                    "rate": rows / used.seconds,
                    "per_cpu_second": rows / used.cpu_seconds,
                    "peak_rss_mb": used.peak_rss_mb,
                }
            )
    return {"cold": results[0], "warm": max(results[1:], key=lambda result: result["rate"])}


def spark_jdbc(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """Spark's JDBC reader, split on the key, into Iceberg's own writer."""
    from modak.runtime.opening import open_site
    from modak.spark.conf import cores

    with open_site(_settings(home)) as site:
        spark = site.spark
        spark.conf.set("spark.sql.catalog.rival", "org.apache.iceberg.spark.SparkCatalog")
        spark.conf.set("spark.sql.catalog.rival.type", "hadoop")
        spark.conf.set("spark.sql.catalog.rival.warehouse", f"file://{home}/rival")
        spark.conf.set("spark.sql.catalog.rival.cache-enabled", "false")
        options = {
            "url": site.dsn.jdbc(),
            "user": site.dsn.user,
            "password": site.dsn.password,
            "dbtable": f"(SELECT * FROM public.events WHERE occurred_at < {rows}) AS events",
            "partitionColumn": "id",
            "lowerBound": "0",
            "upperBound": str(rows),
            "numPartitions": str(2 * cores()),
            "fetchsize": "20000",
            "driver": "org.postgresql.Driver",
        }
        width = rows // PARTITIONS

        def run() -> None:
            spark.sql("DROP TABLE IF EXISTS rival.lake.events PURGE")
            spark.sql(
                "CREATE TABLE rival.lake.events"
                " (id bigint, occurred_at bigint, user_id int, kind string, amount decimal(12,2),"
                f" ok boolean, created timestamp) USING iceberg PARTITIONED BY (truncate({width}, occurred_at))"
                " TBLPROPERTIES ('format-version'='3', 'write.distribution-mode'='none',"
                " 'write.spark.fanout.enabled'='true')"
            )
            spark.read.format("jdbc").options(**options).load().writeTo("rival.lake.events").append()

        return rates(run, rows)


def limit(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """COPY in binary form out of the server, to clients that drop the rows."""
    from modak.postgres.embedded import EmbeddedServer, packaged_binaries

    dsn = EmbeddedServer(home).dsn("modak")
    psql = [str(packaged_binaries() / "psql"), "--no-psqlrc", "--quiet", "--dbname", dsn.safe(), "--command"]

    def copy(partition: int) -> None:
        statement = f"COPY public.events_p{partition} TO STDOUT (FORMAT binary)"
        subprocess.run(
            [*psql, statement], stdout=subprocess.DEVNULL, check=True, env={**os.environ, "PGPASSWORD": dsn.password}
        )

    return _copied(copy, rows)


def server_only(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """COPY in binary form that ends inside the server."""
    from modak.postgres.connect import connect
    from modak.postgres.embedded import EmbeddedServer

    dsn = EmbeddedServer(home).dsn("modak")

    def copy(partition: int) -> None:
        with connect(dsn, autocommit=True) as conn:
            conn.execute(f"COPY public.events_p{partition} TO '/dev/null' (FORMAT binary)")

    return _copied(copy, rows)


def _copied(copy: Callable[[int], None], rows: int) -> dict[str, dict[str, float]]:
    """Copy all partitions, as many at a time as there are cores: cold once, then the best of a few warm runs."""
    from modak.spark.conf import cores

    rates = []
    for _ in range(1 + WARM_RUNS):
        started = time.perf_counter()
        with ThreadPoolExecutor(cores()) as lanes:
            list(lanes.map(copy, range(PARTITIONS)))
        rates.append(rows / (time.perf_counter() - started))
    return {"cold": {"rate": rates[0]}, "warm": {"rate": max(rates[1:])}}


CONTESTANTS = {"limit": limit, "server_only": server_only, "spark_jdbc": spark_jdbc, "ours": ours}

if __name__ == "__main__":
    main(sys.argv[1:])
