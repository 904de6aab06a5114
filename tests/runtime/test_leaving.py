"""A worker that is told to end lets the lease go on time, whatever its services are still at."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from modak.core.errors import ModakError, NotLeader
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.runtime import daemon, maintaining, working
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.runtime.pulse import STUCK_SECONDS, Pulse
from modak.runtime.stores import Repeating
from modak.tables.site import Site
from tests.tables.conftest import settings_for

LEASE = 2.0


@pytest.fixture
def site(fresh_database: Dsn, warehouse: str, tmp_path: Path) -> Iterator[Site]:
    settings = settings_for(
        fresh_database,
        warehouse,
        tmp_path,
        MODAK_LEASE_SECONDS=str(LEASE),
        MODAK_CAMPAIGN_INTERVAL_SECONDS="1",
        MODAK_LAKE_STATS_INTERVAL_SECONDS="3600",
    )
    with open_site(settings) as opened:
        yield opened


def is_free(site: Site) -> bool:
    with connect(site.dsn, autocommit=True) as conn:
        return conn.execute("SELECT expires_at = '-infinity' FROM modak.leader").fetchone() == (True,)


def until(holds: Any, seconds: float = 60.0) -> float:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds
        time.sleep(0.02)
    return time.monotonic() - began


@contextmanager
def never_ends(_site: Site, leader: Leader) -> Iterator[None]:
    """A service in the middle of something long."""
    release = threading.Event()
    try:
        with Repeating("long", 1.0, lambda: release.wait(120), leader.patience):
            yield
    finally:
        release.set()


def test_the_lease_is_let_go_within_itself_though_a_service_is_busy(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "_warm", lambda _site, _pulse: None)
    monkeypatch.setattr(daemon, "maintaining", never_ends)
    pulse, stop = Pulse(site.clock), threading.Event()
    worker = threading.Thread(target=daemon.run, args=(site,), kwargs={"stop": stop, "pulse": pulse}, daemon=True)
    worker.start()
    until(lambda: pulse.role == "leading")
    until(lambda: [each["kind"] for each in pulse.shown()["running"]].count("long"))
    stop.set()
    assert until(lambda: is_free(site)) < LEASE + 5
    worker.join(30)
    assert not worker.is_alive(), "and the process ends"


def test_a_worker_that_lost_the_lease_campaigns_again_though_its_own_work_is_still_under_way(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "_warm", lambda _site, _pulse: None)
    monkeypatch.setattr(daemon, "maintaining", never_ends)
    pulse, stop = Pulse(site.clock), threading.Event()
    worker = threading.Thread(target=daemon.run, args=(site,), kwargs={"stop": stop, "pulse": pulse}, daemon=True)
    worker.start()
    until(lambda: pulse.role == "leading")
    first = pulse.epoch
    with connect(site.dsn, autocommit=True) as conn:
        # As after a long restart of Postgres: the lease ran out, somebody took it and is gone.
        conn.execute("UPDATE modak.leader SET epoch = epoch + 1, holder = 'somebody', expires_at = '-infinity'")
    assert until(lambda: pulse.role == "leading" and pulse.epoch != first) < 2 * LEASE + 5
    stop.set()
    worker.join(30)
    assert not worker.is_alive()


def test_work_that_comes_after_the_lease_was_let_go_is_refused(site: Site) -> None:
    with Leader.campaign(site, 5) as leader:
        leader.leave_within(60)
        assert leader.ending
        assert not leader.lost
        with site.writer(leader.epoch).step():
            pass
        assert leader.patience() == pytest.approx(61, abs=5)
    with Leader.campaign(site, 5) as leader:
        leader.leave_within(0.1)
        until(lambda: is_free(site))
        assert leader.lost
        with pytest.raises(NotLeader), site.writer(leader.epoch).step():
            pass
    assert is_free(site)


def test_a_standby_with_a_long_interval_is_alive(fresh_database: Dsn, warehouse: str, tmp_path: Path) -> None:
    settings = settings_for(
        fresh_database, warehouse, tmp_path, MODAK_LEASE_SECONDS="3600", MODAK_CAMPAIGN_INTERVAL_SECONDS="1800"
    )
    with open_site(settings) as site, Leader.campaign(site, 5):
        pulse, stop = Pulse(site.clock), threading.Event()
        pulse._beat -= STUCK_SECONDS + 1

        def wait() -> None:
            with pytest.raises(NotLeader):
                Leader.campaign(site, 1800, stop, pulse.beat)

        standby = threading.Thread(target=wait, daemon=True)
        standby.start()
        until(lambda: pulse.live().good)
        stop.set()
        standby.join(30)
        assert not standby.is_alive()


def test_a_table_whose_maintenance_cannot_run_waits_alone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def run(_site: Site, _leader: Leader, name: Any, *_: object) -> None:
        tried.append(str(name))
        if str(name) == "public.broken":
            raise ModakError("lake.broken", "Its lake cannot be opened.", hint="Restore it.")

    class Record:
        def __init__(self, table_id: int, name: str) -> None:
            self.table_id, self.name, self.created_at = table_id, name, site.clock.now()

    tables = [Record(1, "public.broken"), Record(2, "public.sound")]
    with Leader.campaign(site, 5) as leader:
        maintainer = maintaining.Maintainer(site, leader, lambda: False)
        monkeypatch.setattr(maintaining, "run", run)
        monkeypatch.setattr(type(site.reader), "tables", lambda _self: tables)
        monkeypatch.setattr(
            type(site.settings.maintenance), "interval_seconds", property(lambda _self: 0), raising=False
        )
        maintainer.turn()
        maintainer.turn()
        assert tried == ["public.broken", "public.sound", "public.sound"]
        [told] = working.shown()["failing"]
        assert (told["table"], told["code"], told["times"]) == ("public.broken", "lake.broken", 1)
        assert told["hint"] == "Restore it."
        maintainer._again.clear()
        maintainer.turn()
        assert tried.count("public.broken") == 2
        [told] = working.shown()["failing"]
        assert told["times"] == 2
        assert told["again_in_seconds"] > maintaining.FIRST_WAIT_SECONDS
    working.forget()
    assert working.shown()["failing"] == []


def test_a_lead_that_has_run_out_is_told_also_when_work_sees_it_before_the_renewal(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Leader, "_renew", lambda _leader: None)
    with capture_logs() as told, Leader.campaign(site, 5) as leader:
        until(lambda: leader.lost)
        leader.leave_within(1)
    assert [each["epoch"] for each in told if each["event"] == "leader.lost"] == [leader.epoch.number]
