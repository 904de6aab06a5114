"""How fast corrections reach the lake: our fold against Spark's MERGE and against what Postgres can COPY out.

A tenth of the lake's rows is corrected, nine of ten corrections are updates and one is a delete, in no particular
order. Ours is the whole fold: plan, write, locate, commit, delta retired, tidied. The rival `merge` is Spark SQL's
MERGE INTO of the same corrections, staged as Parquet beforehand, into a copy of the lake table, by copy-on-write and by
merge-on-read (the faster counts). Both find the lake as their runs before have left it. The limit is COPY … TO
'/dev/null' in binary form of the same delta rows, on as many connections as cores. Every contestant runs in a process
of its own, first cold, then warm.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from bench.contest import contest
from bench.measure import measured
from bench.report import Line, Report
from bench.tiering import PARTITIONS, _fill

ROWS = 10_000_000
EVERY = 10
"""One lake row in so many is corrected."""
WARM_RUNS = 2

_CORRECT = """
INSERT INTO modak.delta (table_id, pk, op, tier_key, payload)
SELECT %(table)s, i::text, CASE WHEN n %% 10 = 0 THEN 2 ELSE 1 END, i, CASE WHEN n %% 10 <> 0 THEN jsonb_object(
    ARRAY['id', 'occurred_at', 'user_id', 'kind', 'amount', 'ok', 'created'],
    ARRAY[i::text, i::text, (i * 7919 %% 100000)::text, 'corrected',
          ((i %% 1000000)::numeric / 100 + 1)::numeric(12,2)::text, (i %% 3 = 0)::text,
          (timestamptz '2026-01-01' + i * interval '1 second')::text]) END
