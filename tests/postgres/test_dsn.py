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
        "postgresql://ann:hush@db/shop?port=five",
    ],
)
def test_a_malformed_url_is_refused_without_showing_the_password(url: str) -> None:
    with pytest.raises(UsageError) as refusal:
        Dsn.parse(url)
    assert "hush" not in str(refusal.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ann:hush@a,b/shop",
        "postgresql://ann:hush@a:5432,b:5433/shop?target_session_attrs=read-write",
        "postgresql://ann:hush@a%2Cb/shop",
        "postgresql://ann:hush@/shop?host=a,b",
        "postgresql://ann:hush@a/shop?host=b%2Cc",
        "postgresql://ann:hush@a/shop?port=5432,5433",
        "postgresql://ann:hush@a/shop?hostaddr=10.0.0.1,10.0.0.2",
        "jdbc:postgresql://a:5432,b:5432/shop?user=ann&password=hush&targetServerType=primary",
    ],
)
def test_several_hosts_are_refused_wherever_they_stand_with_what_to_do(url: str) -> None:
    with pytest.raises(UsageError, match="several hosts") as refusal:
        Dsn.parse(url)
    assert "follows the primary" in refusal.value.hint
    assert "hush" not in str(refusal.value)


def test_a_comma_in_a_password_is_not_another_host() -> None:
    assert Dsn.parse("postgresql://ann:a,b@db/shop").password == "a,b"


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
