"""Every benchmark ends alike: a table and ratios for people, then one JSON object as the very last line."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bench import report
from bench.__main__ import BENCHMARKS
from bench.report import Line, Report

ROOT = Path(__file__).parents[1]


def test_a_report_is_a_table_the_ratios_and_one_line_of_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    lines = [Line("ours (warm)", 2_000_000.4, 900_000.2, 512.3), Line("limit (warm)", 4_000_000)]
    Report("tiering", 2_000_000.4, {"spark_jdbc": 800_000.0}, 4_000_000.0, 512.3, 900_000.2, lines).publish()

    *for_people, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found == {
        "bench": "tiering",
        "ours": 2_000_000,
        "rivals": {"spark_jdbc": 800_000},
        "limit": 4_000_000,
        "ratios": {"vs_spark_jdbc": 2.5, "vs_limit": 0.5},
        "peak_rss_mb": 512,
        "per_cpu_second": 900_000,
    }
    shown = "\n".join(for_people)
    for part in ("ours (warm)", "2,000,000", "900,000", "512", "2.50 times spark_jdbc", "50% of the limit"):
        assert part in shown
    assert json.loads((tmp_path / "tiering.json").read_text()) == found


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_that_is_named_can_be_run(name: str) -> None:
    assert callable(importlib.import_module(f"bench.{name}").main)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_small_run_of_a_benchmark_ends_with_the_promised_object(tmp_path: Path) -> None:
    # A copy, so that the results of a run that was meant to measure stay what they are.
    shutil.copytree(ROOT / "bench", tmp_path / "bench", ignore=shutil.ignore_patterns("results", "__pycache__"))
    command = [sys.executable, "-m", "bench", "tiering", "--rows", "20000"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["bench"], found["rows"]) == ("tiering", 20_000)
    rates = {"ours", "limit", "peak_rss_mb", "per_cpu_second"}
    assert {name for name in rates if found[name] > 0} == rates
    assert found["rivals"].keys() == {"spark_jdbc"}
    assert found["ratios"].keys() == {"vs_spark_jdbc", "vs_limit"}
    assert json.loads((tmp_path / "bench" / "results" / "tiering.json").read_text()) == found
