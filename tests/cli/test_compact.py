"""What `compact` says when it has folded, and when it has not."""

from __future__ import annotations

import pytest

from modak.cli.commands.compact import _show_report
from modak.core.names import TableName
from modak.tables.fold.run import FoldReport

EVENTS = TableName("public", "events")


def test_a_fold_tells_rows_files_vectors_and_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    _show_report(
        FoldReport(EVENTS, 2, 1_500_000, 1_350_000, 1_499_990, 8, 4, 30_000_000, 5.0, snapshot_id=7, swept=3, left=12)
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "folded public.events: 1,500,000 corrections in 2 commits" in said
    assert "(300,000 rows/s)" in said
    assert "1,350,000 rows in 8 files (30.0 MB), 1,499,990 rows hidden by 4 deletion vectors; lake snapshot 7." in said
    assert "Gone from the delta: 3 folded rows kept for readers until now." in said
    assert "Left in the delta: 12 corrections." in said


def test_one_of_a_kind_is_told_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    _show_report(FoldReport(EVENTS, 1, 1, 1, 1, 1, 1, 2_000, 0.5, snapshot_id=7, left=1))
    said = " ".join(capsys.readouterr().out.split())
    assert "1 correction in 1 commit, 0.5 s (2 rows/s)" in said
    assert "1 row in 1 file (2.0 KB), 1 row hidden by 1 deletion vector; lake snapshot 7." in said
    assert "Left in the delta: 1 correction." in said


def test_nothing_to_fold_has_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    _show_report(FoldReport(EVENTS))
    _show_report(FoldReport(EVENTS, blocked="a foreign snapshot has frozen publication"))
    said = " ".join(capsys.readouterr().out.split())
    assert "Nothing to fold in public.events: no correction waits below the cut-line." in said
    assert "Nothing to fold in public.events: a foreign snapshot has frozen publication." in said
