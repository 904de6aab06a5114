"""The life of a small table from registration to its end, in steps that can be cut short anywhere and taken up again.

A step is what a user or the daemon does; `World.restart` is what a supervisor does after a crash. What must hold then
is in `invariants.py`.
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
    with_spark: bool = False
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    rows: set[Row] = field(default_factory=lambda: set(ROWS))
    registered: bool = True
    pin: int | None = None

    def __post_init__(self) -> None:
        self._open()
        self.truth = Invariants(self.site.dsn, self.warehouse)
        self.events = Events.create(self.site)

    def _open(self) -> None:
        self.site: Site = self.stack.enter_context(open_site(self.settings))
        if self.with_spark:
            _ = self.site.spark
        self.leader: Leader = self.stack.enter_context(Leader.campaign(self.site, 5))

    def restart(self, fault: Fault | None = None) -> list[Entry]:
        """End the process and begin another one, which repairs first and must tell exactly what it cleaned up."""
        faults.arm(None)
        faults.watch(None)
        self.stack.close()
        self._open()
        self.events.site = self.site
        left = {op.op_id for op in self.site.reader.unfinished_ops()}
        files = set(self.truth.files())
        faults.arm(fault)
        with capture_logs() as logged:
            repair(self.site, self.leader.epoch)
        faults.arm(None)
        said = [entry for entry in logged if entry["event"] == "repair.cleaned"]
        assert {entry["op"] for entry in said} == left - {op.op_id for op in self.site.reader.unfinished_ops()}
        assert sum(entry["files_removed"] for entry in said) == len(files - set(self.truth.files()))
        return said

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
        if self.registered:
            self.truth.check(self.rows)
        else:
            self.truth.check_gone()


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


def pin(world: World) -> None:
    """A reader comes early: what is tiered stays in the heap too."""
    world.pin = pins.begin(world.site.dsn, world.events.name).pin_id


Act = Callable[[World], None]
Life = tuple[tuple[Act, bool], ...]
LIFE: Life = (
    (registering, True),
    (first_tiering, True),
    (grow, False),
    (second_tiering, True),
    (slip_a_write_past_the_trigger, False),
    (exporting_again, True),
    (leaving, True),
)
"""What happens in which order; True where it is ours and may crash."""

SHORT_LIFE: Life = ((registering, True), (pin, False), (first_tiering, True), (leaving, True))
"""A table that leaves while partitions of it are tiered and still in the heap."""


@dataclass
class Crash:
    """Where a life was cut short, and what the restart said."""

    step: str
    said: list[Entry]


def live(world: World, fault: Fault, life: Life = LIFE, *, on: str | None = None) -> Crash:
    """Live until the fault strikes (in the step `on`, or the first that reaches it), restart, and finish that step."""
    for act, ours in life:
        if not ours or on not in (None, act.__name__):
            act(world)
            continue
        if faults.armed() is None:
            faults.arm(fault)
        try:
            act(world)
        except InjectedFault:
            said = world.restart()
            act(world)
            world.check()
            return Crash(act.__name__, said)
    raise AssertionError(f"the life does not come by {fault}")


def record(world: World, life: Life = LIFE) -> dict[str, list[str]]:
    """Live undisturbed, and tell by which points each step came, in order."""
    passed: dict[str, list[str]] = {}
    for act, ours in life:
        here: list[str] = []
        # The lease is renewed by the clock, not by the steps.
        faults.watch(lambda point, here=here: None if point.startswith("lease.") else here.append(point))  # type: ignore[misc]
        act(world)
        faults.watch(None)
        if ours:
            passed[act.__name__] = here
            world.check()
    return passed
