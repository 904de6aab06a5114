"""Flags are checked before anything is opened: a wrong call is exit code 2, what has not landed is exit code 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

REGISTER = ("register", "--table", "public.events", "--pk", "id", "--tier-key", "at")
TABLE = ("--table", "public.events")
PROFILE = ("profile", "create", "--name", "analytics", "--warehouse", "s3://lake/root")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("register",), "--table"),
        (("register", *TABLE), "--pk"),
        (("register", *TABLE, "--pk", "id"), "--tier-key"),
        ((*REGISTER, "--mode", "sideways"), "mode"),
        ((*REGISTER, "--heap-retention", "100"), "--heap-retention"),
        ((*REGISTER, "--chunk-rows", "10"), "--chunk-rows"),
        ((*REGISTER, "--mode", "mirrored", "--lake-retention", "100"), "--lake-retention"),
        ((*REGISTER, "--mode", "mirrored", "--keep-heap"), "--keep-heap"),
        ((*REGISTER, "--mode", "mirrored", "--heap-retention", "9", "--lake-retention", "9"), "--lake-retention"),
        ((*REGISTER, "--keep-heap", "--lake-retention", "100"), "--lake-retention"),
        ((*REGISTER, "--lake-retention", "100", "--partition-width", "0"), "width"),
        ((*REGISTER, "--lake-retention", "soon"), "--lake-retention"),
        ((*REGISTER, "--lake-retention", "0"), "--lake-retention"),
        ((*REGISTER, "--mode", "mirrored", "--heap-retention", "-5"), "--heap-retention"),
        ((*REGISTER, "--mode", "mirrored", "--chunk-rows", "0"), "--chunk-rows"),
        ((*REGISTER, "--mode", "mirrored", "--chunk-rows", "many"), "--chunk-rows"),
        ((*REGISTER, "--partition-width", "wide"), "--partition-width"),
        ((*REGISTER, "--partition-width", "-1"), "--partition-width"),
        ((*REGISTER, "--numeric-as", "double"), "--numeric-as"),
        ((*REGISTER, "--numeric-as", "decimal:39"), "--numeric-as"),
        (("register", "--table", "a.b.c", "--pk", "id", "--tier-key", "at"), "a.b.c"),
        (("register", *TABLE, "--pk", "", "--tier-key", "at"), "--pk"),
        (("register", *TABLE, "--pk", "id,", "--tier-key", "at"), "--pk"),
        (("register", *TABLE, "--pk", "id,id", "--tier-key", "at"), "--pk"),
        (("register", *TABLE, "--pk", "id", "--tier-key", "at,by"), "--tier-key"),
        (("unregister",), "--table"),
        (("unregister", "--table", "a.b.c"), "a.b.c"),
        (("verify",), "--table"),
        (("ingest", *TABLE), "--file"),
        (("ingest", *TABLE, "--file", "no-such.parquet"), "no-such.parquet"),
        (("ingest", *TABLE, "--jsonl", "no-such.jsonl"), "no-such.jsonl"),
        (("ingest", *TABLE, "--file", "a.parquet", "--jsonl", "b.jsonl"), "--jsonl"),
        (("ingest", *TABLE, "a.parquet"), "--file"),
        (("policy",), "--table"),
        (("policy", *TABLE, "--set", "snapshot_retention_hours"), "key=value"),
        (("policy", *TABLE, "--set", "snapshot_retention_hour=6"), "snapshot_retention_hours"),
        (("policy", *TABLE, "--set", "snapshot_retention_hours=six"), "whole number"),
        (("policy", *TABLE, "--set", "rewrite_enabled=maybe"), "true or false"),
        (("policy", *TABLE, "--set", "rewrite_enabled=true", "--set", "rewrite_enabled=false"), "twice"),
        (("policy", *TABLE, "--unset", "colour"), "colour"),
        (("policy", *TABLE, "--set", "rewrite_enabled=true", "--unset", "rewrite_enabled"), "both"),
        (("policy", *TABLE, "--reset", "--set", "rewrite_enabled=true"), "--reset"),
        (("maintain",), "--table"),
        (("maintain", *TABLE, "--no-wait", "--local"), "--no-wait"),
        (("erase", *TABLE), "--where"),
        (("erase", *TABLE, "--where", "true", "--pk", "1"), "--where"),
        (("health", "--table", "a.b.c"), "a.b.c"),
        (("profile",), "command"),
        (("profile", "delete"), "delete"),
        (("profile", "create", "--name", "x"), "--warehouse"),
        (("profile", "create", "--name", "not a name", "--warehouse", "/srv"), "--name"),
        (("profile", "create", "--name", "x", "--warehouse", "ftp://lake"), "ftp://lake"),
        (("profile", "create", "--name", "x", "--warehouse", "s3://"), "--warehouse"),
        ((*PROFILE, "--format", "hudi"), "hudi"),
        ((*PROFILE, "--config", "region"), "key=value"),
        (("tier",), "--table"),
        (("tier", *TABLE, "--wait", "-1"), "--wait"),
        (("accept",), "--table"),
        (("status", "--table", "a..b"), "a..b"),
        (("stop", "now"), "now"),
    ],
)
def test_a_wrong_call_ends_with_2_and_names_what_is_wrong(modak: Any, args: tuple[str, ...], says: str) -> None:
    result = modak(*args)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert says.lower() in result.stderr.lower()
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_ingest_names_a_file_that_is_not_there_among_several_after_one_flag(modak: Any, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.parquet", "b.parquet")]
    for path in paths:
        path.touch()
    missing = modak("ingest", *TABLE, "--file", *map(str, paths), "no-such.parquet")
    assert missing.exit_code == 2
    assert "no-such.parquet" in missing.stderr


def test_a_key_pasted_as_a_credentials_reference_is_refused_without_repeating_it(modak: Any) -> None:
    result = modak(*PROFILE, "--credentials", "AKIA/VerySecret+Key==")
    assert result.exit_code == 2
    assert "VerySecret" not in result.output


def test_a_malformed_config_pair_is_refused_without_repeating_it(modak: Any) -> None:
    result = modak(*PROFILE, "--config", "s3.secret-access-key:hunter2")
    assert result.exit_code == 2
    assert "hunter2" not in result.output


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("id", ("id",)),
        ("tenant_id,device_id", ("tenant_id", "device_id")),
        ("Tenant_ID , id", ("tenant_id", "id")),
        ('"Tenant Id",id', ("Tenant Id", "id")),
        ('"a ""b"", c"', ('a "b", c',)),
    ],
)
def test_column_lists_are_read_as_sql_reads_names(text: str, names: tuple[str, ...]) -> None:
    from modak.cli.parsing import columns

    assert columns("--pk", text) == names
