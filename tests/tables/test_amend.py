"""`modak.update`, `upsert` and `delete`: a single row is changed wherever it is, and nobody's change is overwritten."""

from __future__ import annotations

import threading
from datetime import date
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import SparkSession

import modak
from modak.core import faults
from modak.core.errors import ModakError, Refused, UsageError
from modak.core.faults import Fault, InjectedFault
from modak.core.names import TableName
from modak.runtime.leader import Leader
from modak.tables import amend, images
from modak.tables.fold.run import fold
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.site import Site
from tests.maintenance import foreign
from tests.maintenance.lake import Lake
from tests.tables.events import Events

VISITED = {"amend.before_commit", "amend.after_commit", "amend.before_call", "amend.after_call"}


@pytest.fixture
def cold(events: Events, leader: Leader) -> Events:
    """Rows 0…199 are in the lake only."""
    events.register()
    events.tier(leader)
    assert events.sql("SELECT min(ts) FROM public.events") == [(200,)]
    return events


def _key(number: int) -> dict[str, Any]:
    return {"id": number, "ts": number}


def test_a_hot_row_is_updated_in_the_heap(cold: Events, site: Site) -> None:
    assert amend.update(site, cold.name, _key(220), {"body": "new"}) == "heap"
    assert cold.sql("SELECT body FROM public.events WHERE id = 220") == [("new",)]


def test_a_row_that_only_the_lake_has_keeps_what_is_not_changed(cold: Events, site: Site) -> None:
    cold.sql("ALTER TABLE public.events ADD COLUMN note text DEFAULT 'as it was'")
    assert amend.update(site, cold.name, _key(50), {"body": "new"}) == "delta"
    assert cold.delta() == {("50", 50): {"id": "50", "ts": "50", "body": "new", "note": "as it was"}}


def test_a_second_update_builds_on_the_first(cold: Events, site: Site, leader: Leader) -> None:
    cold.sql("ALTER TABLE public.events ADD COLUMN note text")
    amend.update(site, cold.name, _key(50), {"body": "first"})
    amend.update(site, cold.name, _key(50), {"note": "second"})
    assert cold.delta()["50", 50] == {"id": "50", "ts": "50", "body": "first", "note": "second"}
    fold(site, leader.epoch, cold.name)
    amend.update(site, cold.name, _key(50), {"body": "third"})
    assert cold.delta()["50", 50] == {"id": "50", "ts": "50", "body": "third", "note": "second"}


def test_an_update_of_the_key_moves_the_row(cold: Events, site: Site) -> None:
    assert amend.update(site, cold.name, _key(50), {"ts": 60}) == "delta"
    assert cold.delta() == {("50", 50): None, ("50", 60): {"id": "50", "ts": "60", "body": "row 50"}}
    assert amend.update(site, cold.name, _key(51), {"ts": 230}) == "heap"
    assert cold.delta()["51", 51] is None
    assert cold.sql("SELECT * FROM public.events WHERE id = 51") == [(51, 230, "row 51")]


def test_a_row_that_is_not_there_is_named_and_never_made(cold: Events, site: Site) -> None:
    assert amend.delete(site, cold.name, _key(30)) == "delta"
    assert amend.delete(site, cold.name, _key(210)) == "heap"
    for at in (30, 30), (210, 210), (77, 78), (999, 220):
        with pytest.raises(Refused, match=f"id = {at[0]}"):
            amend.update(site, cold.name, {"id": at[0], "ts": at[1]}, {"body": "x"})
    assert cold.delta() == {("30", 30): None}


def test_what_cannot_be_meant_is_refused(cold: Events, site: Site) -> None:
    cold.sql("ALTER TABLE public.events ADD length int GENERATED ALWAYS AS (length(body)) STORED")
    senseless: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"id": 1, "ts": 1}, {"bodi": "x"}, "no column 'bodi'"),
        ({"id": 1}, {"body": "x"}, "ts"),
        ({"id": 1, "ts": 1, "body": "row 1"}, {"body": "x"}, "body"),
        ({"id": 1, "ts": 1}, {}, "Nothing"),
        ({"id": 1, "ts": 1}, {"ts": "soon"}, "soon"),
        ({"id": 1, "ts": 1}, {"ts": None}, "cannot be NULL"),
        ({"id": 1, "ts": 1}, {"length": 2}, "'length' of public.events is generated"),
    ]
    for key, changes, what in senseless:
        with pytest.raises((ModakError, UsageError), match=what):
            amend.update(site, cold.name, key, changes)
    assert cold.delta() == {}
    assert cold.sql("SELECT count(*) FROM modak.read_pins") == [(0,)]


