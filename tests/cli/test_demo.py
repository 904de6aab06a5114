"""The demo table: made in one go, known again, with one partition that stays hot."""

from __future__ import annotations

from datetime import UTC, datetime

import psycopg
import pytest

from modak.core.clock import FrozenClock
from modak.core.faults import Fault, InjectedFault, arm
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.runtime import demo

NOON = datetime(2026, 3, 8, 12, 30, tzinfo=UTC)
MIDNIGHT = datetime(2026, 3, 8, tzinfo=UTC)


@pytest.mark.parametrize("now", [NOON, MIDNIGHT], ids=["noon", "midnight"])
def test_seven_days_have_aged_and_today_stays_hot(fresh_database: Dsn, now: datetime) -> None:
    with connect(fresh_database) as conn:
        made = demo.create(conn, clock=FrozenClock(now), rows=5000)
        assert (made.rows, made.partitions, str(made.name)) == (5000, 8, "public.events")
        rows = conn.execute("SELECT tableoid::regclass::text, count(*) FROM events GROUP BY 1 ORDER BY 1").fetchall()
        assert [name for name, _ in rows] == [f"events_202603{day:02d}" for day in range(1, 9)]
        top = conn.execute("SELECT max(occurred_at) FROM events").fetchone()
        assert top == (int(now.timestamp() * 1000),)


def test_rows_look_like_events_of_a_shop(fresh_database: Dsn) -> None:
    with connect(fresh_database) as conn:
        demo.create(conn, clock=FrozenClock(NOON), rows=5000)
        kinds = dict(conn.execute("SELECT kind, count(*) FROM events GROUP BY 1").fetchall())
        assert set(kinds) == {"view", "click", "cart", "purchase", "refund"}
        assert max(kinds, key=lambda kind: kinds[kind]) == "view"
        wrong = conn.execute(
            "SELECT count(*) FROM events WHERE (amount IS NULL) = (kind IN ('purchase', 'refund')) "
            "OR NOT payload ? 'path' OR created <> to_timestamp(occurred_at / 1000.0)"
        ).fetchone()
        assert wrong == (0,)


@pytest.mark.bare
def test_an_empty_database_is_told_from_one_with_tables(fresh_database: Dsn) -> None:
    with connect(fresh_database) as conn:
        conn.execute("CREATE SCHEMA modak")
        conn.execute("CREATE TABLE modak.tables ()")
        assert not demo.has_user_tables(conn)
        conn.execute("CREATE SCHEMA shop")
        conn.execute("CREATE TABLE shop.orders ()")
        assert demo.has_user_tables(conn)


def test_the_demo_table_is_known_again_and_a_users_own_is_not_taken_for_it(fresh_database: Dsn) -> None:
    with connect(fresh_database) as conn:
        conn.execute("CREATE TABLE events ()")
        assert not demo.exists(conn)
        conn.execute("DROP TABLE events")
        demo.create(conn, clock=FrozenClock(NOON), rows=10)
        assert demo.exists(conn)


def test_an_interrupted_creation_leaves_nothing(fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute("SET statement_timeout = '30ms'")
        with pytest.raises(psycopg.errors.QueryCanceled):
            demo.create(conn, clock=FrozenClock(NOON), rows=300_000)
    with connect(fresh_database) as conn:
        assert not demo.has_user_tables(conn)


@pytest.mark.parametrize(("point", "there"), [("demo.before_create", False), ("demo.after_create", True)])
def test_a_crash_around_the_creation_leaves_all_or_nothing(fresh_database: Dsn, point: str, there: bool) -> None:
    arm(Fault(point))
    with pytest.raises(InjectedFault), connect(fresh_database) as conn:
        demo.create(conn, clock=FrozenClock(NOON), rows=10)
    with connect(fresh_database) as conn:
        assert demo.exists(conn) is there
