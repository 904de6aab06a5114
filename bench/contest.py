"""What every benchmark shares: one server, one filled database, and each contestant in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.measure import measured

WARM_RUNS = 3


def contest(bench: str, options: list[str], rows: int, contestants, fill, publish) -> None:
    """Fill a database, let every contestant run in order, publish; or be one contestant, when the options say so."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{bench}")
    parser.add_argument("--rows", type=int, default=rows)
    parser.add_argument("--contestant")
    parser.add_argument("--home")
    known = parser.parse_args(options)
    if known.contestant:
        print(json.dumps(contestants[known.contestant](Path(known.home), known.rows)))
        return
    with tempfile.TemporaryDirectory(prefix="modak-bench-") as folder:
        os.chmod(folder, 0o755)
        home = Path(folder)
        server = started(home)
        try:
            fill(server.dsn("modak"), known.rows)
            found = {name: _in_own_process(bench, name, home, known.rows) for name in contestants}
        finally:
            server.stop()
    publish(found, known.rows)


def started(home: Path):
    """The embedded server of a home folder, running."""
    from modak.postgres.embedded import EmbeddedServer

    server = EmbeddedServer(home)
    server.start()
    return server


def rates(run, rows: int) -> dict[str, dict[str, float]]:
    """Cold once, then the best of a few warm runs."""
    results = []
    for _ in range(1 + WARM_RUNS):
        _, used = measured(run)
        cpu = used.cpu_seconds or 1e-9
        results.append({"rate": rows / used.seconds, "per_cpu_second": rows / cpu, "peak_rss_mb": used.peak_rss_mb})
    return {"cold": results[0], "warm": max(results[1:], key=lambda result: result["rate"])}


def _in_own_process(bench: str, name: str, home: Path, rows: int):
    print(f"running {name} …", file=sys.stderr)
    command = [sys.executable, "-m", f"bench.{bench}", "--contestant", name, "--home", str(home), "--rows", str(rows)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])
