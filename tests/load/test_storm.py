"""Many loaders, random retries, dying leaders: every label exactly once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.loads import adopt_all
from modak.runtime.opening import open_site
from modak.tables.repair import repair
from modak.tables.site import Site
from tests.load.conftest import TOKEN, Api, serving
from tests.tables.conftest import settings_for
from tests.tables.events import Events


def _rows(loader: int, batch: int, size: int, hot: bool) -> list[dict[str, object]]:
    base = 1_000_000 + loader * 100_000 + batch * 1_000
    return [
        {"id": base + at, "ts": 200 + at % 50 if hot else at % 200, "body": f"{loader}/{batch}"} for at in range(size)
    ]


def _load_until_accepted(
    url: str, label: str, rows: list[dict[str, object]], chance: random.Random
) -> dict[str, object]:
    body = "".join(json.dumps(row) + "\n" for row in rows).encode()
    headers = {"X-Modak-Token": TOKEN, "X-Modak-Label": label}
    until = time.monotonic() + 600
    while time.monotonic() < until:
        try:
            hasty = chance.random() < 0.2
            answer = httpx.post(
                f"{url}/api/load/public.events", content=body, headers=headers, timeout=0.05 if hasty else 120
            )
        except httpx.HTTPError:
            continue
        if answer.status_code == 200:
            if chance.random() < 0.3:
                again = httpx.post(f"{url}/api/load/public.events", content=body, headers=headers, timeout=120)
                assert again.status_code != 200 or again.json()["replay"], again.text
            found: dict[str, object] = answer.json()
            return found
        assert answer.status_code in (409, 429, 503), answer.text
        time.sleep(chance.uniform(0.01, 0.2))
    raise AssertionError(f"{label} was never accepted")


def _storm(api: Api, site: Site, events: Events, loaders: int, batches: int, seed: int) -> set[tuple[int, int, str]]:
    wrong: list[BaseException] = []
    wanted: set[tuple[int, int, str]] = set()
    lock = threading.Lock()

    def one(loader: int) -> None:
        chance = random.Random(seed + loader)
        try:
            for batch in range(batches):
                rows = _rows(loader, batch, chance.choice([3, 15]), chance.random() < 0.4)
                _load_until_accepted(api.url, f"{loader}-{batch}", rows, chance)
                with lock:
                    wanted.update((row["id"], row["ts"], row["body"]) for row in rows)  # type: ignore[misc]
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=one, args=(loader,)) for loader in range(loaders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(900)
    assert not wrong, (seed, wrong[:3])
    return wanted


def test_some_loaders_at_once_each_label_once(api: Api, site: Site, leader: Leader, events: Events) -> None:
    seed = random.randrange(2**32)
    base = events.everything()
    wanted = _storm(api, site, events, 6, 3, seed)
    while adopt_all(site, leader):
        pass
    assert events.everything() == base | wanted, seed
    labels = events.sql("SELECT count(*), count(DISTINCT label) FROM modak.load_labels WHERE state = 'committed'")
    assert labels == [(18, 18)]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_fifty_loaders_with_retries_and_leader_kills(
    fresh_database: Dsn, warehouse: str, spark_home: Path, gateway: object
) -> None:
    seed = random.randrange(2**32)
    environ = {
        "MODAK_LOAD_TOKEN": TOKEN,
        "MODAK_LOAD_SPOOL_THRESHOLD": "10",
        "MODAK_LEASE_SECONDS": "2",
        "MODAK_CAMPAIGN_INTERVAL_SECONDS": "0.5",
    }
    with open_site(settings_for(fresh_database, warehouse, spark_home, **environ)) as site:
        events = Events.create(site)
        events.register()
        with Leader.campaign(site, 30) as leader:
            events.tier(leader)
        base = events.everything()
        stop = threading.Event()
        killer = threading.Thread(
            target=_kill_leaders, args=(stop, fresh_database, warehouse, spark_home, environ, seed), daemon=True
        )
        killer.start()
        with serving(site) as url:
            wanted = _storm(Api(url), site, events, 50, 4, seed)
        stop.set()
        killer.join(120)
        with Leader.campaign(site, 60) as leader:
            repair(site, leader.epoch)
            while adopt_all(site, leader):
                pass
        assert events.everything() == base | wanted, seed
        assert events.sql("SELECT count(*) FROM modak.load_labels WHERE state <> 'committed'") == [(0,)]


def _kill_leaders(
    stop: threading.Event, dsn: Dsn, warehouse: str, home: Path, environ: dict[str, str], seed: int
) -> None:
    chance = random.Random(seed)
    settings = {
        "MODAK_PG_URL": dsn.safe(),
        "MODAK_PG_PASSWORD": dsn.password,
        "MODAK_WAREHOUSE": warehouse,
        "MODAK_HOME": str(home),
        **environ,
    }
    while not stop.is_set():
        process = subprocess.Popen([sys.executable, "-m", "tests.load.adopter"], env={**os.environ, **settings})
        stop.wait(chance.uniform(8, 20))
        process.send_signal(signal.SIGKILL)
        process.wait()
