"""Rows of many types by ingest and by load, staged and corrected: DuckDB reads from the lake what was sent."""

from __future__ import annotations

import io
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modak.core.names import TableName
from modak.runtime.leader import Leader
from modak.tables.fold.run import fold
from modak.tables.ingest.run import Request, ingest
from modak.tables.load.adopt import adopt
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.site import Site
from modak.tables.tiering.run import tier
from tests.load.conftest import Api, serving
from tests.tables.readers import by_duckdb

NAME = TableName("public", "orders")
Row = dict[str, Any]


@pytest.fixture
def orders(site: Site, leader: Leader) -> Site:
    """`public.orders` by day: two days in the lake, one in the heap."""
    with site.connect(autocommit=True) as conn:
        conn.execute("CREATE TYPE public.mood AS ENUM ('sad', 'it''s, \"ok\"')")
        conn.execute(
            "CREATE TABLE public.orders (id uuid, at timestamptz, amount numeric(20, 4), day date, doc jsonb,"
            " tags text[], counts int[], raw bytea, mood public.mood, PRIMARY KEY (id, at)) PARTITION BY RANGE (at)"
        )
        for at in (1, 2, 3):
            conn.execute(
                f"CREATE TABLE public.orders_{at} PARTITION OF public.orders"
                f" FOR VALUES FROM ('2026-01-0{at} 00:00+00') TO ('2026-01-0{at + 1} 00:00+00')"
            )
        conn.execute("INSERT INTO public.orders (id, at) VALUES (gen_random_uuid(), '2026-01-03 12:00+00')")
    register(site, RegisterRequest(NAME, ("id",), "at"))
    tier(site, leader.epoch, NAME)
    return site


def _row(number: int) -> Row:
    """A row as Python knows it; every third has nothing but its key."""
    key = {
        "id": f"00000000-0000-4000-8000-{number:012d}",
        "at": datetime(2026, 1, 1 + number % 2, 23, 59, 59, 999_999 - number, tzinfo=UTC),
    }
    rest = {
        "amount": Decimal(f"-1{number:02d}2345678901234.6789"),
        "day": date(1969, 12, 1 + number),
        "doc": {"a": [1, None, 'é"q'], "n": number},
        "tags": ["x", "", 'com,ma "and" {brace}', "NULL", None],
        "counts": [number, -(2**31), None],
        "raw": bytes([0, 255, number]),
        "mood": 'it\'s, "ok"' if number % 2 else "sad",
    }
    return key | (dict.fromkeys(rest) if number % 3 == 0 else rest)


def _line(row: Row) -> str:
    """The row as a user writes it in JSON."""
    plain: dict[str, Any] = {
        **row,
        "at": row["at"].isoformat(),
        "amount": None if row["amount"] is None else str(row["amount"]),
        "day": None if row["day"] is None else row["day"].isoformat(),
        "raw": None if row["raw"] is None else "\\x" + row["raw"].hex(),
    }
    return json.dumps(plain) + "\n"


def _read(site: Site) -> list[Row]:
    rows = by_duckdb(site, NAME)
    return [{**row, "doc": None if row["doc"] is None else json.loads(row["doc"])} for row in rows]


def test_json_lines_of_every_kind_are_ingested_as_they_were_sent(orders: Site, tmp_path: Path) -> None:
    rows = [_row(number) for number in range(12)]
    path = tmp_path / "orders.jsonl"
    path.write_text("".join(map(_line, rows)))
    assert ingest(orders, Request(NAME, (str(path),), "jsonl")).rows == 12
    assert _read(orders) == rows


def test_parquet_of_every_kind_is_ingested_as_it_was_sent(orders: Site, tmp_path: Path) -> None:
    rows = [_row(number) for number in range(12)]
    path = tmp_path / "orders.parquet"
    path.write_bytes(_parquet(rows, pa.uuid()))
    assert ingest(orders, Request(NAME, (str(path),), "parquet", rewrite=True)).rows == 12
    assert _read(orders) == rows


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_loads_of_every_kind_staged_or_corrected_end_as_they_were_sent(orders: Site, leader: Leader, form: str) -> None:
    rows = [_row(number) for number in range(19)]
    hot = {**_row(20), "at": datetime(2026, 1, 3, 6, tzinfo=UTC)}
    with serving(orders) as url:
        api = Api(url)
        staged = _posted(api, form, "many", [*rows[:15], hot])
        assert (staged["state"], staged["spooled_rows"], staged["hot_rows"]) == ("staged", 15, 1)
        corrected = _posted(api, form, "few", rows[15:])
        assert (corrected["state"], corrected["delta_rows"]) == ("committed", 4)
    assert adopt(orders, leader.epoch, NAME).labels == 1
    fold(orders, leader.epoch, NAME)
    assert _read(orders) == rows
    with orders.connect() as conn:
        names = ", ".join(hot)
        found = conn.execute(f"SELECT {names} FROM public.orders WHERE id = '{hot['id']}'").fetchone()  # type: ignore[arg-type]
    assert found is not None
    assert {**dict(zip(hot, found, strict=True)), "id": str(found[0])} == hot


def _posted(api: Api, form: str, label: str, rows: list[Row]) -> Row:
    if form == "jsonl":
        body, kind = "".join(map(_line, rows)).encode(), "application/x-ndjson"
    else:
        body, kind = _parquet(rows), "application/vnd.apache.parquet"
    answer = api.post(body, label, table="public.orders", headers={"Content-Type": kind})
    assert answer.status_code == 200, answer.text
    found: Row = answer.json()
    return found


def _parquet(rows: list[Row], key: pa.DataType = pa.string()) -> bytes:  # noqa: B008
    kinds = {
        "id": key,
        "at": pa.timestamp("us", "UTC"),
        "amount": pa.decimal128(20, 4),
        "day": pa.date32(),
        "doc": pa.string(),
        "tags": pa.list_(pa.string()),
        "counts": pa.list_(pa.int32()),
        "raw": pa.binary(),
        "mood": pa.string(),
    }
    texts = [
        {
            **row,
            "id": UUID(row["id"]).bytes if key == pa.uuid() else row["id"],
            "doc": None if row["doc"] is None else json.dumps(row["doc"]),
        }
        for row in rows
    ]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(texts, pa.schema(list(kinds.items()))), sink)
    return sink.getvalue()
