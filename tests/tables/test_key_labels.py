"""Enums as keys: refused, and watched where a table was registered before they were."""

from __future__ import annotations

import pytest

from modak.core.errors import Refused
from modak.core.names import TableName
from modak.runtime.leader import Leader
from modak.tables.fold.run import fold
from modak.tables.registration.register import preflight, register
from modak.tables.registration.request import RegisterRequest
from modak.tables.site import Site
from modak.tables.status import collect
from tests.tables.events import Events

REQUEST = RegisterRequest(TableName("public", "events"), ("id", "mood"), "ts")


@pytest.fixture
def moods(site: Site) -> Events:
    events = Events(site, REQUEST.table)
    events.sql("CREATE TYPE public.mood AS ENUM ('sad', 'glad')")
    events.sql("CREATE DOMAIN public.feeling AS public.mood")
    events.sql(
        "CREATE TABLE public.events (id bigint, mood public.feeling, ts bigint, PRIMARY KEY (id, mood, ts))"
        " PARTITION BY RANGE (ts)"
    )
    for lower in (0, 100, 200):
        events.add_partition(lower)
    events.sql("INSERT INTO public.events SELECT i, 'sad', i FROM generate_series(0, 150) AS i")
    return events


@pytest.fixture
def known(moods: Events, leader: Leader, monkeypatch: pytest.MonkeyPatch) -> Events:
    """As it was registered when enums were allowed; its first partition is in the lake."""
    with monkeypatch.context() as earlier:
        earlier.setattr("modak.tables.registration.preflight.identity_refusal", lambda _: None)
        register(moods.site, REQUEST)
    assert moods.tier(leader).moved_partitions == ("events_0",)
    return moods


@pytest.mark.parametrize("mode", ["tiered", "mirrored"])
def test_a_table_with_an_enum_in_its_key_is_refused_by_name(moods: Events, mode: str) -> None:
    found = preflight(moods.site, RegisterRequest(REQUEST.table, REQUEST.pk, REQUEST.tier_key, mode=mode))
    (problem,) = found.problems
    assert problem.code == "register.key_type"
    assert problem.message.startswith("Key column mood is an enum, whose labels can be renamed")
    assert problem.hint == "Use a text column with a CHECK constraint for it."


def test_a_renamed_label_of_a_key_stops_every_commit_until_it_has_its_name_again(known: Events, leader: Leader) -> None:
    known.sql("INSERT INTO public.events VALUES (250, 'glad', 250)")
    known.sql('SELECT modak_delete(\'public.events\', \'{"id": 7, "mood": "sad"}\', 7)')
    known.sql("ALTER TYPE public.mood RENAME VALUE 'sad' TO 'blue'")
    said = "Label 'sad' of the key column mood was renamed to 'blue'"
    for act in (lambda: known.tier(leader), lambda: fold(known.site, leader.epoch, known.name)):
        with pytest.raises(Refused, match=said) as refused:
            act()
        assert refused.value.hint == "Rename it back: ALTER TYPE public.mood RENAME VALUE 'blue' TO 'sad'."
    assert sum(problem.startswith(said) for problem in collect(known.site)[0].problems) == 1
    assert len(known.lake()) == 100

    known.sql("ALTER TYPE public.mood RENAME VALUE 'blue' TO 'sad'")
    assert not any(problem.startswith(said) for problem in collect(known.site)[0].problems)
    assert known.tier(leader).moved_partitions == ("events_100",)
    assert fold(known.site, leader.epoch, known.name).rows == 1
    assert sorted(row[0] for row in known.lake()) == [n for n in range(151) if n != 7]


def test_a_new_label_is_known_from_the_first_commit_after_it(known: Events, leader: Leader) -> None:
    known.sql("ALTER TYPE public.mood ADD VALUE 'calm'")
    known.sql("INSERT INTO public.events VALUES (151, 'calm', 151), (250, 'calm', 250)")
    assert known.tier(leader).rows == 52
    known.sql("ALTER TYPE public.mood RENAME VALUE 'calm' TO 'quiet'")
    known.sql("INSERT INTO public.events VALUES (300, 'sad', 299)")
    known.add_partition(300)
    known.sql("INSERT INTO public.events VALUES (301, 'sad', 301)")
    with pytest.raises(Refused, match="Label 'calm' of the key column mood was renamed to 'quiet'"):
        known.tier(leader)
