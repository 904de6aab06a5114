"""How fast an hour of measurements is compacted: 30 files of a million rows, and 1 000 files of ten thousand.

Rows are sorted by host and time and repeated rows are dropped; every contestant must come out with the same number.
Ours is a whole cycle: listing, claim, manifest, merge in a child of a Spark task, checksums, commit; Spark is up
already. The rival `duckdb` is one process that does `COPY (SELECT DISTINCT … ORDER BY …) TO` with all cores and the
same memory; the rival `spark` is plain Spark: read, distinct, sort, write. The limit is DuckDB reading all rows and
columns of the large files and dropping them. Queries for one host run over the files before and after.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from bench.contest import contest
from bench.measure import measured
from bench.report import Line, Report

ROWS = 30_000_000
"""Rows of the large case; the small files hold a third of them together."""
CASES = {"large": 30, "small": 1_000}
WARM_RUNS = 1
FOLDER = "bench/cpu/2026/06/01/09"
_START = 1_780_304_400_000_000


def main(options: list[str]) -> None:
    """Set up once, let every contestant run, publish."""
    contest("measurements", options, ROWS, CONTESTANTS, lambda _dsn, _rows: None, _publish)


def _publish(found: dict[str, dict[str, dict[str, float]]], rows: int) -> None:
    timed = {name: runs for name, runs in found.items() if name not in ("prepare", "query")}
    lines = [
        Line(f"{name} ({heat})", run["rate"], run.get("per_cpu_second"), run.get("peak_rss_mb"))
        for name, runs in timed.items()
        for heat, run in runs.items()
    ]
    rate = {name: runs["warm"]["rate"] for name, runs in timed.items()}
    ours = found["ours_large"]["warm"]
    Report(
        bench="measurements",
        ours=ours["rate"],
        rivals={"duckdb": rate["duckdb_large"], "spark": rate["spark_large"]},
        limit=rate["limit"],
        peak_rss_mb=ours["peak_rss_mb"],
        per_cpu_second=ours["per_cpu_second"],
        lines=lines,
        ratios={
            "vs_duckdb_small_files": rate["ours_small"] / rate["duckdb_small"],
            "vs_spark_small_files": rate["ours_small"] / rate["spark_small"],
        },
        more={
            "rows": rows,
            "small_files": {name: round(rate[f"{name}_small"]) for name in ("ours", "duckdb", "spark")},
            "query_seconds": found["query"],
        },
    ).publish()


def prepare(home: Path, rows: int) -> dict[str, object]:
    """The raw files of both cases; one row in a hundred is there twice."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(7)
    hosts = pa.array([f"host-{number:04d}" for number in range(1_000)])
    regions = pa.array([f"region-{number % 10}" for number in range(1_000)])
    for case, files in CASES.items():
        folder = home / case
        folder.mkdir()
        count = (rows if case == "large" else rows // 3) // files
        for number in range(files):
            host = pa.array(random.integers(0, 1_000, count))
            times = np.sort(_START + random.integers(0, 3_600_000_000, count))
            table = pa.table(
                {
                    "time": pa.array(times, pa.timestamp("us", tz="UTC")),
                    "host": hosts.take(host),
                    "region": regions.take(host),
                    "usage_user": random.random(count) * 100,
                    "usage_system": np.round(random.random(count) * 100, 2),
                    "bytes": random.integers(0, 1 << 40, count),
                }
            )
            table = pa.concat_tables([table, table.slice(0, count // 100)])
            table = table.replace_schema_metadata({"arc:tags": "host,region"})
            pq.write_table(table, folder / f"cpu_20260601_091500_{number:09d}.parquet", compression="zstd")
    return {}


def _files(home: Path, case: str) -> list[str]:
    return sorted(str(path) for path in (home / case).iterdir())


def _expected(rows: int, case: str) -> int:
    files = CASES[case]
    return (rows if case == "large" else rows // 3) // files * files


def _rates(run, rows: int) -> dict[str, dict[str, float]]:
    results = []
    for number in range(1 + WARM_RUNS):
        out, used = measured(lambda number=number: run(number))
        assert out == rows, (out, rows)
        rate, cpu = rows / used.seconds, used.cpu_seconds or 1e-9
        results.append({"rate": rate, "per_cpu_second": rows / cpu, "peak_rss_mb": used.peak_rss_mb})
    return {"cold": results[0], "warm": max(results[1:], key=lambda result: result["rate"])}


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _ours(home: Path, rows: int, case: str) -> dict[str, dict[str, float]]:
    from modak import config
    from modak.measurements.opening import open_manager, open_state, runner_of

    roots = []
    for number in range(1 + WARM_RUNS):
        root = home / f"store-{case}-{number}"
        (root / FOLDER).mkdir(parents=True)
        for file in _files(home, case):
            os.link(file, root / FOLDER / Path(file).name)
        roots.append(root)

    def settings(root: Path):
        return config.load(
            {
                "MODAK_HOME": str(home / "home"),
                "MODAK_MEASUREMENTS_ROOT": str(root),
                "MODAK_MEASUREMENTS_SORT_KEYS": "*=host",
                "MODAK_MEASUREMENTS_MAX_CONCURRENT": "1",
            }
        )

    runner = runner_of(settings(roots[0]))

    def run(number: int) -> int:
        chosen = settings(roots[number])
        (job,) = open_manager(chosen, open_state(chosen), runner).cycle(["hourly"]).jobs
        assert not job.error, job
        return job.rows_out

    return _rates(run, _expected(rows, case))


def _duckdb(home: Path, rows: int, case: str) -> dict[str, dict[str, float]]:
    import duckdb
    import pyarrow.parquet as pq

    def run(number: int) -> int:
        spill, out = home / f"spill-{number}", home / f"duckdb-{case}.parquet"
        engine = duckdb.connect(config={"memory_limit": f"{_memory() >> 20}MiB", "temp_directory": str(spill)})
        engine.execute("SET preserve_insertion_order = false")
        engine.execute(
            "COPY (SELECT DISTINCT * FROM read_parquet(?, union_by_name=true) ORDER BY host, time) TO"
            f" '{out}' (FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 3)",
            [_files(home, case)],
        )
        engine.close()
        return pq.read_metadata(out).num_rows

    return _rates(run, _expected(rows, case))


def _spark(home: Path, rows: int, case: str) -> dict[str, dict[str, float]]:
    import pyarrow.parquet as pq

    from modak import config
    from modak.spark import session

    spark = session.start(config.load({"MODAK_HOME": str(home / "home")}), home / "home")

    def run(number: int) -> int:
        out = home / f"spark-{case}"
        shutil.rmtree(out, ignore_errors=True)
        frame = spark.read.parquet(f"file://{home}/{case}").distinct().sort("host", "time")
        frame.write.option("compression", "zstd").parquet(f"file://{out}")
        return sum(pq.read_metadata(file).num_rows for file in out.glob("*.parquet"))

    return _rates(run, _expected(rows, case))


def limit(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """All rows and columns of the large files read and dropped."""
    import duckdb

    statement = "SELECT sum(hash(COLUMNS(*))) FROM read_parquet(?, hive_partitioning=false)"

    def run(_: int) -> int:
        duckdb.connect().execute(statement, [_files(home, "large")]).fetchall()
        return _expected(rows, "large")

    return _rates(run, _expected(rows, "large"))


def query(home: Path, rows: int) -> dict[str, object]:
    """The mean of one host, over the files before and after; seconds, the best of three."""
    import duckdb

    found = {}
    for case in CASES:
        compacted = sorted(str(path) for path in (home / f"store-{case}-0" / FOLDER).glob("*_compacted.parquet"))
        for label, files in ((f"{case}_before", _files(home, case)), (f"{case}_after", compacted)):
            times = []
            for _ in range(3):
                begun = time.perf_counter()
                engine = duckdb.connect()
                engine.execute(
                    "SELECT avg(usage_user), count(*) FROM read_parquet(?) WHERE host = 'host-0042'", [files]
                ).fetchall()
                times.append(time.perf_counter() - begun)
            found[label] = round(min(times), 4)
    return found


def ours_large(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """Our cycle over few large files."""
    return _ours(home, rows, "large")


def ours_small(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """Our cycle over many small files."""
    return _ours(home, rows, "small")


def duckdb_large(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """One process of DuckDB, few large files."""
    return _duckdb(home, rows, "large")


def duckdb_small(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """One process of DuckDB, many small files."""
    return _duckdb(home, rows, "small")


def spark_large(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """Plain Spark, few large files."""
    return _spark(home, rows, "large")


def spark_small(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """Plain Spark, many small files."""
    return _spark(home, rows, "small")


CONTESTANTS = {
    "prepare": prepare,
    "limit": limit,
    "duckdb_large": duckdb_large,
    "ours_large": ours_large,
    "duckdb_small": duckdb_small,
    "ours_small": ours_small,
    "spark_small": spark_small,
    "spark_large": spark_large,
    "query": query,
}

if __name__ == "__main__":
    main(sys.argv[1:])
