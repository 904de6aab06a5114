"""How fast batches come in: Stream Load, hot and cold, against plain COPY and against INSERT batches into the heap.

Every contestant takes the same rows of JSON lines, in a process of its own, one batch after the other. Ours come by the
Python client through the daemon's HTTP server, which runs in the same process: what both use is counted. `copy` is
Postgres' COPY of the same values (CSV) straight into the table: the limit of any way in. `insert` sends multi-row
INSERTs of 1 000 rows. `cold` stages files; `cold_adopted` also brings them into the lake.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench.contest import contest
from bench.measure import measured
from bench.report import Line, Report

ROWS = 1_000_000
BATCH = 100_000
TOKEN = "load-token-of-the-benchmark"


def main(options: list[str]) -> None:
    """Set up once, let every contestant run, publish."""
    contest("load", options, ROWS, CONTESTANTS, _fill, _publish)


def _publish(found: dict[str, dict[str, float]], rows: int) -> None:
    hot, cold = found["hot"], found["cold_adopted"]
    Report(
        bench="load",
        ours=hot["rate"],
        rivals={name: found[name]["rate"] for name in ("copy", "insert")},
        limit=found["copy"]["rate"],
        peak_rss_mb=hot["peak_rss_mb"],
        per_cpu_second=hot["per_cpu_second"],
        lines=[Line(name, run["rate"], run["per_cpu_second"], run["peak_rss_mb"]) for name, run in found.items()],
        more={
            "rows": rows,
            "batch": BATCH,
            "cold": {
                "staged": round(found["cold"]["rate"]),
                "adopted": round(cold["rate"]),
                "vs_insert": round(cold["rate"] / found["insert"]["rate"], 3),
            },
        },
    ).publish()


def _fill(dsn, rows: int) -> None:
    from modak.postgres.connect import connect

    with connect(dsn, autocommit=True) as conn:
        for name in CONTESTANTS:
            conn.execute(
                f"CREATE TABLE public.b_{name} (id bigint, ts bigint, kind text, amount numeric(12,2), at timestamptz,"
                " PRIMARY KEY (id, ts)) PARTITION BY RANGE (ts)"
            )
            for at in range(3):
                conn.execute(
                    f"CREATE TABLE public.b_{name}_{at} PARTITION OF public.b_{name}"
                    f" FOR VALUES FROM ({at * 1000}) TO ({(at + 1) * 1000})"
                )
            conn.execute(f"INSERT INTO public.b_{name} VALUES (-1, 2500, 'newest', 1, now()), (-2, 1, 'old', 1, now())")


def _rows(start: int, count: int, hot: bool) -> list[tuple[int, int, str, str, str]]:
    base = 2000 if hot else 0
    return [
        (at, base + at % 1000, "view", f"{at % 1000}.50", f"2026-01-01 00:00:{at % 60:02d}+00")
        for at in range(start, start + count)
    ]


def _bodies(home: Path, name: str, rows: int, hot: bool) -> list[Path]:
    folder = home / "bodies" / name
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for start in range(0, rows, BATCH):
        path = folder / f"{start}.jsonl"
        with path.open("w") as file:
            for row in _rows(start, min(BATCH, rows - start), hot):
                file.write(json.dumps(dict(zip(("id", "ts", "kind", "amount", "at"), row, strict=True))) + "\n")
        made.append(path)
    return made


def _loaded(home: Path, rows: int, name: str, *, hot: bool, adopted: bool = False) -> dict[str, float]:
    import modak
    from modak import config
    from modak.core.names import TableName
    from modak.runtime.hosting import loads
    from modak.runtime.leader import Leader
    from modak.runtime.opening import open_site
    from modak.runtime.pulse import Pulse
    from modak.runtime.web.context import Context
    from modak.runtime.web.server import listening
    from modak.tables.load.adopt import adopt
    from modak.tables.registration.register import register
    from modak.tables.registration.request import RegisterRequest
    from modak.tables.tiering.run import tier

    bodies = _bodies(home, name, rows, hot)
    table = TableName("public", f"b_{name}")
    settings = {"MODAK_HOME": str(home), "MODAK_PREMAKE_PARTITIONS": "0", "MODAK_LOAD_TOKEN": TOKEN}
    with open_site(config.load(settings)) as site, Leader.campaign(site, wait_seconds=5) as leader:
        register(site, RegisterRequest(table, ("id",), "ts"))
        tier(site, leader.epoch, table)
        tier(site, leader.epoch, table)
        _ = site.lake
        context = Context(site, Pulse())

        def run() -> int:
            taken = 0
            for number, body in enumerate(bodies):
                answer = modak.load(str(table), body, label=f"batch-{number}", url=url, token=TOKEN)
                taken += answer["hot_rows"] + answer["delta_rows"] + answer["spooled_rows"]
            if adopted:
                adopt(site, leader.epoch, table)
            return taken

        with listening(context, 0, loads(context)) as url:
            taken, used = measured(run)
        assert taken == rows, (taken, rows)
    return _told(rows, used)


def _told(rows: int, used) -> dict[str, float]:
    return {
        "rate": rows / used.seconds,
        "per_cpu_second": rows / max(used.cpu_seconds, 1e-9),
        "peak_rss_mb": used.peak_rss_mb,
    }


def hot(home: Path, rows: int) -> dict[str, float]:
    """Stream Load of recent rows."""
    return _loaded(home, rows, "hot", hot=True)


def cold(home: Path, rows: int) -> dict[str, float]:
    """Stream Load of historical rows, as far as the staged files."""
    return _loaded(home, rows, "cold", hot=False)


def cold_adopted(home: Path, rows: int) -> dict[str, float]:
    """The same with the adoption into the lake."""
    return _loaded(home, rows, "cold_adopted", hot=False, adopted=True)


def copy(home: Path, rows: int) -> dict[str, float]:
    """COPY of the same values into the heap."""
    from modak.postgres.connect import connect
    from modak.postgres.embedded import EmbeddedServer

    texts = [
        "".join(",".join(map(str, row)) + "\n" for row in _rows(start, BATCH, True)) for start in range(0, rows, BATCH)
    ]

    def run() -> None:
        with connect(EmbeddedServer(home).dsn("modak")) as conn:
            for text in texts:
                with conn.cursor().copy("COPY public.b_copy FROM STDIN (FORMAT csv)") as sink:
                    sink.write(text)
                conn.commit()

    _, used = measured(run)
    return _told(rows, used)


def insert(home: Path, rows: int) -> dict[str, float]:
    """INSERT of 1 000 rows at a time."""
    from modak.postgres.connect import connect
    from modak.postgres.embedded import EmbeddedServer

    def run() -> None:
        one = "(%s, %s, %s, %s::numeric, %s::timestamptz)"
        with connect(EmbeddedServer(home).dsn("modak")) as conn:
            for start in range(0, rows, 1000):
                values = _rows(start, 1000, True)
                flat = [value for row in values for value in row]
                conn.execute(f"INSERT INTO public.b_insert VALUES {', '.join([one] * len(values))}", flat)
                conn.commit()

    _, used = measured(run)
    return _told(rows, used)


CONTESTANTS = {"copy": copy, "insert": insert, "hot": hot, "cold": cold, "cold_adopted": cold_adopted}

if __name__ == "__main__":
    main(sys.argv[1:])
