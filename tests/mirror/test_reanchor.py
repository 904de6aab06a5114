"""A lost slot, and leaves that come and go without a word: heap and lake are compared, and only differences written."""

from __future__ import annotations

import pytest

from modak.core.errors import Refused
from modak.lake.model import LakeFile
from modak.postgres.changes.lsn import read_lsn
from modak.runtime.leader import Leader
from modak.tables.mirror.compare import Stretch
from modak.tables.mirror.cycle import Apart, leaf_changes
from modak.tables.mirror.leaves import TrueLeaf
from modak.tables.mirror.reanchor import reanchor, slot_trouble
from modak.tables.site import Site
from tests.mirror.things import Things


def _leaf(oid: int, lower: int | None, upper: int | None, attachment: str = "1", pages: int = 1) -> TrueLeaf:
    from modak.core.names import TableName

    name = TableName("public", f"leaf_{oid}")
    return TrueLeaf(oid, name, oid, "r", "p", oid, pages, pages * 8192, 1.0, attachment, lower, upper)


def _stretches(found: tuple[Apart, ...]) -> list[tuple[int | None, int | None]]:
    return [(apart.stretch.lower, apart.stretch.upper) for apart in found]


def test_leaves_that_came_or_went_name_their_stretch() -> None:
    known = {1: (Stretch(0, 10), "1"), 2: (Stretch(10, 20), "1")}
    same = (_leaf(1, 0, 10), _leaf(2, 10, 20))
    assert leaf_changes(known, same, None) == ()
    assert _stretches(leaf_changes(known, (*same, _leaf(3, 20, 30)), None)) == [(20, 30)]
    assert leaf_changes(known, (*same, _leaf(3, 20, 30, pages=0)), None) == ()
    assert _stretches(leaf_changes(known, same[:1], None)) == [(10, 20)]
    assert _stretches(leaf_changes(known, (same[0], _leaf(2, 10, 20, "2")), None)) == [(10, 20)]
    assert _stretches(leaf_changes(known, (same[0], _leaf(2, 30, 40, "2")), None)) == [(30, 40), (10, 20)]
    assert leaf_changes({1: (Stretch(0, 10), "")}, same[:1], None) == ()
    assert _stretches(leaf_changes({9: (Stretch(None, None), "1")}, (), None)) == [(None, None)]


def test_what_heap_retention_has_retired_is_never_compared() -> None:
    known = {1: (Stretch(0, 10), "1"), 2: (Stretch(10, 20), "1"), 3: (Stretch(None, None), "1")}
    assert _stretches(leaf_changes(known, (), 15)) == [(15, 20), (15, None)]


def test_a_slot_that_cannot_be_followed_says_why(site: Site) -> None:
    things = Things.plain(site, 10)
    things.register()
    state = things.state
    frontier = state.cutline.frontier
    assert slot_trouble(site, state.table, frontier) is None
    assert "begins after" in (slot_trouble(site, state.table, "0/1") or "")
    assert "another server" in (slot_trouble(site, state.table, "FFFFFFFF/0") or "")
    things.lose_slot()
    assert slot_trouble(site, state.table, frontier) == "its replication slot is gone"


def test_after_a_lost_slot_only_what_differs_is_written(site: Site, leader: Leader) -> None:
    things = Things.plain(site, 2000)
    things.register()
    things.lose_slot()
    things.sql("UPDATE public.things SET body = 'unseen' WHERE id IN (5, 500)")
    things.sql("UPDATE public.things SET ts = ts + 7 WHERE id = 501")
    things.sql("UPDATE public.things SET id = 5000 WHERE id = 502")
    things.sql("DELETE FROM public.things WHERE id IN (1, 999)")
    things.fill(2000, 2003)
    before = _paths(things)
    assert reanchor(site, leader.epoch, things.state.table) == 7
    assert things.lake() == things.heap()
    assert before < _paths(things)
    slot = things.slot
    assert slot is not None
    assert read_lsn(things.state.cutline.frontier) == slot.confirmed_lsn
    things.sql("UPDATE public.things SET body = 'seen' WHERE id = 5")
    things.pump(leader)
    assert things.lake() == things.heap()


def test_after_a_lost_slot_nothing_is_written_where_nothing_differs(site: Site, leader: Leader) -> None:
    things = Things.plain(site, 50)
    things.register()
    snapshot = things.state.cutline.snapshot_id
    things.lose_slot()
    assert reanchor(site, leader.epoch, things.state.table) == 0
    assert things.state.cutline.snapshot_id == snapshot
    assert slot_trouble(site, things.state.table, things.state.cutline.frontier) is None
    assert site.reader.unfinished_ops() == ()


def test_reanchoring_brings_columns_that_were_added_meanwhile(site: Site, leader: Leader) -> None:
    things = Things.plain(site, 30)
    things.register()
    things.lose_slot()
    things.sql("ALTER TABLE public.things ADD COLUMN colour text DEFAULT 'red'")
    things.sql("UPDATE public.things SET colour = NULL WHERE id = 3")
    reanchor(site, leader.epoch, things.state.table)
    assert things.lake() == things.heap()


