"""How fast a mirror catches up: mixed changes that lie in the WAL already, until the lake has them.

The changes are those of the `decoding` benchmark, on a table of as many rows that are in the lake before. Ours is
everything: read, decode, fold, look up old rows, write data files and deletion vectors, commit, confirm. The limit is
the server's decoding to nowhere, the same changes counted inside it. Each run writes its changes first, outside the
clock, to a table that is registered anew.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from bench.contest import WARM_RUNS, contest
from bench.decoding import STEP
from bench.measure import measured
from bench.report import Line, Report

ROWS = 500_000

_TABLE = """
CREATE TABLE public.followed (
    id bigint PRIMARY KEY, occurred_at bigint NOT NULL, user_id int, kind text, amount numeric(12,2), ok bool,
    created timestamptz
)
"""
_INSERT = """
INSERT INTO public.followed
SELECT i, i, i * 7919 %% 100000, 'kind ' || i %% 10, (i %% 1000000)::numeric / 100, i %% 3 = 0,
       timestamptz '2026-01-01' + i * interval '1 second'
FROM generate_series(%s::bigint, %s::bigint - 1) AS i
"""
_UPDATE = "UPDATE public.followed SET amount = amount + 1, kind = 'changed' WHERE id >= %s AND id < %s"
_DELETE = "DELETE FROM public.followed WHERE id >= %s AND id < %s"


def main(options: list[str]) -> None:
    """Let every contestant run, publish."""
    contest("pump", options, ROWS, CONTESTANTS, _fill, _publish)


def _publish(found: dict[str, dict[str, dict[str, float]]], rows: int) -> None:
    lines = [
        Line(f"{name} ({heat})", run["rate"], run.get("per_cpu_second"), run.get("peak_rss_mb"))
        for name, runs in found.items()
        for heat, run in runs.items()
    ]
    ours = found["ours"]["warm"]
    Report(
        bench="pump",
        ours=ours["rate"],
        rivals={},
        limit=found["limit"]["warm"]["rate"],
        peak_rss_mb=ours["peak_rss_mb"],
        per_cpu_second=ours["per_cpu_second"],
        lines=lines,
        more={"changes": rows, "flushes": ours["flushes"], "cold": round(found["ours"]["cold"]["rate"])},
    ).publish()


def _fill(dsn, rows: int) -> None:
    from modak.postgres.connect import connect

    print(f"filling public.followed with {rows:,} rows …", file=sys.stderr)
    with connect(dsn, autocommit=True) as conn:
        conn.execute(_TABLE)
        conn.execute(_INSERT, (0, rows))
        conn.execute("VACUUM (ANALYZE) public.followed")
        conn.execute("CHECKPOINT")


def _change(conn, rows: int, first: int) -> int:
    """So many changes, six of ten inserts, three updates, one a delete; in transactions of a thousand rows."""
    made = 0
    at, old = first, first - rows
    while made < rows:
        conn.execute(_INSERT, (at, at + 2 * STEP))
        conn.execute(_INSERT, (at + 2 * STEP, at + 4 * STEP))
        conn.execute(_INSERT, (at + 4 * STEP, at + 6 * STEP))
        conn.execute(_UPDATE, (old, old + 3 * STEP))
        conn.execute(_DELETE, (old + 3 * STEP, old + 4 * STEP))
        made += 10 * STEP
        at += 6 * STEP
        old += 4 * STEP
    return made


def _runs(home: Path, rows: int, act) -> list[dict[str, float]]:
    from modak import config
    from modak.core.names import TableName
    from modak.postgres.connect import connect
    from modak.runtime.leader import Leader
    from modak.runtime.opening import open_site
    from modak.tables.registration.register import register
    from modak.tables.registration.request import RegisterRequest
    from modak.tables.registration.unregister import unregister

    name = TableName("public", "followed")
    results = []
    settings = config.load({"MODAK_HOME": str(home), "MODAK_PREMAKE_PARTITIONS": "0"})
    with open_site(settings) as site, Leader.campaign(site, wait_seconds=5) as leader:
        _ = site.spark
        for _attempt in range(1 + WARM_RUNS):
            with connect(site.dsn, autocommit=True) as conn:
                conn.execute("TRUNCATE public.followed")
                conn.execute(_INSERT, (0, rows))
                register(site, RegisterRequest(name, ("id",), "occurred_at", mode="mirrored"))
                record = site.reader.table(name)
                made = _change(conn, rows, rows)
                conn.execute("CHECKPOINT")
                results.append(act(site, leader, conn, record, made))
            unregister(site, name, drop_lake=True)
    return results


def ours(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """Until everything is in the lake and confirmed."""

    def act(site, leader, _conn, record, made: int) -> dict[str, float]:
        from modak.tables.mirror.pump.run import Pump

        with Pump(site, leader.epoch, record.table_id) as pump:

            def catch_up() -> int:
                flushes = read = 0
                while read < made:
                    turn = pump.turn()
                    read, flushes = read + turn.changes, flushes + turn.flushes
                assert read == made, (read, made)
                return flushes

            flushes, used = measured(catch_up)
        return {
            "rate": made / used.seconds,
            "per_cpu_second": made / (used.cpu_seconds or 1e-9),
            "peak_rss_mb": used.peak_rss_mb,
            "flushes": flushes,
        }

    results = _runs(home, rows, act)
    return {"cold": results[0], "warm": max(results[1:], key=lambda result: result["rate"])}


def limit(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """The same changes, decoded and counted in the server."""

    def act(site, _leader, conn, record, made: int) -> dict[str, float]:
        from modak.tables.mirror.names import publication_name, slot_name

        started = time.perf_counter()
        conn.execute(
            "SELECT count(*) FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '1',"
            " 'publication_names', %s, 'binary', 'true')",
            (slot_name(record.table_id, site.dsn.dbname), publication_name(record.table_id)),
        )
        return {"rate": made / (time.perf_counter() - started)}

    results = _runs(home, rows, act)
    return {"cold": results[0], "warm": max(results[1:], key=lambda result: result["rate"])}


CONTESTANTS = {"limit": limit, "ours": ours}

if __name__ == "__main__":
    main(sys.argv[1:])
