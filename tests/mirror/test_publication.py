"""A publication that somebody tampers with while no worker runs: what was not published is found by a comparison."""

from __future__ import annotations

from contextlib import closing

import pytest

from modak.postgres.changes.publication import find_publications
from modak.runtime.leader import Leader
from modak.tables.mirror.pump.run import Pump
from modak.tables.mirror.replication import marks_of
from modak.tables.site import Site
from tests.mirror.things import Things

UNSEEN = "UPDATE public.things SET body = 'unseen' WHERE id % 50 = 0"


@pytest.mark.parametrize(
    "tampering",
    [
        ("DROP PUBLICATION {p}", UNSEEN, "CREATE PUBLICATION {p} FOR TABLE things WITH (publish_via_partition_root)"),
        ("ALTER PUBLICATION {p} DROP TABLE things", UNSEEN, "ALTER PUBLICATION {p} ADD TABLE things"),
        ("ALTER PUBLICATION {p} DROP TABLE things", UNSEEN),
        pytest.param(
            ("DROP PUBLICATION {p}", UNSEEN, "CREATE PUBLICATION {p} FOR ALL TABLES"), marks=pytest.mark.superuser
        ),
        ("ALTER PUBLICATION {p} SET TABLE things WHERE (id < 10)", UNSEEN),
        ("ALTER PUBLICATION {p} SET TABLE things (id, ts)", "INSERT INTO things VALUES (9001, 9001, 'new')"),
        ("ALTER PUBLICATION {p} SET (publish = 'insert')", UNSEEN),
        (
            "ALTER PUBLICATION {p} SET (publish = 'insert')",
            UNSEEN,
            "ALTER PUBLICATION {p} SET (publish = 'insert, update, delete, truncate')",
        ),
    ],
)
def test_changes_that_were_not_published_are_found_by_a_comparison(
    site: Site, leader: Leader, tampering: tuple[str, ...]
) -> None:
    things = Things.plain(site, 300)
    things.register()
    things.pump(leader)
    for statement in tampering:
        things.sql(statement.format(p=things.publication))
    things.fill(300, 305)
    assert _anchored_anew(things, leader)
    things.sql("DELETE FROM public.things WHERE id = 7")
    assert not _anchored_anew(things, leader)
    assert things.lake() == things.heap()
    with site.connect(autocommit=True) as conn:
        (found,) = find_publications(conn, [things.publication]).items()
    assert marks_of(things.state.cutline) == {found[0]: found[1].mark}
    assert (found[1].relids, found[1].whole) == ((things.state.table.relid,), True)


def test_a_table_that_was_renamed_stays_published(site: Site, leader: Leader) -> None:
    things = Things.plain(site, 30)
    things.register()
    things.sql("ALTER TABLE public.things RENAME TO stuff")
    things.sql("UPDATE public.stuff SET body = 'after' WHERE id = 3")
    assert not _anchored_anew(things, leader)


def _anchored_anew(things: Things, leader: Leader) -> bool:
    """Follow the changes as a new worker would; whether it began with a comparison."""
    with closing(Pump(things.site, leader.epoch, things.state.table.table_id)) as pump:
        first = pump.turn()
        while pump.turn().changes:
            pass
    return first.reanchored
