"""How fast files come in: 1 000 Parquet files of new keys adopted by `ingest`, against Spark that reads and appends.

Each contestant brings the same files into a tiered table of the same layout, in a process of its own. Ours is the whole
command: footers, key scan, copies, one commit. `ours_wide` does it with files of ten times the bytes (and the same
number of rows): adoption looks at footers and keys, not at the rest. `rewrite` is ours with every row written anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.contest import contest
from bench.measure import measured
from bench.report import Line, Report

FILES = 1_000
ROWS = 2_000_000
WIDTH = 1_000_000


def main(options: list[str]) -> None:
    """Set up once, let every contestant run, publish."""
    contest("adopt", options, ROWS, CONTESTANTS, _fill, _publish)


def _publish(found: dict[str, dict[str, float]], rows: int) -> None:
    ours, rival = found["ours"], found["spark_append"]
    Report(
        bench="adopt",
        ours=ours["rate"],
        rivals={name: found[name]["rate"] for name in ("spark_append", "rewrite")},
        limit=0,
        peak_rss_mb=ours["peak_rss_mb"],
        per_cpu_second=ours["per_cpu_second"],
        lines=[Line(name, run["rate"], run["per_cpu_second"], run["peak_rss_mb"]) for name, run in found.items()],
        more={
            "rows": rows,
            "files": FILES,
            "seconds": {name: round(run["seconds"], 2) for name, run in found.items()},
            "megabytes": {name: round(run["megabytes"]) for name, run in found.items()},
            "ten_times_the_bytes_takes": round(found["ours_wide"]["seconds"] / ours["seconds"], 2),
            "vs_spark_seconds": round(rival["seconds"] / ours["seconds"], 2),
        },
    ).publish()


def _fill(dsn, rows: int) -> None:
    from modak.postgres.connect import connect

    with connect(dsn, autocommit=True) as conn:
        for name in CONTESTANTS:
            conn.execute(
                f"CREATE TABLE public.{name} (id bigint, ts bigint, body text, PRIMARY KEY (id, ts))"
                " PARTITION BY RANGE (ts)"
            )
            for at in range(3):
                conn.execute(
                    f"CREATE TABLE public.{name}_{at} PARTITION OF public.{name}"
                    f" FOR VALUES FROM ({at * WIDTH}) TO ({(at + 1) * WIDTH})"
                )
            conn.execute(f"INSERT INTO public.{name} VALUES (-1, {2 * WIDTH}, 'newest'), (-2, 1, 'oldest')")


def _files(folder: Path, rows: int, text: int) -> float:
    """The inputs, outside of the clock; returns megabytes."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    each = rows // FILES
    chance = np.random.default_rng(1)
    for number in range(FILES):
        ids = np.arange(number * each, (number + 1) * each, dtype=np.int64)
        keys = ids % WIDTH
        keys = (number * (WIDTH // FILES)) + keys % (WIDTH // FILES)
        letters = chance.integers(97, 123, (each, text), dtype=np.uint8)
        body = pa.array([row.tobytes().decode() for row in letters])
        table = pa.table({"id": ids, "ts": keys.astype(np.int64), "body": body})
        pq.write_table(table, folder / f"part-{number:05d}.parquet", compression="none", use_dictionary=False)
    return sum(path.stat().st_size for path in folder.iterdir()) / 1e6


def _ours(home: Path, rows: int, name: str, text: int, *, rewrite: bool = False) -> dict[str, float]:
    from modak import config
    from modak.core.names import TableName
    from modak.runtime.leader import Leader
    from modak.runtime.opening import open_site
    from modak.tables.ingest.run import Request, ingest
    from modak.tables.registration.register import register
    from modak.tables.registration.request import RegisterRequest
    from modak.tables.tiering.run import tier

    megabytes = _files(home / "inputs" / name, rows, text)
    table = TableName("public", name)
    with open_site(config.load({"MODAK_HOME": str(home), "MODAK_PREMAKE_PARTITIONS": "0"})) as site:
        register(site, RegisterRequest(table, ("id",), "ts"))
        with Leader.campaign(site, wait_seconds=5) as leader:
            tier(site, leader.epoch, table)
            tier(site, leader.epoch, table)
        if rewrite:
            _ = site.spark
            from modak.tables.ingest import plan

            plan._rough = lambda _one: ("asked for",)
        request = Request(table, (str(home / "inputs" / name),), "parquet", rewrite=True)
        report, used = measured(lambda: ingest(site, request))
        assert report.rows == rows, (report.rows, rows)
        assert report.adopted_files == (0 if rewrite else FILES), report.adopted_files
    return _told(rows, used, megabytes)


def _told(rows: int, used, megabytes: float) -> dict[str, float]:
    return {
        "rate": rows / used.seconds,
        "per_cpu_second": rows / max(used.cpu_seconds, 1e-9),
        "peak_rss_mb": used.peak_rss_mb,
        "seconds": used.seconds,
        "megabytes": megabytes,
    }


def ours(home: Path, rows: int) -> dict[str, float]:
    """Adoption of narrow files."""
    return _ours(home, rows, "ours", 20)


def ours_wide(home: Path, rows: int) -> dict[str, float]:
    """The same rows in files of about ten times the bytes."""
    return _ours(home, rows, "ours_wide", 340)


def rewrite(home: Path, rows: int) -> dict[str, float]:
    """Every row written anew, in Spark tasks."""
    return _ours(home, rows, "rewrite", 20, rewrite=True)


def spark_append(home: Path, rows: int) -> dict[str, float]:
    """Spark reads the files and appends them with Iceberg's own writer."""
    from modak import config
    from modak.runtime.opening import open_site

    megabytes = _files(home / "inputs" / "spark_append", rows, 20)
    with open_site(config.load({"MODAK_HOME": str(home)})) as site:
        spark = site.spark
        spark.conf.set("spark.sql.catalog.rival", "org.apache.iceberg.spark.SparkCatalog")
        spark.conf.set("spark.sql.catalog.rival.type", "hadoop")
        spark.conf.set("spark.sql.catalog.rival.warehouse", f"file://{home}/rival")
        spark.sql(
            "CREATE TABLE rival.lake.events (id bigint, ts bigint, body string) USING iceberg"
            f" PARTITIONED BY (truncate({WIDTH}, ts)) TBLPROPERTIES ('format-version'='3',"
            " 'write.distribution-mode'='none', 'write.spark.fanout.enabled'='true')"
        )
        source = f"file://{home}/inputs/spark_append"
        _, used = measured(lambda: spark.read.parquet(source).writeTo("rival.lake.events").append())
    return _told(rows, used, megabytes)


CONTESTANTS = {"spark_append": spark_append, "ours": ours, "ours_wide": ours_wide, "rewrite": rewrite}

if __name__ == "__main__":
    main(sys.argv[1:])
