"""Registering a mirrored table: what it sets up, what it refuses, and that unregistering leaves nothing of it."""

from __future__ import annotations

from typing import Any

import pytest

from modak.core.errors import ModakError, Refused, UsageError
from modak.postgres.changes.publication import find_publications
from modak.tables.mirror.names import slot_name
from modak.tables.registration.register import preflight
from modak.tables.site import Site
from tests.mirror.things import Things


def _objects(things: Things) -> tuple[int, int, int]:
    slots = things.sql("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()")[0][0]
    publications = things.sql("SELECT count(*) FROM pg_publication")[0][0]
    triggers = things.sql(
        "SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal AND tgname LIKE '%modak%'"
        " AND tgrelid::regclass::text NOT LIKE 'modak.%'"
    )[0][0]
    return slots, publications, triggers


def test_registration_sets_up_identity_publication_and_slot_and_copies_the_rows(site: Site) -> None:
    things = Things.plain(site, 100)
    done = things.register()
    assert done.created
    assert done.rows_copied == 100
    assert things.identities() == {"things": "f"}
    with site.connect(autocommit=True) as conn:
        found = find_publications(conn, [things.publication])[things.publication]
    assert (found.relids, found.whole) == ((things.state.table.relid,), True)
    slot = things.slot
    assert slot is not None
    assert not slot.lost
    line = things.state.cutline
    assert line.t is None
    assert line.frontier is not None
    assert line.heal_until is None
    assert things.lake() == things.heap()
    row = site.reader.status()[0]
    assert (row.mode, row.copying, row.mirror_frontier) == ("mirrored", False, line.frontier)


def test_a_mirror_stays_unpartitioned_unless_a_width_is_given(site: Site) -> None:
    plain, wide, none = (Things.ranged(site, name=name) for name in ("plain", "wide", "none"))
    plain.register()
    wide.register(partition_width="100")
    none.register(partition_width="0")
    for things, transform in ((plain, None), (wide, "truncate"), (none, None)):
        lake = site.lake.load(things.state.table.lake)
        assert lake is not None
        assert lake.layout.transform == transform
        assert things.lake() == things.heap()


def test_a_composite_key_of_any_type_is_copied_in_its_order(site: Site) -> None:
    things = Things(site, Things.plain(site, 0, name="other").name, ("tenant", "device"))
    things.name = type(things.name)("public", "things")
    things.sql(
        "CREATE TABLE public.things (tenant text, device uuid, ts date NOT NULL, id int, PRIMARY KEY (tenant, device))"
    )
    things.sql(
        "INSERT INTO public.things SELECT chr(31) || 't\\' || i % 7, md5(i::text)::uuid, date '2024-01-01' + i, i"
        " FROM generate_series(1, 90) AS i"
    )
    things.register(chunk_rows=10)
    chunks = things.chunks()
    assert len(chunks) == 9
    assert [chunk[3] for chunk in chunks] == ["committed"] * 9
    assert sum(chunk[4] for chunk in chunks) == 90
    assert sorted(row[3] for row in things.lake()) == list(range(1, 91))


def test_the_same_registration_again_changes_nothing_and_another_is_refused_by_name(site: Site) -> None:
    things = Things.ranged(site)
    things.register(heap_retention="1000", chunk_rows=77)
    line = things.state.cutline
    again = things.register(heap_retention="1000", chunk_rows=77)
    assert not again.created
    assert things.state.cutline == line
    for other, named in (
        ({"heap_retention": "2000", "chunk_rows": 77}, "--heap-retention is 1000, not 2000"),
        ({"heap_retention": "1000"}, "--chunk-rows is 77, not 50000"),
        ({"heap_retention": "1000", "chunk_rows": 77, "partition_width": "5"}, "--partition-width is 0, not 5"),
    ):
        with pytest.raises(Refused, match=named):
            things.register(**other)


def test_everything_wrong_is_told_in_one_list(site: Site) -> None:
    things = Things(site, Things.plain(site, 0, name="x").name, ("id",))
    things.sql("CREATE UNLOGGED TABLE public.bad (id numeric, ts bigint, body text)")
    things.name = type(things.name)("public", "bad")
    with pytest.raises(Refused) as caught:
        things.register(heap_retention="10")
    for part in (
        "no primary key",
        "may be NULL",
        "unlogged",
        "--heap-retention needs PARTITION BY RANGE",
        "Key column id",
    ):
        assert part in caught.value.message
    assert site.reader.table(things.name) is None


