"""Help is the first page of documentation that anybody reads: it has examples, and they are right."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from modak.cli.main import app


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    group = group or get_command(app)
    for name, command in group.commands.items():
        yield (*path, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


PATHS = [path for path, _ in commands()]
EXAMPLES = [
    line.strip() for _, command in commands() for line in command.epilog.splitlines()[1:] if "modak-worker" in line
]


def test_the_commands_are_those_of_the_reference_and_ours() -> None:
    names = {path[0] for path in PATHS}
    reference = {"run", "register", "unregister", "verify", "ingest", "policy", "maintain", "profile"}
    assert names == reference | {"tier", "compact", "status", "config", "accept", "stop", "version", "sql", "shell"} | {
        "top",
        "pause",
        "resume",
        "measurements",
        "compact-job",
        "entities",
        "health",
        "erase",
        "convert",
        "reanchor",
    }
    assert {path[1] for path in PATHS if path[0] == "profile" and len(path) == 2} == {"list", "create", "check"}


def test_help_lists_every_command_under_a_heading(modak: Any) -> None:
    result = modak("--help")
    assert result.exit_code == 0
    for heading in ("Look and run:", "Tables:", "Lake:", "This installation:", "Examples:"):
        assert heading in result.stdout
    for path in PATHS:
        if len(path) == 1:
            assert f"\n  {path[0]} " in result.stdout


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_of_every_command_shows_examples(modak: Any, path: tuple[str, ...]) -> None:
    result = modak(*path, "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout
    assert f"  modak-worker {' '.join(path)}" in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("path", [(), ("tier",), ("profile", "create")])
def test_a_switch_has_no_type_in_the_panels_of_a_terminal(
    modak: Any, monkeypatch: pytest.MonkeyPatch, path: tuple[str, ...]
) -> None:
    monkeypatch.setattr("modak.cli.family.on_terminal", lambda: True)
    shown = modak(*path, "--help").stdout
    assert "╭" in shown
    assert "--help" in shown
    assert "bool" not in shown.lower()


@pytest.mark.parametrize("line", EXAMPLES)
def test_every_example_uses_commands_and_flags_that_exist(line: str) -> None:
    words = shlex.split(line.split(" | ", 1)[0])
    words = words[words.index("modak-worker") + 1 :]
    command: Any = get_command(app)
    while words and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    known = {flag for parameter in command.params for flag in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (
            "register",
            """--table --pk --tier-key --mode --heap-retention --lake-retention --keep-heap --chunk-rows
            --partition-width --profile --numeric-as --dry-run""",
        ),
        ("unregister", "--table --drop-lake --discard-corrections"),
        ("verify", "--table"),
        ("ingest", "--table --file --jsonl"),
        ("policy", "--table --set --unset --reset"),
        ("maintain", "--table --no-wait --dry-run --local"),
        ("health", "--table --json"),
        ("erase", "--table --where --pk --dry-run"),
        ("profile create", "--name --warehouse --format --config --credentials --default"),
        ("run", "--demo"),
        ("tier", "--table --dry-run"),
        ("status", "--table --json"),
        ("config", "--json"),
        ("accept", "--table"),
    ],
)
def test_every_flag_is_in_the_help(modak: Any, command: str, flags: str) -> None:
    text = modak(*command.split(), "--help").stdout
    for flag in flags.split():
        assert f"  {flag}" in text or f", {flag}" in text


def test_a_mistyped_command_is_answered_with_the_right_one(modak: Any) -> None:
    result = modak("regster")
    assert result.exit_code == 2
    assert "error: " in result.stderr
    assert "'register'" in result.stderr
    assert "hint: See modak-worker --help." in result.stderr


def test_an_unknown_flag_names_itself_and_the_help_to_read(modak: Any) -> None:
    result = modak("tier", "--table", "public.t", "--now")
    assert result.exit_code == 2
    assert "--now" in result.stderr
    assert "modak-worker tier --help" in result.stderr
