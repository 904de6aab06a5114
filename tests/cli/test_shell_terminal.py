"""`modak-worker shell` at a real terminal: a prompt, Ctrl-C that ends only the query, a memory of what was typed."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from modak import config
from modak.postgres.dsn import Dsn
from modak.runtime.opening import open_site
from tests.tables.events import Events

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

PATIENCE = 120.0
PROMPT = "modak> "
ENDLESS = "select count(*) from range(1000000000000) where id % 7 = 8;"


class Terminal:
    """A program at the other end of a pseudo-terminal."""

    def __init__(self, environ: dict[str, str], *command: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MODAK_")}
        # As a terminal program does it: Ctrl-C is a signal only for whoever has the terminal for its own.
        self.pid, self._ours = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], command, {**clean, **environ, "TERM": "dumb", "COLUMNS": "200"})
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, text: str) -> str:
        """Read until the text shows up; gives what came before it, and forgets all of it."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self._ours], [], [], 0.5)[0]:
                self.seen += os.read(self._ours, 65536).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def ends(self) -> int:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.1)
        raise AssertionError("it does not end")

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._ours)


@pytest.fixture
def shell(fresh_database: Dsn, warehouse: str, tmp_path: Path, gateway: object) -> Iterator[Terminal]:
    environ = {
        "MODAK_PG_URL": fresh_database.uri(),
        "MODAK_WAREHOUSE": warehouse,
        "MODAK_HOME": str(tmp_path / "home"),
        "HOME": os.environ["HOME"],
    }
    with open_site(config.load({name: value for name, value in environ.items() if name != "HOME"})) as site:
        Events.create(site).register()
    terminal = Terminal(environ, str(Path(sys.executable).parent / "modak-worker"), "shell")
    yield terminal
    terminal.close()


def test_a_conversation_at_a_terminal(shell: Terminal) -> None:
    shell.until(PROMPT)
    # Spark starts with the first query; even that can be given up.
    shell.type("select 'early';\n")
    time.sleep(1)
    shell.type("\x03")
    assert "cancelled" in shell.until(PROMPT)

    shell.type("select count(*) as n from events;\n")
    assert "251" in shell.until(PROMPT)

    shell.type(f"{ENDLESS}\n")
    time.sleep(5)
    shell.type("\x03")
    assert "cancelled" in shell.until(PROMPT)

    shell.type("select 1 +\n")
    shell.until("...> ")
    # The prompt stands before anybody waits for a key; a signal in between is only seen with the next one.
    time.sleep(1)
    shell.type("\x03")
    shell.until(PROMPT)

    # Up: the line that was given up, the endless query, the count.
    for _ in range(3):
        shell.type("\x1b[A")
        time.sleep(0.2)
    shell.type("\n")
    shell.until("251")
    shell.until(PROMPT)
    shell.type("\\q\n")
    assert shell.ends() == 0
