"""The page on maintenance: its commands run, in the order in which they stand there, and its table has every key."""

from __future__ import annotations

import re
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from modak.lake.policy import keys_of
from modak.runtime.leader import Leader
from modak.runtime.maintaining import serving
from tests.cli.conftest import modak  # noqa: F401
from tests.maintenance.lake import Lake
from tests.maintenance.test_requests import environ

__all__ = ["environ"]

PAGE = (Path(__file__).parents[2] / "docs" / "maintenance.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^modak-worker (.+)$", PAGE, flags=re.MULTILINE)


def test_the_page_lists_every_key() -> None:
    assert set(re.findall(r"^\| `([a-z_]+)` \|.*\|.*\|$", PAGE, flags=re.MULTILINE)) >= set(keys_of("iceberg"))


@pytest.mark.spark
def test_every_command_on_the_page_runs(lake: Lake, modak: Any, environ: dict[str, str]) -> None:  # noqa: F811
    lake.correct(9)
    lake.leader.__exit__(None, None, None)
    assert len(COMMANDS) >= 14
    for words in map(shlex.split, COMMANDS):
        with ExitStack() as stack:
            if words == ["maintain", "--table", "public.events"]:
                leader = stack.enter_context(Leader.campaign(lake.site, 10))
                stack.enter_context(serving(lake.site, leader))
            done = modak(*words, **environ)
        assert done.exit_code == 0, (words, done.output)
    assert not {row for row in lake.rows() if row[2] == "row 3" or row[0] == 7}
