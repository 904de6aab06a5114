"""What may be written into a setting."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from modak.config import TieringSettings, load
from modak.config.cron import read_cron
from modak.config.kinds import read_bytes, show_bytes
from modak.config.pairs import Malformed, Pairs, SecretPairs, read_pairs, write_pairs
from modak.config.places import read_warehouse, split_postgres_url
from modak.core.errors import Refused, UsageError

words = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20).map(str.strip)
keys = words.filter(lambda key: key != "" and not set(key) & set("=;\\"))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("256MiB", 256 << 20),
        ("1GiB", 1 << 30),
        ("128MB", 128_000_000),
        ("1.5 KiB", 1536),
        ("42", 42),
        ("1_000", 1000),
        ("7B", 7),
        ("2tib", 2 << 40),
    ],
)
def test_sizes_count_in_1024s_with_an_i_and_in_1000s_without(text: str, count: int) -> None:
    assert read_bytes(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "MiB", "1.5", "0.1KiB", "4g", "1 XB", "١MB", "1e9", "10000000PiB"])
def test_a_size_that_is_not_a_whole_positive_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(Malformed):
        read_bytes(text)


@given(st.integers(1, 2**63 - 1))
def test_a_shown_size_reads_back_exactly(count: int) -> None:
    assert read_bytes(show_bytes(count)) == count


@given(st.integers(1, 1000), st.sampled_from("KMGTP"), st.booleans())
def test_every_unit_reads_back_in_any_case(amount: int, unit: str, binary: bool) -> None:
    text = f"{amount}{unit}{'iB' if binary else 'B'}"
    assert read_bytes(text) == read_bytes(text.lower()) == read_bytes(text.upper()) == read_bytes(f" {text} ")
    assert read_bytes(text) == amount * (1024 if binary else 1000) ** ("KMGTP".index(unit) + 1)


@given(st.dictionaries(keys, words))
def test_pairs_read_back_exactly(pairs: dict[str, str]) -> None:
    assert read_pairs(write_pairs(pairs)) == pairs


@given(st.text())
def test_pairs_are_read_or_refused_and_nothing_else(text: str) -> None:
    try:
        pairs = read_pairs(text)
    except Malformed:
        return
    assert read_pairs(write_pairs(pairs)) == pairs


def test_a_value_may_hold_equals_signs_and_an_escaped_semicolon() -> None:
    assert read_pairs(r" a = b==; c=d\;e ;; f=C:\temp;g=\\;") == {"a": "b==", "c": "d;e", "f": r"C:\temp", "g": "\\"}


@pytest.mark.parametrize("text", ["a", "=b", "a=1;a=2", "a=1;b"])
def test_pairs_without_key_or_equals_sign_or_with_a_key_twice_are_refused(text: str) -> None:
    with pytest.raises(Malformed):
        read_pairs(text)


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("/data/lake", "file:///data/lake"),
        ("/data/../lake/", "file:///lake"),
        ("file:/data/lake", "file:///data/lake"),
        ("file:///data/lake/", "file:///data/lake"),
        ("file://localhost/data", "file:///data"),
        ("~/lake", f"file://{os.path.expanduser('~')}/lake"),
        ("lake", f"file://{Path.cwd()}/lake"),
        ("/with space", "file:///with space"),
        ("s3://bucket", "s3://bucket"),
        ("s3a://bucket/a/", "s3://bucket/a"),
        ("gs://bucket/a", "gs://bucket/a"),
        ("abfs://box@account.dfs.core.windows.net/a", "abfs://box@account.dfs.core.windows.net/a"),
    ],
)
def test_a_lake_root_has_one_form(text: str, uri: str) -> None:
    assert read_warehouse(text) == uri
    assert read_warehouse(uri) == uri


@pytest.mark.parametrize(
    "text", ["/", "file:/", "file://other/data", "s3:bucket", "s3:///a", "ftp://x/y", "s3://k:s@b/a"]
)
def test_a_lake_root_that_cannot_be_one_is_refused(text: str) -> None:
    with pytest.raises(Malformed):
        read_warehouse(text)


@pytest.mark.parametrize(
    ("text", "address", "user", "password"),
    [
        ("postgresql://h/db", "postgresql://h/db", None, None),
        ("postgres://u@h:5433/db", "postgres://h:5433/db", "u", None),
        ("postgresql://u:p%40%3A@h/db?sslmode=require", "postgresql://h/db?sslmode=require", "u", "p@:"),
        (
            "jdbc:postgresql://h:1/db?user=a@b&password=s%26t&ssl=true",
            "jdbc:postgresql://h:1/db?ssl=true",
            "a@b",
            "s&t",
        ),
        ("postgresql://u:p@[::1]:5432/db", "postgresql://[::1]:5432/db", "u", "p"),
        ("postgresql:///db?host=/tmp", "postgresql:///db?host=/tmp", None, None),
        ("postgresql://h", "postgresql://h", None, None),
    ],
)
def test_credentials_leave_the_postgres_url(text: str, address: str, user: str | None, password: str | None) -> None:
    url = split_postgres_url(text)
    assert (url.address, url.user, url.password) == (address, user, password)


@pytest.mark.parametrize("odd", "@:/?#")
@pytest.mark.parametrize("where", ["hunter{}two", "{}hunter", "hunter{}"])
def test_an_unescaped_password_never_ends_up_in_the_address(odd: str, where: str) -> None:
    try:
        seen = split_postgres_url(f"postgresql://u:{where.format(odd)}@host/db").address
    except Malformed as wrong:
        seen = str(wrong)
    assert "hunter" not in seen


def test_the_url_wins_over_user_and_password_variables() -> None:
    both = {"MODAK_PG_URL": "postgresql://url:one@h/db", "MODAK_PG_USER": "env", "MODAK_PG_PASSWORD": "two"}
    found = load(both).postgres
    assert (found.url, found.user, found.password.get_secret_value()) == ("postgresql://h/db", "url", "one")
    found = load({**both, "MODAK_PG_URL": "postgresql://h/db"}).postgres
    assert (found.user, found.password.get_secret_value()) == ("env", "two")


@pytest.mark.parametrize("text", ["5 * * * *", "0 3 * * *", "*/15 0-6/2 1,15 jan-mar mon-fri", "0 0 * * 7"])
def test_five_field_schedules_are_taken(text: str) -> None:
    assert read_cron(f" {text} ") == text


@pytest.mark.parametrize(
    "text", ["", "* * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "5-1 * * * *", "*/0 * * * *", "a * * * *"]
)
def test_other_schedules_are_refused(text: str) -> None:
    with pytest.raises(Malformed):
        read_cron(text)


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("SPARK_EXECUTOR_MEMORY", "spark.executor.memory"),
        ("spark_executor_memory", "spark.executor.memory"),
        ("spark_driver_extraJavaOptions", "spark.driver.extraJavaOptions"),
        ("spark_sql_catalog_my__lake", "spark.sql.catalog.my_lake"),
        ("spark.sql.catalog.x.cache-enabled", "spark.sql.catalog.x.cache-enabled"),
    ],
)
def test_a_spark_setting_is_spelled_with_underscores_for_dots(variable: str, name: str) -> None:
    assert load({f"MODAK_SPARK_CONF_{variable}": "a b=c"}).spark.conf == {name: "a b=c"}


def test_two_spellings_of_one_spark_setting_are_refused() -> None:
    with pytest.raises(UsageError, match=r"both stand for spark\.ui\.port"):
        load({"MODAK_SPARK_CONF_SPARK_UI_PORT": "1", "MODAK_SPARK_CONF_spark_ui_port": "2"})


def test_credentials_go_over_a_profile_and_a_blank_value_removes_a_key() -> None:
    credentials = load({"MODAK_CREDENTIALS_PROD_S3": "key=new;token=;extra=1"}).credentials
    inherited = {"key": "old", "token": "t", "region": "eu", "blank": ""}
    assert credentials.merged("prod-s3", inherited) == {"key": "new", "extra": "1", "region": "eu", "blank": ""}


def test_missing_credentials_name_their_variable() -> None:
    with pytest.raises(Refused, match="MODAK_CREDENTIALS_PROD_S3 is not set"):
        load({}).credentials.merged("prod.s3", {})


def test_an_endpoint_without_scheme_gets_one_from_the_ssl_switch() -> None:
    def url(**given: str) -> str | None:
        return load({f"MODAK_S3_{name.upper()}": value for name, value in given.items()}).lake.s3_endpoint_url

    assert url() is None
    assert url(endpoint="minio:9000") == "http://minio:9000"
    assert url(endpoint="minio:9000", ssl="yes") == "https://minio:9000"
    assert url(endpoint="https://minio:9000/") == "https://minio:9000"


def test_jars_are_absolute_paths_or_uris() -> None:
    found = load({"MODAK_SPARK_JARS": "~/a.jar, /b.jar,s3://bucket/c.jar,"}).spark.jars
    assert found == (os.path.expanduser("~/a.jar"), "/b.jar", "s3://bucket/c.jar")


def test_sort_keys_fall_back_to_those_of_the_star() -> None:
    measurements = load({"MODAK_MEASUREMENTS_SORT_KEYS": "cpu=host, region;*=host"}).measurements
    assert measurements.sort_keys_of("cpu") == ("host", "region")
    assert measurements.sort_keys_of("disk") == ("host",)
    assert load({}).measurements.sort_keys_of("disk") == ()


def test_retention_is_told_per_measurement() -> None:
    kept = load({"MODAK_MEASUREMENTS_RETENTION": "cpu=30d;*=12h"}).measurements.kept()
    assert {name: time.total_seconds() for name, time in kept.items()} == {"cpu": 30 * 86_400, "*": 12 * 3600}
    with pytest.raises(UsageError, match="the time of cpu is no duration"):
        load({"MODAK_MEASUREMENTS_RETENTION": "cpu=long"})


def test_loopback_is_what_only_this_machine_reaches() -> None:
    def loopback(host: str) -> bool:
        return load({"MODAK_HTTP_HOST": host, "MODAK_API_TOKEN": "t"}).http.loopback

    assert all(map(loopback, ("127.0.0.1", "127.1.2.3", "localhost", "::1")))
    assert not any(map(loopback, ("0.0.0.0", "::", "db", "localhost.example", "128.0.0.1")))


def test_settings_are_frozen_and_travel_to_other_processes() -> None:
    settings = load({"MODAK_LAKE_PROPS": "hadoop.a=b", "MODAK_CREDENTIALS_A": "k=v", "MODAK_PG_PASSWORD": "p"})
    with pytest.raises(ValidationError):
        settings.tiering.premake_partitions = 3
    with pytest.raises(AttributeError):
        settings.tiering = TieringSettings()  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(settings)) == settings == copy.deepcopy(settings)


def test_a_model_made_in_code_is_checked_as_one_from_the_environment() -> None:
    assert TieringSettings(tiering_lag="3d").reclaim_lag == "3d"
    for wrong in ({"premake_partitions": -1}, {"cycle_interval_seconds": 0}, {"tiering_lag": "soon"}, {"lag": 1}):
        with pytest.raises(ValidationError):
            TieringSettings(**wrong)


def test_pairs_are_mappings_that_compare_by_content() -> None:
    assert Pairs({"a": "1"}) == {"a": "1"}
    assert hash(Pairs({"a": "1", "b": "2"})) == hash(Pairs({"b": "2", "a": "1"}))
    assert SecretPairs.of({"a": "1"})["a"] == "1"
