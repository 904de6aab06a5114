"""Leadership by a lease row: one leader at a time, every leadership a new epoch, never behind a pooler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, cast

import psycopg
import pytest

from modak.catalog.lease import Lease
from modak.core.errors import ModakError, Refused
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn

Conn = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def _nobody_leads(conn: Conn) -> Iterator[None]:
    yield
    conn.execute("UPDATE modak.leader SET expires_at = '-infinity'")


def test_one_leads_and_the_other_waits(catalog: Dsn) -> None:
    one, two = Lease(catalog, "one", 30), Lease(catalog, "two", 30)
    first = one.campaign()
    assert first is not None
    assert one.epoch == first
    assert two.campaign() is None
    assert one.campaign() is None
    assert one.renew()
    assert not two.renew()
    one.release()
    second = two.campaign()
    assert second is not None
    assert second.number == first.number + 1
    assert one.epoch is None
    two.release()


def test_a_lapsed_lease_cannot_be_renewed_even_if_nobody_took_it(catalog: Dsn) -> None:
    lease = Lease(catalog, "slow", 0.3)
    first = lease.campaign()
    time.sleep(0.4)
    assert lease.epoch is None
    assert not lease.renew()
    again = lease.campaign()
    assert first is not None
    assert again is not None
    assert again.number == first.number + 1
    lease.release()


def test_renewal_keeps_the_lease_beyond_its_first_length(catalog: Dsn) -> None:
    lease, rival = Lease(catalog, "steady", 0.5), Lease(catalog, "rival", 0.5)
    assert lease.campaign()
    for _ in range(4):
        time.sleep(0.2)
        assert lease.renew()
        assert rival.campaign() is None
    lease.release()
    rival.close()


def test_a_leader_that_was_overtaken_cannot_renew_or_release_the_others_lease(catalog: Dsn, conn: Conn) -> None:
    old = Lease(catalog, "old", 0.2)
    assert old.campaign()
    time.sleep(0.3)
    new = Lease(catalog, "new", 30)
    assert new.campaign()
    assert not old.renew()
    old.release()
    assert new.renew()
    new.release()


def test_a_commit_of_our_own_does_not_cost_the_lease(catalog: Dsn) -> None:
    lease = Lease(catalog, "busy", 2)
    assert lease.campaign()
    with connect(catalog) as committing:
        committing.execute("SELECT FROM modak.leader FOR SHARE")
        assert lease.renew()
    lease.release()


def test_a_lost_connection_is_an_error_to_try_again_and_the_lease_stays(catalog: Dsn, conn: Conn) -> None:
    lease = Lease(catalog, "cut", 30)
    assert lease.campaign()
    conn.execute("SELECT pg_terminate_backend(backend_pid, 2000) FROM modak.leader")
    with pytest.raises(ModakError) as lost:
        lease.renew()
    assert lost.value.retryable
    assert lease.renew()
    lease.release()


class TransactionPool:
    """What a transaction pooler does: every transaction of a client may get another backend."""

    def __init__(self, *backends: Conn) -> None:
        self._backends = backends
        self._turn = 0

    def execute(self, *what: Any) -> psycopg.Cursor[Any]:
        self._turn += 1
        return self._backends[self._turn % len(self._backends)].execute(*what)

    closed = False

    def close(self) -> None:
        pass

    def __enter__(self) -> TransactionPool:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_backend_that_changes_between_transactions_is_refused(catalog: Dsn, conn: Conn) -> None:
    with connect(catalog, autocommit=True) as one, connect(catalog, autocommit=True) as two:
        pool = cast("Conn", TransactionPool(one, two))
        lease = Lease(catalog, "pooled", 30, open_connection=lambda _: pool)
        with pytest.raises(Refused) as refused:
            [lease.campaign() for _ in range(3)]
        assert refused.value.code == "lease.pooler"


def test_a_pooler_with_one_idle_backend_is_found_out_too(catalog: Dsn, conn: Conn) -> None:
    pool = cast("Conn", TransactionPool(conn))
    with pytest.raises(Refused) as refused:
        Lease(catalog, "pooled", 30, open_connection=lambda _: pool).campaign()
    assert refused.value.code == "lease.pooler"
