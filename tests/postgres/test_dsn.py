from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict

from modak.core.errors import UsageError
from modak.postgres.dsn import Dsn

_WORD = st.text(
    st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20
)


def test_a_postgres_url_is_read() -> None:
    dsn = Dsn.parse("postgresql://ann:s%40crt@db.example:6432/shop?sslmode=require")
    assert dsn == Dsn("db.example", 6432, "shop", "ann", "s@crt", (("sslmode", "require"),))


def test_a_jdbc_url_is_read_with_its_own_parameter_names() -> None:
    dsn = Dsn.parse("jdbc:postgresql://db:5433/shop?user=ann&password=x&ApplicationName=me&reWriteBatchedInserts=true")
    assert (dsn.host, dsn.port, dsn.dbname, dsn.user, dsn.password) == ("db", 5433, "shop", "ann", "x")
    assert dict(dsn.options) == {"application_name": "me"}


def test_separate_credentials_win_over_those_in_the_url() -> None:
    dsn = Dsn.parse("postgres://ann:old@db/shop", user="bob", password="new")
    assert (dsn.user, dsn.password) == ("bob", "new")


def test_ipv6_addresses_keep_their_brackets() -> None:
    dsn = Dsn.parse("postgresql://ann@[::1]:5432/shop")
    assert dsn.host == "::1"
    assert dsn.jdbc() == "jdbc:postgresql://[::1]:5432/shop"


def test_the_jdbc_form_has_no_credentials_and_takes_parameters() -> None:
    dsn = Dsn.parse("postgresql://ann:secret@db/shop?sslmode=require&application_name=x")
    assert dsn.jdbc({"currentSchema": "modak_iceberg"}) == (
        "jdbc:postgresql://db:5432/shop?sslmode=require&currentSchema=modak_iceberg"
    )


def test_a_socket_folder_cannot_become_a_jdbc_address() -> None:
    with pytest.raises(UsageError, match="TCP"):
        Dsn.parse("postgresql:///shop?host=/run/postgresql&user=ann").jdbc()


@pytest.mark.parametrize(
    "url",
    [
        "mysql://ann:hush@db/shop",
        "postgresql://ann:hush@db:port/shop",
        "ann:hush@db/shop",
        "postgresql://ann:hush@a,b/shop",
        "jdbc:postgresql://db/shop?password=hush&nonsense=1",
        "postgresql://ann:hush@[db/shop",
    ],
)
def test_a_malformed_url_is_refused_without_showing_the_password(url: str) -> None:
    with pytest.raises(UsageError) as refusal:
        Dsn.parse(url)
    assert "hush" not in str(refusal.value)


@given(user=_WORD, password=_WORD, dbname=_WORD)
def test_any_credentials_survive_both_forms_that_libpq_reads(user: str, password: str, dbname: str) -> None:
    dsn = Dsn("db", 5432, dbname, user, password)
    for form in (dsn.conninfo(), dsn.uri()):
        read = conninfo_to_dict(form)
        assert (read["user"], read["password"], read["dbname"]) == (user, password, dbname)


@given(password=st.text(st.characters(categories=["Lu", "Nd"]), min_size=12, max_size=20))
def test_no_form_for_people_shows_the_password(password: str) -> None:
    dsn = Dsn("db", 5432, "shop", "ann", password, (("sslpassword", password),))
    for shown in (repr(dsn), str(dsn), dsn.safe(), dsn.jdbc(), dsn.scrub(dsn.conninfo()), dsn.scrub(dsn.uri())):
        assert password not in shown
