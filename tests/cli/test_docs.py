"""The documents keep up with the program: commands, flags and links in them exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from modak.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKS = [
    (page, link)
    for page in PAGES
    for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
    if "://" not in link
]
CALLS = [
    (page.name, line.strip())
    for page in PAGES
    for line in page.read_text().splitlines()
    if re.match(r"\s*(?:[A-Z_]+=\S+ )*modak-(?:worker|console) \S", line)
]
CONSOLE = sorted((ROOT / "src/modak/console/static/js").rglob("*.js"))
NAMED = [
    (page.name, words)
    for page in (ROOT / "deploy/prometheus/alerts.yaml", *CONSOLE)
    for words in re.findall(r"\bmodak-(?:worker|console)((?: --?[a-z][a-z-]*| [a-z][a-z-]*)+)", page.read_text())
]
"""Commands that an alert or a page of the console tells an operator, with the words that follow them."""


def test_the_readme_lists_every_command() -> None:
    listed = set(re.findall(r"^\| `([a-z-]+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    group: Any = get_command(app)
    assert listed == set(group.commands)


def test_the_readme_leads_to_every_page_once() -> None:
    text = (ROOT / "README.md").read_text().partition("## Read on")[2]
    linked = re.findall(r"\(docs/([a-z]+)\.md\)", text)
    assert sorted(linked) == sorted(page.stem for page in (ROOT / "docs").glob("*.md") if page.stem != "configuration")


@pytest.mark.parametrize(("page", "link"), LINKS, ids=lambda value: value.name if isinstance(value, Path) else value)
def test_links_between_documents_lead_somewhere(page: Path, link: str) -> None:
    assert (page.parent / link).exists()


@pytest.mark.parametrize(("_page", "line"), CALLS)
def test_commands_in_the_documents_exist_with_their_flags(_page: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    words = words[next(at for at, word in enumerate(words) if word in ("modak-worker", "modak-console")) + 1 :]
    command: Any = get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    known = {flag for parameter in command.params for flag in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize(("_page", "words"), NAMED)
def test_commands_that_alerts_and_the_console_name_exist_with_their_flags(_page: str, words: str) -> None:
    said = words.split()
    command: Any = get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[said.pop(0)]
    known = {flag for parameter in command.params for flag in parameter.opts}
    assert {word for word in said if word.startswith("--")} <= known


def test_alerts_and_the_console_do_name_commands() -> None:
    pages = {page for page, _ in NAMED}
    assert {"alerts.yaml", "fleet.js", "errors.js", "mirrors.js", "measurements.js"} <= pages
    assert len(NAMED) >= 14


def test_the_documents_name_no_path_of_the_machine_that_they_were_written_on() -> None:
    here = (str(Path(__file__).resolve().parents[2]), str(Path.home()) + "/")
    for page in PAGES:
        assert not [path for path in here if path in page.read_text()], page
