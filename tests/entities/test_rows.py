"""Rows out of Postgres: what counts as a value, what a portion may hold, and how long a query may take."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from io import BytesIO
from typing import Any

import pyarrow.parquet as pq
import pytest

from modak.core.errors import ModakError
from modak.entities import rows as module
from modak.entities.compaction import compact
from modak.entities.flushing import flush
from modak.entities.plan import KeyRange
from modak.entities.rows import Lanes, Live, Source, rows_of
from modak.entities.snapshot import holding
from modak.entities.tables import check
from tests.entities.world import World, changed, key, registry


def test_texts_that_look_like_numbers_are_no_moments(world: World) -> None:
    world.registry = registry(
        changed(
            day={"id": 20, "type": "date"},
            days={"id": 21, "type": "list", "items": "date"},
            written={"id": 22, "type": "datetime", "column": "text_02"},
        )
    )
    world.put(1, title="fits", seen="1970-01-01T00:00:01Z")
    insert = "INSERT INTO eav_data VALUES (7, %s, %s, %s, %s, %s)"
    world.sql(insert, (key(1), 20, "", "1970-01-02", None))
    world.sql(insert, (key(1), 21, "[]", None, None))
    world.put(2, title="numbers", seen=20260101)
    world.put(3, title="no moment", seen="20260101")
    world.put(4, title="no day")
    world.sql(insert, (key(4), 20, "", "2026", None))
    world.put(5, title="no days")
    world.sql(insert, (key(5), 21, "0", "5", None))
    world.put(6, title="not written so")
    world.sql("UPDATE entity_main SET text_02 = '20260101' WHERE ltbase_row_id = %s", (key(6),))
    (report,) = flush(world.store)
    assert {each.row_id for each in report.unfit} == {key(number) for number in (3, 4, 5, 6)}
    found = world.read()
    assert (found[key(1)]["seen"], found[key(1)]["day"], found[key(1)]["days"]) == (1000, 86_400_000, [])
    assert found[key(2)]["seen"] == 20_260_101
    assert [found[key(number)]["seen"] for number in (3, 4)] == [None, None]


def test_a_number_with_more_digits_than_its_type_is_put_aside_and_never_becomes_another(world: World) -> None:
    world.registry = registry(changed(amount={"id": 3, "type": "numeric"}))
    world.put(1, amount=Decimal("12345678901234567890123456789012345678"))
    world.put(2, amount=Decimal("1234567890123456789012345678.0123456789"))
    (report,) = flush(world.store)
    assert [each.row_id for each in report.unfit] == [key(1)]
    found = world.read()
    assert found[key(1)]["amount"] is None
    assert found[key(2)]["amount"] == Decimal("1234567890123456789012345678.0123456789")


def test_whole_numbers_are_written_as_differences_whatever_their_names(world: World) -> None:
    odd = {"a.b": {"id": 30, "type": "integer"}, 'q"u': {"id": 31, "type": "bigint"}}
    world.registry = registry(changed(**odd))
    for number in range(40):
        world.put(number, title=f"row {number}", due=1_000_000 + number, qty=5)
        for attribute in (30, 31):
            world.sql(
                "INSERT INTO eav_data VALUES (7, %s, %s, '', NULL, %s)", (key(number), attribute, number - attribute)
            )
    before = world.read()
    flush(world.store)
    assert world.read() == before
    file = pq.ParquetFile(BytesIO(world.objects.get(world.paths()[0]).data))
    group = file.metadata.row_group(0)
    found = {column.path_in_schema: column.encodings for column in map(group.column, range(group.num_columns))}
    delta = {name for name, encodings in found.items() if "DELTA_BINARY_PACKED" in encodings}
    assert delta >= {"due", "a.b", 'q"u'}
    assert not delta & {"qty", "schema_id", "title", "row_id"}
    compact(world.store)
    assert world.read() == before


@pytest.mark.parametrize("lanes", [1, 3])
def test_the_lanes_of_a_portion_share_what_it_may_hold(
    world: World, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.sql(
        "INSERT INTO entity_main (ltbase_schema_id, ltbase_row_id, ltbase_created_at, ltbase_updated_at)"
        " SELECT 7, md5(i::text)::uuid, 1, i FROM generate_series(1, 300) i"
    )
    world.sql(
        "INSERT INTO eav_data SELECT 7, md5(i::text)::uuid, 5, '0', repeat('x', 500), NULL"
        " FROM generate_series(1, 300) i"
    )
    held: list[int] = []
    real = module.pivot

    def measured(schema: Any, main: Any, eav: Sequence[Iterable[Any]]) -> Any:
        batches = [list(each) for each in eav]
        held.append(sum(batch.nbytes for lane in batches for batch in lane))
        return real(schema, main, batches)

    real_stream = module.stream
    monkeypatch.setattr(module, "pivot", measured)
    monkeypatch.setattr(module, "stream", lambda *given, **more: real_stream(*given, **more, batch_bytes=4_000))
    with world.connect() as conn:
        installed = check(conn, world.store.tables)
        (pages,) = conn.execute("SELECT pg_relation_size('eav_data') / 8192").fetchone()
    with holding(world.store, installed) as snapshot:
        source = Source(
            world.store.address, snapshot.id, world.store.tables, world.schema, lanes=Lanes(lanes, 0, pages)
        )
        parts = list(rows_of(source, Live(KeyRange()), limit=60_000))
    assert sum(part.table.num_rows for part in parts) == 300
    assert max(held) <= 60_000
    # No smaller than it must be: what one lane leaves is there for the others.
    assert len(parts) <= 8


@pytest.mark.parametrize(("rows", "seconds"), [(1, 60), (200, 0.3)])
def test_a_query_ends_in_time_although_no_batch_arrives(
    world: World, monkeypatch: pytest.MonkeyPatch, rows: int, seconds: float
) -> None:
    world.put(1, qty=5)
    slow = (
        "SELECT row_id AS key, attr_id, array_indices AS at, 'x' || pg_sleep(%s) AS value"
        " FROM eav_data, generate_series(1, %s)"
    )
    with world.connect() as conn:
        installed = check(conn, world.store.tables)
    with holding(world.store, installed) as snapshot:
        source = Source(world.store.address, snapshot.id, world.store.tables, world.schema, timeout_seconds=0.5)
        (whole,) = rows_of(replace(source, timeout_seconds=60.0), Live(KeyRange()))
        monkeypatch.setattr(module, "eav_query", lambda *_: slow % (seconds, rows))
        began = time.monotonic()
        with pytest.raises(ModakError, match=r"took longer than 0\.5 s") as raised:
            list(rows_of(source, Live(KeyRange())))
    assert time.monotonic() - began < 20
    assert (raised.value.code, raised.value.retryable) == ("entities.timeout", True)
    assert whole.table.column("qty").to_pylist() == [5]
