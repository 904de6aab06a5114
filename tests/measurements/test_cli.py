"""The commands of the page on measurement stores, as a person types them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from modak.cli.main import app
from modak.storage.objects import Objects
from tests.measurements.support import data_files, fill
from tests.s3_fixtures import S3Server

Modak = Callable[..., Result]
PAGE = Path(__file__).parents[2] / "docs" / "measurements.md"


@pytest.fixture
def modak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Modak:
    for name in [name for name in os.environ if name.startswith("MODAK_")]:
        monkeypatch.delenv(name)
    environ = {
        "MODAK_HOME": str(tmp_path / "home"),
        "MODAK_MEASUREMENTS_ROOT": str(tmp_path / "store"),
        "MODAK_MEASUREMENTS_ISOLATION": "process",
        "MODAK_MEASUREMENTS_GRACE_SECONDS": "0",
    }

    def call(*args: str, **more: str) -> Result:
        return CliRunner(env={**environ, **more}).invoke(app, list(args))

    return call


def test_the_commands_of_the_page_do_what_the_page_says(modak: Modak, folder: Objects) -> None:
    lines = re.findall(r"^modak-worker (measurements .*)$", PAGE.read_text(), flags=re.MULTILINE)
    results = {line: modak(*line.split()) for line in lines}
    (compacted,) = (result for line, result in results.items() if line.endswith("--tier hourly"))
    assert "corrupt on purpose" in results[lines[0]].stdout
    assert re.search(r"120 files|119 files", compacted.stdout), compacted.stdout
    assert [result.exit_code for result in results.values()] == [0, 0, 0, 0, 1, 0]
    assert results[lines[-2]].stdout.count("cannot be read") == 1
    assert len(data_files(folder)) == 7
    assert "_iceberg/demo/cpu/metadata/v1.metadata.json" in results[lines[-1]].stdout


def test_the_python_of_the_page_runs(tmp_path: Path, folder: Objects) -> None:
    fill(folder, files=10)
    (code,) = (each for each in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "Manager(" in each)
    code = code.replace("/tmp/measurements", str(tmp_path / "store")).replace("/tmp/compaction", str(tmp_path / "temp"))
    exec(compile(code, str(PAGE), "exec"), {})
    assert sum("_compacted" in path for path in data_files(folder)) == 1


def test_retention_and_export_on_the_command_line(modak: Modak, folder: Objects) -> None:
    fill(folder, files=12)
    assert modak("measurements", "compact", "--tier", "hourly").exit_code == 0
    told = json.loads(modak("measurements", "export", "--database", "db", "--measurement", "cpu", "--json").stdout)
    assert (told["files"], told["rows"], told["left_out"]) == (1, 60, [])
    keep = {"MODAK_MEASUREMENTS_RETENTION": "cpu=1d"}
    (plan,) = json.loads(modak("measurements", "compact", "--dry-run", "--json", **keep).stdout)
    assert (plan["tier"], plan["files"], plan["batches"]) == ("retention", 1, 0)
    assert "dropped" in modak("measurements", "compact", **keep).stdout
    # The exported table still shows the file.
    assert len(data_files(folder)) == 1
    assert "is gone" in modak("measurements", "export", "--database", "db", "--measurement", "cpu", "--drop").stdout
    assert modak("measurements", "recover").exit_code == 0
    assert data_files(folder) == []
    none = modak("measurements", "export", "--database", "db", "--measurement", "cpu")
    assert none.exit_code == 1
    assert "nothing that a table could show" in none.stderr
    assert json.loads(modak("measurements", "generate", "--hours", "1", "--files", "2", "--json").stdout)["files"] == 4


def test_everything_is_told_as_json_too(modak: Modak, folder: Objects) -> None:
    fill(folder, files=12)
    (candidate,) = json.loads(modak("measurements", "candidates", "--tier", "hourly", "--json").stdout)
    assert (candidate["partition"], candidate["files"]) == ("db/cpu/2026/11/01/09", 12)
    (job,) = json.loads(modak("measurements", "compact", "--tier", "hourly", "--json").stdout)["jobs"]
    assert (job["files"], job["rows_out"], job["outputs"], job["error"]) == (12, 60, 1, "")
    status = json.loads(modak("measurements", "status", "--json").stdout)
    assert status["measurements"][0]["files"] == {"compacted": 1}
    (cycle,) = json.loads(modak("measurements", "history", "--json").stdout)
    assert cycle["jobs"][0]["job_id"] == job["job_id"]
    assert json.loads(modak("measurements", "jobs", "--json").stdout) == []
    assert json.loads(modak("measurements", "recover", "--json").stdout)["recovered"] == 0
    assert json.loads(modak("measurements", "verify", "--json").stdout)[0]["rows"] == 60


def test_with_a_grace_period_inputs_wait_and_are_shown_as_a_job(modak: Modak, folder: Objects) -> None:
    fill(folder, files=12)
    grace = {"MODAK_MEASUREMENTS_GRACE_SECONDS": "900"}
    assert modak("measurements", "compact", **grace).exit_code == 0
    assert len(data_files(folder)) == 13
    assert "committed" in modak("measurements", "jobs").stdout
    assert "1 of 1 job moved on" in modak("measurements", "recover").stdout
    assert len(data_files(folder)) == 1


@pytest.mark.parametrize(
    ("args", "environ", "said"),
    [
        (("measurements", "status"), {"MODAK_MEASUREMENTS_ROOT": ""}, "MODAK_MEASUREMENTS_ROOT"),
        (("measurements", "compact", "--tier", "yearly"), {}, "no tier 'yearly'"),
        (("measurements", "compact", "--tier", "weekly"), {}, "MODAK_MEASUREMENTS_WEEKLY_ENABLED=true"),
        (("measurements", "generate", "--until", "soon"), {}, "no time"),
        (("measurements", "compact"), {"MODAK_MEASUREMENTS_RETENTION": "cpu=long"}, "no duration"),
    ],
)
def test_wrong_usage_is_told_with_the_next_step(
    modak: Modak, args: tuple[str, ...], environ: dict[str, str], said: str
) -> None:
    result = modak(*args, **environ)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_hostile_database_is_refused(modak: Modak) -> None:
    result = modak("measurements", "compact", "--database", "../etc")
    assert result.exit_code == 1
    assert "cannot be the name of a database" in result.stderr


def test_a_bucket_works_as_a_folder_does_and_its_keys_are_never_shown(modak: Modak, s3_server: S3Server) -> None:
    root = f"s3://{s3_server.new_bucket()}/store"
    fill(Objects.of(root, s3_server.props), files=12)
    environ = {**s3_server.environ, "MODAK_MEASUREMENTS_ROOT": root}
    results = [modak("measurements", *words, **environ) for words in (("compact",), ("status",), ("verify",))]
    assert [result.exit_code for result in results] == [0, 0, 0]
    assert "12 files → 1" in results[0].stdout
    assert not any("modak-secret" in result.output for result in results)


def test_compact_job_answers_in_json_and_says_when_there_was_no_order(tmp_path: Path, folder: Objects) -> None:
    from modak.measurements.isolation import SubprocessJobConfig, SubprocessJobResult

    fill(folder, files=2)
    order = SubprocessJobConfig(
        database="db",
        measurement="cpu",
        partition_path="db/cpu/2026/11/01/09",
        files=tuple(data_files(folder)),
        tier="hourly",
        target_size_mb=512,
        temp_directory=str(tmp_path / "temp"),
        storage_config=json.dumps({"root": folder.root}),
        job_id="20261130t090000000-0123abcd",
    )
    worker = str(Path(sys.executable).with_name("modak-worker"))

    def job(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [worker, "compact-job"], input=text, capture_output=True, text=True, timeout=120, check=False
        )

    done = job(order.to_json() + "\n")
    answer = SubprocessJobResult.from_json(done.stdout)
    assert (done.returncode, answer.success, answer.files_compacted, answer.rows_out) == (0, True, 2, 10)
    assert answer.output_file in data_files(folder)
    failed = job(SubprocessJobConfig.from_json(order.to_json()).to_json().replace(folder.root, "s3:///"))
    assert (failed.returncode, SubprocessJobResult.from_json(failed.stdout).success) == (0, False)
    assert job("no json").returncode == 1
