"""Columns that change while a table is mirrored: in order with the rows around them, also while the pump is down."""

from __future__ import annotations

import pyarrow as pa
import pytest

from modak.core.errors import Refused
from modak.postgres.changes.relation import RelationColumn
from modak.postgres.describe import describe
from modak.tables.mirror.pump.columns import seen_as
from modak.tables.mirror.pump.definition import Definition
from modak.tables.mirror.pump.generated import with_generated
from tests.mirror.world import Make

HUNDRED = "SELECT i, i, 'row ' || i FROM generate_series(1, 100) AS i"


def test_an_added_column_is_followed_with_and_without_a_default(make: Make) -> None:
    table = make(rows=HUNDRED)
    table.sql(
        "UPDATE @ SET body = 'before' WHERE id < 5",
        "ALTER TABLE @ ADD COLUMN plain int",
        "UPDATE @ SET plain = id WHERE id BETWEEN 3 AND 7",
        "ALTER TABLE @ ADD COLUMN given text DEFAULT 'given'",
        "UPDATE @ SET body = 'after' WHERE id BETWEEN 6 AND 9",
        "INSERT INTO @ (id, ts, body, given) VALUES (200, 1, 'x', NULL), (201, 1, 'y', 'z')",
    )
    table.pump()
    assert table.is_same()


def test_a_default_that_differs_from_row_to_row_is_taken_from_the_heap(make: Make) -> None:
    table = make(rows=HUNDRED)
    table.sql("UPDATE @ SET body = 'x' WHERE id = 1", "ALTER TABLE @ ADD COLUMN r float8 DEFAULT random()")
    table.sql("UPDATE @ SET body = 'y' WHERE id = 2")
    table.pump()
    assert table.pump().reanchored
    assert table.is_same()
    assert not table.pump().reanchored


@pytest.mark.parametrize(
    "later",
    [
        ("ALTER TABLE @ ALTER g TYPE bigint",),
        ("ALTER TABLE @ ALTER g DROP DEFAULT", "VACUUM FULL @"),
        ("ALTER TABLE @ RENAME g TO d", "ALTER TABLE @ ALTER d TYPE bigint, ALTER d SET DEFAULT 5"),
    ],
)
@pytest.mark.parametrize("followed", [False, True])
def test_a_default_that_a_rewrite_has_put_into_the_rows_is_taken_from_the_heap(
    make: Make, later: tuple[str, ...], followed: bool
) -> None:
    table = make(rows=HUNDRED)
    table.sql("ALTER TABLE @ ADD COLUMN g int DEFAULT -751", "UPDATE @ SET g = 3 WHERE id = 3")
    if followed:
        table.sql("UPDATE @ SET body = 'x' WHERE id = 1")
        table.pump()
    table.sql(*later, "UPDATE @ SET body = 'y' WHERE id = 2")
    turns = [table.pump() for _ in range(3)]
    assert any(turn.reanchored for turn in turns) is not followed
    assert table.is_same()


def test_a_heap_that_was_rewritten_once_is_compared_once(make: Make) -> None:
    table = make(rows=HUNDRED)
    table.sql("VACUUM FULL @", "ALTER TABLE @ ADD COLUMN g int", "UPDATE @ SET g = 3 WHERE id = 3")
    assert [table.pump().reanchored for _ in range(3)] == [False, True, False]
    table.sql("ALTER TABLE @ ADD COLUMN h int", "UPDATE @ SET h = 3 WHERE id = 3")
    assert not any(table.pump().reanchored for _ in range(3))
    assert table.is_same()


def test_a_heap_that_was_rewritten_before_its_copy_is_not_compared(make: Make) -> None:
    table = make(rows=HUNDRED, before="VACUUM FULL @")
    table.sql("ALTER TABLE @ ADD COLUMN g int", "UPDATE @ SET g = 3 WHERE id = 3")
    assert not any(table.pump().reanchored for _ in range(3))
    assert table.is_same()


def test_dropped_and_renamed_columns_are_followed_in_their_order(make: Make) -> None:
    table = make(
        columns="id bigint PRIMARY KEY, ts bigint NOT NULL, a text, b text, c int",
        rows="SELECT i, i, 'a' || i, 'b' || i, i FROM generate_series(1, 50) AS i",
    )
    table.sql(
        "UPDATE @ SET a = 'first' WHERE id = 1",
        "ALTER TABLE @ RENAME COLUMN a TO z",
        "UPDATE @ SET z = 'second' WHERE id = 2",
        "ALTER TABLE @ DROP COLUMN b",
        "UPDATE @ SET z = 'third' WHERE id = 3",
        "ALTER TABLE @ RENAME COLUMN c TO b",
        "UPDATE @ SET b = 4 WHERE id = 4",
    )
    table.pump()
    assert table.is_same()
    assert list(table.lake()[0]) == ["id", "ts", "z", "b"]


