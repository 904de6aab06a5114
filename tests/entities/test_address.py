"""Where Postgres is and how we are let in: tokens that a command prints, and TLS everywhere but on this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from modak.config import load
from modak.core.errors import ModakError, UsageError
from modak.entities import address as module
from modak.entities.address import Address, address_of
from modak.entities.config import CDCConfig, from_settings
from modak.entities.flushing import flush
from modak.entities.initial import init
from modak.entities.verifying import verify
from modak.postgres.arrow import stream
from modak.postgres.dsn import Dsn
from tests.entities.test_cli import Call, environ, installed, modak
from tests.entities.world import INVOICE, SCHEMA, World

__all__ = ["environ", "installed", "modak"]


def test_tls_is_wanted_everywhere_but_on_this_machine() -> None:
    remote = address_of(CDCConfig(pg_host="db.example", pg_db="shop"))
    local = address_of(CDCConfig(pg_host="127.0.0.1", pg_db="shop"))
    forced = address_of(CDCConfig(pg_host="localhost", pg_db="shop", pg_ssl_mode="verify-full"))
    default = address_of(CDCConfig(), Dsn("db.example", 5432, "shop", "me"))
    own = address_of(CDCConfig(), Dsn("db.example", 5432, "shop", "me", options=(("sslmode", "verify-ca"),)))
    modes = [dict(each.dsn.options)["sslmode"] for each in (remote, local, forced, default, own)]
    assert modes == ["require", "disable", "verify-full", "require", "verify-ca"]


def test_the_user_is_postgres_where_none_is_named() -> None:
    assert address_of(CDCConfig(pg_host="db.example", pg_db="shop")).dsn.user == "postgres"
    assert address_of(CDCConfig(pg_host="db.example", pg_db="shop", pg_user="").with_defaults()).dsn.user == "postgres"
    settings = load({"MODAK_ENTITIES_PG_HOST": "db.example", "MODAK_ENTITIES_PG_DB": "shop"})
    assert address_of(from_settings(settings.entities)[0]).dsn.user == "postgres"


def test_going_without_tls_is_said_once() -> None:
    module._say_plain.cache_clear()
    with capture_logs() as said:
        for _ in range(2):
            address_of(CDCConfig(pg_host="127.0.0.1", pg_db="shop"))
        address_of(CDCConfig(pg_host="db.example", pg_db="shop"))
    assert [(each["event"], each["host"]) for each in said] == [("entities.without_tls", "127.0.0.1")]


def test_a_server_that_cannot_do_tls_is_not_talked_to_where_it_is_required(world: World) -> None:
    wanted = replace(world.dsn, options=(*world.dsn.options, ("sslmode", "require")))
    store = replace(world.store, address=Address(wanted))
    with pytest.raises(ModakError, match="SSL") as caught, store.connect():
        pass
    assert world.dsn.password not in str(caught.value)
    with pytest.raises(ModakError, match="SSL"):
        stream(store.address.fresh(), "SELECT 1", snapshot=None)


def command(folder: Path, prints: str) -> str:
    """A command that prints a token, and leaves a line behind each time."""
    script = folder / "token"
    script.write_text(f"#!/bin/sh\necho $PGUSER@$PGHOST:$PGPORT/$PGDATABASE >> {folder}/calls\n{prints}\n")
    script.chmod(0o755)
    return str(script)


def test_a_token_is_fetched_for_every_connection_and_shown_nowhere(tmp_path: Path) -> None:
    script = command(tmp_path, "echo token-of-$PGUSER")
    config = CDCConfig(pg_host="db.example", pg_db="shop", pg_user="me", pg_use_iam=True, pg_token_command=script)
    address = address_of(config)
    assert address.fresh().password == address.fresh().password == "token-of-me"
    assert (tmp_path / "calls").read_text() == "me@db.example:5432/shop\n" * 2
    assert "token-of" not in repr(address)
    assert script not in repr(config)
    with pytest.raises(UsageError, match="asks for tokens"):
        address_of(replace(config, pg_token_command=""))
    for failing in ("sh -c 'echo secret; exit 3'", "sh -c 'echo secret >&2'", "/no/such/command secret"):
        with pytest.raises(ModakError, match=r"gave no token|printed nothing") as caught:
            Address(Dsn("h", 1, "d", "u"), failing).fresh()
        assert "secret" not in str(caught.value)
        assert caught.value.retryable


def test_every_flow_enters_with_a_token_of_its_own(world: World, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(world.dsn.password)
    address = Address(replace(world.dsn, password="stale"), command(tmp_path, f"cat {secret}"))
    store = replace(world.store, address=address)
    world.many(0, 5)
    assert flush(store)[0].rows == 5
    assert init(store, SCHEMA, replace_delta=True).rows == 5
    assert verify(store, SCHEMA).sound
    calls = (tmp_path / "calls").read_text().splitlines()
    # A flush alone connects for: checking, the lock, counting twice, the snapshot and a look at it, both queries of its
    # task, and marking; an init of clean rows marks none.
    assert len(calls) >= 9 + 6 + 5
    secret.write_text("expired")
    with pytest.raises(ModakError) as caught:
        flush(store)
    assert "expired" not in str(caught.value)
    assert world.dsn.password not in str(caught.value)


def test_a_command_with_tokens_works_on_a_postgres_of_its_own(
    modak: Call, installed: World, tmp_path: Path, environ: dict[str, str]
) -> None:
    installed.many(0, 3)
    secret = tmp_path / "secret"
    secret.write_text(installed.dsn.password)
    own = {
        "MODAK_PG_URL": "",
        "MODAK_ENTITIES_PG_HOST": installed.dsn.host,
        "MODAK_ENTITIES_PG_PORT": str(installed.dsn.port),
        "MODAK_ENTITIES_PG_DB": installed.dsn.dbname,
        "MODAK_ENTITIES_PG_USER": installed.dsn.user,
        "MODAK_ENTITIES_PG_USE_IAM": "true",
        "MODAK_ENTITIES_PG_TOKEN_COMMAND": command(tmp_path, f"cat {secret}"),
    }
    again = modak("install", **own)
    assert (again.exit_code, "without TLS, because it is this machine" in again.output) == (0, True), again.output
    done = modak("flush", **own)
    assert (done.exit_code, "3 rows in 1 file " in done.stdout) == (0, True), done.output
    assert installed.dsn.password not in done.output + again.output
    assert json.loads(Path(environ["MODAK_ENTITIES_REGISTRY"]).read_text()) == INVOICE