def test_the_preflight_tells_size_time_and_wal_and_what_the_server_lacks(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    things = Things.plain(site, 1000)
    things.sql("ANALYZE public.things")
    found = preflight(site, things.request())
    assert (found.problems, found.rows) == ((), 1000)
    assert found.bytes > 0
    assert found.seconds >= 1
    assert found.wal_bytes >= 0
    assert any("REPLICA IDENTITY FULL" in note for note in found.notes)
    from dataclasses import replace

    from modak.tables.registration import register as module

    really = module.look
    poor: Any = lambda conn, heap: replace(  # noqa: E731
        really(conn, heap), wal_level="replica", free_slots=0, free_senders=0, standby=True, version=120_000
    )
    monkeypatch.setattr(module, "look", poor)
    codes = {problem.code for problem in preflight(site, things.request()).problems}
    assert codes == {"register.wal_level", "register.slots", "register.senders", "register.standby", "register.version"}


@pytest.mark.superuser
def test_missing_privileges_are_problems(site: Site) -> None:
    things = Things.plain(site, 3)
    things.sql("DROP ROLE IF EXISTS modak_poor")
    things.sql("CREATE ROLE modak_poor LOGIN PASSWORD 'x'")
    try:
        from dataclasses import replace

        from modak.postgres.connect import connect
        from modak.postgres.describe import describe
        from modak.tables.mirror.preflight import inspect_mirror, look

        things.sql("GRANT USAGE ON SCHEMA modak, public TO modak_poor")
        things.sql("GRANT SELECT ON ALL TABLES IN SCHEMA modak, public TO modak_poor")
        with connect(replace(site.dsn, user="modak_poor", password="x"), autocommit=True) as conn:
            heap = describe(conn, things.name, "ts")
            found, shape = inspect_mirror(heap, things.request(), None, False, look(conn, heap))
        assert shape is None
        said = " ".join(problem.message for problem in found.problems)
        for part in ("replication slots", "publications", "does not own"):
            assert part in said
    finally:
        things.sql("DROP OWNED BY modak_poor")
        things.sql("DROP ROLE modak_poor")


def test_flags_of_the_other_mode_are_usage_errors(site: Site) -> None:
    things = Things.plain(site, 1)
    with pytest.raises(UsageError, match="--keep-heap is for tiered tables only"):
        things.register(keep_heap=True)
    with pytest.raises(UsageError, match="--lake-retention is for tiered tables only"):
        things.register(lake_retention="5")


def test_unregistering_takes_away_slot_publication_identity_and_triggers(site: Site) -> None:
    things = Things.ranged(site)
    things.sql("ALTER TABLE public.things_100 REPLICA IDENTITY NOTHING")
    things.register(heap_retention="1000")
    assert _objects(things)[:2] == (1, 1)
    assert set(things.identities().values()) == {"f"}
    assert things.sql("SELECT modak.unguarded(table_id) FROM modak.tables") == []
    location = things.state.table.location
    done = things.unregister()
    assert done.kept_location == location
    assert _objects(things) == (0, 0, 0)
    assert things.identities() == {"things": "d", "things_0": "d", "things_100": "n", "things_200": "d"}


def test_unregistering_takes_away_a_slot_from_when_the_database_had_another_name(site: Site) -> None:
    things = Things.plain(site, 10)
    things.register()
    table_id = things.state.table.table_id
    former, other = slot_name(table_id, "as_it_was_called"), slot_name(table_id + 10_000, "as_it_was_called")
    for name in (former, other):
        things.sql(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
    things.unregister()
    left = {name for (name,) in things.sql("SELECT slot_name FROM pg_replication_slots WHERE slot_name LIKE 'modak%'")}
    things.sql(f"SELECT pg_drop_replication_slot('{other}')")
    assert other in left
    assert former not in left


def test_a_lake_that_was_no_plain_mirror_is_not_taken_over(site: Site) -> None:
    things = Things.ranged(site)
    things.register(heap_retention="1000")
    things.unregister()
    with pytest.raises(Refused, match="was not left by a plain mirror"):
        things.register()


def test_a_mirror_that_left_its_lake_is_taken_over_and_only_differences_are_written(site: Site) -> None:
    things = Things.plain(site, 200)
    things.register()
    things.unregister()
    things.sql("UPDATE public.things SET body = 'changed' WHERE id = 7")
    things.sql("DELETE FROM public.things WHERE id = 8")
    things.fill(200, 203)
    again = things.register()
    assert again.created
    assert again.rows_copied == 4
    assert things.lake() == things.heap()


def test_an_open_transaction_makes_registration_wait_and_say_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    things = Things.plain(site, 5)
    monkeypatch.setattr("modak.tables.mirror.replication.TRIES", 2)
    with site.connect() as conn:
        conn.execute("UPDATE public.things SET body = 'open'")
        with pytest.raises(ModakError) as caught:
            things.register()
        assert caught.value.code == "postgres.busy"
        conn.rollback()
    assert things.register().rows_copied == 5
    assert things.lake() == things.heap()