def test_a_column_dropped_and_added_again_is_another_column(make: Make) -> None:
    table = make(rows=HUNDRED)
    table.sql(
        "UPDATE @ SET body = 'old' WHERE id = 1",
        "ALTER TABLE @ DROP COLUMN body",
        "ALTER TABLE @ ADD COLUMN body text",
        "UPDATE @ SET body = 'new' WHERE id = 2",
    )
    table.pump()
    assert table.is_same()
    table.sql(
        "ALTER TABLE @ DROP COLUMN body, ADD COLUMN body text DEFAULT 'd'", "UPDATE @ SET body = 'x' WHERE id = 3"
    )
    table.pump(fresh=True)
    assert table.is_same()


def test_columns_that_exchange_their_names_exchange_nothing_else(make: Make) -> None:
    table = make(
        columns="id bigint PRIMARY KEY, ts bigint NOT NULL, a text, b text",
        rows="SELECT i, i, 'a' || i, 'b' || i FROM generate_series(1, 20) AS i",
    )
    table.sql("UPDATE @ SET a = 'x' WHERE id = 1")
    table.together(
        "ALTER TABLE @ RENAME COLUMN a TO t", "ALTER TABLE @ RENAME COLUMN b TO a", "ALTER TABLE @ RENAME COLUMN t TO b"
    )
    table.sql("UPDATE @ SET a = 'y' WHERE id = 2")
    table.pump()
    assert table.is_same()


def test_a_change_of_columns_that_fails_is_told_as_failed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make(rows=HUNDRED)

    def broken(*_: object) -> None:
        raise Refused("lake.broken", "The lake is broken.")

    table.sql("ALTER TABLE @ ADD COLUMN plain int", "UPDATE @ SET plain = id WHERE id BETWEEN 3 AND 7")
    monkeypatch.setattr("modak.tables.mirror.pump.evolve.land", broken)
    with pytest.raises(Refused, match="broken"):
        table.pump()
    monkeypatch.undo()
    told = table.sql("SELECT kind, error FROM modak.op_log WHERE phase = 'failed'")
    assert ("evolve", "lake.broken: The lake is broken.") in told
    table.pump()
    assert table.is_same()


def test_definition_and_rows_change_in_one_transaction(make: Make) -> None:
    table = make(rows=HUNDRED)
    table.together(
        "UPDATE @ SET body = 'a' WHERE id = 1",
        "ALTER TABLE @ ADD COLUMN n int DEFAULT 7",
        "UPDATE @ SET n = 8 WHERE id IN (1, 2)",
        "ALTER TABLE @ RENAME COLUMN body TO text",
        "INSERT INTO @ VALUES (300, 1, 'i', 9)",
    )
    table.pump()
    assert table.is_same()


def test_a_wider_type_evolves(make: Make) -> None:
    table = make(
        columns="id int PRIMARY KEY, ts int NOT NULL, n int, d numeric(6,2), f real",
        rows="SELECT i, i, i, i, i FROM generate_series(1, 20) AS i",
    )
    table.sql(
        "UPDATE @ SET n = 5 WHERE id = 1",
        "ALTER TABLE @ ALTER n TYPE bigint, ALTER d TYPE numeric(12,2), ALTER f TYPE float8, ALTER id TYPE bigint",
        "UPDATE @ SET n = 5000000000, d = 123456789.25, id = 5000000000 WHERE id = 2",
        "UPDATE @ SET f = 1.5 WHERE id = 3",
    )
    turn = table.pump()
    assert not turn.reanchored
    assert table.is_same()


def test_columns_that_change_without_a_row_after_them_are_followed_too(make: Make) -> None:
    table = make(rows=HUNDRED)
    table.sql("UPDATE @ SET body = 'x' WHERE id = 1", "ALTER TABLE @ ADD COLUMN n int DEFAULT 3, DROP COLUMN body")
    table.pump()
    table.pump()
    assert table.is_same()
    table.sql("UPDATE @ SET n = 4 WHERE id = 2", "ALTER TABLE @ RENAME COLUMN n TO m")
    table.pump(fresh=True)
    table.pump()
    assert table.is_same()
    assert table.pump().flushes == 0


def test_another_type_is_copied_again_from_the_heap(make: Make) -> None:
    table = make(
        columns="id bigint PRIMARY KEY, ts bigint NOT NULL, n int",
        rows="SELECT i, i, i FROM generate_series(1, 50) AS i",
    )
    table.sql(
        "UPDATE @ SET n = 500 WHERE id = 1",
        "ALTER TABLE @ ALTER n TYPE text USING 'n' || n",
        "UPDATE @ SET n = 'two' WHERE id = 2",
    )
    table.pump()
    assert table.pump().reanchored
    table.pump()
    assert table.is_same()


def test_another_type_of_a_key_is_refused_by_name(make: Make) -> None:
    table = make(rows=HUNDRED)
    table.sql("ALTER TABLE @ ALTER id TYPE text USING 'n' || id", "UPDATE @ SET body = 'x' WHERE id = 'n2'")
    with pytest.raises(Refused, match="id"):
        table.pump()
    assert len(table.lake()) == 100


ROW = "UPDATE @ SET body = 'x' WHERE body = 'row 2'"