def test_a_file_with_deletes_of_another_tool_is_not_read(cold: Events, site: Site, leader: Leader) -> None:
    foreign.equality_delete(Lake(cold, leader), [[77]])
    with pytest.raises(Refused) as refused:
        amend.update(site, cold.name, _key(50), {"body": "new"})
    assert refused.value.code == "amend.foreign_deletes"
    assert amend.upsert(site, cold.name, {**_key(50), "body": "new"}) == "delta"
    assert amend.update(site, cold.name, _key(50), {"body": "newer"}) == "delta"
    assert cold.delta() == {("50", 50): {"id": "50", "ts": "50", "body": "newer"}}


def test_updates_of_one_row_by_many_at_once_all_count(cold: Events, site: Site) -> None:
    cold.sql("ALTER TABLE public.events ADD COLUMN " + ", ADD COLUMN ".join(f"n{i} int DEFAULT 0" for i in range(4)))
    amend.update(site, cold.name, _key(50), {"n0": 0})
    failures: list[BaseException] = []

    def work(column: str) -> None:
        try:
            amend.update(site, cold.name, _key(50), {column: 1})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"n{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    image = cold.delta()["50", 50]
    assert image is not None
    assert not failures
    assert [image[f"n{i}"] for i in range(4)] == ["1"] * 4


def test_a_correction_and_a_fold_between_reading_and_writing_are_not_overwritten(
    cold: Events, site: Site, leader: Leader
) -> None:
    cold.sql("ALTER TABLE public.events ADD COLUMN note text")
    once: list[str] = []

    def meanwhile(*given: Any) -> Any:
        if not once:
            once.append("lake")
            amend.upsert(site, cold.name, {"id": 50, "ts": 50, "body": "theirs", "note": "theirs"})
            fold(site, leader.epoch, cold.name)
        return original(*given)

    original = images.lake_image
    patched = pytest.MonkeyPatch()
    patched.setattr(images, "lake_image", meanwhile)
    try:
        amend.update(site, cold.name, _key(50), {"body": "ours"})
    finally:
        patched.undo()
    assert once == ["lake"]
    image = cold.delta()["50", 50]
    assert image is not None
    assert (image["body"], image["note"]) == ("ours", "theirs")


def test_a_crash_leaves_all_of_the_change_or_nothing(cold: Events, site: Site) -> None:
    for number, point in enumerate(sorted(VISITED)):
        faults.arm(Fault(point))
        try:
            with pytest.raises(InjectedFault):
                _correct(site, cold, number, whole_row=point.endswith("call"))
        finally:
            faults.arm(None)
        assert ((str(number), number) in cold.delta()) == (".after" in point), point


def _correct(site: Site, events: Events, number: int, *, whole_row: bool) -> str:
    if whole_row:
        return amend.upsert(site, events.name, {**_key(number), "body": "new"})
    return amend.update(site, events.name, _key(number), {"body": "new"})


def test_an_image_older_than_a_rename_keeps_its_values(cold: Events, site: Site, leader: Leader) -> None:
    cold.sql("ALTER TABLE public.events ADD COLUMN note text, ADD COLUMN extra text DEFAULT 'then'")
    amend.upsert(site, cold.name, {**_key(51), "body": "kept"})
    fold(site, leader.epoch, cold.name)
    amend.upsert(site, cold.name, {**_key(50), "body": "kept", "extra": "lost with its column"})
    cold.sql("ALTER TABLE public.events RENAME body TO text")
    cold.sql("ALTER TABLE public.events DROP extra")
    cold.sql("ALTER TABLE public.events ADD extra text DEFAULT 'again', ADD COLUMN n int NOT NULL DEFAULT 5")
    cold.sql("ALTER TABLE public.events ALTER n SET DEFAULT 6, ALTER extra SET DEFAULT 'later'")
    amend.update(site, cold.name, _key(50), {"note": "x"})
    expected = {"id": "50", "ts": "50", "text": "kept", "note": "x", "extra": "again", "n": "5"}
    assert cold.delta()["50", 50] == expected
    amend.update(site, cold.name, _key(50), {"n": 7})
    assert cold.delta()["50", 50] == {**expected, "n": "7"}
    amend.update(site, cold.name, _key(51), {"n": 7})
    assert cold.delta()["51", 51] == {**expected, "id": "51", "ts": "51", "note": None, "n": "7"}


