"""Another mode for a table in place, tiered with its heap kept and mirrored, there and back."""

from __future__ import annotations

import pytest

from modak.catalog import pins
from modak.catalog.mirrors import MirrorHealth, note_health
from modak.core.errors import Refused
from modak.runtime.leader import Leader
from modak.tables.mirror.convert import convert
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.site import Site
from modak.tables.status import TableStatus, collect_one
from modak.tables.tiering.run import tier
from tests.mirror.things import Things


@pytest.fixture
def kept(site: Site, leader: Leader) -> Things:
    """A tiered table that keeps its heap, two of three partitions in the lake, corrections waiting in the delta."""
    things = Things.ranged(site)
    register(site, RegisterRequest(things.name, ("id",), "ts", keep_heap=True))
    tier(site, leader.epoch, things.name)
    things.sql("UPDATE public.things SET body = 'corrected' WHERE id = 50")
    things.sql("DELETE FROM public.things WHERE id = 51")
    return things


def test_a_table_that_keeps_its_heap_becomes_a_mirror_and_back(kept: Things, leader: Leader) -> None:
    site = kept.site
    assert kept.sql("SELECT count(*) FROM modak.delta")[0][0] == 2
    rows = convert(site, kept.name, "mirrored")
    # What the lake had is not written again: the correction and the hot partition are all that it lacked.
    assert rows == 51
    state = kept.state
    assert (state.table.mode, state.table.keep_heap, state.cutline.t) == ("mirrored", False, None)
    assert kept.lake() == kept.heap()
    assert kept.sql("SELECT count(*) FROM pg_trigger WHERE tgname = '!modak_capture'") == [(0,)]
    assert kept.sql("SELECT count(*) FROM modak.delta") == [(0,)]
    kept.sql("UPDATE public.things SET body = 'followed' WHERE id IN (60, 240)")
    kept.pump(leader)
    assert kept.lake() == kept.heap()
    _tell(kept, "it stands")
    assert "it stands" in str(_status(kept).problems)

    assert convert(site, kept.name, "tiered") == 0
    # The thread that has just followed it may still have a word to say.
    _tell(kept, "too late")
    status, state = _status(kept), kept.state
    assert (status.mirror_lag_bytes, status.problems) == (None, ())
    assert (state.table.mode, state.table.keep_heap, state.cutline.frontier) == ("tiered", True, None)
    assert kept.sql("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == [(0,)]
    tier(site, leader.epoch, kept.name)
    assert kept.state.cutline.t == 200
    assert kept.lake() == [row for row in kept.heap() if row[1] < 200]


def test_a_mirror_has_nothing_left_of_the_diversion_in_its_default_partition(site: Site) -> None:
    things = Things.ranged(site)
    things.sql("CREATE TABLE public.things_rest PARTITION OF public.things DEFAULT")
    register(site, RegisterRequest(things.name, ("id",), "ts", keep_heap=True))
    diverting = "SELECT count(*) FROM pg_trigger WHERE tgname LIKE '~modak_divert%'"
    assert things.sql(diverting) == [(2,)]
    convert(site, things.name, "mirrored")
    assert things.sql(diverting) == [(0,)]
    assert things.sql("SELECT count(*) FROM modak.diversions") == [(0,)]


def _tell(things: Things, error: str) -> None:
    with things.site.connect(autocommit=True) as conn:
        note_health(conn, MirrorHealth(table_id=things.state.table.table_id, error=error, lag_bytes=5))


def _status(things: Things) -> TableStatus:
    status = collect_one(things.site, things.name)
    assert status is not None
    return status


def test_what_only_the_lake_has_keeps_a_table_from_becoming_a_mirror(site: Site, leader: Leader) -> None:
    things = Things.ranged(site)
    register(site, RegisterRequest(things.name, ("id",), "ts"))
    with pytest.raises(Refused, match="does not keep its heap"):
        convert(site, things.name, "mirrored")


def test_a_reader_and_a_dropped_partition_forbid_the_change(kept: Things, leader: Leader) -> None:
    pin = pins.begin(kept.site.dsn, kept.name)
    with pytest.raises(Refused, match="is being read"):
        convert(kept.site, kept.name, "mirrored")
    with kept.site.connect(autocommit=True) as conn:
        pins.end(conn, pin.pin_id)
    kept.sql("DROP TABLE public.things_0")
    tier(kept.site, leader.epoch, kept.name)
    with pytest.raises(Refused, match="rows that its heap does not have"):
        convert(kept.site, kept.name, "mirrored")
    assert kept.state.table.mode == "tiered"


def test_heap_retention_has_no_way_back(site: Site) -> None:
    things = Things.ranged(site)
    things.register(heap_retention="1000")
    with pytest.raises(Refused, match="not complete any more"):
        convert(site, things.name, "tiered")


def test_the_same_mode_again_is_refused(site: Site) -> None:
    things = Things.plain(site, 5)
    things.register()
    with pytest.raises(Refused, match="mirrored already"):
        convert(site, things.name, "mirrored")
    with pytest.raises(Refused, match="not partitioned"):
        convert(site, things.name, "tiered")


def test_a_mirror_with_rows_from_the_beginning_of_time_does_not_become_tiered(site: Site) -> None:
    things = Things.ranged(site)
    things.sql("CREATE TABLE public.things_old PARTITION OF public.things FOR VALUES FROM (MINVALUE) TO (0)")
    things.sql("INSERT INTO public.things VALUES (-1, -1, 'old')")
    things.register()
    with pytest.raises(Refused, match="starts at MINVALUE and holds rows"):
        convert(site, things.name, "tiered")
    assert things.state.table.mode == "mirrored"
    assert things.lake() == things.heap()
