"""The curl calls of the page on loading, sent by curl itself; and the answer that the page shows."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.load.conftest import TOKEN, Api
from tests.tables.events import Events

PAGE = (Path(__file__).parents[2] / "docs" / "loading.md").read_text(encoding="utf-8")
CALLS = re.findall(r"^curl .+?(?<!\\)\n", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl on this machine")
def test_every_call_on_the_page_works(api: Api, events: Events, tmp_path: Path) -> None:
    rows = [{"id": 210, "ts": 210, "body": "a"}, {"id": 211, "ts": 211, "body": "b"}, {"id": 5, "ts": 5, "body": "c"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(b"id,ts,body\n220,220,x\n"))
    assert len(CALLS) == 2
    answers = []
    for call in CALLS:
        here = call.replace("http://127.0.0.1:9090", api.url).replace("curl ", "curl --silent --fail-with-body ", 1)
        environ = {**os.environ, "MODAK_LOAD_TOKEN": TOKEN}
        done = subprocess.run(
            ["sh", "-c", here], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        answers.append(json.loads(done.stdout))
    (shown,) = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    assert answers[0] == json.loads(shown)
    assert {(210, 210, "a"), (5, 5, "c"), (220, 220, "x")} <= events.everything()
