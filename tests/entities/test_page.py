"""The page on entity stores: its registry is one, its commands run, in the order in which they stand there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from modak import entities
from modak.entities.registry import read_registry
from tests.entities.test_cli import Call, environ, installed, modak
from tests.entities.world import World

__all__ = ["environ", "installed", "modak"]

PAGE = (Path(__file__).parents[2] / "docs" / "entities.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^modak-worker entities (.+)$", PAGE, flags=re.MULTILINE)


def test_the_registry_on_the_page_is_one() -> None:
    (described,) = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    (schema,) = read_registry([json.loads(described)]).schemas
    assert [each.name for each in schema.attributes] == ["amount", "due", "tags", "title"]


def test_every_command_on_the_page_but_queries_runs(modak: Call, installed: World) -> None:
    installed.many(0, 5)
    for words in map(shlex.split, COMMANDS):
        if words[0] == "query":
            continue
        done = modak(*words)
        assert done.exit_code == 0, (words, done.output)
    assert len(COMMANDS) >= 12


def test_the_page_names_everything_that_is_public() -> None:
    assert [name for name in entities.__all__ if name not in PAGE] == []


@pytest.mark.spark
def test_the_queries_on_the_page_run(
    modak: Call,
    installed: World,
    environ: dict[str, str],
    spark: object,
    spark_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed.put(1, title="dear", amount="250.00")
    installed.put(2, title="cheap", amount="2.50")
    queries = [words for words in map(shlex.split, COMMANDS) if words[0] == "query"]
    assert queries
    for words in queries:
        done = modak(*words, MODAK_HOME=str(spark_home))
        assert done.exit_code == 0, done.output
        assert "dear" in done.stdout
        assert "cheap" not in done.stdout
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names = {"spark": spark}
    exec(program, names)
    assert [row["title"] for row in names["frame"].collect()] == ["dear"]  # type: ignore[attr-defined]
