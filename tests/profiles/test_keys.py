"""From profiles to keys, pure: what lies over what, and what each client calls it."""

from __future__ import annotations

from pathlib import Path

import pytest

from modak import config
from modak.catalog.records import Profile
from modak.core.errors import Refused
from modak.spark.credentials import needed_schemes
from modak.spark.jars import BUNDLES
from modak.storage import access
from modak.storage.access import Key
from modak.storage.client import scrubbed
from modak.storage.stores import Stores
from modak.tables.profiles import key_of


def _profile(warehouse: str, ref: str | None = None, **config_: str) -> Profile:
    pairs = {key.replace("_", "."): value for key, value in config_.items()}
    return Profile(
        profile_id=1,
        name="p",
        warehouse=warehouse,
        format="iceberg",
        config=pairs,
        credentials_ref=ref,
        is_default=False,
    )


def test_credentials_lie_over_config_over_the_default_access(tmp_path: Path) -> None:
    settings = config.load(
        {
            "MODAK_HOME": str(tmp_path),
            "MODAK_S3_ENDPOINT": "minio:9000",
            "MODAK_S3_ACCESS_KEY": "default",
            "MODAK_S3_SECRET_KEY": "s1",
            "MODAK_CREDENTIALS_TEST": "s3.access-key-id=mine;s3.secret-access-key=s2;s3.endpoint=",
        }
    )
    key = key_of(settings, _profile("s3://b/w", "test", client_region="eu"))
    assert key.props["s3.access-key-id"] == "mine"
    assert key.props["client.region"] == "eu"
    assert "s3.endpoint" not in key.props
    assert key_of(settings, _profile("s3://b/w")).props["s3.endpoint"] == "http://minio:9000"
    assert key_of(settings, _profile("s3://b/w", "other")).missing == "MODAK_CREDENTIALS_OTHER"
    assert "s2" not in repr(key)


def test_a_property_that_no_client_takes_stops_only_its_own_profile(tmp_path: Path) -> None:
    settings = config.load(
        {
            "MODAK_HOME": str(tmp_path),
            "MODAK_CREDENTIALS_TEST": "gcs.credentials-file=/secret/place",
            "MODAK_LAKE_PROPS": "iceberg.catalog.cache-enabled=false",
        }
    )
    key = key_of(settings, _profile("gs://b/w", "test"))
    stores = Stores([key, Key(f"file://{tmp_path}/a")])
    stores.write(f"file://{tmp_path}/a/x", b"1")
    with pytest.raises(Refused, match="gs://b/w cannot be opened") as refused:
        stores.exists("gs://b/w/x")
    assert "MODAK_CREDENTIALS_TEST" in str(refused.value)
    assert "gcs.credentials-file" in str(refused.value)
    assert "GOOGLE_APPLICATION_CREDENTIALS" in refused.value.hint
    assert "/secret/place" not in str(refused.value)
    assert key_of(settings, _profile("gs://b/w")).wrong is None


def test_only_object_stores_ask_for_jars() -> None:
    keys = [Key("file:///a"), Key("s3://b/w"), Key("gs://b/w"), Key("abfss://c@a/w")]
    assert needed_schemes(keys[:1]) == frozenset()
    assert needed_schemes(keys) == {"s3", "gs", "abfss"} <= set(BUNDLES)


def test_a_uri_is_opened_by_the_longest_root_that_holds_it() -> None:
    access.use([Key("s3://keys/a", {"x": "1"}), Key("s3://keys/a/b", {"x": "2"}), Key("s3://gone", missing="VAR")])
    assert access.key_of("s3://keys/a/b/c").props == {"x": "2"}
    assert access.key_of("s3a://keys/a/bc").props == {"x": "1"}
    with pytest.raises(Refused, match="VAR is not set"):
        access.key_of("s3://gone/x")


def test_nothing_outside_the_profiles_is_touched(tmp_path: Path) -> None:
    stores = Stores([Key(f"file://{tmp_path}/a"), Key(f"file://{tmp_path}/a/inner")])
    stores.write(f"file://{tmp_path}/a/inner/x", b"1")
    assert stores.read(f"file://{tmp_path}/a/inner/x") == b"1"
    with pytest.raises(Refused, match="outside every storage profile"):
        stores.delete_prefix(f"file://{tmp_path}/b")


def test_a_stores_words_lose_their_keys() -> None:
    assert (
        scrubbed("SignatureDoesNotMatch secret_access_key=abc&x=1") == "SignatureDoesNotMatch secret_access_key=***&x=1"
    )
