"""The life of a small table from registration to its end, in steps that can be cut short at any point and taken up again.

A step is what a user or the daemon does; `World.restart` is what a supervisor does after a crash. What must hold then is
in `invariants.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from structlog.testing import capture_logs

from modak.catalog import pins
from modak.core import faults
from modak.core.faults import Fault, InjectedFault
from modak.core.states import PartitionState
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.registration.unregister import unregister
from modak.tables.repair import repair
from modak.tables.site import Site
from tests.tables.events import Events
from tests.tables.invariants import Invariants, Row

ROWS: frozenset[Row] = frozenset((i, i, f"row {i}") for i in range(251))
NEW_ROW: Row = (350, 350, "new", "red")
PASSES = 4
"""More passes than any step needs to come to rest."""

Entry = dict[str, Any]


@dataclass
class World:
    """A database, a warehouse and the process that works on them; a restart makes a new process of it."""

    settings: Any
    warehouse: str
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    rows: set[Row] = field(default_factory=lambda: set(ROWS))
    registered: bool = True
    pin: int | None = None

    def __post_init__(self) -> None:
        self._open()
        self.events = Events.create(self.site)

    def _open(self) -> None:
        self.site: Site = self.stack.enter_context(open_site(self.settings))
        _ = self.site.spark
        self.leader: Leader = self.stack.enter_context(Leader.campaign(self.site, 5))

    def restart(self) -> list[Entry]:
        """End the process and begin another one, which repairs first; returns what that said."""
        faults.arm(None)
        faults.watch(None)
        self.stack.close()
        self._open()
        self.events.site = self.site
        with capture_logs() as said:
            repair(self.site, self.leader.epoch)
        return [entry for entry in said if entry["event"] == "repair.cleaned"]

    def close(self) -> None:
        self.stack.close()

    def tier(self) -> None:
        """Cycles until no partition waits to be dropped."""
        for _ in range(PASSES):
            self.events.tier(self.leader)
            state = self.site.reader.state(self.events.name)
            if state.pins or not any(part.state is PartitionState.TIERED for part in state.living()):
                return
        raise AssertionError("a partition is never dropped")

    def check(self) -> None:
        """Everything that must hold when no operation is under way."""
        truth = Invariants(self.site.dsn, self.warehouse)
        if self.registered:
            truth.check(self.rows)
        else:
            truth.check_gone()


def registering(world: World) -> None:
    """The table enters the house."""
    world.events.register()


def first_tiering(world: World) -> None:
    """Two partitions go into the lake and out of the heap."""
    world.tier()


def grow(world: World) -> None:
    """A user adds a column, a reader pins the table, and rows go on arriving."""
    world.events.sql("ALTER TABLE public.events ADD COLUMN colour text DEFAULT 'red'")
    world.events.sql("INSERT INTO public.events VALUES (350, 350, 'new')")
    world.pin = pins.begin(world.site.dsn, world.events.name).pin_id
    world.rows = {(*row, "red") for row in world.rows} | {NEW_ROW}


def second_tiering(world: World) -> None:
    """The lake takes the new column and a third partition, whose heap copy stays for the pinned reader."""
    world.tier()


def slip_a_write_past_the_trigger(world: World) -> None:
    """The reader ends; somebody disables the capture trigger and changes a row that the lake already has."""
    with world.site.connect(autocommit=True) as conn:
        assert world.pin is not None
        pins.end(conn, world.pin)
    world.events.sql('ALTER TABLE public.events_200 DISABLE TRIGGER "!modak_capture"')
    world.events.sql("UPDATE public.events_200 SET body = 'changed unseen' WHERE id = 210")
    world.rows = {row for row in world.rows if row[0] != 210} | {(210, 210, "changed unseen", "red")}


def exporting_again(world: World) -> None:
    """The partition that was not watched is exported again, and only then dropped."""
    world.tier()


def leaving(world: World) -> None:
    """The table goes, and its lake with it."""
    world.registered = False
    if world.site.reader.table(world.events.name) is not None:
        unregister(world.site, world.events.name, drop_lake=True)


Act = Callable[[World], None]
LIFE: tuple[tuple[Act, bool], ...] = (
    (registering, True),
    (first_tiering, True),
    (grow, False),
    (second_tiering, True),
    (slip_a_write_past_the_trigger, False),
    (exporting_again, True),
    (leaving, True),
)
"""What happens in which order; True where it is ours and may crash."""


@dataclass
class Crash:
    """Where a life was cut short, and what the restart said."""

    step: str
    said: list[Entry]


def live(world: World, fault: Fault | None = None, *, on: str | None = None) -> Crash | None:
    """Live until the fault strikes (in the step named by `on`, or the first that reaches it), restart, and finish that step.

    Without a fault the life goes to its end; with one it stops after the step that crashed, having checked the world.
    """
    for act, ours in LIFE:
        if not ours or fault is None or on not in (None, act.__name__):
            act(world)
            continue
        if faults.armed() is None:
            faults.arm(fault)
        try:
            act(world)
        except InjectedFault as injected:
            assert str(injected) == fault.point
            said = world.restart()
            act(world)
            world.check()
            return Crash(act.__name__, said)
        if on is not None:
            faults.arm(None)
    faults.arm(None)
    return None
