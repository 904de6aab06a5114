"""How old the lake is: from the commit in Postgres until a reader of the lake sees the row, under steady changes.

A writer commits a hundred changes every twentieth of a second (inserts and updates, 5 000 a second in the default) and
notes when each commit returned; the daemon's own threads follow with default settings. Every commit that moves F is
noted when it is visible. The age of a change is the time between the two; p50 and p99 are over all changes.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from bench.contest import contest
from bench.report import Line, Report

ROWS = 150_000
"""Changes: half a minute of them."""
RATE = 5_000
STEP = 250

_TABLE = "CREATE TABLE public.steady (id bigint PRIMARY KEY, ts bigint NOT NULL, body text, n int)"
_INSERT = "INSERT INTO public.steady SELECT i, i, 'row ' || i, 0 FROM generate_series(%s::bigint, %s::bigint - 1) AS i"
_UPDATE = "UPDATE public.steady SET n = n + 1, body = body || '!' WHERE id >= %s AND id < %s"


def main(options: list[str]) -> None:
    """Run it and publish."""
    contest("freshness", options, ROWS, CONTESTANTS, _fill, _publish)


def _publish(found: dict[str, dict[str, dict[str, float]]], rows: int) -> None:
    run = found["ours"]["steady"]
    Report(
        bench="freshness",
        ours=run["rate"],
        rivals={},
        limit=RATE,
        peak_rss_mb=run["peak_rss_mb"],
        per_cpu_second=run["per_cpu_second"],
        lines=[Line("ours", run["rate"], run["per_cpu_second"], run["peak_rss_mb"])],
        more={
            "changes": rows,
            "p50_seconds": round(run["p50"], 3),
            "p99_seconds": round(run["p99"], 3),
            "commits": run["commits"],
        },
    ).publish()


def _fill(dsn, _rows: int) -> None:
    from modak.postgres.connect import connect

    with connect(dsn, autocommit=True) as conn:
        conn.execute(_TABLE)
        conn.execute(_INSERT, (0, 100_000))


def ours(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """The daemon's threads under a steady writer."""
    import numpy as np

    from bench.measure import measured
    from modak import config
    from modak.core.names import TableName
    from modak.postgres.changes.lsn import read_lsn
    from modak.postgres.connect import connect
    from modak.runtime import mirrors
    from modak.runtime.leader import Leader
    from modak.runtime.opening import open_site
    from modak.tables.registration.register import register
    from modak.tables.registration.request import RegisterRequest

    settings = config.load({"MODAK_HOME": str(home)})
    name = TableName("public", "steady")
    written: list[tuple[int, float, int]] = []
    seen: list[tuple[int, float]] = []
    ended = threading.Event()

    def watch(table_id: int) -> None:
        with connect(site.dsn, autocommit=True) as conn:
            while not ended.is_set():
                row = conn.execute(
                    "SELECT frontier::text FROM modak.cutline WHERE table_id = %s", (table_id,)
                ).fetchone()
                at, now = read_lsn(row[0]), time.perf_counter()
                if not seen or seen[-1][0] != at:
                    seen.append((at, now))
                time.sleep(0.01)

    def write() -> None:
        with connect(site.dsn, autocommit=True) as conn:
            started, made, at, old = time.perf_counter(), 0, 1_000_000, 0
            while made < rows:
                if (made // STEP) % 2:
                    conn.execute(_UPDATE, (old, old + STEP))
                    old = (old + STEP) % 100_000
                else:
                    conn.execute(_INSERT, (at, at + STEP))
                    at += STEP
                made += STEP
                now = time.perf_counter()
                lsn = conn.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()[0]
                written.append((read_lsn(lsn), now, STEP))
                time.sleep(max(0.0, started + made / RATE - time.perf_counter()))

    with open_site(settings) as site:
        _ = site.spark
        register(site, RegisterRequest(name, ("id",), "ts", mode="mirrored"))
        table_id = site.reader.table(name).table_id
        with Leader.campaign(site, wait_seconds=5) as leader, mirrors.serving(site, leader):
            watcher = threading.Thread(target=watch, args=(table_id,))
            watcher.start()

            def run() -> None:
                write()
                deadline = time.monotonic() + 120
                while seen[-1][0] < written[-1][0] and time.monotonic() < deadline:
                    # F follows only what this table did; the last position is that of its own commit or a bit later.
                    with connect(site.dsn, autocommit=True) as conn:
                        conn.execute(_UPDATE, (0, 1))
                    time.sleep(0.5)

            _, used = measured(run)
            ended.set()
            watcher.join()
    positions = np.array([at for at, _ in seen])
    times = np.array([when for _, when in seen])
    commits = np.array([at for at, _, _ in written])
    place = np.minimum(np.searchsorted(positions, commits), len(times) - 1)
    ages = np.maximum(times[place] - np.array([when for _, when, _ in written]), 0)
    span = written[-1][1] - written[0][1]
    return {
        "steady": {
            "rate": rows / span,
            "per_cpu_second": rows / (used.cpu_seconds or 1e-9),
            "peak_rss_mb": used.peak_rss_mb,
            "p50": float(np.percentile(ages, 50)),
            "p99": float(np.percentile(ages, 99)),
            "commits": len(seen) - 1,
        }
    }


CONTESTANTS = {"ours": ours}

if __name__ == "__main__":
    main(sys.argv[1:])