@pytest.mark.parametrize(
    ("code", "statements"),
    [
        pytest.param("mirror.key_dropped", ("ALTER TABLE @ DROP COLUMN ts",), id="tier-key"),
        pytest.param("mirror.key_dropped", ("ALTER TABLE @ DROP COLUMN ts", ROW), id="tier-key-and-a-row"),
        pytest.param("mirror.key_dropped", ("ALTER TABLE @ DROP COLUMN id",), id="key"),
        pytest.param("mirror.key_dropped", ("ALTER TABLE @ DROP COLUMN id", ROW), id="key-and-a-row"),
        pytest.param(
            "mirror.key_changed",
            ("ALTER TABLE @ DROP CONSTRAINT {name}_pkey", "ALTER TABLE @ ADD PRIMARY KEY (body)", ROW),
            id="another-key",
        ),
        pytest.param("mirror.table_gone", ("DROP TABLE @",), id="table"),
        pytest.param("mirror.table_gone", (ROW, "DROP TABLE @"), id="table-and-a-row"),
    ],
)
@pytest.mark.parametrize("fresh", [False, True])
def test_what_nobody_can_follow_is_refused_by_name(
    make: Make, code: str, statements: tuple[str, ...], fresh: bool
) -> None:
    table = make(rows=HUNDRED)
    table.sql("UPDATE @ SET body = 'seen' WHERE id = 1")
    table.pump()
    before = table.lake()
    table.sql(*(statement.replace("{name}", table.name.name) for statement in statements))
    if fresh:
        table.close()
    for _ in range(2):
        with pytest.raises(Refused) as refused:
            table.pump()
        assert refused.value.code == code
        assert refused.value.hint
    assert table.lake() == before


def test_renamed_keys_are_followed(make: Make) -> None:
    table = make(rows=HUNDRED, partition_width="10")
    table.sql(
        "UPDATE @ SET body = 'a' WHERE id = 1",
        "ALTER TABLE @ RENAME COLUMN ts TO at",
        "UPDATE @ SET at = at + 50 WHERE id = 2",
        "DELETE FROM @ WHERE id = 3",
    )
    table.pump()
    assert table.is_same()
    record = table.site.reader.table(table.name)
    assert record is not None
    assert record.tier_key == "at"
    table.sql("UPDATE @ SET at = at - 50 WHERE id = 2")
    table.pump(fresh=True)
    assert table.is_same()


def test_a_renamed_and_moved_table_is_followed(make: Make) -> None:
    from modak.core.names import TableName

    table = make(rows=HUNDRED)
    table.sql("UPDATE @ SET body = 'a' WHERE id = 1", f"ALTER TABLE @ RENAME TO {table.name.name}_new")
    table.name = TableName("public", f"{table.name.name}_new")
    table.sql("UPDATE @ SET body = 'b' WHERE id = 2", f"CREATE SCHEMA s_{table.name.name}")
    table.sql(f"ALTER TABLE @ SET SCHEMA s_{table.name.name}")
    table.name = TableName(f"s_{table.name.name}", table.name.name)
    table.sql("UPDATE @ SET body = 'c' WHERE id = 3")
    table.pump()
    assert table.is_same()
    table.pump(fresh=True)
    assert table.is_same()


def test_stored_generated_columns_have_their_values(make: Make) -> None:
    table = make(
        columns="id bigint PRIMARY KEY, ts bigint NOT NULL, body text,"
        " n bigint GENERATED ALWAYS AS (id * 2 + ts) STORED",
        rows="SELECT i, i, 'row ' || i FROM generate_series(1, 30) AS i",
    )
    table.sql(
        "UPDATE @ SET ts = ts + 1 WHERE id < 10",
        "INSERT INTO @ VALUES (100, 5, 'new')",
        "UPDATE @ SET id = 200 WHERE id = 20",
    )
    table.pump()
    assert table.is_same()


def test_generated_columns_that_are_not_published_are_computed_again(make: Make) -> None:
    """As a server before 18 sends them: without the generated column."""
    table = make(
        columns="id bigint PRIMARY KEY, ts timestamptz NOT NULL, body text, d numeric(8,2),"
        " n text GENERATED ALWAYS AS (body || ', \"' || d) STORED, twice bigint GENERATED ALWAYS AS (id * 2) STORED",
        rows="SELECT i, now(), CASE i % 4 WHEN 0 THEN NULL WHEN 1 THEN '' ELSE E'two\nlines ' || i END, i / 3.0"
        " FROM generate_series(1, 30) AS i",
    )
    record = table.site.reader.table(table.name)
    assert record is not None
    with table.site.connect(autocommit=True) as conn:
        heap = describe(conn, table.name, "ts")
        sent = [column for column in heap.columns if not column.generated]
        columns = tuple(RelationColumn(column.name, column.type, 0, -1, True) for column in sent)
        seen = seen_as(record, heap, Definition(tuple(column.attnum for column in sent), columns))
    rows = table.heap()
    values = {f"c{column.attnum}": [row[column.name] for row in rows] for column in sent}
    whole = with_generated(table.site, seen, pa.table(values))
    for column in seen.unpublished:
        assert whole[f"c{column.attnum}"].to_pylist() == [row[column.name] for row in rows]
