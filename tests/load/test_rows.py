"""Rows that only Postgres can refuse: each is told by its line and counts as any other bad row."""

from __future__ import annotations

import json

import pytest

from modak.runtime.leader import Leader
from modak.tables.site import Site
from tests.load.conftest import Api, adopted
from tests.tables.events import Events

STRICT = """
    CREATE TYPE public.mood AS ENUM ('sad', 'happy');
    ALTER TABLE public.events ADD COLUMN mood public.mood, ADD COLUMN code varchar(3),
        ADD CONSTRAINT short CHECK (length(body) < 20 AND body NOT LIKE 'x%'), ALTER body SET NOT NULL
"""


@pytest.mark.parametrize("where", [210, 10])
def test_what_postgres_refuses_has_a_line_and_counts_for_the_ratio(api: Api, events: Events, where: int) -> None:
    events.sql(STRICT)
    good = {"id": 1000, "ts": where, "body": "fine", "mood": "sad"}
    lines = [
        good,
        {**good, "id": 1001, "body": None},
        {**good, "id": 1002, "body": "x-rated"},
        {**good, "id": 1003, "mood": "angry"},
        {**good, "id": 1004, "code": "abcdef"},
        {**good, "body": "again"},
        "nonsense",
        {**good, "id": 1005, "code": "abc"},
    ]
    body = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines).encode()
    before = events.everything()
    refused = api.post(body, "strict", params={"max_error_ratio": "0.74"})
    assert refused.status_code == 400
    assert (refused.json()["error"], refused.json()["rejected_rows"]) == ("load.bad_rows", 6)
    assert [(row["line"], row["reason"]) for row in refused.json()["rows"]] == [
        (2, "column body is NULL"),
        (3, "it violates check constraint short"),
        (4, 'column mood: invalid input value for enum mood: "angry"'),
        (5, "column code: value too long for type character varying(3)"),
        (6, "its key comes again, first on line 1"),
        (7, "is not a JSON object"),
    ]
    assert events.everything() == before
    done = api.post(body, "strict", params={"max_error_ratio": "0.75"})
    assert (done.status_code, done.json()["rejected_rows"]) == (200, 6), done.text
    assert (done.json()["hot_rows"], done.json()["delta_rows"]) == ((2, 0) if where >= 200 else (0, 2))
    kept = {row[0]: row[2] for row in events.everything() if row[0] >= 1000}
    assert kept == {1000: "fine", 1005: "fine"}


def test_a_large_cold_batch_without_its_bad_rows_is_staged_as_any_other(
    api: Api, site: Site, leader: Leader, events: Events
) -> None:
    rows = [{"id": 1000 + at, "ts": at, "body": "loaded"} for at in range(30)]
    rows[20] = {**rows[3], "body": "again"}
    body = "".join(json.dumps(row) + "\n" for row in rows).encode()
    refused = api.post(body, "big")
    assert refused.json()["rows"] == [{"line": 21, "reason": "its key comes again, first on line 4"}]
    done = api.post(body, "big", params={"max_error_ratio": "0.1"}).json()
    assert (done["state"], done["spooled_rows"], done["rejected_rows"]) == ("staged", 29, 1)
    assert adopted(site, leader, events).labels == 1
    assert {row[0]: row[2] for row in events.lake() if row[0] >= 1000} == {
        1000 + at: "loaded" for at in range(30) if at != 20
    }


def test_what_only_the_whole_table_can_tell_refuses_the_batch(api: Api, events: Events) -> None:
    events.sql("CREATE UNIQUE INDEX ON public.events (body, ts)")
    before = events.everything()
    body = b'{"id": 1000, "ts": 210, "body": "same"}\n{"id": 1001, "ts": 210, "body": "same"}\n'
    refused = api.post(body, "unique", params={"max_error_ratio": "1"})
    assert (refused.status_code, refused.json()["error"]) == (400, "load.refused")
    assert "unique constraint" in refused.json()["message"]
    assert events.everything() == before
