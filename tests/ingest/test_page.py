"""The commands of the page on ingesting run, in the order in which they stand there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from modak.cli.main import app
from modak.runtime.leader import Leader
from modak.tables.site import Site
from tests.tables.events import Events

PAGE = (Path(__file__).parents[2] / "docs" / "ingesting.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^modak-worker (ingest .+)$", PAGE, flags=re.MULTILINE)


def test_every_command_on_the_page_runs(
    site: Site, events: Events, leader: Leader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events.register()
    events.tier(leader)
    here = tmp_path / "here"
    (here / "history").mkdir(parents=True)
    monkeypatch.chdir(here)
    for at, name in enumerate(("part-1.parquet", "part-2.parquet", "history/a.parquet")):
        pq.write_table(pa.table({"id": [1000 + at], "ts": [at], "body": ["x"]}), name)
    Path("history.jsonl").write_text(json.dumps({"id": 2000, "ts": 5, "body": "y"}) + "\n")
    environ = {
        "MODAK_PG_URL": site.dsn.safe(),
        "MODAK_PG_PASSWORD": site.dsn.password,
        "MODAK_WAREHOUSE": site.settings.lake.warehouse,
        "MODAK_HOME": str(site.settings.home.path),
    }
    assert len(COMMANDS) >= 4
    for words in map(shlex.split, COMMANDS):
        # What lies on a bucket is tested with one, in tests/profiles.
        local = ["history/*.parquet" if word.startswith("s3://") else word for word in words]
        done = CliRunner(env=environ).invoke(app, local)
        assert done.exit_code == 0, (words, done.output, done.stderr)
    assert {row[0] for row in events.lake() if row[0] >= 1000} == {1000, 1001, 1002, 2000}