def test_a_row_that_stands_twice_in_the_lake_is_mended(site: Site, leader: Leader) -> None:
    things = Things.plain(site, 20)
    things.register()
    things.lose_slot()
    things.sql("DELETE FROM public.things")
    assert reanchor(site, leader.epoch, things.state.table) == 0
    assert things.lake() == []


def test_an_attached_leaf_with_rows_is_compared_and_no_other(site: Site, leader: Leader) -> None:
    things = Things.ranged(site)
    things.register()
    things.pump(leader)
    things.sql("CREATE TABLE public.apart (LIKE public.things INCLUDING ALL)")
    things.sql("INSERT INTO public.apart SELECT i, 300 + i, 'apart' FROM generate_series(1, 50) AS i")
    things.sql("ALTER TABLE public.things ATTACH PARTITION public.apart FOR VALUES FROM (300) TO (400)")
    before = _paths(things)
    assert things.cycle(leader).noted == ("public.apart was attached",)
    things.sql("UPDATE public.things SET body = 'after' WHERE id = 7 AND ts >= 300")
    things.sql("DELETE FROM public.things WHERE id = 8 AND ts >= 300")
    things.fill(390, 395)
    things.pump(leader)
    report = things.cycle(leader)
    # What the change stream has brought since is there already.
    assert report.mended_rows == 48
    assert things.state.cutline.heal_until is not None
    assert before < _paths(things)
    things.pump(leader)
    assert things.lake() == things.heap()
    assert things.identities()["apart"] == "f"
    assert things.cycle(leader).noted == ()


def test_a_detached_leaf_leaves_the_lake_even_with_changes_on_the_way(site: Site, leader: Leader) -> None:
    things = Things.ranged(site)
    things.register()
    things.pump(leader)
    things.sql("UPDATE public.things SET body = 'last' WHERE id = 110")
    things.sql("ALTER TABLE public.things DETACH PARTITION public.things_100")
    assert things.cycle(leader).mended_rows == 0
    assert len(things.lake()) == 250
    things.pump(leader)
    things.cycle(leader)
    assert things.lake() == things.heap()
    assert len(things.lake()) == 150
    things.sql("UPDATE public.things_100 SET body = 'while apart' WHERE id = 120")
    things.sql("ALTER TABLE public.things ATTACH PARTITION public.things_100 FOR VALUES FROM (100) TO (200)")
    things.cycle(leader)
    things.pump(leader)
    things.cycle(leader)
    assert things.lake() == things.heap()
    assert len(things.lake()) == 250


def test_a_leaf_that_was_apart_between_two_looks_is_noticed(site: Site, leader: Leader) -> None:
    things = Things.ranged(site)
    things.register()
    things.cycle(leader)
    things.sql("ALTER TABLE public.things DETACH PARTITION public.things_100")
    things.sql("UPDATE public.things_100 SET body = 'unseen' WHERE id = 150")
    things.sql("ALTER TABLE public.things ATTACH PARTITION public.things_100 FOR VALUES FROM (100) TO (200)")
    assert things.cycle(leader).noted == ("public.things_100 was detached and attached again",)
    things.pump(leader)
    assert things.cycle(leader).mended_rows == 1
    assert things.lake() == things.heap()


def test_a_leaf_cannot_be_truncated_alone_but_the_table_can(site: Site, leader: Leader) -> None:
    import psycopg

    things = Things.ranged(site)
    things.register()
    with pytest.raises(psycopg.Error, match=r"cannot truncate public\.things_100 alone"):
        things.sql("TRUNCATE public.things_100")
    things.sql("BEGIN; TRUNCATE public.things; COMMIT")
    with pytest.raises(psycopg.Error, match="alone"):
        things.sql("BEGIN; TRUNCATE public.things; TRUNCATE public.things_0; COMMIT")
    things.pump(leader)
    assert things.heap() == things.lake() == []


def test_a_column_of_another_type_and_one_made_anew_are_followed(site: Site, leader: Leader) -> None:
    things = Things.plain(site, 5)
    things.sql("ALTER TABLE public.things ADD COLUMN colour text DEFAULT 'red'")
    things.register()
    things.lose_slot()
    things.sql("ALTER TABLE public.things ALTER COLUMN body TYPE int USING length(body)")
    things.sql("ALTER TABLE public.things DROP COLUMN colour")
    things.sql("ALTER TABLE public.things ADD COLUMN colour int DEFAULT 7")
    reanchor(site, leader.epoch, things.state.table)
    assert things.lake() == things.heap()
    table = site.lake.load(things.state.table.lake)
    assert table is not None
    assert [column.name for column in table.schema] == ["id", "ts", "body", "colour"]
    things.sql("UPDATE public.things SET body = 8 WHERE id = 3")
    things.pump(leader)
    assert things.lake() == things.heap()


def test_a_key_of_another_type_is_refused_by_name(site: Site, leader: Leader) -> None:
    things = Things.plain(site, 5)
    things.register()
    things.lose_slot()
    things.sql("ALTER TABLE public.things ALTER COLUMN id TYPE text")
    with pytest.raises(Refused, match="id"):
        reanchor(site, leader.epoch, things.state.table)


def _paths(things: Things) -> set[str]:
    state = things.state
    files: list[LakeFile] = list(things.site.lake.files(state.table.lake, state.cutline.snapshot_id))
    return {file.file.path for file in files}
