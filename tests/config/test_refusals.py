"""A wrong environment is refused before anything is done, with every mistake and no secret in the message."""

from __future__ import annotations

import traceback

import pytest
from pydantic import ValidationError

from modak.config import LakeSettings, PostgresSettings, explain, load
from modak.config.settings import concerns
from modak.core.errors import UsageError
from tests.config.test_defaults import ALL

SECRET = "hunter2"


def refusal(environ: dict[str, str]) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load(environ)
    return caught.value


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("MODAK_TIERING_LGA", "MODAK_TIERING_LAG"),
        ("MODAK_PG_PASWORD", "MODAK_PG_PASSWORD"),
        ("MODAK_tiering_lag", "MODAK_TIERING_LAG"),
        ("MODAK_PREMAKE_PARTITION", "MODAK_PREMAKE_PARTITIONS"),
        ("MODAK_CREDENTIAL_S3", "MODAK_CREDENTIALS_…"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_one_probably_meant(typo: str, meant: str) -> None:
    error = refusal({typo: SECRET})
    assert error.message == f"{typo} is not a setting: did you mean {meant}?"
    assert (error.exit_code, error.retryable, error.code) == (2, False, "config.invalid")


def test_an_unknown_setting_that_resembles_none_is_refused_without_a_guess() -> None:
    assert refusal({"MODAK_ZZZZZZZZ": "1"}).message == "MODAK_ZZZZZZZZ is not a setting."


def test_variables_of_others_are_none_of_our_business() -> None:
    assert load({"PATH": "/bin", "modak_x": "1", "XMODAK_Y": "2", "MODAKX": "3"}) == load({})


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("MODAK_CYCLE_INTERVAL_SECONDS", "0", "a number of seconds above 0"),
        ("MODAK_CYCLE_INTERVAL_SECONDS", "nan", "a number of seconds above 0"),
        ("MODAK_LEASE_SECONDS", "-1", "a number of seconds above 0"),
        ("MODAK_TIERING_LAG", "7 days", "a whole number, or for time keys a duration such as 7d or 12h"),
        ("MODAK_TIERING_LAG", "-1", "a whole number, or for time keys a duration such as 7d or 12h"),
        ("MODAK_PREMAKE_PARTITIONS", "two", "a whole number from 0 to 10000"),
        ("MODAK_COMPACTION_BATCH", "0", "a whole number of at least 1"),
        ("MODAK_COMPACTION_BATCH", "1.5", "a whole number of at least 1"),
        ("MODAK_TARGET_FILE_BYTES", "lots", "a size such as 256MiB, 1GiB, 128MB or a number of bytes"),
        ("MODAK_CONSOLE_SQL", "perhaps", "true or false"),
        ("MODAK_CONSOLE_PORT", "70000", "a whole number from 1 to 65535"),
        ("MODAK_METRICS_PORT", "0", "a whole number from 1 to 65535"),
        ("MODAK_LOG", "xml", "console or json"),
        ("MODAK_MAINTENANCE_ENGINE", "flink", "spark or embedded"),
        ("MODAK_LAKE_FORMAT", "delta", "iceberg"),
        ("MODAK_SPARK_MASTER", "here", "local[*], local[4], spark://host:port, k8s://… or yarn"),
        ("MODAK_CATALOG_NAMESPACE", "a.b", "a name of letters, digits, _ and -"),
        ("MODAK_MEASUREMENTS_BATCH_FILES", "501", "a whole number from 2 to 500"),
        ("MODAK_MEASUREMENTS_ISOLATION", "thread", "spark or process"),
        ("MODAK_ENTITIES_SCHEMAS", "1,x", "a list of schema ids (0 to 32767) with commas between"),
        ("MODAK_ENTITIES_QUERY_TIMEOUT", "soon", "a duration such as 90s, 5m or 1h (a plain number is seconds)"),
    ],
)
def test_a_malformed_value_names_variable_value_and_what_is_expected(variable: str, value: str, expected: str) -> None:
    assert refusal({variable: value}).message == f"{variable}={value!r}: expected {expected}."


def test_a_manifest_template_must_vary_by_schema() -> None:
    assert "the same file for every schema" in refusal({"MODAK_ENTITIES_MANIFEST_TEMPLATE": "m.json"}).message


