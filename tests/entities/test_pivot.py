"""The pivot against a dictionary: whatever the order of the rows, every value stands beside its key."""

from __future__ import annotations

import random
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modak.entities.pivot import Rows, in_key_order, pivot, row_ids_of
from modak.entities.registry import EntitySchema, read_registry

SCHEMA: EntitySchema = read_registry(
    [
        {
            "schema_id": 7,
            "name": "thing",
            "attributes": {
                "title": {"id": 1, "type": "text"},
                "size": {"id": 2, "type": "integer"},
                "tags": {"id": 3, "type": "list", "items": "text"},
            },
        }
    ]
).resolve(7)
EAV = pa.schema(
    [
        ("key", pa.binary()),
        ("attr_id", pa.int16()),
        ("at", pa.string()),
        ("value", pa.string()),
    ]
)
Row = tuple[int, int, str | None, str | None]
KEYS = st.one_of(
    st.integers(0, 2**128 - 1),
    # Ids of one moment share their first half, counted ones their last but a few bits.
    st.integers(0, 3).map(lambda low: (5 << 64) | low),
    st.integers(0, 3).map(lambda high: (high << 64) | 9),
)


def octets(key: int) -> bytes:
    return key.to_bytes(16, "big")


def pivoted(keys: list[int], rows: list[Row], batch_rows: int, lanes: int = 1) -> Rows:
    """Keys in any order, attribute rows in batches as Postgres may send them."""
    main = pa.table(
        {
            "key": pa.array([octets(key) for key in keys], pa.binary()),
            "created": pa.array([1] * len(keys), pa.int64()),
            "updated": pa.array(range(len(keys)), pa.int64()),
        }
    )
    columns = [[octets(row[0]) for row in rows], *([row[at] for row in rows] for at in range(1, 4))]
    arrays = [pa.array(each, field.type) for each, field in zip(columns, EAV, strict=True)]
    batches = pa.Table.from_arrays(arrays, schema=EAV).to_batches(batch_rows)
    return pivot(SCHEMA, in_key_order(main), [batches[lane::lanes] for lane in range(lanes)])


def test_without_lists_the_sign_of_an_attribute_says_of_an_index_that_it_is_there() -> None:
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array([octets(1), octets(2), octets(2)], pa.binary()),
            pa.array([-1, 1, 2], pa.int16()),
            pa.array(["indexed", "two", "2"], pa.string()),
        ],
        names=["key", "attr_id", "value"],
    )
    main = pa.table(
        {"key": pa.array([octets(1), octets(2)], pa.binary()), "created": [1, 1], "updated": [1, 1]},
    )
    found = pivot(SCHEMA, main, [[batch]])
    assert [(each.row_id, each.reason) for each in found.unfit] == [
        (str(UUID(int=1)), "a value of 'title' is not a text")
    ]
    assert found.fit().select(["title", "size"]).to_pylist() == [{"title": "two", "size": 2}]


@given(st.lists(KEYS, unique=True, min_size=1, max_size=12), st.integers(1, 7), st.integers(0, 2**32))
def test_every_value_stands_beside_its_key(keys: list[int], batch_rows: int, seed: int) -> None:
    chance = random.Random(seed)
    strangers = [key ^ 1 for key in keys if key ^ 1 not in keys]
    expected: dict[int, dict[str, object]] = {}
    rows: list[Row] = []
    for key in (*keys, *strangers):
        title, size, tags = (chance.random() < 0.7 for _ in range(3))
        many = chance.randrange(4)
        expected[key] = {
            "title": f"t{key}" if title else None,
            "size": key % 1000 if size else None,
            "tags": [f"g{number}" for number in range(many)] if tags and many else None,
        }
        rows += [(key, 1, None, f"t{key}")] if title else []
        rows += [(key, 2, None, str(key % 1000))] if size else []
        rows += [(key, 3, str(number), f"g{number}") for number in range(many)] if tags else []
        rows.append((key, 99, None, "of an attribute that nobody describes"))
    chance.shuffle(rows)
    found = pivoted(keys, rows, batch_rows, chance.randint(1, 3))
    assert found.unfit == ()
    ids = found.table.column("row_id").to_pylist()
    assert ids == [str(UUID(int=key)) for key in sorted(keys)]
    updated = {key: number for number, key in enumerate(keys)}
    assert found.table.column("changed_at").to_pylist() == [updated[key] for key in sorted(keys)]
    values = found.table.select(["title", "size", "tags"]).to_pylist()
    assert values == [expected[key] for key in sorted(keys)]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([(1, 2, None, "1.5")], "'size' is not a integer"),
        ([(1, 1, "0", "indexed")], "'title' is not a text"),
        ([(1, 3, "0.1", "nested")], "'tags' is not a list<text>"),
        ([(1, 3, "0", "a"), (1, 3, None, "alone")], "'tags' is not a list<text>"),
    ],
)
def test_what_does_not_fit_is_told_by_its_row_and_spares_the_others(rows: list[Row], reason: str) -> None:
    found = pivoted([1, 2], [*rows, (2, 1, None, "two")], 1)
    [(row_id, said)] = [(each.row_id, each.reason) for each in found.unfit]
    assert (row_id, said) == (str(UUID(int=1)), f"a value of {reason}")
    assert found.fit().column("title").to_pylist() == ["two"]


def test_keys_become_the_texts_of_uuids() -> None:
    keys = [0, 1, 2**128 - 1, 0x0123456789ABCDEF_FEDCBA9876543210]
    column = pa.chunked_array([pa.array([octets(key) for key in keys], pa.binary())])
    assert row_ids_of(column).to_pylist() == [str(UUID(int=key)) for key in keys]
