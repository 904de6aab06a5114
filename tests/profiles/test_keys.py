"""From profiles to keys, pure: what lies over what, and what each client calls it."""

from __future__ import annotations

from pathlib import Path

import pytest

from modak import config
from modak.catalog.records import Profile
from modak.core.errors import Refused
from modak.spark.credentials import java_props, needed_schemes
from modak.spark.jars import BUNDLES
from modak.storage import access
from modak.storage.access import Key
from modak.storage.client import options, scrubbed
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


def test_each_store_has_its_own_words() -> None:
    s3 = options("s3://b/w", {"s3.endpoint": "http://h:1", "s3.access-key-id": "k", "client.region": "eu"})
    assert s3 == {
        "endpoint": "http://h:1",
        "access_key_id": "k",
        "region": "eu",
        "virtual_hosted_style_request": "false",
        "allow_http": "true",
    }
    assert options("gs://b/w", {"gcs.credentials-file": "/key.json"}) == {"service_account": "/key.json"}
    azure = {"adls.auth.shared-key.account.name": "a", "adls.auth.shared-key.account.key": "k"}
    assert options("abfs://c@a.dfs.core.windows.net/w", azure) == {"account_name": "a", "account_key": "k"}
    java = java_props(Key("s3://b/w", {"s3.endpoint": "http://h:1", "s3.region": "eu"}))
    assert (java["client.region"], java["s3.path-style-access"]) == ("eu", "true")


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
