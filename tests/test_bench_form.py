"""Every benchmark ends alike: a table and ratios for people, then one JSON object as the very last line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench import report
from bench.report import Line, Report


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
