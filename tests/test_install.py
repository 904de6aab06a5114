"""What is installed: pinned by hash, and no more of it than a newcomer's first start needs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNNING, DEVELOPING = ROOT / "requirements.txt", ROOT / "requirements-dev.txt"


def pins(file: Path) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", file.read_text(), flags=re.MULTILINE))


def names(wanted: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", each, maxsplit=1)[0] for each in wanted}


@pytest.mark.parametrize("file", [RUNNING, DEVELOPING], ids=lambda file: file.name)
def test_every_package_is_pinned_with_hashes_and_no_address(file: Path) -> None:
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE)
    for block in re.split(r"\n(?=\S)", text.strip()):
        assert re.match(r"[a-z0-9._-]+==\S+ \\\n( +--hash=sha256:[0-9a-f]{64}( \\\n|$))+$", block), block[:80]
    assert "://" not in text


def test_both_files_pin_the_same_versions() -> None:
    assert pins(RUNNING).items() <= pins(DEVELOPING).items()


def test_running_needs_what_the_project_names_and_none_of_the_tools() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    running = names([*project["project"]["dependencies"], *extras["embedded"], *extras["tracing"]])
    builder = names(project["build-system"]["requires"])
    assert running | builder <= pins(RUNNING).keys()
    for tool in ("mypy", "moto", "playwright", "pyiceberg", "pytest", "ruff", "schemathesis"):
        assert tool not in pins(RUNNING)
    assert names(extras["dev"]) <= pins(DEVELOPING).keys()


@pytest.mark.parametrize(
    ("target", "files"),
    [
        ("install", ["requirements.txt"]),
        ("run", ["requirements.txt"]),
        ("test", ["requirements.txt", "requirements-dev.txt"]),
        ("bench", ["requirements.txt", "requirements-dev.txt"]),
    ],
)
def test_a_target_installs_only_what_it_needs(target: str, files: list[str], tmp_path: Path) -> None:
    commands = make("-n", target, f"VENV={tmp_path}/venv")
    assert re.findall(r"--require-hashes -r (\S+)", commands) == files


def test_the_unattended_run_is_exactly_make_test(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "$PWD" "$@" >> {shlex.quote(str(tmp_path / "called"))}\n')
    make.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run([ROOT / ".ci" / "run"], cwd=tmp_path, env={**os.environ, "PATH": path}, check=True)
    assert (tmp_path / "called").read_text().splitlines() == [f"{ROOT} test"]


def test_the_gate_checks_style_types_and_rooms_before_it_tests(tmp_path: Path) -> None:
    commands = make("-n", "test", f"VENV={tmp_path}/venv")
    tools = re.findall(r"/venv/bin/(ruff check|ruff format --check|mypy|lint-imports|pytest)\b", commands)
    assert list(dict.fromkeys(tools)) == ["ruff check", "ruff format --check", "mypy", "lint-imports", "pytest"]


def test_help_lists_every_target_that_is_meant_for_people() -> None:
    listed = set(re.findall(r"^  make (\S+) +\S", make("help"), flags=re.MULTILINE))
    assert listed == {"help", "install", "run", "test", "test-all", "lint", "stores", "bench", "lock", "clean"}


def make(*args: str) -> str:
    done = subprocess.run(["make", "--no-print-directory", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout
