from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from typing import Any

import psycopg
import pytest

from modak.core.axis import Axis
from modak.core.errors import ModakError, Refused
from modak.core.names import TableName
from modak.postgres.bounds import parse_bound
from modak.postgres.connect import connect
from modak.postgres.describe import PgTable, axis_of, describe, high_water
from modak.postgres.dsn import Dsn

Conn = psycopg.Connection[Any]


@pytest.fixture
def conn(database: Dsn) -> Iterator[Conn]:
    with connect(database, autocommit=True) as opened:
        schema = f"s{secrets.token_hex(4)}"
        opened.execute(f"CREATE SCHEMA {schema}")
        opened.execute(f"SET search_path = {schema}, public")
        yield opened


@pytest.fixture
def look(conn: Conn) -> Callable[..., PgTable]:
    def _look(name: str, tier_key: str | None = None) -> PgTable:
        row = conn.execute("SELECT current_schema()").fetchone()
        assert row is not None
        return describe(conn, TableName(row[0], name), tier_key)

    return _look


Look = Callable[..., PgTable]


def _bounds(table: PgTable) -> list[tuple[int | None, int | None]]:
    return [(leaf.lower, leaf.upper) for leaf in table.leaves]


def test_a_table_that_does_not_exist_is_refused_by_name(conn: Conn) -> None:
    with pytest.raises(Refused, match=r"public\.nowhere") as refusal:
        describe(conn, TableName("public", "nowhere"), None)
    assert refusal.value.code == "postgres.no_such_table"


def test_integer_bounds_may_be_negative_open_or_default(conn: Conn, look: Look) -> None:
    conn.execute("CREATE TABLE t (id bigint PRIMARY KEY) PARTITION BY RANGE (id)")
    conn.execute("CREATE TABLE t_low PARTITION OF t FOR VALUES FROM (MINVALUE) TO (-100)")
    conn.execute("CREATE TABLE t_mid PARTITION OF t FOR VALUES FROM (-100) TO (9223372036854775806)")
    conn.execute("CREATE TABLE t_top PARTITION OF t FOR VALUES FROM (9223372036854775806) TO (MAXVALUE)")
    conn.execute("CREATE TABLE t_rest PARTITION OF t DEFAULT")
    table = look("t", "id")
    assert table.partition_strategy == "range"
    assert table.partition_columns == ("id",)
    assert _bounds(table) == [(None, -100), (-100, 2**63 - 2), (2**63 - 2, None), (None, None)]
    assert [leaf.is_default for leaf in table.leaves] == [False, False, False, True]
    assert not any(leaf.is_spill for leaf in table.leaves)


def test_date_bounds_are_days(conn: Conn, look: Look) -> None:
    conn.execute("CREATE TABLE t (d date) PARTITION BY RANGE (d)")
    conn.execute("CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM ('-infinity') TO ('0044-03-15 BC')")
    conn.execute("CREATE TABLE t_2 PARTITION OF t FOR VALUES FROM ('1969-12-31') TO ('2020-02-29')")
    conn.execute("CREATE TABLE t_3 PARTITION OF t FOR VALUES FROM ('2020-02-29') TO ('infinity')")
    days = Axis.DATE.of(date(2020, 2, 29))
    bc = conn.execute("SELECT date '0044-03-15 BC' - date '1970-01-01'").fetchone()
    assert bc is not None
    assert _bounds(look("t", "d")) == [(None, bc[0]), (-1, days), (days, None)]


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata", "America/St_Johns"])
def test_timestamptz_bounds_do_not_depend_on_the_session(conn: Conn, look: Look, zone: str) -> None:
    conn.execute("CREATE TABLE t (at timestamptz) PARTITION BY RANGE (at)")
    conn.execute(
        "CREATE TABLE t_1 PARTITION OF t"
        " FOR VALUES FROM ('2020-01-01 00:00:00.000001+00') TO ('2020-01-02 00:00+05:30')"
    )
    conn.execute(f"SET TimeZone = '{zone}'")
    axis = Axis.TIMESTAMPTZ
    lower = axis.of(datetime(2020, 1, 1, 0, 0, 0, 1, tzinfo=UTC))
    upper = axis.of(datetime(2020, 1, 1, 18, 30, tzinfo=UTC))
    assert _bounds(look("t", "at")) == [(lower, upper)]


def test_timestamp_bounds_keep_every_microsecond(conn: Conn, look: Look) -> None:
    conn.execute("CREATE TABLE t (at timestamp(6)) PARTITION BY RANGE (at)")
    conn.execute(
        "CREATE TABLE t_1 PARTITION OF t"
        " FOR VALUES FROM ('0001-01-01 00:00:00.000001') TO ('9999-12-31 23:59:59.999999')"
    )
    axis = Axis.TIMESTAMP
    assert _bounds(look("t", "at")) == [
        (axis.of(datetime(1, 1, 1, 0, 0, 0, 1)), axis.of(datetime(9999, 12, 31, 23, 59, 59, 999999)))  # noqa: DTZ001
    ]


def test_a_finite_bound_beyond_the_axis_is_its_end(conn: Conn, look: Look) -> None:
    conn.execute("CREATE TABLE t (at timestamp) PARTITION BY RANGE (at)")
    conn.execute("CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM ('2020-01-01') TO ('294276-12-31')")
    assert _bounds(look("t", "at"))[0][1] is None


def test_bounds_are_unknown_when_the_table_is_not_ranged_by_the_tier_key(conn: Conn, look: Look) -> None:
    conn.execute("CREATE TABLE two (a int, b int) PARTITION BY RANGE (a, b)")
    conn.execute("CREATE TABLE two_1 PARTITION OF two FOR VALUES FROM (1, MINVALUE) TO (5, 7)")
    conn.execute("CREATE TABLE listed (a int) PARTITION BY LIST (a)")
    conn.execute("CREATE TABLE listed_1 PARTITION OF listed FOR VALUES IN (1, 2)")
    conn.execute("CREATE TABLE expr (a int) PARTITION BY RANGE ((a + 1))")
    assert _bounds(look("two", "a")) == [(None, None)]
    assert look("two", "a").partition_columns == ("a", "b")
    assert look("listed", "a").partition_strategy == "list"
    assert _bounds(look("listed", "a")) == [(None, None)]
    assert look("expr", "a").partition_columns == ("(expression)",)


def test_bounds_with_quotes_and_commas_are_read() -> None:
    bound = parse_bound("FOR VALUES FROM ('it''s, (odd)', MINVALUE, '-5') TO (10, MAXVALUE, 'x''::text')")
    assert bound is not None
    assert bound.lower == ("it's, (odd)", None, "-5")
    assert bound.upper == ("10", None, "x'::text")
    assert parse_bound("DEFAULT") is None
    assert parse_bound("FOR VALUES IN (1, 2)") is None


def test_the_spill_is_the_lowest_partition_of_that_name(conn: Conn, look: Look) -> None:
    conn.execute("CREATE TABLE t (id int) PARTITION BY RANGE (id)")
    conn.execute("CREATE TABLE t_modak_spill PARTITION OF t FOR VALUES FROM (MINVALUE) TO (0)")
    conn.execute("CREATE TABLE x_modak_spill PARTITION OF t FOR VALUES FROM (0) TO (10)")
    assert [(leaf.name, leaf.is_spill) for leaf in look("t", "id").leaves] == [
        ("t_modak_spill", True),
        ("x_modak_spill", False),
    ]


def test_the_kind_of_every_partition_shows(conn: Conn, look: Look) -> None:
    conn.execute("CREATE TABLE t (id int, x int) PARTITION BY RANGE (id)")
    conn.execute("CREATE TABLE t_plain PARTITION OF t FOR VALUES FROM (0) TO (10)")
    conn.execute("CREATE TABLE t_sub PARTITION OF t FOR VALUES FROM (10) TO (20) PARTITION BY LIST (x)")
    assert {leaf.name: leaf.kind for leaf in look("t", "id").leaves} == {"t_plain": "r", "t_sub": "p"}


