"""A group of real workers on a Postgres of its own, a writer that never stops, and what must hold at the end."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from modak import config
from modak.core.errors import ModakError
from modak.postgres.connect import connect
from modak.postgres.embedded import EmbeddedServer
from modak.runtime.opening import open_site
from tests.tables.events import Events

ROOT = Path(__file__).parents[2]
PATIENCE = 180.0
_AWAY = re.compile("Postgres at .* cannot be reached|connection to Postgres was lost|shutting down|starting up")


class Member:
    """One worker process in a session of its own."""

    def __init__(self, environ: dict[str, str], log: Path) -> None:
        self.log = log
        self.replaced = False
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MODAK_")}
        with log.open("a") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.runtime.member", str(self.port)],
                cwd=ROOT,
                env={**clean, **environ},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def get(self, path: str) -> tuple[int, Any]:
        """An HTTP answer; 0: there is none."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())
        except (OSError, ValueError):
            return 0, None

    def signal(self, number: signal.Signals) -> None:
        """To the whole session: a JVM sleeps and dies with its worker."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(30)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def said(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]


class Group:
    """Members on one database."""

    def __init__(self, folder: Path, *, lease: float, **more: str) -> None:
        home = Path(tempfile.mkdtemp(prefix="modak-test-group-"))
        home.chmod(0o711)
        self.folder, self._home = folder, home
        self.server = EmbeddedServer(home, extra_options={"fsync": "off"})
        self.server.start()
        self.dsn = self.server.dsn()
        self.lease = lease
        self.environ = {
            "MODAK_PG_URL": self.dsn.safe(),
            "MODAK_PG_PASSWORD": self.dsn.password,
            "MODAK_HOME": str(folder / "home"),
            "MODAK_WAREHOUSE": str(folder / "lake"),
            "MODAK_CYCLE_INTERVAL_SECONDS": "0.5",
            "MODAK_PREMAKE_PARTITIONS": "5",
            "MODAK_LEASE_SECONDS": str(lease),
            "MODAK_CAMPAIGN_INTERVAL_SECONDS": str(lease / 3),
            **more,
        }
        self.members: list[Member] = []

    def start(self) -> Member:
        self.members.append(Member(self.environ, self.folder / f"member-{len(self.members)}.log"))
        return self.members[-1]

    def close(self) -> None:
        for member in self.members:
            member.signal(signal.SIGKILL)
            member.process.wait(30)
        self.server.destroy()
        shutil.rmtree(self._home, ignore_errors=True)

    @contextlib.contextmanager
    def site(self) -> Iterator[Any]:
        with open_site(config.load(self.environ)) as opened:
            yield opened

    def revive(self) -> None:
        """Start again whoever came while Postgres was away and left for that reason, as a supervisor would."""
        for each in [member for member in self.members if (member.process.poll() or 0) > 0 and not member.replaced]:
            assert _AWAY.search(each.log.read_text().splitlines()[-1]), each.log.read_text()
            each.replaced = True
            self.start()

    def leads(self) -> Member | None:
        """The member that the lease names."""
        try:
            with connect(self.dsn, autocommit=True) as conn:
                row = conn.execute("SELECT holder FROM modak.leader WHERE expires_at > clock_timestamp()").fetchone()
        except ModakError:
            return None
        pid = int(row[0].split(":")[1]) if row and row[0] else None
        return next((each for each in self.members if each.process.pid == pid and each.process.poll() is None), None)

    def others_ready(self) -> bool:
        """Whether somebody stands by."""
        self.revive()
        leader = self.leads()
        alive = [each for each in self.members if each is not leader and each.process.poll() is None]
        return leader is not None and any(each.get("/readyz")[0] == 200 for each in alive)

    def until(self, holds: Callable[[], object], otherwise: str, patience: float = PATIENCE) -> None:
        deadline = time.monotonic() + patience
        while not holds():
            if time.monotonic() > deadline:
                logs = "\n\n".join(member.log.read_text()[-4000:] for member in self.members)
                raise AssertionError(f"{otherwise}\n{logs}")
            time.sleep(0.1)


class Writer(threading.Thread):
    """Inserts ever newer rows, now and then an old one, and knows what has been committed."""

    def __init__(self, group: Group, seed: int) -> None:
        super().__init__(name="writer", daemon=True)
        self._group = group
        self._random = random.Random(seed)
        self.rows: dict[tuple[int, int], str] = {}
        self.unsure: set[tuple[int, int]] = set()
        self.ended = threading.Event()
        self.next = 251

    def run(self) -> None:
        conn = None
        while not self.ended.is_set():
            new = [(self.next + n, self.next + n, f"row {self.next + n}") for n in range(5)]
            if self.next > 600 and self._random.random() < 0.3:
                old = self._random.randrange(100)
                new.append((1_000_000 + self.next, old, "late"))
            try:
                conn = conn or connect(self._group.dsn)
                conn.execute("SET lock_timeout = '5s'")
                for row in new:
                    conn.execute("INSERT INTO public.events VALUES (%s, %s, %s)", row)
                conn.commit()
                self.rows.update({(row[0], row[1]): row[2] for row in new})
            except Exception:
                # The acknowledgement may be what was lost; such rows may be there or not, but never twice.
                self.unsure.update((row[0], row[1]) for row in new)
                if conn is not None:
                    conn.close()
                conn = None
                self.ended.wait(0.2)
            self.next += 5
            self.ended.wait(0.2)


class Watch(threading.Thread):
    """Looks at the lease again and again, and remembers for how long nobody led while Postgres answered."""

    def __init__(self, group: Group) -> None:
        super().__init__(name="watch", daemon=True)
        self._group = group
        self.ended = threading.Event()
        self.gaps: list[float] = []
        self.epochs: set[int] = set()

    def run(self) -> None:
        since: float | None = None
        while not self.ended.wait(0.1):
            now = time.monotonic()
            try:
                with connect(self._group.dsn, autocommit=True) as conn:
                    row = conn.execute("SELECT epoch, expires_at > clock_timestamp() FROM modak.leader").fetchone()
            except ModakError:
                since = None
                continue
            assert row is not None
            self.epochs.add(int(row[0]))
            if row[1]:
                if since is not None:
                    self.gaps.append(now - since)
                since = None
            elif since is None:
                since = now


def settled(group: Group, events: Events) -> bool:
    """Whether all that is old enough is in the lake, nothing waits and nothing is under way."""
    state = events.site.reader.state(events.name)
    high = events.sql("SELECT max(ts) FROM public.events")[0][0]
    folded = events.sql("SELECT count(*) FROM modak.delta WHERE folded_into IS NULL")[0][0] == 0
    return not state.unfinished and folded and (state.cutline.t or 0) >= high // 100 * 100


def no_operation_was_done_twice(events: Events) -> None:
    """Tiering operations that landed cover the axis without an overlap, and every snapshot has its own operation."""
    ranges = events.sql(
        "SELECT (plan->>'cut_from')::bigint, (plan->>'cut_to')::bigint FROM modak.op_log"
        " WHERE kind = 'tier' AND phase IN ('committed', 'done') ORDER BY 1"
    )
    for (_, upper), (lower, _) in pairwise(ranges):
        assert upper <= lower, ranges
    snapshots = events.sql(
        "SELECT cleanup->>'snapshot' FROM modak.op_log WHERE phase IN ('committed', 'done') AND cleanup ? 'snapshot'"
    )
    assert len(snapshots) == len(set(snapshots))