def test_columns_that_swapped_their_names_are_told_apart_in_an_older_image(
    cold: Events, site: Site, leader: Leader
) -> None:
    cold.sql("ALTER TABLE public.events ADD a text, ADD b text, ADD note text")
    amend.update(site, cold.name, _key(50), {"a": "first", "b": "second"})
    fold(site, leader.epoch, cold.name)
    amend.update(site, cold.name, _key(50), {"a": "First"})
    for rename in ("a TO spare", "b TO a", "spare TO b"):
        cold.sql(f"ALTER TABLE public.events RENAME {rename}")
    amend.update(site, cold.name, _key(50), {"note": "x"})
    image = cold.delta()["50", 50]
    assert image is not None
    assert (image["a"], image["b"]) == ("second", "First")


def test_a_column_added_again_does_not_show_what_the_lake_has_under_its_name(
    cold: Events, site: Site, leader: Leader
) -> None:
    cold.sql("ALTER TABLE public.events ADD extra text")
    amend.update(site, cold.name, _key(50), {"extra": "old"})
    fold(site, leader.epoch, cold.name)
    cold.sql("ALTER TABLE public.events DROP extra")
    cold.sql("ALTER TABLE public.events ADD extra text")
    amend.update(site, cold.name, _key(50), {"body": "new"})
    assert cold.delta()["50", 50] == {"id": "50", "ts": "50", "body": "new", "extra": None}


def test_what_is_not_changed_keeps_its_letters(events: Events, site: Site, leader: Leader) -> None:
    events.sql("ALTER TABLE public.events ADD doc jsonb NOT NULL DEFAULT 'null', ADD raw json, ADD odd json")
    raw, odd = '{"b":1,"a":2,"a":3}', '{"a": "\\u0000"}'
    events.sql(f"UPDATE public.events SET raw = '{raw}', odd = '{odd}'")
    events.register()
    events.tier(leader)
    for body in ("from the lake", "from the delta"):
        assert amend.update(site, events.name, _key(50), {"body": body}) == "delta"
        image = events.delta()["50", 50]
        assert image == {"id": "50", "ts": "50", "body": body, "doc": "null", "raw": raw, "odd": odd}
    amend.update(site, events.name, _key(50), {"raw": None, "doc": {"a": 1}})
    image = events.delta()["50", 50]
    assert image is not None
    assert (image["doc"], image["raw"], image["odd"]) == ('{"a": 1}', None, odd)
    assert amend.update(site, events.name, _key(240), {"ts": 60}) == "delta"
    assert events.delta()["240", 60] == {
        "id": "240", "ts": "60", "body": "row 240", "doc": "null", "raw": raw, "odd": odd
    }  # fmt: skip


@pytest.mark.parametrize("transparent", [False, True], ids=["no spill", "a spill"])
def test_an_update_of_the_key_moves_a_row_between_the_tiers(cold: Events, site: Site, transparent: bool) -> None:
    if transparent:
        cold.sql("SELECT modak.modak_enable_transparent_writes('public.events')")
    assert amend.update(site, cold.name, _key(220), {"ts": 60, "body": "cold now"}) == "delta"
    assert amend.update(site, cold.name, _key(61), {"ts": 230}) == "heap"
    assert amend.update(site, cold.name, _key(221), {"ts": 231}) == "heap"
    assert amend.update(site, cold.name, _key(222), {"ts": 222, "body": "stays"}) == "heap"
    assert cold.sql("SELECT * FROM public.events WHERE id IN (61, 220, 221, 222) ORDER BY id") == [
        (61, 230, "row 61"),
        (221, 231, "row 221"),
        (222, 222, "stays"),
    ]
    assert cold.delta() == {("220", 60): {"id": "220", "ts": "60", "body": "cold now"}, ("61", 61): None}
    with pytest.raises(Refused, match="id = 220, ts = 220"):
        amend.update(site, cold.name, _key(220), {"ts": 60})


def test_a_row_moves_onto_no_other_row(cold: Events, site: Site) -> None:
    cold.sql("INSERT INTO public.events VALUES (70, 230, 'hot')")
    amend.upsert(site, cold.name, {"id": 70, "ts": 80, "body": "corrected"})
    for goal in 230, 80:
        with pytest.raises(Refused) as refused:
            amend.update(site, cold.name, _key(70), {"ts": goal})
        assert refused.value.code == "amend.key_taken"
    for key, goal in ((70, 230), _key(70)), ((70, 80), _key(70)), ((70, 230), {"id": 201, "ts": 201}):
        with pytest.raises(Refused, match="already") as refused:
            amend.update(site, cold.name, {"id": key[0], "ts": key[1]}, goal)
        assert refused.value.code == "amend.key_taken"
    assert cold.delta() == {("70", 80): {"id": "70", "ts": "80", "body": "corrected"}}
    assert cold.sql("SELECT body FROM public.events WHERE id = 70") == [("hot",)]
    amend.delete(site, cold.name, _key(70))
    assert amend.update(site, cold.name, {"id": 70, "ts": 230}, {"ts": 70}) == "delta"
    assert cold.delta()["70", 70] == {"id": "70", "ts": "70", "body": "hot"}