FROM (
    SELECT n, ((n * 7919) %% %(count)s) * %(every)s + %(run)s AS i FROM generate_series(0, %(count)s::bigint - 1) AS n
) AS picked
"""


def main(options: list[str]) -> None:
    """Set up once, let every contestant run, publish."""
    contest("fold", options, ROWS, CONTESTANTS, _fill, _publish)


def _publish(found: dict[str, dict[str, dict[str, float]]], rows: int) -> None:
    contestants = {name: runs for name, runs in found.items() if name != "prepare"}
    lines = [
        Line(f"{name} ({heat})", run["rate"], run.get("per_cpu_second"), run.get("peak_rss_mb"))
        for name, runs in contestants.items()
        for heat, run in runs.items()
    ]
    ours, limit = found["ours"], found["limit"]
    merge = {heat: max(found[name][heat]["rate"] for name in ("merge_cow", "merge_mor")) for heat in ("cold", "warm")}
    Report(
        bench="fold",
        ours=ours["warm"]["rate"],
        rivals={"merge": merge["warm"]},
        limit=limit["warm"]["rate"],
        peak_rss_mb=ours["warm"]["peak_rss_mb"],
        per_cpu_second=ours["warm"]["per_cpu_second"],
        lines=lines,
        more={
            "rows": rows,
            "corrections": rows // EVERY,
            "cold": {
                "ours": round(ours["cold"]["rate"]),
                "merge": round(merge["cold"]),
                "vs_merge": round(ours["cold"]["rate"] / merge["cold"], 3),
            },
        },
    ).publish()


def _settings(home: Path):
    from modak import config

    return config.load({"MODAK_HOME": str(home), "MODAK_RECLAIM_LAG": str(2**62), "MODAK_PREMAKE_PARTITIONS": "0"})


def _correct(site, rows: int, run: int) -> int:
    """Fill the delta with the corrections of one run; returns how many."""
    from modak.core.names import TableName

    table = site.reader.state(TableName("public", "events")).table.table_id
    count = rows // EVERY
    with site.connect(autocommit=True) as conn:
        conn.execute(_CORRECT, {"table": table, "count": count, "every": EVERY, "run": run})
        conn.execute("VACUUM (ANALYZE) modak.delta")
        conn.execute("CHECKPOINT")
    return count


def prepare(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """The lake table, two copies of it for the rival, and the corrections of every run as Parquet."""
    from modak.core.names import TableName
    from modak.runtime.leader import Leader
    from modak.runtime.opening import open_site
    from modak.tables.registration.register import register
    from modak.tables.registration.request import RegisterRequest
    from modak.tables.tiering.run import tier

    name = TableName("public", "events")
    with open_site(_settings(home)) as site, Leader.campaign(site, wait_seconds=5) as leader:
        spark = site.spark
        register(site, RegisterRequest(name, ("id",), "occurred_at"))
        assert tier(site, leader.epoch, name).rows == rows
        _rival(spark, home)
        for mode, how in (("cow", "copy-on-write"), ("mor", "merge-on-read")):
            spark.sql(
                f"CREATE TABLE rival.lake.events_{mode} USING iceberg"
                f" PARTITIONED BY (truncate({rows // PARTITIONS}, occurred_at)) TBLPROPERTIES ('format-version'='3',"
                f" 'write.merge.mode'='{how}') AS SELECT * FROM modak.modak.public.events"
            )
        for run in range(1 + WARM_RUNS):
            _correct(site, rows, run)
            _stage(site, home, run)
            with site.connect(autocommit=True) as conn:
                conn.execute("TRUNCATE modak.delta")
        _correct(site, rows, 0)
    return {}


def _stage(site, home: Path, run: int) -> None:
    spark = site.spark
    columns = (
        "op, tier_key AS occurred_at, pk::bigint AS id, (payload->>'user_id')::int AS user_id,"
        " payload->>'kind' AS kind, (payload->>'amount')::numeric(12,2) AS amount, (payload->>'ok')::boolean AS ok,"
        " (payload->>'created')::timestamptz AS created"
    )
    options = {
        "url": site.dsn.jdbc(),
        "user": site.dsn.user,
        "password": site.dsn.password,
        "dbtable": f"(SELECT {columns} FROM modak.delta) AS staged",
        "driver": "org.postgresql.Driver",
        "fetchsize": "20000",
    }
    frame = spark.read.format("jdbc").options(**options).load()
    frame.repartition(4).write.mode("overwrite").parquet(f"{home}/staged-{run}")


def _rival(spark, home: Path) -> None:
    spark.conf.set("spark.sql.catalog.rival", "org.apache.iceberg.spark.SparkCatalog")
    spark.conf.set("spark.sql.catalog.rival.type", "hadoop")
    spark.conf.set("spark.sql.catalog.rival.warehouse", f"file://{home}/rival")
    spark.conf.set("spark.sql.catalog.rival.cache-enabled", "false")


def ours(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """Our whole fold; between runs the delta is filled again, outside the clock."""
    from modak.core.names import TableName
    from modak.runtime.leader import Leader
    from modak.runtime.opening import open_site
    from modak.tables.fold.run import fold

    name = TableName("public", "events")
    results = []
    with open_site(_settings(home)) as site, Leader.campaign(site, wait_seconds=5) as leader:
        _ = site.spark
        for run in range(1 + WARM_RUNS):
            count = _correct(site, rows, run) if run else rows // EVERY
            report, used = measured(lambda: fold(site, leader.epoch, name))
            assert (report.rows, report.replaced) == (count, count), report
            results.append(
                {
                    "rate": count / used.seconds,
                    "per_cpu_second": count / used.cpu_seconds,
                    "peak_rss_mb": used.peak_rss_mb,
                }
            )
    return {"cold": results[0], "warm": max(results[1:], key=lambda result: result["rate"])}


def _merge(home: Path, rows: int, mode: str) -> dict[str, dict[str, float]]:
    from modak.runtime.opening import open_site

    target = f"rival.lake.events_{mode}"
    count = rows // EVERY
    results = []
    with open_site(_settings(home)) as site:
        spark = site.spark
        _rival(spark, home)
        for run in range(1 + WARM_RUNS):
            spark.read.parquet(f"{home}/staged-{run}").createOrReplaceTempView("staged")
            statement = (
                f"MERGE INTO {target} t USING staged s ON t.id = s.id AND t.occurred_at = s.occurred_at"
                " WHEN MATCHED AND s.op = 2 THEN DELETE"
                " WHEN MATCHED THEN UPDATE SET user_id = s.user_id, kind = s.kind, amount = s.amount, ok = s.ok,"
                " created = s.created WHEN NOT MATCHED AND s.op = 1 THEN INSERT"
                " (id, occurred_at, user_id, kind, amount, ok, created)"
                " VALUES (s.id, s.occurred_at, s.user_id, s.kind, s.amount, s.ok, s.created)"
            )
            _, used = measured(lambda sql=statement: spark.sql(sql).collect())
            left = spark.sql(f"SELECT count(*) FROM {target}").collect()[0][0]
            assert left == rows - (run + 1) * -(-count // 10), (left, rows, count, run)
            results.append(
                {
                    "rate": count / used.seconds,
                    "per_cpu_second": count / used.cpu_seconds,
                    "peak_rss_mb": used.peak_rss_mb,
                }
            )
    return {"cold": results[0], "warm": max(results[1:], key=lambda result: result["rate"])}


def merge_cow(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """MERGE with Iceberg's default, copy-on-write."""
    return _merge(home, rows, "cow")


def merge_mor(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """MERGE with merge-on-read: deletion vectors, as we write them."""
    return _merge(home, rows, "mor")


def limit(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """The delta rows by COPY in binary form to nowhere, on as many connections as cores."""
    from modak.postgres.connect import connect
    from modak.postgres.embedded import EmbeddedServer
    from modak.spark.conf import cores

    dsn = EmbeddedServer(home).dsn("modak")
    lanes = cores()
    count = rows // EVERY

    def copy(lane: int) -> None:
        low, high = (rows * at // lanes for at in (lane, lane + 1))
        with connect(dsn, autocommit=True) as conn:
            conn.execute(
                "COPY (SELECT op, tier_key, pk, payload FROM modak.delta"
                f" WHERE tier_key >= {low} AND tier_key < {high}) TO '/dev/null' (FORMAT binary)"
            )

    rates = []
    for _ in range(1 + WARM_RUNS):
        started = time.perf_counter()
        threads = [threading.Thread(target=copy, args=(lane,)) for lane in range(lanes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rates.append(count / (time.perf_counter() - started))
    return {"cold": {"rate": rates[0]}, "warm": {"rate": max(rates[1:])}}


CONTESTANTS = {"prepare": prepare, "limit": limit, "merge_cow": merge_cow, "merge_mor": merge_mor, "ours": ours}

if __name__ == "__main__":
    main(sys.argv[1:])
