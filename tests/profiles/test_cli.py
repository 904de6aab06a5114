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
from tests.profiles.conftest import SECRET, credentials
from tests.s3_fixtures import S3Server

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
    for step in ("write", "read", "conditional put", "list", "delete"):
        assert re.search(rf"{step} +ok", done.stdout), step
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


def test_secrets_and_strange_keys_are_refused_without_being_repeated(modak: Call) -> None:
    base = ("profile", "create", "--name", "x", "--warehouse", "s3://bucket/w")
    secret = modak(*base, "--config", "s3.secret-access-key=hunter2")
    assert secret.exit_code == 2
    assert "MODAK_CREDENTIALS_" in secret.stderr
    assert "hunter2" not in secret.output + secret.stderr
    assert modak(*base, "--config", "colour=red").exit_code == 2


def test_every_command_on_the_page_runs(modak: Call, tmp_path: Path) -> None:
    commands = re.findall(r"^modak-worker (profile .+)$", PAGE, flags=re.MULTILINE)
    assert len(commands) >= 5
    environ = {"MODAK_CREDENTIALS_ANALYTICS": "client.region=eu-central-1", "MODAK_CREDENTIALS_MINIO": "s3.region=x"}
    for words in map(shlex.split, commands):
        if words[1] == "check":
            continue
        here = [word.replace("/srv/archive", str(tmp_path / "srv")) for word in words]
        done = modak(*here, **environ)
        assert done.exit_code == 0, (words, done.output, done.stderr)
