"""`run`: the daemon in the foreground, with a greeting, the life of the tables as it happens, and a clean end.

The daemon works in a thread of its own and the main thread waits for signals: Spark would otherwise put its own handler
in place of ours, and a signal must not break into the middle of a step. The first signal lets the current step end,
the second does not wait. While Spark still starts there is no step, and the first one ends it.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from modak.cli.errors import debugging
from modak.cli.output import duration, fields, note, number, on_terminal, paint, say

if TYPE_CHECKING:
    from modak.config import Settings
    from modak.console.app import Console
    from modak.runtime.web.context import Context
    from modak.tables.site import Site


_NEXT = ("status", "config", "register --help")
_NEXT_IN_THE_DEMO = (
    "status",
    "tier --table public.events --dry-run",
    'sql "select kind, count(*), sum(amount) from public.events group by kind"',
)
WITH_CONSOLE = "with console"
"""What `modak-console` hands down, so that `run` serves the pages."""


def run(
    context: typer.Context,
    demo: Annotated[
        bool,
        typer.Option("--demo", help="In an empty database, first make public.events with a million rows."),
    ] = False,
) -> None:
    """Host the daemon until it is stopped.

    It tiers, reclaims and makes partitions ahead. Several workers on one database form a group in which one leads.
    """
    from modak.cli.place import say_if_it_starts, settings

    chosen = settings()

    from modak.cli import logs
    from modak.runtime.opening import open_site

    logs.configure(chosen.log.format, level="debug" if debugging() else "info")
    try:
        with _terminated_like_interrupted():
            say_if_it_starts(chosen)
            with open_site(chosen) as site:
                _greet(site, chosen, _NEXT_IN_THE_DEMO if demo else _NEXT)
                if demo:
                    _prepare_demo(site)
                tell = chosen.log.format != "json"
                if tell and site.reader.tables():
                    _show_status(site)
                _serve(site, tell=tell, console=context.obj == WITH_CONSOLE)
    except KeyboardInterrupt:
        pass
    note("Stopped. Starting again resumes where this left off.")


def _serve(site: Site, *, tell: bool, console: bool) -> None:
    from modak.runtime.hosting import host

    stop, changed = threading.Event(), threading.Event()
    failure: list[BaseException] = []

    def work() -> None:
        try:
            host(
                site,
                stop=stop,
                on_event=lambda _event, _fields: changed.set(),
                port=site.settings.http.console_port if console else None,
                guests=_console if console else None,
            )
        except BaseException as error:
            failure.append(error)

    worker = threading.Thread(target=work, name="daemon", daemon=True)
    with _stopping(stop, waiting=lambda: "spark" in vars(site)):
        worker.start()
        while worker.is_alive():
            worker.join(0.2)
            if changed.is_set():
                changed.clear()
                if tell:
                    _show_status(site)
    if failure:
        raise failure[0]


def _console(context: Context) -> Console:
    from modak.console.app import Console

    return Console(context.guard, context.site.settings)


def _show_status(site: Site) -> None:
    from modak.cli.commands.status import show
    from modak.core.errors import ModakError
    from modak.tables.status import collect

    try:
        say()
        show(collect(site))
        say()
    except ModakError as error:
        note(f"The status cannot be shown now: {error.message}")


def _greet(site: Site, settings: Settings, next_commands: Sequence[str]) -> None:
    from modak import __version__

    say(f"{paint(f'Modak {__version__}', 'bold')}")
    fields({"Postgres": _psql(site, settings), "lake": settings.lake.warehouse})
    say()
    say("Try next, in another terminal:")
    home = f"MODAK_HOME={settings.home.path} " if _home_is_chosen() else ""
    for command in next_commands:
        say(f"  {home}{program()} {command}")
    say()
    sys.stdout.flush()


def program() -> str:
    """How the user called us, so that a command can be copied from the screen."""
    called = sys.argv[0]
    return called if called.endswith("/modak-worker") and not _on_path() else "modak-worker"


def _on_path() -> bool:
    import shutil

    return shutil.which("modak-worker") is not None


def _home_is_chosen() -> bool:
    import os

    return "MODAK_HOME" in os.environ


def _psql(site: Site, settings: Settings) -> str:
    if settings.postgres.url is not None:
        return site.dsn.safe()
    from modak.cli.passfile import write

    return f"PGPASSFILE={write(settings.home.path, site.dsn)} psql {site.dsn.safe()}"


def _prepare_demo(site: Site) -> None:
    from modak.runtime import demo
    from modak.tables.registration.register import register
    from modak.tables.registration.request import RegisterRequest

    with site.connect() as conn:
        if demo.exists(conn):
            note(f"The demo table {demo.TABLE} is here already.")
        elif demo.has_user_tables(conn):
            note("This database has tables of its own, so no demo table is made.")
            return
        else:
            note(f"Making {demo.TABLE} with {number(demo.ROWS)} rows …")
            conn.rollback()
            made = demo.create(conn, clock=site.clock)
            took = duration(made.seconds)
            note(f"Made {demo.TABLE}: {number(made.rows)} rows in {made.partitions} partitions, {took}.")
    done = register(site, RegisterRequest(demo.TABLE, demo.PRIMARY_KEY, demo.TIER_KEY))
    if done.created:
        note(f"Registered {done.table}: the cut-line starts at {done.cut_line}, its lake is {done.location}.")


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _stopping(stop: threading.Event, waiting: Callable[[], bool]) -> Iterator[None]:
    def ask(_number: int, _frame: object) -> None:
        if stop.is_set() or not waiting():
            raise KeyboardInterrupt
        stop.set()
        again = " Ctrl-C again does not wait." if on_terminal(sys.stderr) else ""
        note(f"Stopping after the current step.{again}")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