def test_numbers_that_json_does_not_know_are_taken(cold: Events, site: Site) -> None:
    cold.sql("ALTER TABLE public.events ADD f float8, ADD many float8[]")
    inf, nan = float("inf"), float("nan")
    for number in 220, 50:
        for value, text in (nan, "NaN"), (inf, "Infinity"), (-inf, "-Infinity"):
            amend.update(site, cold.name, _key(number), {"f": value, "many": [1.5, value]})
            shown = (
                [tuple(row) for row in cold.sql("SELECT f::text, many::text FROM public.events WHERE id = 220")]
                if number == 220
                else [tuple((cold.delta()["50", 50] or {}).get(name) for name in ("f", "many"))]
            )
            assert shown == [(text, "{1.5," + text + "}")]
    amend.upsert(site, cold.name, {**_key(51), "f": nan, "many": (nan,)})
    assert cold.delta()["51", 51] == {"id": "51", "ts": "51", "body": None, "f": "NaN", "many": "{NaN}"}


def test_every_value_of_a_wide_row_survives_the_way_through_the_lake(
    site: Site, leader: Leader, spark: SparkSession
) -> None:
    name = TableName("public", "wide")
    table = Events(site, name)
    table.sql(
        "CREATE TABLE public.wide (id uuid, day date, amount numeric(12,2), doc jsonb, raw json, tags text[],"
        " nums int[], at timestamptz, bin bytea, f real, touched boolean DEFAULT false,"
        " twice numeric GENERATED ALWAYS AS (amount * 2) STORED, PRIMARY KEY (id, day)) PARTITION BY RANGE (day)"
    )
    for low, high in (("2024-01-01", "2024-01-02"), ("2024-01-02", "2024-01-03"), ("2024-01-03", "2024-01-04")):
        table.sql(
            f"CREATE TABLE public.\"wide_{low}\" PARTITION OF public.wide FOR VALUES FROM ('{low}') TO ('{high}')"
        )
    row = (
        "('00000000-0000-0000-0000-00000000000a', '2024-01-01', 12.50, '{\"a\": [1, 1e400]}', '{\"b\":  2}',"
        " '{a,\"b c\",NULL,\"\\\"\"}', '{1,NULL}', 'infinity', '\\x00ff', 0.1)"
    )
    table.sql(f"INSERT INTO public.wide VALUES {row}")
    table.sql("INSERT INTO public.wide (id, day) VALUES ('00000000-0000-0000-0000-00000000000b', '2024-01-03')")
    columns = "id, day, amount, doc, raw::text, tags, nums, at::text, bin, f, twice"
    (before,) = table.sql(f"SELECT {columns} FROM public.wide WHERE day = '2024-01-01'")

    register(site, RegisterRequest(name, ("id",), "day"))
    table.tier(leader)
    assert table.sql("SELECT count(*) FROM public.wide WHERE day = '2024-01-01'") == [(0,)]

    key = {"id": "00000000-0000-0000-0000-00000000000a", "day": date(2024, 1, 1)}
    assert modak.update("public.wide", key, {"touched": True}, spark=spark, settings=site.settings) == "delta"

    ((image,),) = table.sql("SELECT payload FROM modak.delta")
    table.sql("CREATE TABLE public.back (LIKE public.wide)")
    with site.connect(autocommit=True) as conn:
        conn.execute(
            "INSERT INTO public.back SELECT r.* FROM modak.delta d,"
            " jsonb_to_record(d.payload || jsonb_build_object('doc', (d.payload->>'doc')::jsonb, 'raw', NULL)) AS r("
            "id uuid, day date, amount numeric(12,2), doc jsonb, raw json, tags text[], nums int[], at timestamptz,"
            " bin bytea, f real, touched boolean, twice numeric)"
        )
    shown = columns.replace("raw::text", "NULL")
    (after,) = table.sql(f"SELECT {shown} FROM public.back")
    assert image["raw"] == '{"b":  2}'
    assert image["touched"] in ("t", "true")
    assert [a for at, a in enumerate(after) if at != 4] == [b for at, b in enumerate(before) if at != 4]
    assert after[2] == Decimal("12.50")
