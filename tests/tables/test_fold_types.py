"""Folding keys and values of every kind: what the trigger wrote down as text is in the lake what it was in the heap."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest

from modak.core.names import TableName
from modak.runtime.leader import Leader
from modak.tables.fold.run import fold
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.site import Site
from modak.tables.tiering.run import tier

pytestmark = pytest.mark.spark

NAME = TableName("public", "odd")
ODD = ["", "plain", "back\\slash", "\\", "\x1f", "a\x1fb", "\\\x1f\\", "quote's", "näh"]
CREATE = """
CREATE TABLE public.odd (
    tenant text NOT NULL, code uuid NOT NULL, n numeric(6,2) NOT NULL, at {tier} NOT NULL, padded char(4), net inet,
    small smallint, price numeric(12,3), ratio double precision, ok boolean, raw bytea, day date, seen timestamp,
    tags text[], doc jsonb, "Odd ""Name" text, PRIMARY KEY (tenant, code, n, at)
) PARTITION BY RANGE (at);
"""
ROW = """
    %s, gen_random_uuid(), i / 4.0, {at}, 'ab', '10.0.0.1', i, i * 1.5, i / 3.0, i %% 2 = 0, decode('00ff', 'hex'),
    date '2024-02-29' + i, timestamp '2024-01-01' + i * interval '1 second', ARRAY['a,b', NULL, '"', 'x{{'],
    jsonb_build_object('k', i), 'it''s'
"""


def _table(site: Site, tier_type: str, bounds: list[str], at: str) -> None:
    with site.connect(autocommit=True) as conn:
        conn.execute(CREATE.format(tier=tier_type).encode())
        for number, (low, high) in enumerate(pairwise(bounds)):
            leaf = f"CREATE TABLE public.odd_{number} PARTITION OF public.odd"
            conn.execute(f"{leaf} FOR VALUES FROM ('{low}') TO ('{high}')".encode())
        for text in ODD:
            insert = f"INSERT INTO public.odd SELECT {ROW.format(at=at)} FROM generate_series(0, 9) AS i"
            conn.execute(insert.encode(), (text,))
        top = f"INSERT INTO public.odd (tenant, code, n, at) VALUES ('top', gen_random_uuid(), 0, '{bounds[-2]}')"
        conn.execute(top.encode())


def _heap(site: Site, below: str) -> list[str]:
    columns = (
        "tenant, code, n, at, padded::text, net::text, small, price, ratio, ok, raw, day, seen, tags, doc::text,"
        ' "Odd ""Name"'
    )
    with site.connect(autocommit=True) as conn:
        rows = conn.execute(f"SELECT {columns} FROM public.odd WHERE at < '{below}'".encode()).fetchall()
    return sorted(repr(tuple(_plain(value) for value in row)) for row in rows)


def _lake(site: Site) -> list[str]:
    from pyiceberg.table import StaticTable

    table = StaticTable.from_metadata(site.reader.state(NAME).cutline.metadata_location).scan().to_arrow()
    return sorted(repr(tuple(_plain(value) for value in row.values())) for row in table.to_pylist())


def _plain(value: Any) -> Any:
    return value.astimezone(UTC) if isinstance(value, datetime) and value.tzinfo is not None else value


@pytest.mark.parametrize(
    ("tier_type", "bounds", "at"),
    [
        (
            "timestamptz",
            ["2024-01-01 00:00:00+00", "2024-01-02 00:00:00+00", "2024-01-03 00:00:00+00"],
            "timestamptz '2024-01-01 00:00:00.000001+00' + i * interval '1 hour'",
        ),
        pytest.param(
            "date", ["1969-12-25", "1970-01-08", "1970-01-22"], "date '1969-12-28' + i", marks=pytest.mark.full
        ),
        pytest.param("integer", ["-100", "100", "300"], "i - 5", marks=pytest.mark.full),
    ],
)
def test_every_kind_of_key_and_value_is_folded_as_it_stands_in_the_heap(
    site: Site, leader: Leader, tier_type: str, bounds: list[str], at: str
) -> None:
    _table(site, tier_type, bounds, at)
    register(site, RegisterRequest(NAME, ("tenant", "code", "n"), "at", keep_heap=True))
    tier(site, leader.epoch, NAME)
    before = _lake(site)
    assert before == _heap(site, bounds[-2])
    assert len(before) == 10 * len(ODD)
    with site.connect(autocommit=True) as conn:
        conn.execute(
            "UPDATE public.odd SET price = -price, tags = array_append(tags, 'more'), ratio = 'NaN', ok = NULL,"
            " raw = NULL, padded = 'x', net = '::1/64', day = '0001-01-01', \"Odd \"\"Name\" = chr(31) || chr(92)"
            " WHERE small = 3"
        )
        conn.execute("DELETE FROM public.odd WHERE small = 4")
        conn.execute("UPDATE public.odd SET tenant = tenant || chr(92) || chr(31) WHERE small = 5")
        insert = f"INSERT INTO public.odd SELECT {ROW.format(at=at)} FROM generate_series(1, 1) AS i"
        conn.execute(insert.encode(), ("late",))
        if tier_type == "timestamptz":
            conn.execute("UPDATE public.odd SET at = at + interval '1 microsecond' WHERE small = 6")
    report = fold(site, leader.epoch, NAME)
    assert report.left == 0
    assert report.replaced == len(ODD) * (4 if tier_type == "timestamptz" else 3)
    assert _lake(site) == _heap(site, bounds[-2])