def test_a_partition_whose_detach_was_interrupted_shows(fresh_database: Dsn) -> None:
    name = TableName("public", "t")
    with connect(fresh_database, autocommit=True) as conn, connect(fresh_database) as reader:
        conn.execute("CREATE TABLE t (id int) PARTITION BY RANGE (id)")
        conn.execute("CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (10)")
        reader.execute("SELECT * FROM t")
        conn.execute("SET lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            conn.execute("ALTER TABLE t DETACH PARTITION t_1 CONCURRENTLY")
        (leaf,) = describe(conn, name, "id").leaves
        assert leaf.detach_pending
        assert (leaf.lower, leaf.upper) == (0, 10)


def test_composite_keys_keep_the_order_of_the_index(conn: Conn, look: Look) -> None:
    conn.execute('CREATE TABLE t (a int, "B c" text, d date, PRIMARY KEY (d, a, "B c"))')
    assert look("t").primary_key == ("d", "a", "B c")
    assert look("t").partition_strategy is None


def test_types_are_resolved_through_domains_and_arrays(conn: Conn, look: Look) -> None:
    conn.execute("CREATE TYPE mood AS ENUM ('a'); CREATE TYPE pair AS (x int, y int)")
    conn.execute("CREATE DOMAIN price AS numeric(12, 3) CHECK (VALUE > 0); CREATE DOMAIN dearer AS price")
    conn.execute("CREATE DOMAIN tags AS varchar(7)[]")
    # The packaged server has no ICU, which alone can make such a collation.
    conn.execute("CREATE COLLATION loose (provider = libc, locale = 'C')")
    conn.execute("UPDATE pg_collation SET collisdeterministic = false WHERE collname = 'loose'")
    conn.execute(
        "CREATE TABLE t (p dearer, n numeric, neg numeric(3, -2), a tags, m mood, ms mood[], c pair, r int4range,"
        " v varchar(9), ts timestamptz(3), ci text COLLATE loose, mr int4multirange, iv int2vector)"
    )
    types = {column.name: column.type for column in look("t").columns}
    assert (types["p"].name, types["p"].precision, types["p"].scale) == ("numeric", 12, 3)
    assert (types["n"].precision, types["n"].scale) == (None, None)
    assert (types["neg"].precision, types["neg"].scale) == (3, -2)
    assert types["a"].kind == "array"
    assert types["a"].element is not None
    assert (types["a"].element.name, types["a"].element.precision) == ("varchar", 7)
    assert (types["m"].name, types["m"].kind) == ("mood", "enum")
    assert types["ms"].element is not None
    assert types["ms"].element.kind == "enum"
    assert [types[name].kind for name in ("c", "r", "mr", "iv")] == ["composite", "range", "range", "scalar"]
    assert types["v"].precision == 9
    assert types["ts"].precision == 3
    assert [types[name].collation_deterministic for name in ("v", "ci")] == [True, False]


def test_only_tier_key_types_have_an_axis(conn: Conn, look: Look) -> None:
    conn.execute(
        "CREATE TABLE t (a int2, b int4, c int8, d date, e timestamp, f timestamptz, g text, h int[], i numeric)"
    )
    assert [axis_of(column.type) for column in look("t").columns] == [
        *[Axis.INTEGER] * 3,
        Axis.DATE,
        Axis.TIMESTAMP,
        Axis.TIMESTAMPTZ,
        *[None] * 3,
    ]


def test_constant_defaults_are_told_from_changing_ones(conn: Conn, look: Look) -> None:
    conn.execute("CREATE FUNCTION mine() RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT 1'")
    conn.execute("""
        CREATE TABLE t (id bigint GENERATED ALWAYS AS IDENTITY, zero bigint DEFAULT 0, price numeric(8, 2) DEFAULT 1.5,
          word varchar(5) DEFAULT '{x}%s', list int[] DEFAULT '{1,2}', arr int[] DEFAULT ARRAY[1, 2],
          nothing int DEFAULT NULL, at timestamptz DEFAULT now(), day date DEFAULT current_date,
          chance float8 DEFAULT random(), own int DEFAULT mine(), neg int DEFAULT -5,
          fixed timestamptz DEFAULT '2020-01-01 00:00+00', twice int GENERATED ALWAYS AS (3 * 2) STORED)
    """)
    columns = {column.name: column for column in look("t").columns}
    constant = {name: column.default_value for name, column in columns.items() if column.default_constant}
    assert constant == {
        "zero": "0",
        "price": "1.50",
        "word": "{x}%s",
        "list": "{1,2}",
        "arr": "{1,2}",
        "neg": "-5",
        "fixed": "2020-01-01 00:00:00+00",
    }
    assert columns["nothing"].default is None
    assert columns["twice"].generated
    assert columns["own"].default is not None


def test_the_value_that_old_rows_show_is_known_for_plain_and_partitioned_tables(conn: Conn, look: Look) -> None:
    conn.execute("CREATE TABLE plain (id int)")
    conn.execute("CREATE TABLE parted (id int) PARTITION BY RANGE (id)")
    conn.execute("CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10)")
    for name in ("plain", "parted"):
        conn.execute(f"INSERT INTO {name} VALUES (1)")
        conn.execute(f"ALTER TABLE {name} ADD COLUMN word text DEFAULT 'it''s {{\"odd\", \\x}}'")
        conn.execute(f"ALTER TABLE {name} ADD COLUMN list int[] DEFAULT '{{1,2}}'")
        conn.execute(f"ALTER TABLE {name} ADD COLUMN at timestamptz DEFAULT now()")
        conn.execute(f"ALTER TABLE {name} ALTER COLUMN word SET DEFAULT 'other'")
        shown = conn.execute(f"SELECT word, list::text, at::text FROM {name}").fetchone()
        columns = {column.name: column for column in look(name).columns}
        assert tuple(columns[each].missing_value for each in ("word", "list", "at")) == shown
        assert columns["word"].default_value == "other"
        assert columns["id"].missing_value is None


def test_dropped_columns_leave_a_gap_in_the_numbers(conn: Conn, look: Look) -> None:
    conn.execute("CREATE TABLE t (a int, b int, c int)")
    conn.execute("ALTER TABLE t DROP COLUMN b")
    conn.execute("ALTER TABLE t ADD COLUMN b text NOT NULL")
    assert [(column.name, column.attnum, column.not_null) for column in look("t").columns] == [
        ("a", 1, False),
        ("c", 3, False),
        ("b", 4, True),
    ]


def test_distinct_counts_come_from_the_leaf_when_the_parent_was_never_analysed(conn: Conn, look: Look) -> None:
    conn.execute("CREATE TABLE t (id int, kind text) PARTITION BY RANGE (id)")
    conn.execute("CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (10000)")
    assert look("t").columns[0].n_distinct is None
    conn.execute("INSERT INTO t SELECT i, 'kind ' || i % 3 FROM generate_series(0, 9999) i")
    conn.execute("ANALYZE t_1")
    columns = {column.name: column for column in look("t").columns}
    assert columns["id"].n_distinct == -1
    assert columns["kind"].n_distinct == 3


def test_sizes_are_measured_and_not_estimated(conn: Conn, look: Look) -> None:
    conn.execute("CREATE TABLE t (id int, v text) PARTITION BY RANGE (id)")
    conn.execute("CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (10000)")
    conn.execute("CREATE TABLE t_2 PARTITION OF t FOR VALUES FROM (10000) TO (20000)")
    conn.execute("INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(0, 9999) i")
    full, empty = look("t", "id").leaves
    assert full.pages > 100
    assert full.bytes >= full.pages * 8192
    assert full.relfilenode > 0
    assert (empty.pages, empty.relfilenode > 0) == (0, True)


def test_foreign_keys_that_point_at_the_table_are_named_once(conn: Conn, look: Look) -> None:
    conn.execute("CREATE TABLE t (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    conn.execute("CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (10)")
    conn.execute("CREATE TABLE child (id int CONSTRAINT to_t REFERENCES t)")
    schema = look("t").name.schema
    assert look("t").inbound_foreign_keys == (f"{schema}.child: to_t",)
    assert look("child").inbound_foreign_keys == ()


def test_inheritance_children_are_not_partitions(conn: Conn, look: Look) -> None:
    conn.execute("CREATE TABLE t (id int); CREATE TABLE kid () INHERITS (t)")
    table = look("t")
    assert table.leaves == ()
    assert table.inheritance_children == (f"{table.name.schema}.kid",)


def test_the_time_zone_is_that_of_the_database_and_not_of_our_session(fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute(f"ALTER DATABASE \"{fresh_database.dbname}\" SET TimeZone = 'Europe/Berlin'")
        conn.execute("CREATE TABLE t (id int)")
    with connect(fresh_database) as conn:
        assert describe(conn, TableName("public", "t")).time_zone == "Europe/Berlin"


def test_a_limited_role_sees_what_it_lacks(conn: Conn, look: Look, database: Dsn) -> None:
    conn.execute("CREATE TABLE t (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    conn.execute("CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (10)")
    name = look("t").name
    role = f"reader_{secrets.token_hex(4)}"
    conn.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'weak'")
    try:
        conn.execute(f"GRANT USAGE ON SCHEMA {name.schema} TO {role}; GRANT SELECT ON t TO {role}")
        conn.execute("INSERT INTO t VALUES (7)")
        with connect(replace(database, user=role, password="weak"), autocommit=True) as limited:
            table = describe(limited, name, "id")
            assert table.privileges == {"select", "usage_of_schema"}
            assert [(leaf.lower, leaf.upper) for leaf in table.leaves] == [(0, 10)]
            with pytest.raises(ModakError) as refusal:
                high_water(limited, table, "id")
            assert refusal.value.code == "postgres.privilege"
            conn.execute(f"GRANT SELECT ON t_1 TO {role}")
            assert "select_partitions" in describe(limited, name, "id").privileges
            assert high_water(limited, table, "id") == 7
        conn.execute(f"GRANT {conn.info.user} TO {role}")
        with connect(replace(database, user=role, password="weak"), autocommit=True) as member:
            assert {"owner", "owner_of_partitions", "create_in_schema"} <= describe(member, name, "id").privileges
    finally:
        conn.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_row_security_that_would_hide_rows_from_us_shows(conn: Conn, look: Look, database: Dsn) -> None:
    conn.execute("CREATE TABLE t (id int); ALTER TABLE t ENABLE ROW LEVEL SECURITY")
    name = look("t").name
    assert not look("t").row_security
    role = f"reader_{secrets.token_hex(4)}"
    conn.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'weak'")
    try:
        conn.execute(f"GRANT USAGE ON SCHEMA {name.schema} TO {role}; GRANT SELECT ON t TO {role}")
        with connect(replace(database, user=role, password="weak")) as limited:
            assert describe(limited, name).row_security
    finally:
        conn.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_describing_gives_up_instead_of_waiting_behind_an_exclusive_lock(
    conn: Conn, look: Look, database: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modak.postgres.describe._LOCK_WAIT", "100ms")
    conn.execute("CREATE TABLE t (id int)")
    name = look("t").name
    with connect(database) as blocker:
        blocker.execute(f"LOCK TABLE {name}")
        with pytest.raises(ModakError) as refusal:
            look("t")
    assert refusal.value.code == "postgres.busy"
    assert conn.execute("SHOW lock_timeout").fetchone() == ("0",)
    assert look("t").name == name


def test_describing_inside_a_transaction_leaves_its_settings_alone(conn: Conn, look: Look) -> None:
    conn.execute("CREATE TABLE t (id int)")
    with conn.transaction():
        conn.execute("SET LOCAL lock_timeout = '1234ms'")
        look("t")
        assert conn.execute("SHOW lock_timeout").fetchone() == ("1234ms",)


def test_the_high_water_mark_comes_from_the_topmost_leaf_with_rows(conn: Conn, look: Look) -> None:
    conn.execute("CREATE TABLE t (id int) PARTITION BY RANGE (id)")
    conn.execute("CREATE TABLE t_modak_spill PARTITION OF t FOR VALUES FROM (MINVALUE) TO (0)")
    for lower in range(0, 500, 100):
        conn.execute(f"CREATE TABLE t_{lower} PARTITION OF t FOR VALUES FROM ({lower}) TO ({lower + 100})")
    conn.execute("CREATE TABLE t_rest PARTITION OF t DEFAULT")
    assert high_water(conn, look("t", "id"), "id") is None
    conn.execute("INSERT INTO t VALUES (5), (150), (270), (1000000), (-1)")
    assert high_water(conn, look("t", "id"), "id") == 270
    conn.execute("CREATE TABLE t_top (id int)")
    conn.execute("DELETE FROM t WHERE id > 500")
    conn.execute("ALTER TABLE t ATTACH PARTITION t_top FOR VALUES FROM (500) TO (MAXVALUE)")
    conn.execute("INSERT INTO t VALUES (777)")
    assert high_water(conn, look("t", "id"), "id") == 777


def test_rows_at_infinity_do_not_move_the_high_water_mark(conn: Conn, look: Look) -> None:
    conn.execute("CREATE TABLE t (at timestamptz) PARTITION BY RANGE (at)")
    conn.execute("CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (MINVALUE) TO ('2020-01-01')")
    conn.execute("CREATE TABLE t_2 PARTITION OF t FOR VALUES FROM ('2020-01-01') TO (MAXVALUE)")
    conn.execute("INSERT INTO t VALUES ('infinity'), ('-infinity'), ('2019-05-06 07:08:09.000001+00')")
    expected = Axis.TIMESTAMPTZ.of(datetime(2019, 5, 6, 7, 8, 9, 1, tzinfo=UTC))
    assert high_water(conn, look("t", "at"), "at") == expected


def test_an_unpartitioned_table_has_a_high_water_mark_too(conn: Conn, look: Look) -> None:
    conn.execute("CREATE TABLE t (d date, word text); INSERT INTO t VALUES ('2020-02-29'), ('1960-01-01'), (NULL)")
    assert high_water(conn, look("t"), "d") == Axis.DATE.of(date(2020, 2, 29))
    with pytest.raises(Refused):
        high_water(conn, look("t"), "word")
