"""How fast entities reach their store: init and flush against DuckDB, compaction against Spark's own way.

A million entities with twenty attributes, sixteen of them rows of `eav_data`. Ours is the whole flow: lock, snapshot,
export, checksum, manifest, marking. The rival `duckdb` reads the same tables with its Postgres extension in one
process, pivots them by filtered aggregates and COPYs them to Parquet with the same compression; for the flush it is
given a query that lets Postgres choose the dirty rows, and it marks none. It has it easier: numerics come as doubles,
what does not fit is rounded, nothing is checked, and rows stay as they come, which also packs better than the order of
random ids that a base needs; `init in order` is the same with that order. The rival `spark` merges the same base and
delta files with a window and row_number. The limit is COPY … TO '/dev/null' of both tables in binary form on as many
connections as cores. Every contestant runs in a process of its own, first cold, then warm.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from bench.contest import contest
from bench.measure import measured
from bench.report import Line, Report

ROWS = 1_000_000
DIRTY = 10
"""One entity in so many is changed before a flush."""
WARM_RUNS = 2
SCHEMA = 7
_KINDS = ["text"] * 8 + ["integer"] * 3 + ["numeric"] * 3 + ["bool", "datetime"]


def _described() -> dict[str, object]:
    attributes: dict[str, object] = {
        "name": {"id": 101, "type": "text", "column": "text_01"},
        "born": {"id": 102, "type": "date", "column": "bigint_01", "encoding": "unix_ms"},
        "rank": {"id": 103, "type": "integer", "column": "integer_01"},
        "live": {"id": 104, "type": "bool", "column": "smallint_01", "encoding": "bool_smallint"},
    }
    for number, kind in enumerate(_KINDS, start=1):
        digits = {"precision": 12, "scale": 2} if kind == "numeric" else {}
        attributes[f"a{number:02d}"] = {"id": number, "type": kind, **digits}
    return {"schema_id": SCHEMA, "name": "thing", "attributes": attributes}


def main(options: list[str]) -> None:
    """Set up once, let every contestant run, publish."""
    contest("entities", options, ROWS, CONTESTANTS, _fill, _publish)


def _publish(found: dict[str, dict[str, dict[str, dict[str, float]]]], rows: int) -> None:
    lines = [
        Line(f"{flow}: {name} ({heat})", run["rate"], run.get("per_cpu_second"), run.get("peak_rss_mb"))
        for flow in ("init", "init in order", "flush", "compaction")
        for name, flows in found.items()
        for heat, run in flows.get(flow, {}).items()
    ]
    ours, duck, spark = found["ours"], found["duckdb"], found["spark"]
    warm = {flow: ours[flow]["warm"]["rate"] for flow in ours}
    Report(
        bench="entities",
        ours=warm["init"],
        rivals={"duckdb": duck["init"]["warm"]["rate"]},
        limit=found["limit"]["init"]["warm"]["rate"],
        peak_rss_mb=ours["init"]["warm"]["peak_rss_mb"],
        per_cpu_second=ours["init"]["warm"]["per_cpu_second"],
        lines=lines,
        more={
            "rows": rows,
            "flush": {
                "rows": rows // DIRTY,
                "ours": round(warm["flush"]),
                "vs_duckdb": round(warm["flush"] / duck["flush"]["warm"]["rate"], 3),
            },
            "compaction": {
                "ours": round(warm["compaction"]),
                "vs_spark": round(warm["compaction"] / spark["compaction"]["warm"]["rate"], 3),
            },
        },
    ).publish()


def _fill(dsn, rows: int) -> None:
    """Entities made inside Postgres, with the key built over finished rows; nobody has changed them yet."""
    from modak.entities.config import CDCConfig
    from modak.entities.tables import EntityTables, install
    from modak.postgres.connect import connect

    tables = EntityTables.of(CDCConfig())
    with connect(dsn, autocommit=True) as conn:
        install(conn, tables)
        for table in ("entity_main", "eav_data"):
            conn.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")
        conn.execute("ALTER TABLE eav_data DROP CONSTRAINT eav_data_pkey")
        conn.execute("SET synchronous_commit = off; SET maintenance_work_mem = '512MB'")
        conn.execute(
            "INSERT INTO entity_main (ltbase_schema_id, ltbase_row_id, text_01, bigint_01, integer_01, smallint_01,"
            f" ltbase_created_at, ltbase_updated_at) SELECT {SCHEMA}, md5(i::text)::uuid, 'thing ' || i, i * 86400000,"
            f" i % 1000, i % 2, 1700000000000 + i, 1700000000000 + i FROM generate_series(1::bigint, {rows}) i"
        )
        texts = [number for number, kind in enumerate(_KINDS, start=1) if kind == "text"]
        conn.execute(
            f"INSERT INTO eav_data SELECT {SCHEMA}, md5(i::text)::uuid, a, '',"
            f" CASE WHEN a <= {len(texts)} THEN 'value ' || (i * 7919 % 100003 + a) END,"
            f" CASE WHEN a > {len(texts)} THEN CASE WHEN a = 15 THEN i % 2 WHEN a = 16 THEN 1700000000000 + i"
            f" ELSE i * a % 100000 END END FROM generate_series(1::bigint, {rows}) i,"
            # An application writes the attributes of an entity together.
            f" LATERAL generate_series(1, {len(_KINDS)} + (i - i)::int) a"
        )
        conn.execute("ALTER TABLE eav_data ADD PRIMARY KEY (schema_id, row_id, attr_id, array_indices)")
        install(conn, tables)
        # An install that finds triggers switched off makes every row dirty.
        conn.execute("DELETE FROM change_log")
        conn.execute("VACUUM ANALYZE change_log")
        conn.execute("VACUUM ANALYZE eav_data")
        conn.execute("VACUUM ANALYZE entity_main")
        conn.execute("CHECKPOINT")


def _dirty(conn, rows: int, run: int) -> int:
    """Change every tenth entity, another tenth in each run."""
    count = rows // DIRTY
    conn.execute("DELETE FROM change_log")
    conn.execute(
        f"UPDATE entity_main SET integer_01 = integer_01 + 1 WHERE ltbase_row_id IN"
        f" (SELECT md5((i * {DIRTY} + {run % DIRTY} + 1)::text)::uuid FROM generate_series(0, {count - 1}) i)"
    )
    conn.execute("VACUUM ANALYZE change_log")
    conn.execute("CHECKPOINT")
    return count


def _store(home: Path, rows: int):
    from modak import config
    from modak.entities.address import Address
    from modak.entities.config import CDCConfig, CompactionConfig
    from modak.entities.registry import read_registry
    from modak.entities.store import Crew, EntityStore
    from modak.postgres.embedded import EmbeddedServer
    from modak.spark import session
    from modak.storage.objects import Objects

    settings = config.load({"MODAK_HOME": str(home)})
    spark = session.start(settings, home)
    session.warm(spark)
    return EntityStore(
        CDCConfig(min_records=1, max_age_ms=0, batch_size=max(rows // DIRTY, 1)),
        CompactionConfig(),
        Address(EmbeddedServer(home).dsn("modak")),
        Objects.of(str(home / "entities")),
        read_registry([_described()]),
        Crew(lambda: spark, driver_rows=1_000),
    )


def _heats(results: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    return {"cold": results[0], "warm": max(results[1:], key=lambda result: result["rate"])}


def _rate(rows: int, used) -> dict[str, float]:
    return {
        "rate": rows / used.seconds,
        "per_cpu_second": rows / (used.cpu_seconds or 1e-9),
        "peak_rss_mb": used.peak_rss_mb,
    }


def ours(home: Path, rows: int) -> dict[str, dict[str, dict[str, float]]]:
    """The whole flows; between the runs of a flush rows are changed, outside the clock."""
    from modak.entities.compaction import compact
    from modak.entities.flushing import flush
    from modak.entities.initial import init

    store = _store(home, rows)
    inits, flushes, compactions = [], [], []
    for run in range(1 + WARM_RUNS):
        report, used = measured(lambda: init(store, SCHEMA, replace_delta=True))
        assert (report.rows, report.unfit) == (rows, ()), report
        inits.append(_rate(rows, used))
        with store.connect() as conn:
            count = _dirty(conn, rows, run)
        (flushed,), used = measured(lambda: flush(store))
        assert (flushed.rows, flushed.marked) == (count, count), flushed
        flushes.append(_rate(count, used))
        _keep(home, store)
        (done,), used = measured(lambda: compact(store))
        assert (done.rows, done.error) == (rows, None), done
        compactions.append(_rate(rows + count, used))
    return {"init": _heats(inits), "flush": _heats(flushes), "compaction": _heats(compactions)}


def _keep(home: Path, store) -> None:
    """The files of one compaction, for the rival."""
    manifest = store.manifests.load(SCHEMA).manifest
    listed = home / "sources.txt"
    if not listed.exists():
        paths = [f"{entry.level} {store.objects.local(entry.path)}" for entry in manifest.entries]
        listed.write_text("\n".join(paths))


def duckdb(home: Path, rows: int) -> dict[str, dict[str, dict[str, float]]]:
    """DuckDB with its Postgres extension, in one process: scan, pivot by filtered aggregates, COPY."""
    import importlib

    import duckdb as duck

    from modak.postgres.connect import connect
    from modak.postgres.embedded import EmbeddedServer

    extension = Path(importlib.import_module("duckdb_extension_postgres_scanner").__file__).parent
    (binary,) = extension.rglob("*.duckdb_extension")
    dsn = EmbeddedServer(home).dsn("modak")
    session = duck.connect(config={"allow_unsigned_extensions": "true"})
    session.execute(f"LOAD '{binary}'")
    session.execute(f"ATTACH '{dsn.conninfo().replace(chr(39), chr(39) * 2)}' AS pg (TYPE postgres, READ_ONLY)")
    casts = {"text": "{}", "integer": "{}::INTEGER", "numeric": "{}::DECIMAL(12,2)", "bool": "{} = 1"}
    columns = ", ".join(
        casts.get(kind, "{}::BIGINT").format(
            f"max({'value_text' if kind == 'text' else 'value_numeric'}) FILTER (WHERE attr_id = {number})"
        )
        + f" AS a{number:02d}"
        for number, kind in enumerate(_KINDS, start=1)
    )
    main_columns = (
        f"{SCHEMA}::SMALLINT AS schema_id, m.ltbase_row_id::VARCHAR AS row_id, m.{{}} AS changed_at,"
        " 0::BIGINT AS deleted_at, m.ltbase_created_at, m.ltbase_updated_at, m.ltbase_deleted_at, m.text_01 AS name,"
        " m.bigint_01 AS born, m.integer_01 AS rank, m.smallint_01 = 1 AS live"
    )
    options = "(FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 3)"

    def copy(main: str, eav: str, target: str, stamp: str = "ltbase_updated_at", order: str = "") -> None:
        session.execute("CALL pg_clear_cache()")
        session.execute(
            f"COPY (SELECT {main_columns.format(stamp)}, e.* EXCLUDE (row_id) FROM {main} m"
            f" LEFT JOIN (SELECT row_id, {columns} FROM {eav} WHERE schema_id = {SCHEMA}"
            f" GROUP BY row_id) e ON e.row_id = m.ltbase_row_id{order}) TO"
            f" '{home}/{target}.parquet' {options}"
        )

    inits, ordered, flushes = [], [], []
    for run in range(1 + WARM_RUNS):
        _, used = measured(lambda: copy("pg.entity_main", "pg.eav_data", "duckdb-base"))
        inits.append(_rate(rows, used))
        in_order = " ORDER BY m.ltbase_row_id"
        _, used = measured(lambda how=in_order: copy("pg.entity_main", "pg.eav_data", "duckdb-sorted", order=how))
        ordered.append(_rate(rows, used))
        with connect(dsn, autocommit=True) as conn:
            count = _dirty(conn, rows, run)
        chosen = f"SELECT row_id, changed_at FROM change_log WHERE schema_id = {SCHEMA} AND flushed_at = 0"
        queries = [
            f"postgres_query(''pg'', ''SELECT t.*{more} FROM {table} t JOIN ({chosen}) c ON c.row_id = t.{key}"
            f" WHERE t.{number} = {SCHEMA}'')".replace("''", "'")
            for table, key, number, more in (
                ("entity_main", "ltbase_row_id", "ltbase_schema_id", ", c.changed_at"),
                ("eav_data", "row_id", "schema_id", ""),
            )
        ]
        _, used = measured(lambda pair=queries: copy(pair[0], pair[1], "duckdb-delta", "changed_at"))
        flushes.append(_rate(count, used))
    return {"init": _heats(inits), "init in order": _heats(ordered), "flush": _heats(flushes)}


def spark(home: Path, rows: int) -> dict[str, dict[str, dict[str, float]]]:
    """Spark's own way to merge: all files in one frame, a window by row id, row_number."""
    from modak import config
    from modak.spark import session

    engine = session.start(config.load({"MODAK_HOME": str(home)}), home)
    session.warm(engine)
    sources = [line.split(" ", 1) for line in (home / "sources.txt").read_text().splitlines()]
    levels = {level: [path for kind, path in sources if kind == level] for level in ("base", "delta")}
    engine.conf.set("spark.sql.parquet.compression.codec", "zstd")
    results = []
    for run in range(1 + WARM_RUNS):
        engine.read.parquet(*levels["base"]).createOrReplaceTempView("base")
        engine.read.parquet(*levels["delta"]).createOrReplaceTempView("delta")
        merged = engine.sql(
            "SELECT * EXCEPT (seq, place) FROM (SELECT *, row_number() OVER (PARTITION BY row_id ORDER BY seq DESC,"
            " changed_at DESC) AS place FROM (SELECT *, 1 AS seq FROM base UNION ALL SELECT *, 2 AS seq FROM delta))"
            " WHERE place = 1 AND deleted_at = 0"
        )
        _, used = measured(lambda made=merged, at=run: made.write.mode("overwrite").parquet(f"{home}/spark-{at}"))
        results.append(_rate(rows + rows // DIRTY, used))
    return {"compaction": _heats(results)}


def limit(home: Path, rows: int) -> dict[str, dict[str, dict[str, float]]]:
    """Both tables by COPY in binary form to nowhere, on as many connections as cores."""
    from modak.postgres.connect import connect
    from modak.postgres.embedded import EmbeddedServer
    from modak.spark.conf import cores

    dsn = EmbeddedServer(home).dsn("modak")
    lanes = cores()
    with connect(dsn, autocommit=True) as conn:
        pages = {
            table: conn.execute("SELECT pg_relation_size(%s) / 8192", (table,)).fetchone()[0]
            for table in ("entity_main", "eav_data")
        }

    def copy(lane: int) -> None:
        with connect(dsn, autocommit=True) as conn:
            for table, count in pages.items():
                low, high = (count * at // lanes for at in (lane, lane + 1))
                conn.execute(
                    f"COPY (SELECT * FROM {table} WHERE ctid >= '({low},0)' AND ctid < '({high},0)')"
                    " TO '/dev/null' (FORMAT binary)"
                )

    rates = []
    for _ in range(1 + WARM_RUNS):
        started = time.perf_counter()
        threads = [threading.Thread(target=copy, args=(lane,)) for lane in range(lanes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rates.append(rows / (time.perf_counter() - started))
    return {"init": {"cold": {"rate": rates[0]}, "warm": {"rate": max(rates[1:])}}}


CONTESTANTS = {"limit": limit, "ours": ours, "duckdb": duckdb, "spark": spark}

if __name__ == "__main__":
    main(sys.argv[1:])
