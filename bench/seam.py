"""How fast a table is read across the seam: 10 % of the rows in the heap, 90 % in the lake, 1 % of those corrected.

Every contestant runs in a process of its own and reads all rows and columns through Spark into its `noop` sink, first
cold (the first job of its session), then warm. Ours is the whole read: pin, snapshot, heap, lake, delta, release. The
rival `parquet` is plain Spark over Parquet files with the same rows, as Spark itself writes them. The rival `postgres`
is a Postgres that alone holds everything, read by Spark's partitioned JDBC reader. The limit is pyarrow reading the
rival's Parquet files on as many threads as cores, without any Spark.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.contest import contest, rates
from bench.report import Line, Report
from bench.tiering import _CREATE, _FILL

ROWS = 10_000_000
PARTITIONS = 10
CORRECTED_EVERY = 100

_CORRECT = """
INSERT INTO modak.delta (table_id, pk, op, tier_key, payload)
SELECT t.table_id, i::text, 1, i, jsonb_build_object(
    'id', i::text, 'occurred_at', i::text, 'user_id', '1', 'kind', 'corrected', 'amount', '0.01', 'ok', 'true',
    'created', '2026-01-01 00:00:00+00')
FROM modak.tables t, generate_series(0, %s::bigint, %s) i
WHERE t.table_name = 'events'
"""


def main(options: list[str]) -> None:
    """Set up once, let every contestant run, publish."""
    contest("seam", options, ROWS, CONTESTANTS, _fill, _publish)


def _publish(found: dict[str, dict[str, dict[str, float]]], rows: int) -> None:
    del found["prepare"]
    lines = [
        Line(f"{name} ({heat})", run["rate"], run.get("per_cpu_second"), run.get("peak_rss_mb"))
        for name, runs in found.items()
        for heat, run in runs.items()
    ]
    ours = found["ours"]
    Report(
        bench="seam",
        ours=ours["warm"]["rate"],
        rivals={name: found[name]["warm"]["rate"] for name in ("parquet", "postgres")},
        limit=found["limit"]["warm"]["rate"],
        peak_rss_mb=ours["warm"]["peak_rss_mb"],
        per_cpu_second=ours["warm"]["per_cpu_second"],
        lines=lines,
        more={
            "rows": rows,
            "postgres_way": "Spark JDBC, partitioned by id, two partitions per core, fetchsize 20000",
            "cold": {name: round(runs["cold"]["rate"]) for name, runs in found.items()},
        },
    ).publish()


def _fill(dsn, rows: int) -> None:
    from modak.postgres.connect import connect

    width = rows // PARTITIONS
    print(f"filling public.events with {rows:,} rows …", file=sys.stderr)
    with connect(dsn, autocommit=True) as conn:
        conn.execute(_CREATE)
        for at in range(PARTITIONS):
            conn.execute(
                f"CREATE TABLE public.events_p{at} PARTITION OF public.events"
                f" FOR VALUES FROM ({at * width}) TO ({(at + 1) * width})"
            )
        conn.execute(_FILL, (0, rows - 1))
        conn.execute("CREATE TABLE public.everything AS SELECT * FROM public.events")
        conn.execute("ALTER TABLE public.everything ADD PRIMARY KEY (id, occurred_at)")
        conn.execute("VACUUM (ANALYZE) public.events, public.everything")


def _settings(home: Path):
    from modak import config

    return config.load({"MODAK_HOME": str(home), "MODAK_PREMAKE_PARTITIONS": "0"})


def prepare(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """Tier nine tenths, correct a hundredth of them, and write the rival's files."""
    import modak
    from modak.core.names import TableName
    from modak.runtime.leader import Leader
    from modak.runtime.opening import open_site
    from modak.tables.registration.register import register
    from modak.tables.registration.request import RegisterRequest
    from modak.tables.tiering.run import tier

    name = TableName("public", "events")
    cold = rows // PARTITIONS * (PARTITIONS - 1)
    settings = _settings(home)
    with open_site(settings) as site:
        _ = site.spark
        with Leader.campaign(site, wait_seconds=5) as leader:
            register(site, RegisterRequest(name, ("id",), "occurred_at"))
            assert tier(site, leader.epoch, name).rows == cold
        with site.connect(autocommit=True) as conn:
            conn.execute(_CORRECT, (cold - 1, CORRECTED_EVERY))
            conn.execute("VACUUM (ANALYZE) modak.delta")
        with modak.snapshot(site.spark, ["public.events"], settings=settings) as at:
            frame = at.read("public.events")
            frame.write.mode("overwrite").parquet(f"file://{home}/rival")
            assert frame.count() == rows
            assert at.read("public.events", where="kind = 'corrected'").count() == cold // CORRECTED_EVERY
    return {}


def ours(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """The whole seam read."""
    import modak
    from modak.runtime.opening import open_site

    settings = _settings(home)
    with open_site(settings) as site:
        spark = site.spark

        def run() -> None:
            with modak.snapshot(spark, ["public.events"], settings=settings) as at:
                at.read("public.events").write.format("noop").mode("overwrite").save()

        return rates(run, rows)


def parquet(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """Plain Spark over Parquet files with the same rows."""
    from modak.runtime.opening import open_site

    with open_site(_settings(home)) as site:
        spark = site.spark
        files = f"file://{home}/rival"
        return rates(lambda: spark.read.parquet(files).write.format("noop").mode("overwrite").save(), rows)


def postgres(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """Spark's JDBC reader over a table that has everything."""
    from modak.runtime.opening import open_site
    from modak.spark.conf import cores

    with open_site(_settings(home)) as site:
        spark = site.spark
        options = {
            "url": site.dsn.jdbc(),
            "user": site.dsn.user,
            "password": site.dsn.password,
            "dbtable": "public.everything",
            "partitionColumn": "id",
            "lowerBound": "0",
            "upperBound": str(rows),
            "numPartitions": str(2 * cores()),
            "fetchsize": "20000",
            "driver": "org.postgresql.Driver",
        }

        def run() -> None:
            spark.read.format("jdbc").options(**options).load().write.format("noop").mode("overwrite").save()

        return rates(run, rows)


def limit(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """The rival's bytes through pyarrow alone."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    from modak.spark.conf import cores

    pa.set_cpu_count(cores())
    files = ds.dataset(f"{home}/rival", format="parquet", exclude_invalid_files=True)

    def run() -> None:
        assert sum(batch.num_rows for batch in files.to_batches(use_threads=True)) == rows

    return rates(run, rows)


CONTESTANTS = {"prepare": prepare, "limit": limit, "parquet": parquet, "postgres": postgres, "ours": ours}

if __name__ == "__main__":
    main(sys.argv[1:])
