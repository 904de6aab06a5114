"""The conversation of `modak-worker shell`: statements ended by semicolons, backslash commands, one answer each.

At a terminal, lines can be edited, are remembered, and Ctrl-C gives up the running query only. From a pipe it is a
script that stops at the first error.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from modak.cli import errors
from modak.cli.answers import deliver
from modak.cli.output import note, say
from modak.cli.output import table as grid
from modak.cli.statements import blank, split
from modak.core.errors import ModakError, UsageError
from modak.core.names import TableName

if TYPE_CHECKING:
    from modak.tables.site import Site

HELP = """\
Statements end with a semicolon and may span lines. Every query sees all its tables at one moment.
\\dt          registered tables
\\d [TABLE]   columns of a table (without a name: the tables)
\\timing      switch the display of times on or off
\\?           this list
\\q           leave"""


class Shell:
    """One conversation."""

    def __init__(self, site: Site, *, interactive: bool) -> None:
        self._site = site
        self._interactive = interactive
        self._timing = False
        self._pending = ""
        self._commands: dict[str, Callable[[str], None]] = {
            "\\d": self._describe,
            "\\dt": lambda _: self._tables(),
            "\\timing": lambda _: self._switch_timing(),
            "\\?": lambda _: say(HELP),
        }

    def run(self) -> int:
        """Talk until the end of the input; the exit code is that of the first error of a script."""
        while True:
            try:
                line = self._line()
            except KeyboardInterrupt:
                self._pending = ""
                note("")
                continue
            if line is None or line.strip() == "\\q":
                return self._last() if line is None else 0
            code = self._take(line)
            if code and not self._interactive:
                return code

    def _last(self) -> int:
        """A statement at the end of a script needs no semicolon."""
        rest, self._pending = self._pending, ""
        return 0 if blank(rest) else self._do(lambda: self._query(rest))

    def _line(self) -> str | None:
        if not self._interactive:
            return sys.stdin.readline() or None
        try:
            return input("modak> " if blank(self._pending) else "  ...> ") + "\n"
        except EOFError:
            say()
            return None

    def _take(self, line: str) -> int:
        if blank(self._pending) and line.lstrip().startswith("\\"):
            return self._do(lambda: self._command(line.strip()))
        statements, self._pending = split(self._pending + line)
        for statement in statements:
            code = self._do(lambda text=statement: self._query(text))  # type: ignore[misc]
            if code:
                return code
        return 0

    def _do(self, step: Callable[[], None]) -> int:
        try:
            step()
        except ModakError as error:
            return errors.report(error)
        except KeyboardInterrupt:
            note("cancelled")
            return 130
        return 0

    def _command(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        command = self._commands.get(word)
        if command is None:
            raise UsageError("usage.shell", f"There is no command {word}.", hint="\\? lists them.")
        command(rest.strip().rstrip(";"))

    def _switch_timing(self) -> None:
        self._timing = not self._timing
        say(f"Timing is {'on' if self._timing else 'off'}.")

    def _tables(self) -> None:
        found = self._site.reader.status()
        grid(
            ("Table", "Mode", "Cut-line T", "Delta"),
            [(str(row.name), row.mode, _cut(row.axis, row.cutline_t), str(row.delta_backlog)) for row in found],
        )

    def _describe(self, name: str) -> None:
        if not name:
            self._tables()
            return
        from modak.postgres.describe import describe
        from modak.tables.seam.columns import shape_of

        record = self._site.reader.state(TableName.parse(name)).table
        with self._site.connect() as conn:
            shape = shape_of(record, describe(conn, record.name, record.tier_key))
        roles = {**dict.fromkeys(shape.pk, "primary key"), shape.tier_key: "tier key"}
        if shape.tier_key in shape.pk:
            roles[shape.tier_key] = "primary key, tier key"
        grid(
            ("Column", "Type", "Key"),
            [(column.name, column.mapped.column.type, roles.get(column.name, "")) for column in shape.columns],
        )

    def _query(self, text: str) -> None:
        begun = time.monotonic()
        run_cancellable(self._site, lambda: self._answer(text))
        if self._timing:
            say(f"Time: {time.monotonic() - begun:.3f} s")

    def _answer(self, text: str) -> None:
        from modak.tables.seam.mentions import wrong
        from modak.tables.seam.query import query

        try:
            with query(self._site, self._site.spark, text) as frame:
                deliver(frame, "table", None)
        except ModakError:
            raise
        except Exception as error:
            raise wrong(error) from None


def run_cancellable(site: Site, work: Callable[[], None]) -> None:
    """Run Spark work in a thread of its own, so that Ctrl-C ends its jobs and not the conversation with the JVM.

    Spark starts in that thread too: a signal in the middle of the start would leave half a session behind.
    """
    from pyspark import InheritableThread

    group = f"modak-shell-{uuid4().hex}"
    given_up, done = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def target() -> None:
        try:
            site.spark.sparkContext.setJobGroup(group, "modak-worker shell", interruptOnCancel=True)
            if not given_up.is_set():
                work()
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    InheritableThread(target=target, daemon=True).start()
    try:
        # Not by joining the thread: one whose join is interrupted counts as ended in Python 3.11, while it still runs.
        while not done.wait(0.1):
            pass
    except KeyboardInterrupt:
        given_up.set()
        while not done.is_set():
            if "spark" in vars(site):
                site.spark.sparkContext.cancelJobGroup(group)
            done.wait(0.2)
        raise
    if failed:
        raise failed[0]


def remember(history: Path) -> None:
    """Line editing with a history that outlives the conversation, where the platform has it."""
    try:
        import readline
    except ImportError:
        return
    import atexit
    import contextlib

    history.parent.mkdir(parents=True, exist_ok=True)
    history.touch(mode=0o600, exist_ok=True)
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(2_000)
    atexit.register(readline.write_history_file, history)


def _cut(axis: object, t: int | None) -> str:
    from modak.core.axis import Axis

    return "–" if t is None or not isinstance(axis, Axis) else axis.literal(t)
