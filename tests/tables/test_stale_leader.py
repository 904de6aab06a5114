"""A leader that was overtaken changes nothing in Postgres either: every DDL of a pass holds its epoch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from modak.catalog import spill
from modak.catalog.write import CatalogWriter
from modak.core import faults
from modak.core.errors import NotLeader
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.site import Site
from modak.tables.tidy import open_spill
from tests.tables.conftest import settings_for
from tests.tables.events import Events
from tests.tables.invariants import Invariants

OVERTAKEN = "UPDATE modak.leader SET epoch = epoch + 1, holder = 'another', expires_at = now() + interval '1 hour'"
FREE = "UPDATE modak.leader SET expires_at = '-infinity'"
ROWS = {(i, i, f"row {i}") for i in range(251)}
SEEN = """
    SELECT c.oid::int8, c.relname, pg_get_expr(c.relpartbound, c.oid), h.inhdetachpending
    FROM pg_class c LEFT JOIN pg_inherits h ON h.inhrelid = c.oid
    WHERE c.relkind = 'r' AND c.relname LIKE 'events%'
    UNION ALL SELECT t.oid::int8, t.tgname, t.tgenabled::text, false FROM pg_trigger t WHERE t.tgname LIKE '%modak%'
    UNION ALL SELECT s.table_id, s.spill_oid::text, s.upper_bound::text, false FROM modak.spills s
    UNION ALL SELECT p.leaf_oid::int8, p.partition_name, p.state, false FROM modak.partitions p
    ORDER BY 1, 2
"""


@pytest.fixture
def site(fresh_database: Dsn, warehouse: str, spark_home: Path, gateway: object) -> Iterator[Site]:
    settings = settings_for(fresh_database, warehouse, spark_home, MODAK_PREMAKE_PARTITIONS="1")
    with open_site(settings) as opened:
        yield opened


class Overtaking:
    """Another worker takes the lease at the moment that this one comes to a point; what it saw then is kept."""

    def __init__(self, events: Events, point: str) -> None:
        self._events, self._point = events, point
        self.saw: list[tuple[Any, ...]] | None = None

    def __call__(self, reached: str) -> None:
        if reached == self._point and self.saw is None:
            self._events.sql(OVERTAKEN)
            self.saw = self._events.sql(SEEN)


@pytest.mark.parametrize(
    ("point", "default"),
    [
        ("partitions.before_sync", False),
        ("premake.before_attach", False),
        ("seal.before_trigger", False),
        ("reclaim.before_detach", False),
        ("reclaim.before_detach", True),
        ("reclaim.before_drop", False),
        ("spill.before_widen", False),
    ],
)
def test_a_leader_that_is_overtaken_in_a_pass_leaves_the_heap_alone(
    site: Site, events: Events, warehouse: str, point: str, default: bool
) -> None:
    if default:
        # With one, partitions are detached in a transaction; without, beside one.
        events.sql("CREATE TABLE public.events_rest PARTITION OF public.events DEFAULT")
    events.register()
    overtaking = Overtaking(events, point)
    faults.watch(overtaking)
    with Leader.campaign(site, 5) as first, pytest.raises(NotLeader) as refused:
        events.tier(first)
    faults.watch(None)
    assert refused.value.code == "lease.lost"
    assert overtaking.saw is not None
    assert events.sql(SEEN) == overtaking.saw

    events.sql(FREE)
    with Leader.campaign(site, 5) as second:
        while events.tier(second).changed:
            pass
    assert events.everything() == ROWS
    truth = Invariants(site.dsn, warehouse)
    truth.check_journal()
    if not default:
        truth.check_partitions()


def test_a_leader_that_falls_asleep_in_its_ddl_is_not_waited_for(site: Site, events: Events) -> None:
    events.register()
    with Leader.campaign(site, 5) as first, site.connect() as conn:
        CatalogWriter(site.dsn, first.epoch, idle_millis=300).hold(conn)
        # It waits for the end of that transaction, and gets the lease.
        events.sql(OVERTAKEN)
        with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
            conn.execute("SELECT 1")
    events.sql(FREE)
    with Leader.campaign(site, 5) as second:
        assert second.epoch.number > first.epoch.number


def test_a_leader_that_was_overtaken_makes_no_spill(site: Site, events: Events) -> None:
    events.register()
    with site.connect(autocommit=True) as conn:
        assert spill.disable(conn, events.name)
        with Leader.campaign(site, 5) as first:
            events.sql(OVERTAKEN)
            with pytest.raises(NotLeader):
                open_spill(site, site.writer(first.epoch), events.name)
        table_id = site.reader.state(events.name).table.table_id
        assert spill.find(conn, table_id) is None
        assert open_spill(site, site.writer(None), events.name) is None
        assert spill.find(conn, table_id) is not None