def test_all_problems_are_reported_at_once() -> None:
    wrong = {
        "MODAK_TIERING_LGA": "1",
        "MODAK_TIERING_LAG": "x",
        "MODAK_CYCLE_INTERVAL_SECONDS": "0",
        "MODAK_PG_URL": "mysql://h/db",
        "MODAK_CREDENTIALS_A": "x",
        "MODAK_SPARK_CONF_X": "1",
        "MODAK_LAKE_PROPS": "foo=1",
    }
    message = refusal({**wrong, "MODAK_HTTP_HOST": "0.0.0.0"}).message
    assert message.startswith("8 settings are wrong:\n")
    for variable in (*wrong, "MODAK_HTTP_HOST"):
        assert message.count(f"  - {variable}") == 1, variable


def test_a_malformed_value_does_not_cause_a_second_complaint() -> None:
    message = refusal({"MODAK_LEASE_SECONDS": "long", "MODAK_CAMPAIGN_INTERVAL_SECONDS": "60"}).message
    assert message.startswith("MODAK_LEASE_SECONDS='long'")


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"MODAK_LEASE_SECONDS": "5"}, "MODAK_LEASE_SECONDS must exceed MODAK_CAMPAIGN_INTERVAL_SECONDS"),
        ({"MODAK_HTTP_HOST": "0.0.0.0"}, "set MODAK_API_TOKEN"),
        ({"MODAK_HTTP_HOST": "::", "MODAK_API_READ_TOKEN": "r"}, "set MODAK_API_TOKEN"),
        ({"MODAK_API_TOKEN": "t", "MODAK_API_READ_TOKEN": "t"}, "use two tokens"),
        ({"MODAK_S3_ACCESS_KEY": "k"}, "belong together"),
        ({"MODAK_S3_SSL": "true", "MODAK_S3_ENDPOINT": "http://h"}, "begins with http://"),
        ({"MODAK_CATALOG_TOKEN": "t"}, "no effect without MODAK_CATALOG_URI"),
        ({"MODAK_MEASUREMENTS_ENABLED": "true"}, "needs MODAK_MEASUREMENTS_ROOT"),
        ({"MODAK_ENTITIES_ENABLED": "true"}, "needs MODAK_ENTITIES_REGISTRY"),
        ({"MODAK_ENTITIES_MAX_BACKOFF_MS": "1"}, "must not be below"),
        ({"MODAK_QUERY_PG_PASSWORD": "p"}, "needs MODAK_QUERY_PG_USER"),
        ({"MODAK_ENTITIES_PG_HOST": "h"}, "needs MODAK_ENTITIES_PG_DB"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(environ: dict[str, str], sentence: str) -> None:
    assert sentence in refusal(environ).message


def test_beyond_loopback_a_token_is_enough() -> None:
    assert not load({"MODAK_HTTP_HOST": "0.0.0.0", "MODAK_API_TOKEN": "t"}).http.loopback


WITH_SECRETS = {
    "MODAK_PG_URL": f"postgresql://u:{SECRET}@h/db",
    "MODAK_S3_ACCESS_KEY": SECRET,
    "MODAK_S3_SECRET_KEY": SECRET,
    "MODAK_CATALOG_URI": "https://catalog",
    "MODAK_CATALOG_TOKEN": SECRET,
    "MODAK_API_TOKEN": SECRET,
    "MODAK_API_READ_TOKEN": SECRET + "r",
    "MODAK_LOAD_TOKEN": SECRET,
    "MODAK_ENTITIES_PG_PASSWORD": SECRET,
    "MODAK_CREDENTIALS_S3": f"a={SECRET};b={SECRET}",
    "MODAK_LAKE_PROPS": f"hadoop.fs.s3a.secret.key={SECRET};iceberg.table.x=visible",
    "MODAK_SPARK_CONF_SPARK_HADOOP_FS_S3A_SECRET_KEY": SECRET,
    "MODAK_SPARK_CONF_SPARK_SQL_CATALOG_X_URI": f"jdbc:postgresql://h/db?password={SECRET}",
    "MODAK_SPARK_CONF_SPARK_SQL_CATALOG_Y_URI": f"https://u:{SECRET}@h",
}


def test_secrets_are_there_for_code_and_masked_for_people() -> None:
    settings = load(WITH_SECRETS)
    assert settings.postgres.password.get_secret_value() == SECRET
    assert settings.lake.props["hadoop.fs.s3a.secret.key"] == SECRET
    assert settings.credentials.merged("s3", {}) == {"a": SECRET, "b": SECRET}
    texts = [repr(settings), str(settings), f"{settings}", repr(explain(WITH_SECRETS))]
    for concern in concerns():
        part = getattr(settings, concern)
        texts += [repr(part), str(part), repr(part.model_dump()), part.model_dump_json()]
    assert not [text for text in texts if SECRET in text]
    assert "visible" in repr(settings)


def test_a_listing_masks_secrets_and_says_where_values_come_from() -> None:
    listed = {each.name: each for each in explain({**WITH_SECRETS, "MODAK_LEASE_SECONDS": "20"})}
    url, password, lease, cycle = (
        listed[f"MODAK_{name}"] for name in ("PG_URL", "PG_PASSWORD", "LEASE_SECONDS", "CYCLE_INTERVAL_SECONDS")
    )
    assert (url.value_for_display, url.source) == ("postgresql://h/db", "environment")
    assert (password.value_for_display, password.source, password.secret) == ("********", "environment", True)
    assert (lease.value_for_display, lease.source) == ("20", "environment")
    assert (cycle.value_for_display, cycle.source) == ("10", "default")
    assert listed["MODAK_CREDENTIALS_S3"].value_for_display == "a=********;b=********"
    assert listed["MODAK_SPARK_CONF_SPARK_HADOOP_FS_S3A_SECRET_KEY"].value_for_display == "********"
    assert listed["MODAK_LAKE_PROPS"].value_for_display == "hadoop.fs.s3a.secret.key=********;iceberg.table.x=visible"
    assert all(each.help for each in listed.values())


def test_a_listing_of_a_wrong_environment_is_refused_too() -> None:
    with pytest.raises(UsageError, match="MODAK_TIERING_LAG"):
        explain({"MODAK_TIERING_LGA": "1"})


@pytest.mark.parametrize(
    "environ",
    [
        {"MODAK_PG_URL": f"postgresql://u:{SECRET}@x@h/db"},
        {"MODAK_PG_URL": f"postgresql://u:{SECRET}@h:port/db"},
        {"MODAK_PG_URL": f"mysql://u:{SECRET}@h/db"},
        {"MODAK_PG_URL": f"postgresql://h/db?sslpassword={SECRET}"},
        {"MODAK_CREDENTIALS_A": SECRET},
        {"MODAK_CREDENTIALS_a": f"k={SECRET}"},
        {"MODAK_LAKE_PROPS": f"secret={SECRET}"},
        {"MODAK_LAKE_PROPS": SECRET},
        {"MODAK_WAREHOUSE": f"s3://key:{SECRET}@bucket/a"},
        {"MODAK_S3_ENDPOINT": f"https://key:{SECRET}@h"},
        {"MODAK_CATALOG_URI": f"https://u:{SECRET}@h"},
        {"MODAK_SPARK_CONF_X": SECRET},
        {"MODAK_UNKNOWN": SECRET},
    ],
)
def test_no_error_and_no_traceback_repeats_what_may_be_a_secret(environ: dict[str, str]) -> None:
    error = refusal(environ)
    assert SECRET not in "".join(traceback.format_exception(error))


def test_models_made_in_code_do_not_repeat_a_secret_either() -> None:
    with pytest.raises(ValidationError) as postgres:
        PostgresSettings(url=f"postgresql://u:{SECRET}@h/db")
    with pytest.raises(ValidationError) as lake:
        LakeSettings(s3_endpoint=f"u:{SECRET}@h")
    assert SECRET not in f"{postgres.value} {lake.value}"


@pytest.mark.parametrize("variable", sorted(ALL))
def test_any_text_is_taken_or_refused_with_the_variable_named(variable: str) -> None:
    messages: list[str] = []
    for text in ("\x00", "ä", "-1", "a=b;", "://", "  ", "9" * 400, "9" * 5000, "{}"):
        try:
            load({variable: text})
        except UsageError as error:
            messages.append(error.message)
    assert all(variable in message and len(message) < 400 for message in messages)
