"""Every type from the heap through ADBC into Parquet, against what Postgres itself says and the way by text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings

from modak.core.errors import ModakError
from modak.lake.iceberg.files import FileWriter
from modak.lake.iceberg.output import local_path
from modak.lake.model import Layout
from modak.lake.parse import parse_text
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.lake.every_type import (
    COLUMNS,
    ROWS,
    TYPES_SQL,
    create_sql,
    differences,
    insert,
    lake_columns,
    mapped_columns,
    plain,
    read_heap,
)

_REALISTIC = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def conn(database: Dsn) -> Iterator[Any]:
    with connect(database, autocommit=True) as opened:
        opened.execute(TYPES_SQL)
        opened.execute(create_sql("every"))
        yield opened


@_REALISTIC
@given(rows=ROWS)
def test_a_value_is_the_same_by_binary_by_text_and_in_the_file(
    rows: list[tuple[Any, ...]], conn: Any, database: Dsn, warehouse: str
) -> None:
    conn.execute("TRUNCATE every")
    insert(conn, "every", rows)
    mapped = mapped_columns(conn, "every")

    heap = read_heap(database, "every", mapped)

    texts = _texts(conn)
    by_text = pa.table({m.column.name: parse_text(m, texts[m.column.name]) for m in mapped})
    assert not differences(heap, by_text)
    with FileWriter(f"file://{warehouse}/op", lake_columns(mapped), Layout(), task="t") as writer:
        for batch in heap.to_batches():
            writer.write(batch)
        (written,) = writer.close()
    assert written.rows == len(rows)
    assert not differences(heap, pq.read_table(local_path(written.path)))
    _check_against_postgres(conn, heap)


def _texts(conn: Any) -> dict[str, pa.Array]:
    """Every value by its output function, which is what a delta payload holds."""
    names = ["k", *COLUMNS]
    shown = ", ".join(f"CASE WHEN {name} IS DISTINCT FROM NULL THEN format('%s', {name}) END" for name in names)
    rows = conn.execute(f"SELECT {shown} FROM every ORDER BY k").fetchall()
    return {name: pa.array([row[at] for row in rows], pa.string()) for at, name in enumerate(names)}


def _check_against_postgres(conn: Any, heap: pa.Table) -> None:
    micros = "(extract(epoch FROM {0}) * 1000000)::text"
    infinite = "CASE {0}::text WHEN 'infinity' THEN '9223372036854775807' WHEN '-infinity' THEN '-9223372036854775807'"
    expected = {
        "ts": f"{infinite} ELSE trim_scale({micros.replace('::text', '')})::text END",
        "tz": f"{infinite} ELSE trim_scale({micros.replace('::text', '')})::text END",
        "d": "CASE {0}::text WHEN 'infinity' THEN '2147483647' WHEN '-infinity' THEN '-2147483647' "
        "ELSE ({0} - date '1970-01-01')::text END",
    }
    for name, formula in expected.items():
        rows = conn.execute(f"SELECT ({formula.format(name)})::bigint FROM every ORDER BY k").fetchall()
        assert plain(heap.column(name)) == [row[0] for row in rows], name
    for name in (
        "b",
        "i2",
        "i4",
        "i8",
        "n12_2",
        "n38_10",
        "n3_5",
        "n3_minus2",
        "n_free",
        "by",
        "u",
        "t",
        "a_i4",
        "a_t",
    ):
        rows = conn.execute(f"SELECT {name} FROM every ORDER BY k").fetchall()
        assert plain(heap.column(name)) == [row[0] for row in rows], name


@pytest.mark.parametrize(
    ("kind", "value", "code"),
    [
        ("numeric(12,2)", "NaN", "types.not_a_number"),
        ("numeric", "NaN", "types.not_a_number"),
        ("numeric", "Infinity", "types.not_a_number"),
        ("numeric", "-Infinity", "types.not_a_number"),
        ("numeric", "1" + "0" * 20, "types.out_of_range"),
        ("numeric", "9" * 38 + ".9", "types.out_of_range"),
        ("numeric", "-" + "9" * 60, "types.out_of_range"),
        ("numeric", "0." + "0" * 18 + "1", "types.out_of_range"),
        ("numeric(60,0)", "3" * 57, "types.out_of_range"),
        ("timestamp", "294247-01-10 04:00:54.775807", "types.out_of_range"),
        ("timestamp", "294247-01-10 04:00:54.775808", "types.out_of_range"),
        ("timestamptz", "294276-12-31 23:59:59.999999+00", "types.out_of_range"),
        ("int[]", "{{1,2},{3,4}}", "types.multidimensional"),
        ("text[]", "[0:0][0:1]={{a,b}}", "types.multidimensional"),
        ("timestamp[]", "{294276-01-01}", "types.out_of_range"),
    ],
)
def test_a_value_that_the_lake_cannot_hold_is_refused_by_column_both_ways(
    kind: str, value: str, code: str, fresh_database: Dsn
) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute(f'CREATE TABLE bad (k bigint, "odd ""name" {kind})')
        conn.execute(f"INSERT INTO bad VALUES (1, %s::text::{kind}), (2, NULL)", (value,))
        mapped = mapped_columns(conn, "bad")
        with pytest.raises(ModakError, match='odd "name') as by_binary:
            read_heap(fresh_database, "bad", mapped)
        with pytest.raises(ModakError, match='odd "name') as by_text:
            parse_text(mapped[1], pa.array([value, None]))
    assert (by_binary.value.code, by_text.value.code) == (code, code)


@pytest.mark.parametrize("value", ["1." + "0" * 60, "-0.5" + "0" * 40, "0", "9" * 20 + "." + "9" * 18, "0" * 3 + "7"])
def test_superfluous_zeros_of_a_numeric_do_no_harm(value: str, fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute("CREATE TABLE zeros (k bigint, n numeric)")
        conn.execute("INSERT INTO zeros VALUES (1, %s::text::numeric)", (value,))
        (expected,) = conn.execute("SELECT n FROM zeros").fetchone() or ()
        assert read_heap(fresh_database, "zeros", mapped_columns(conn, "zeros"))["n"].to_pylist() == [expected]


def test_a_numeric_stored_as_text_keeps_every_value(fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute("CREATE TABLE free (k bigint, n numeric, a numeric[])")
        conn.execute("INSERT INTO free VALUES (1, 'NaN', '{1.50,-Infinity}'), (2, 1e60, NULL), (3, 1.10, '{}')")
        heap = read_heap(fresh_database, "free", mapped_columns(conn, "free", numeric="string"))
    assert heap["n"].to_pylist() == ["NaN", "1" + "0" * 60, "1.10"]
    assert heap["a"].to_pylist() == [["1.50", "-Infinity"], None, []]


@pytest.mark.parametrize("kind", ["int[]", "few"])
def test_lower_bounds_of_arrays_are_not_kept(kind: str, fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute("CREATE DOMAIN few AS int[] CHECK (cardinality(VALUE) < 9)")
        conn.execute(f"CREATE TABLE shifted (k bigint, a {kind})")
        conn.execute("INSERT INTO shifted VALUES (1, '[0:2]={1,2,3}')")
        mapped = mapped_columns(conn, "shifted")
    assert read_heap(fresh_database, "shifted", mapped)["a"].to_pylist() == [[1, 2, 3]]
    assert parse_text(mapped[1], pa.array(["[0:2]={1,2,3}"])).to_pylist() == [[1, 2, 3]]


def test_a_null_in_a_required_column_is_refused(fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute("CREATE TABLE strict (k bigint, t text NOT NULL)")
        mapped = mapped_columns(conn, "strict")
        conn.execute("ALTER TABLE strict ALTER t DROP NOT NULL")
        conn.execute("INSERT INTO strict VALUES (1, NULL)")
    with pytest.raises(ModakError, match="Column t holds NULL"):
        read_heap(fresh_database, "strict", mapped)
