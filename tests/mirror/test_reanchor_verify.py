"""Verify, status and reads of mirrored tables."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

import modak
from modak.core.errors import ModakError, Refused
from modak.core.names import TableName
from modak.runtime.leader import Leader
from modak.tables.mirror import audit as auditing
from modak.tables.site import Site
from modak.tables.status import collect
from modak.tables.tiering.run import tier
from modak.tables.verify.repair import repair_differing
from modak.tables.verify.run import Limits, verify
from tests.mirror.things import Things


def _break(things: Things) -> None:
    """Somebody changes rows that the change stream does not show."""
    things.lose_slot()
    things.sql("UPDATE public.things SET body = 'unseen' WHERE id = 17")
    things.sql("DELETE FROM public.things WHERE id = 18")
    things.sql("INSERT INTO public.things VALUES (5000, 5, 'unseen')")
    line = things.state.cutline
    with things.site.writer(None).step() as tx:
        # As if the mirror had come this far without seeing them.
        tx.move(line, replace(line, frontier="FFFF/0"))


def test_a_mirror_that_has_followed_is_equal(site: Site, leader: Leader) -> None:
    things = Things.ranged(site)
    things.register()
    things.sql("UPDATE public.things SET body = NULL WHERE id % 10 = 0")
    things.pump(leader)
    report = verify(site, things.name)
    assert report.sound
    assert report.compared_rows == 250
    assert [(band.heap_rows, band.lake_rows) for band in report.bands if band.heap_rows] == [
        (100, 100),
        (100, 100),
        (50, 50),
    ]


def test_rows_that_are_only_on_their_way_do_not_count(
    site: Site, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    things = Things.plain(site, 100)
    things.register()
    things.sql("UPDATE public.things SET body = 'on its way' WHERE id < 10")
    # The mirror comes when it is waited for.
    really = auditing.wait_for

    def wait(site: Site, name: TableName, position: int, patience: float) -> None:
        things.pump(leader)
        really(site, name, position, patience)

    monkeypatch.setattr(auditing, "wait_for", wait)
    report = verify(site, things.name)
    assert report.sound
    assert report.compared_rows == 100


def test_a_mirror_that_does_not_come_is_said_to_be_behind(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    things = Things.plain(site, 10)
    things.register()
    things.sql("UPDATE public.things SET body = 'never' WHERE id = 1")
    monkeypatch.setattr(auditing, "PATIENCE_SECONDS", 0.3)
    with pytest.raises(ModakError, match="has not come to the present"):
        verify(site, things.name)


def test_what_differs_is_named_and_mended_by_the_daemon_when_asked(site: Site, leader: Leader) -> None:
    things = Things.plain(site, 100)
    things.register()
    _break(things)
    report = verify(site, things.name, Limits(), repair_differing)
    assert not report.sound
    assert report.differing_rows == 3
    found = {(each.kind, each.key, each.column) for each in report.differences}
    assert found == {("changed", "17", "body"), ("extra", "18", None), ("missing", "5000", None)}
    assert report.notes
    assert things.sql("SELECT reason FROM modak.mirror_diffs") == [("verify has found differences",)]
    things.cycle(leader)
    assert things.lake() == things.heap()
    assert verify(site, things.name).sound


def test_a_part_of_the_bands_can_be_verified(site: Site) -> None:
    things = Things.ranged(site)
    things.register()
    report = verify(site, things.name, Limits(since=150))
    assert report.sound
    assert report.compared_rows == 100
    assert verify(site, things.name, Limits(sample=0.2)).skipped_bands > 0


def test_verify_of_a_table_that_is_still_copied_says_so(site: Site) -> None:
    things = Things.plain(site, 10)
    things.register()
    line = things.state.cutline
    with site.writer(None).step() as tx:
        tx.move(line, replace(line, frontier=None))
    with pytest.raises(ModakError, match="has not landed yet"):
        verify(site, things.name)
    assert any("first copy has not landed" in problem for problem in collect(site)[0].problems)


def test_the_status_of_a_mirror_shows_its_size_and_no_problem_of_a_grid(site: Site) -> None:
    things = Things.plain(site, 100)
    ranged = Things.ranged(site, 250, name="gaps")
    ranged.sql("DROP TABLE public.gaps_100")
    things.register()
    ranged.register()
    for row in collect(site):
        assert (row.mode, row.cut_line, row.problems) == ("mirrored", None, ())
        assert row.heap_bytes > 0
        assert row.lake_rows in (100, 150)


def test_a_busy_table_is_equal_while_it_is_pumped(site: Site, leader: Leader) -> None:
    things = Things.plain(site, 500)
    things.register()
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            things.sql(f"UPDATE public.things SET body = 'busy {number}' WHERE id = {number % 500}")

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        with things.followed(leader):
            report = auditing.audit(site, things.name)
    finally:
        stop.set()
        writer.join(60)
    assert report.differing_rows == 0
    assert report.findings == ()


def test_a_mirror_is_not_tiered_by_hand(site: Site, leader: Leader) -> None:
    things = Things.ranged(site)
    things.register(heap_retention="100")
    with pytest.raises(Refused, match="in the lake already"):
        tier(site, leader.epoch, things.name)


@pytest.mark.spark
def test_mirrors_read_from_the_heap_or_across_the_seam(site: Site, leader: Leader) -> None:
    plain = Things.ranged(site, name="plain")
    plain.sql("ALTER TABLE public.plain DETACH PARTITION public.plain_200")
    plain.sql(
        "CREATE TABLE public.deep PARTITION OF public.plain FOR VALUES FROM (200) TO (300) PARTITION BY HASH (id)"
    )
    for at in range(2):
        plain.sql(f"CREATE TABLE public.deep_{at} PARTITION OF public.deep FOR VALUES WITH (MODULUS 2, REMAINDER {at})")
    plain.fill(200, 260)
    plain.register()
    things = Things.ranged(site, 450, partitions=5)
    things.register(heap_retention="100")
    everything = set(things.heap())
    for _ in range(2):
        things.cycle(leader)
        things.pump(leader)
    things.cycle(leader)
    assert len(things.heap()) == 150
    with modak.snapshot(site.spark, settings=site.settings) as at:
        assert {tuple(row) for row in at.read("public.plain").collect()} == set(plain.heap())
        assert {tuple(row) for row in at.read("public.things").collect()} == everything
    things.sql("SELECT modak_delete('public.things', '30', 30)")
    gone = {(30, 30, "row 30")}
    with things.followed(leader):
        frame = modak.read_lake(site.spark, "public.things", settings=site.settings)
    assert {tuple(row) for row in frame.collect()} == everything - gone
    with plain.followed(leader):
        some = modak.read_lake(site.spark, "public.plain", ["id"], "ts >= 90 AND ts < 110", settings=site.settings)
    assert {row[0] for row in some.collect()} == set(range(90, 110))
    report = verify(site, things.name)
    assert report.sound
    assert report.compared_rows == 150
    assert report.lake_only_rows == 300
    assert verify(site, plain.name).sound
