"""How fast a live table is copied: the whole registration of a mirrored table against the plain Spark way and against
what Postgres can COPY out.

Every contestant runs in a process of its own on the same table, first cold (the first job of its session), then warm.
Ours is `register --mode mirrored` from the first look to the frontier: replica identity, publication, slot, chunks, the
commits. The rival `spark_jdbc` reads with Spark's partitioned JDBC reader and appends with Iceberg's own writer; it has
no slot, no journal, and nobody could follow it. The limit is what Postgres can COPY out: COPY … TO STDOUT in binary
form on as many connections as cores, to clients in C that drop every row.
"""

# ruff: noqa: A005

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.contest import WARM_RUNS, contest, rates
from bench.measure import measured
from bench.report import Line, Report

ROWS = 10_000_000

_CREATE = """
CREATE TABLE public.accounts (
    id bigint PRIMARY KEY, changed_at bigint NOT NULL, user_id integer NOT NULL, kind text NOT NULL,
    amount numeric(12,2) NOT NULL, ok boolean NOT NULL, created timestamptz NOT NULL
)
"""
_FILL = """
INSERT INTO public.accounts
SELECT i, i, (i * 7919) %% 100000, (ARRAY['view','click','buy','return'])[1 + i %% 4], (i %% 1000000)::numeric / 100,
       i %% 3 = 0, timestamptz '2026-01-01' + i * interval '1 second'
FROM generate_series(0, %s::bigint - 1) AS i
"""


def main(options: list[str]) -> None:
    """Set up once, let every contestant run, publish."""
    contest("copy", options, ROWS, CONTESTANTS, _fill, _publish)


def _publish(found: dict[str, dict[str, dict[str, float]]], rows: int) -> None:
    lines = [
        Line(f"{name} ({heat})", run["rate"], run.get("per_cpu_second"), run.get("peak_rss_mb"))
        for name, runs in found.items()
        for heat, run in runs.items()
    ]
    ours, rival, limit = (found[name] for name in ("ours", "spark_jdbc", "limit"))
    Report(
        bench="copy",
        ours=ours["warm"]["rate"],
        rivals={"spark_jdbc": rival["warm"]["rate"]},
        limit=limit["warm"]["rate"],
        peak_rss_mb=ours["warm"]["peak_rss_mb"],
        per_cpu_second=ours["warm"]["per_cpu_second"],
        lines=lines,
        more={
            "rows": rows,
            "cold": {
                "ours": round(ours["cold"]["rate"]),
                "spark_jdbc": round(rival["cold"]["rate"]),
                "vs_spark_jdbc": round(ours["cold"]["rate"] / rival["cold"]["rate"], 3),
            },
        },
    ).publish()


def _fill(dsn, rows: int) -> None:
    from modak.postgres.connect import connect

    print(f"filling public.accounts with {rows:,} rows …", file=sys.stderr)
    with connect(dsn, autocommit=True) as conn:
        conn.execute(_CREATE)
        conn.execute(_FILL, (rows,))
        conn.execute("VACUUM (ANALYZE) public.accounts")
        conn.execute("CHECKPOINT")


def _settings(home: Path):
    from modak import config

    return config.load({"MODAK_HOME": str(home)})


def ours(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """The whole registration; between runs the table is let go, outside the clock."""
    from modak.core.names import TableName
    from modak.runtime.opening import open_site
    from modak.tables.registration.register import register
    from modak.tables.registration.request import RegisterRequest
    from modak.tables.registration.unregister import unregister

    name = TableName("public", "accounts")
    request = RegisterRequest(name, ("id",), "changed_at", mode="mirrored")
    results = []
    with open_site(_settings(home)) as site:
        _ = site.spark
        for _attempt in range(1 + WARM_RUNS):
            done, used = measured(lambda: register(site, request))
            assert done.rows_copied == rows, (done.rows_copied, rows)
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
            "dbtable": "public.accounts",
            "partitionColumn": "id",
            "lowerBound": "0",
            "upperBound": str(rows),
            "numPartitions": str(2 * cores()),
            "fetchsize": "20000",
            "driver": "org.postgresql.Driver",
        }

        def run() -> None:
            spark.sql("DROP TABLE IF EXISTS rival.lake.accounts PURGE")
            spark.sql(
                "CREATE TABLE rival.lake.accounts"
                " (id bigint, changed_at bigint, user_id int, kind string, amount decimal(12,2),"
                " ok boolean, created timestamp) USING iceberg"
                " TBLPROPERTIES ('format-version'='3', 'write.distribution-mode'='none')"
            )
            spark.read.format("jdbc").options(**options).load().writeTo("rival.lake.accounts").append()

        return rates(run, rows)


def limit(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """COPY in binary form out of the server, to clients that drop the rows."""
    from modak.postgres.embedded import EmbeddedServer, packaged_binaries
    from modak.spark.conf import cores

    dsn = EmbeddedServer(home).dsn("modak")
    psql = [str(packaged_binaries() / "psql"), "--no-psqlrc", "--quiet", "--dbname", dsn.safe(), "--command"]
    lanes = cores()

    def copy(lane: int) -> None:
        low, high = rows * lane // lanes, rows * (lane + 1) // lanes
        statement = f"COPY (SELECT * FROM public.accounts WHERE id >= {low} AND id < {high}) TO STDOUT (FORMAT binary)"
        subprocess.run(
            [*psql, statement], stdout=subprocess.DEVNULL, check=True, env={**os.environ, "PGPASSWORD": dsn.password}
        )

    found = []
    for _ in range(1 + WARM_RUNS):
        started = time.perf_counter()
        with ThreadPoolExecutor(lanes) as pool:
            list(pool.map(copy, range(lanes)))
        found.append(rows / (time.perf_counter() - started))
    return {"cold": {"rate": found[0]}, "warm": {"rate": max(found[1:])}}


CONTESTANTS = {"limit": limit, "spark_jdbc": spark_jdbc, "ours": ours}

if __name__ == "__main__":
    main(sys.argv[1:])
