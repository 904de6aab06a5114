"""What a user writes reaches both clients alike, or is refused: names, pure; and what real clients make of them."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from modak.core.errors import ModakError
from modak.spark.credentials import java_props
from modak.spark.gateway import Gateway
from modak.storage.access import Key
from modak.storage.client import backend, options
from modak.storage.properties import ACCOUNT, TABLE, unknown

ROOTS = {"s3": "s3://bucket/w", "gs": "gs://bucket/w", "abfs": "abfs://box@acme.dfs.core.windows.net/w"}
HOST = "acme.dfs.core.windows.net"
PAGE = (Path(__file__).parents[2] / "docs" / "storage.md").read_text(encoding="utf-8")


def _java(root: str, props: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in java_props(Key(root, props)).items() if not name.startswith("s3.retry.")}


@pytest.mark.parametrize(
    ("store", "given", "java", "client"),
    [
        ("gs", {"gcs.oauth2.token": "t"}, {"gcs.oauth2.token": "t"}, {"bearer_token": "t"}),
        ("gs", {"gcs.project-id": "p"}, {"gcs.project-id": "p"}, {}),
        ("gs", {"gcs.no-auth": "true"}, {"gcs.no-auth": "true"}, {"skip_signature": "true", "bearer_token": ""}),
        (
            "gs",
            {"gcs.service.host": "http://127.0.0.1:1"},
            {"gcs.service.host": "http://127.0.0.1:1"},
            {"base_url": "http://127.0.0.1:1", "allow_http": "true"},
        ),
        (
            "abfs",
            {"adls.auth.shared-key.account.name": "n", "adls.auth.shared-key.account.key": "k"},
            {"adls.auth.shared-key.account.name": "n", "adls.auth.shared-key.account.key": "k"},
            {"account_name": "n", "account_key": "k"},
        ),
        (
            "abfs",
            {"adls.auth.shared-key.account.key": "k"},
            {"adls.auth.shared-key.account.name": "acme", "adls.auth.shared-key.account.key": "k"},
            {"account_name": "acme", "account_key": "k"},
        ),
        ("abfs", {"adls.sas-token.acme": "s"}, {f"adls.sas-token.{HOST}": "s"}, {"sas_token": "s"}),
        ("abfs", {f"adls.sas-token.{HOST}": "s"}, {f"adls.sas-token.{HOST}": "s"}, {"sas_token": "s"}),
        ("abfs", {"adls.sas-token.other": "s"}, {}, {}),
        ("abfs", {"adls.token": "t"}, {"adls.token": "t"}, {"token": "t"}),
        (
            "abfs",
            {"adls.endpoint": "https://e"},
            {f"adls.connection-string.{HOST}": "https://e"},
            {"endpoint": "https://e"},
        ),
        ("abfs", {"adls.read.block-size-bytes": "9"}, {"adls.read.block-size-bytes": "9"}, {}),
        (
            "s3",
            {"s3.region": "eu", "s3.sse.type": "kms"},
            {"client.region": "eu", "s3.sse.type": "kms"},
            {"region": "eu", "virtual_hosted_style_request": "true"},
        ),
        (
            "s3",
            {"s3.endpoint": "https://h", "s3.session-token": "t"},
            {
                "s3.endpoint": "https://h",
                "s3.session-token": "t",
                "client.region": "us-east-1",
                "s3.path-style-access": "true",
            },
            {
                "endpoint": "https://h",
                "session_token": "t",
                "region": "us-east-1",
                "virtual_hosted_style_request": "false",
            },
        ),
    ],
)
def test_a_property_reaches_both_clients_under_their_own_names(
    store: str, given: dict[str, str], java: dict[str, str], client: dict[str, str]
) -> None:
    assert unknown(ROOTS[store], given) is None
    assert _java(ROOTS[store], given) == java
    assert options(ROOTS[store], given) == client


def test_of_several_ways_into_azure_both_clients_take_the_same() -> None:
    every = {
        "adls.sas-token.acme": "s",
        "adls.auth.shared-key.account.name": "acme",
        "adls.auth.shared-key.account.key": "k",
        "adls.token": "t",
    }
    # Iceberg's own order: a signature, then the key, then the token.
    assert options(ROOTS["abfs"], every) == {"sas_token": "s"}
    del every["adls.sas-token.acme"]
    assert options(ROOTS["abfs"], every) == {"account_name": "acme", "account_key": "k"}


@pytest.mark.parametrize(
    ("store", "name", "hint"),
    [
        ("gs", "gcs.service-account-key", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("gs", "gcs.credentials-file", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("gs", "gcs.oauth2-token", "Did you mean gcs.oauth2.token?"),
        ("gs", "gcs.encryption-key", "Known: gcs.oauth2.token"),
        ("gs", "bearer_token", "Write gcs.oauth2.token."),
        ("abfs", "adls.token.client-secret", "AZURE_CLIENT_SECRET"),
        ("abfs", "adls.account-key", "Write adls.auth.shared-key.account.key."),
        ("abfs", "adls.sas-token", "Write adls.sas-token.<account>."),
        ("abfs", "account_key", "Write adls.auth.shared-key.account.key."),
        ("s3", "s3.acess-key-id", "Did you mean s3.access-key-id?"),
        ("s3", "s3.secret-key", "Write s3.secret-access-key."),
    ],
)
def test_what_cannot_reach_both_is_refused_with_what_to_do_instead(store: str, name: str, hint: str) -> None:
    odd = unknown(ROOTS[store], {name: "x"})
    assert odd is not None
    assert odd.name == name
    assert hint in odd.hint


def test_the_page_names_every_property() -> None:
    missing = [each.name for store in TABLE.values() for each in store if f"`{each.name}`" not in PAGE]
    assert missing == []


@dataclass
class Listener:
    """A server that is asked, remembers how the asker showed who it is, and has nothing."""

    address: str
    shown: list[str] = field(default_factory=list)


@pytest.fixture
def listener() -> Iterator[Listener]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.shown.append(f"{self.path} {self.headers.get('Authorization')}")
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    heard = Listener(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield heard
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("store", "given", "shown"),
    [
        ("gs", {"gcs.service.host": "{address}", "gcs.oauth2.token": "hush"}, "Bearer hush"),
        ("gs", {"gcs.service.host": "{address}", "gcs.no-auth": "true"}, "None"),
        ("abfs", {"adls.endpoint": "{address}", "adls.token": "hush"}, "Bearer hush"),
        ("abfs", {"adls.endpoint": "{address}", "adls.sas-token.acme": "sv=1&sig=hush"}, "sig=hush"),
        (
            "abfs",
            {"adls.endpoint": "{address}", "adls.auth.shared-key.account.key": "aHVzaA=="},
            "SharedKey acme:",
        ),
    ],
)
def test_the_client_of_tasks_shows_the_store_what_was_given(
    listener: Listener, store: str, given: dict[str, str], shown: str
) -> None:
    import obstore

    props = {name: value.replace("{address}", listener.address) for name, value in given.items()}
    with pytest.raises(FileNotFoundError):
        obstore.head(backend(ROOTS[store], props), "file")
    assert len(listener.shown) == 1
    assert shown in listener.shown[0]


def test_a_property_that_is_refused_names_no_value() -> None:
    odd = unknown(ROOTS["gs"], {"gcs.service-account-key": "hunter2"})
    assert "hunter2" not in repr(odd)
    with pytest.raises(ModakError, match="no place for a lake"):
        options("ftp://host/w", {})


def test_iceberg_itself_knows_every_name_that_it_is_given(gateway: Gateway) -> None:
    jvm = gateway.jvm
    classes = {
        "s3": ("aws.s3.S3FileIOProperties", "aws.AwsClientProperties"),
        "gs": ("gcp.GCPProperties",),
        "abfs": ("azure.AzureProperties",),
    }
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    for store, names in classes.items():
        paths = [f"org/apache/iceberg/{name.replace('.', '/')}.class" for name in names]
        # The classes themselves cannot be opened without the libraries of the clouds; their constants can be read.
        code = b"".join(bytes(loader.getResourceAsStream(path).readAllBytes()) for path in paths)
        for each in TABLE[store]:
            name = each.java.replace(ACCOUNT, "").encode()
            assert struct.pack(">BH", 1, len(name)) + name in code, each.java
    made = jvm.java.util.HashMap()
    for name, value in _java(ROOTS["gs"], {"gcs.oauth2.token": "hush", "gcs.project-id": "p"}).items():
        made.put(name, value)
    read = jvm.org.apache.iceberg.gcp.GCPProperties(made)
    assert (read.oauth2Token().get(), read.projectId().get()) == ("hush", "p")
