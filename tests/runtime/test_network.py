"""A worker whose network fails: somebody else leads meanwhile, its own late work is refused, and it comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql

from modak.catalog.write import CatalogWriter
from modak.core.errors import ModakError, NotLeader
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.runtime import daemon
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.runtime.pulse import Pulse
from tests.support.proxy import FaultProxy
from tests.tables.conftest import settings_for

PATIENCE = 120.0


def until(holds: Callable[[], object], otherwise: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


@pytest.fixture
def quick(warehouse: str, tmp_path: Path) -> Callable[[Dsn], Any]:
    def settings(dsn: Dsn) -> Any:
        return settings_for(dsn, warehouse, tmp_path, MODAK_LEASE_SECONDS="2", MODAK_CAMPAIGN_INTERVAL_SECONDS="0.5")

    return settings


def test_a_worker_that_is_cut_off_is_replaced_and_comes_back(
    fresh_database: Dsn, quick: Callable[[Dsn], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "_warm", lambda _site, _pulse: None)
    with FaultProxy(fresh_database.host, fresh_database.port) as proxy:
        behind = replace(fresh_database, port=proxy.port)
        with open_site(quick(behind)) as site, open_site(quick(fresh_database)) as elsewhere:
            pulse, stop = Pulse(site.clock), threading.Event()
            worker = threading.Thread(target=daemon.run, args=(site,), kwargs={"stop": stop, "pulse": pulse})
            worker.start()
            try:
                until(lambda: pulse.role == "leading", "nobody leads")
                first = pulse.epoch
                assert first is not None
                proxy.black_hole()
                with Leader.campaign(elsewhere, PATIENCE) as rival:
                    assert rival.epoch.number == first + 1, "the lease has run out, and somebody else took it"
                    stale = CatalogWriter(fresh_database, replace(rival.epoch, number=first))
                    with pytest.raises(NotLeader), stale.step():
                        pass
                proxy.heal()
                proxy.cut()
                until(lambda: pulse.role == "leading" and (pulse.epoch or 0) > first + 1, "it does not come back")
            finally:
                proxy.heal()
                proxy.cut()
                stop.set()
                worker.join(PATIENCE)
            assert not worker.is_alive()


def test_one_address_that_comes_to_lead_to_another_server_is_followed(
    fresh_database: Dsn, quick: Callable[[Dsn], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "_warm", lambda _site, _pulse: None)
    where = (fresh_database.host, fresh_database.port)
    # Two ways to the one server of the tests stand for the old primary and the new one.
    with (
        FaultProxy(*where) as old,
        FaultProxy(*where) as new,
        FaultProxy("127.0.0.1", old.port) as address,
        open_site(quick(replace(fresh_database, port=address.port))) as site,
    ):
        pulse, stop = Pulse(site.clock), threading.Event()
        worker = threading.Thread(target=daemon.run, args=(site,), kwargs={"stop": stop, "pulse": pulse})
        worker.start()
        try:
            until(lambda: pulse.role == "leading", "nobody leads")
            first = pulse.epoch
            assert first is not None
            old.close()
            until(lambda: pulse.role != "leading", "it leads on a dead server")
            address.lead_to("127.0.0.1", new.port)
            until(lambda: pulse.role == "leading" and (pulse.epoch or 0) > first, "it does not follow the address")
        finally:
            address.lead_to("127.0.0.1", new.port)
            stop.set()
            worker.join(PATIENCE)
        assert not worker.is_alive()


def test_an_address_that_still_leads_to_a_standby_can_be_waited_for(fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute(
            sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(
                sql.Identifier(fresh_database.dbname)
            )
        )
    asked = Dsn.parse(fresh_database.uri() + "?target_session_attrs=read-write")
    with pytest.raises(ModakError) as refusal:
        connect(asked)
    assert (refusal.value.code, refusal.value.retryable) == ("postgres.unreachable", True)


def test_a_leader_that_hears_nothing_knows_by_its_own_clock_that_it_does_not_lead(
    fresh_database: Dsn, quick: Callable[[Dsn], Any]
) -> None:
    with (
        FaultProxy(fresh_database.host, fresh_database.port) as proxy,
        open_site(quick(replace(fresh_database, port=proxy.port))) as site,
        Leader.campaign(site, 5) as leader,
    ):
        proxy.black_hole()
        until(lambda: leader.lost, "it still believes")
        proxy.heal()
        proxy.cut()


def test_a_lease_that_is_let_go_is_taken_at_once(fresh_database: Dsn, warehouse: str, tmp_path: Path) -> None:
    # A standby that slept through its interval would come half an hour later.
    settings = settings_for(
        fresh_database, warehouse, tmp_path, MODAK_LEASE_SECONDS="3600", MODAK_CAMPAIGN_INTERVAL_SECONDS="1800"
    )
    with open_site(settings) as site:
        first = Leader.campaign(site, 5)
        taken: list[int] = []

        def wait() -> None:
            with Leader.campaign(site, 1800) as second:
                taken.append(second.epoch.number)

        with first:
            standby = threading.Thread(target=wait, daemon=True)
            standby.start()
            time.sleep(0.5)
            assert taken == []
        standby.join(PATIENCE)
        assert taken == [first.epoch.number + 1]


def test_a_lease_that_runs_out_is_taken_when_it_does_and_not_an_interval_later(
    fresh_database: Dsn, warehouse: str, tmp_path: Path
) -> None:
    settings = settings_for(
        fresh_database, warehouse, tmp_path, MODAK_LEASE_SECONDS="1900", MODAK_CAMPAIGN_INTERVAL_SECONDS="1800"
    )
    with open_site(settings) as site:
        first = Leader.campaign(site, 5)
        with site.connect(autocommit=True) as conn:
            conn.execute("UPDATE modak.leader SET expires_at = clock_timestamp() + interval '1 second'")
        with Leader.campaign(site, 1800) as second:
            assert second.epoch.number == first.epoch.number + 1
