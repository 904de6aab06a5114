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
from modak.tables import amend
from modak.tables.fold.run import fold
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.site import Site
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
    senseless: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"id": 1, "ts": 1}, {"bodi": "x"}, "no column 'bodi'"),
        ({"id": 1}, {"body": "x"}, "ts"),
        ({"id": 1, "ts": 1, "body": "row 1"}, {"body": "x"}, "body"),
        ({"id": 1, "ts": 1}, {}, "Nothing"),
        ({"id": 1, "ts": 1}, {"ts": "soon"}, "soon"),
    ]
    for key, changes, what in senseless:
        with pytest.raises((ModakError, UsageError), match=what):
            amend.update(site, cold.name, key, changes)
    assert cold.delta() == {}
    assert cold.sql("SELECT count(*) FROM modak.read_pins") == [(0,)]


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

    original = amend._lake_image
    patched = pytest.MonkeyPatch()
    patched.setattr(amend, "_lake_image", meanwhile)
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

    (image,) = table.sql("SELECT payload FROM modak.delta")
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
    # A document of type json goes through jsonb, which keeps its value but not its blanks.
    assert image[0]["raw"] == '{"b": 2}'
    assert image[0]["touched"] in ("t", "true")
    assert [a for at, a in enumerate(after) if at != 4] == [b for at, b in enumerate(before) if at != 4]
    assert after[2] == Decimal("12.50")
