from __future__ import annotations

import socket
from dataclasses import replace

import psycopg
import pytest

from modak.core.errors import ModakError
from modak.postgres import arrow
from modak.postgres.connect import connect, refused_at_the_door, translate
from modak.postgres.dsn import Dsn


def _unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _open(how: str, dsn: Dsn) -> None:
    if how == "psycopg":
        connect(dsn)
    else:
        arrow.stream(dsn, "SELECT 1")


@pytest.mark.parametrize("how", ["psycopg", "adbc"])
def test_a_wrong_password_is_named_and_not_shown(how: str, database: Dsn) -> None:
    with pytest.raises(ModakError) as refusal:
        _open(how, replace(database, password="hush-hush"))
    assert refusal.value.code == "postgres.auth"
    assert not refusal.value.retryable
    assert "hush-hush" not in str(refusal.value)
    assert refusal.value.__cause__ is None


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            'connection failed: connection to server at "127.0.0.1", port 1 failed: Connection refused\n\tIs it there?',
            "cannot be reached: Connection refused.",
        ),
        (
            'connection to server at "localhost" (::1), port 1 failed: FATAL:  authentication failed for "x"',
            "does not let 'me' in: authentication failed for \"x\".",
        ),
        ("failed to resolve host 'far': Name or service not known.", "host 'far': Name or service not known."),
        (
            "connection failed: FATAL:  sorry, too many clients already",
            "has no free connection: sorry, too many clients already.",
        ),
    ],
)
def test_the_reason_comes_without_the_preamble_of_the_library(said: str, told: str) -> None:
    message = refused_at_the_door(Dsn("far", 1, "shop", "me", "hush"), said).message
    assert message.startswith("Postgres at postgresql://me@far:1/shop ")
    assert message.endswith(told)


@pytest.mark.parametrize("how", ["psycopg", "adbc"])
def test_a_server_that_is_not_there_is_worth_another_try(how: str, database: Dsn) -> None:
    with pytest.raises(ModakError) as refusal:
        _open(how, replace(database, port=_unused_port()))
    assert refusal.value.code == "postgres.unreachable"
    assert refusal.value.retryable
    assert database.password not in str(refusal.value)


@pytest.mark.parametrize("how", ["psycopg", "adbc"])
def test_a_database_that_does_not_exist_is_named(how: str, database: Dsn) -> None:
    with pytest.raises(ModakError, match="'nowhere'") as refusal:
        _open(how, database.with_database("nowhere"))
    assert refusal.value.code == "postgres.no_database"
    assert not refusal.value.retryable


def test_text_does_not_depend_on_the_settings_of_database_or_role(fresh_database: Dsn) -> None:
    with connect(fresh_database, autocommit=True) as conn:
        for setting in (
            "TimeZone = 'Asia/Kolkata'",
            "DateStyle = 'German'",
            "extra_float_digits = -5",
            "bytea_output = 'escape'",
            "IntervalStyle = 'sql_standard'",
        ):
            conn.execute(f'ALTER DATABASE "{fresh_database.dbname}" SET {setting}')
    question = (
        "SELECT timestamptz '2020-01-02 03:04:05+00', date '2020-01-02', 0.1::float8, '\\x00ff'::bytea,"
        " interval '1 day 2 hours', money '1234.5'"
    )
    as_text = f"SELECT a::text, b::text, c::text, d::text, e::text, f::text FROM ({question}) AS q(a, b, c, d, e, f)"
    expected = ("2020-01-02 03:04:05+00", "2020-01-02", "0.1", "\\x00ff", "P1DT2H", "$1,234.50")
    with connect(fresh_database) as conn:
        assert conn.execute(as_text).fetchone() == expected
    with arrow.stream(fresh_database, as_text) as rows:
        assert tuple(next(iter(rows)).to_pylist()[0].values()) == expected


@pytest.mark.parametrize(
    ("statement", "code", "retryable"),
    [
        ("SELECT * FROM nowhere", "postgres.no_such_table", False),
        ("SELECT 1 / 0", "postgres.error", False),
        ("SET LOCAL statement_timeout = 1; SELECT pg_sleep(5)", "postgres.busy", True),
        ("SET TRANSACTION READ ONLY; CREATE TABLE x ()", "postgres.read_only", True),
        ("SELECT pg_terminate_backend(pg_backend_pid())", "postgres.connection_lost", True),
        ("SET ROLE pg_monitor; CREATE TABLE public.x ()", "postgres.privilege", False),
    ],
)
def test_an_error_says_whether_trying_again_can_help(database: Dsn, statement: str, code: str, retryable: bool) -> None:
    conn = connect(database)
    with pytest.raises(psycopg.Error) as failure:
        conn.execute(statement)
    conn.close()
    error = translate(failure.value)
    assert (error.code, error.retryable) == (code, retryable)
