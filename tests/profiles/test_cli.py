"""`profile create | list | check` as a user calls them, and the commands of the page on storage."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from modak.cli.main import app
from modak.postgres.dsn import Dsn
from modak.storage.access import Key
from modak.storage.store import Store
from modak.tables.checking import check
from tests.profiles.conftest import SECRET, credentials
from tests.s3_fixtures import S3Server
from tests.support.store_proxy import StoreProxy

PAGE = (Path(__file__).parents[2] / "docs" / "storage.md").read_text(encoding="utf-8")
Call = Callable[..., Any]


@pytest.fixture
def modak(fresh_database: Dsn, tmp_path: Path) -> Call:
    def call(*args: str, **environ: str) -> Any:
        given = {
            "MODAK_PG_URL": fresh_database.safe(),
            "MODAK_PG_PASSWORD": fresh_database.password,
            "MODAK_HOME": str(tmp_path / "home"),
            **environ,
        }
        return CliRunner(env=given).invoke(app, list(args))

    return call


def test_profiles_are_created_listed_and_exactly_one_is_the_default(modak: Call, tmp_path: Path) -> None:
    first = modak("profile", "create", "--name", "archive", "--warehouse", str(tmp_path / "archive"))
    assert (first.exit_code, "created profile archive" in first.stdout) == (0, True)
    again = modak("profile", "create", "--name", "archive", "--warehouse", str(tmp_path / "archive"), "--default")
    assert "there already" in again.stdout
    other = modak("profile", "create", "--name", "archive", "--warehouse", str(tmp_path / "other"))
    assert other.exit_code == 1
    assert "another --warehouse" in other.stderr
    listed = json.loads(modak("profile", "list", "--json").stdout)["profiles"]
    assert {one["name"]: one["default"] for one in listed} == {"archive": True, "default": False}
    assert "* archive" in modak("profile", "list").stdout


def test_a_check_times_every_step_or_names_the_cause(modak: Call, s3_server: S3Server, tmp_path: Path) -> None:
    modak("profile", "create", "--name", "folder", "--warehouse", str(tmp_path / "folder"))
    done = modak("profile", "check", "folder")
    assert done.exit_code == 0
    steps = ("write", "read", "conditional put", "list", "delete")
    assert re.findall(r"^  ([a-z ]+?) +ok  \d+\.\d s$", done.stdout, flags=re.MULTILINE) == [*steps]
    bucket = f"s3://{s3_server.new_bucket()}/lake"
    modak("profile", "create", "--name", "bucket", "--warehouse", bucket, "--credentials", "test")
    missing = modak("profile", "check", "bucket")
    assert missing.exit_code == 1
    assert "MODAK_CREDENTIALS_TEST is not set" in missing.stderr
    environ = credentials(s3_server.endpoint)
    assert modak("profile", "check", "bucket", **environ).exit_code == 0
    nowhere = f"s3://{bucket.split('/')[2]}-gone/lake"
    modak("profile", "create", "--name", "gone", "--warehouse", nowhere, "--credentials", "test")
    failed = modak("profile", "check", "gone", **environ)
    assert failed.exit_code == 1
    assert "write" in failed.stderr
    assert SECRET not in failed.output + failed.stderr
    unknown = modak("profile", "check", "folders")
    assert unknown.exit_code == 1
    assert "There is no storage profile 'folders'" in unknown.stderr


def test_a_failing_check_tells_what_is_wrong_with_the_store(modak: Call, s3_server: S3Server, tmp_path: Path) -> None:
    bucket = f"s3://{s3_server.new_bucket()}/lake"
    (tmp_path / "file").write_text("no folder")

    def failed(name: str, warehouse: str, given: str | None = None) -> str:
        reference = ("--credentials", "test") if given else ()
        modak("profile", "create", "--name", name, "--warehouse", warehouse, *reference)
        done = modak("profile", "check", name, **({"MODAK_CREDENTIALS_TEST": given} if given else {}))
        assert done.exit_code == 1
        assert SECRET not in done.output + done.stderr
        return str(done.stderr)

    good = credentials(s3_server.endpoint)["MODAK_CREDENTIALS_TEST"]
    gone = failed("gone", f"s3://{bucket.split('/')[2]}-gone/lake", good)
    assert "write: Storage cannot write" in gone
    assert "NoSuchBucket: The specified bucket does not exist" in gone
    nobody = failed("nobody", bucket, good.replace(s3_server.endpoint, "http://127.0.0.1:9"))
    assert "PUT http://127.0.0.1:9/" in nobody
    assert str(tmp_path / "file") in failed("file", str(tmp_path / "file" / "below"))


@pytest.mark.parametrize(
    ("ignored", "cause"),
    [
        ("if-none-match", "overwrites an object that it was told to create only where there is none"),
        ("if-match", "replaces a version that is gone"),
    ],
)
def test_a_store_that_ignores_conditions_fails_the_check_and_keeps_nothing_of_it(
    modak: Call, s3_server: S3Server, ignored: str, cause: str
) -> None:
    bucket = f"s3://{s3_server.new_bucket()}/lake"
    modak("profile", "create", "--name", "deaf", "--warehouse", bucket, "--credentials", "test")
    with StoreProxy(s3_server.endpoint, seed=1, rate=0, deaf_to=(ignored,)) as proxy:
        failed = modak("profile", "check", "deaf", **credentials(proxy.endpoint))
    assert failed.exit_code == 1
    assert f"conditional put: The store {cause}." in " ".join(failed.stderr.split())
    assert "It cannot hold a lake safely." in " ".join(failed.stderr.split())
    done = re.findall(r"^  ([a-z ]+?) +(ok|failed)  \d+\.\d s$", failed.stdout, flags=re.MULTILINE)
    assert done == [("write", "ok"), ("read", "ok"), ("conditional put", "failed")]
    assert list(Store.of(bucket, s3_server.props).list()) == []


def test_each_step_of_a_check_has_its_own_time(tmp_path: Path) -> None:
    ticks = iter([0.0, 1.0, 3.0, 10.0, 14.0, 20.0, 28.0, 30.0, 46.0, 50.0, 82.0])
    steps = check(Key(f"file://{tmp_path}/lake"), clock=lambda: next(ticks))
    assert [step.seconds for step in steps] == [2.0, 4.0, 8.0, 16.0, 32.0]


def test_secrets_and_strange_keys_are_refused_without_being_repeated(modak: Call) -> None:
    base = ("profile", "create", "--name", "x", "--warehouse", "s3://bucket/w")
    secret = modak(*base, "--config", "s3.secret-access-key=hunter2")
    assert secret.exit_code == 2
    assert "MODAK_CREDENTIALS_" in secret.stderr
    assert "hunter2" not in secret.output + secret.stderr
    assert modak(*base, "--config", "colour=red").exit_code == 2
    slip = modak(*base, "--config", "s3.path-style-acess=true")
    assert slip.exit_code == 2
    assert "Did you mean s3.path-style-access?" in slip.stderr


def test_every_command_on_the_page_runs(modak: Call, tmp_path: Path) -> None:
    commands = re.findall(r"^modak-worker (profile .+)$", PAGE, flags=re.MULTILINE)
    assert len(commands) >= 5
    environ = {
        "MODAK_CREDENTIALS_ANALYTICS": "client.region=eu-central-1",
        "MODAK_CREDENTIALS_MINIO": "s3.region=x",
        "MODAK_CREDENTIALS_AZURITE": "adls.auth.shared-key.account.key=eA==",
    }
    for words in map(shlex.split, commands):
        if words[1] == "check":
            continue
        here = [word.replace("/srv/archive", str(tmp_path / "srv")) for word in words]
        done = modak(*here, **environ)
        assert done.exit_code == 0, (words, done.output, done.stderr)
