"""One maintenance pass over one table: delete debt, bin-pack, manifests, expiry, orphans, in this order.

Before them come the files that earlier expiries have freed.
Each step is planned from the table as the step before has left it, and published by its own commit. A step that fails
is journaled with its error, and the later ones run all the same. A pass that had something to do is one row of the
journal with the counters of every step. The leader's thread and `maintain --local` both come through here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg
import structlog

from modak.catalog.journal import Journal
from modak.catalog.lease import Epoch
from modak.catalog.write import CatalogWriter
from modak.core.errors import Conflict, ModakError, NotLeader
from modak.core.faults import InjectedFault, reach
from modak.core.ids import OpId, new_op_id
from modak.core.names import TableName
from modak.core.states import OpPhase
from modak.core.underway import working
from modak.postgres.connect import translate
from modak.tables.maintenance import erasures
from modak.tables.maintenance.engine import MaintenanceEngine, engine_of
from modak.tables.maintenance.expiry import expire
from modak.tables.maintenance.manifests import rewrite_manifests
from modak.tables.maintenance.observe import observe
from modak.tables.maintenance.orphans import sweep
from modak.tables.maintenance.plan import (
    PASSES,
    ExpiryStep,
    MaintenancePlan,
    ManifestStep,
    OrphanStep,
    Pass,
    RewriteStep,
    Step,
    plan_maintenance,
)
from modak.tables.maintenance.policy import Policy, of
from modak.tables.maintenance.rewriting import rewrite
from modak.tables.site import Site
from modak.tables.tidy import finish_expiries, tidy_landed

log = structlog.get_logger()

REPLANS = 5
MOST_COMMITS = 1_000
"""Rounds of one step when there is more than one commit may hold."""
FATAL = frozenset({"spark.gateway_lost"})

OnProgress = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class PassReport:
    """What one step did, or why it did nothing."""

    name: Pass
    counters: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    skipped: str | None = None
    error: str | None = None

    @property
    def changed(self) -> bool:
        """Whether it did anything."""
        return bool(self.counters) and self.error is None


@dataclass(frozen=True, slots=True)
class MaintenanceReport:
    """What one pass over a table did."""

    table: TableName
    passes: tuple[PassReport, ...]
    op_id: str | None = None
    engine: str = ""

    @property
    def failed(self) -> tuple[PassReport, ...]:
        """Steps that ended with an error."""
        return tuple(one for one in self.passes if one.error is not None)

    def plain(self) -> dict[str, Any]:
        """The report as the journal and a request keep it."""
        return {
            one.name: {"skipped": one.skipped}
            if one.skipped
            else {**one.counters, "seconds": round(one.seconds, 3), **({"error": one.error} if one.error else {})}
            for one in self.passes
        }


def maintain(
    site: Site,
    epoch: Epoch,
    name: TableName,
    *,
    engine: str | None = None,
    on_progress: OnProgress | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> MaintenanceReport:
    """Run a pass over a table in the name of a leader's epoch."""
    try:
        return _Run(site, epoch, name, engine_of(site, engine), on_progress or _quietly, stopping).all()
    except psycopg.Error as error:
        raise translate(error) from error


def plan_now(site: Site, name: TableName) -> MaintenancePlan:
    """What a pass would do now; changes nothing."""
    policy = of(site, site.reader.state(name).table)
    return plan_maintenance(observe(site, name, policy), policy)


class _Run:
    """One pass, step by step."""

    def __init__(
        self,
        site: Site,
        epoch: Epoch,
        name: TableName,
        engine: MaintenanceEngine,
        on_progress: OnProgress,
        stopping: Callable[[], bool],
    ) -> None:
        self._site = site
        self._writer: CatalogWriter = site.writer(epoch)
        self._name = name
        self._engine = engine
        self._on_progress = on_progress
        self._stopping = stopping
        self._op_id: OpId = new_op_id(site.clock)
        self._journaled = False

    def all(self) -> MaintenanceReport:
        # Trims, and a pass that was cut short, have left files to whoever has the time.
        finish_expiries(self._site, self._writer, self._name, self._engine)
        with working(self._op_id):
            done: list[PassReport] = []
            for name in PASSES:
                done.append(PassReport(name, skipped="stopping") if self._stopping() else self._pass(name))
            self._end(done)
        erasures.finish(self._site, self._writer, self._name)
        op_id = self._op_id if self._journaled else None
        return MaintenanceReport(self._name, tuple(done), op_id, self._engine.name)

    def _pass(self, name: Pass) -> PassReport:
        started = self._site.clock.monotonic()
        counters: dict[str, Any] = {}
        error: str | None = None
        skipped: str | None = None
        try:
            skipped = self._rounds(name, counters)
        except NotLeader:
            raise
        except Conflict as conflict:
            # A reader is pinning, or others commit faster than we look: nothing is wrong, the next pass does it.
            skipped = f"deferred: {conflict.message}"
            log.info("maintenance.deferred", table=str(self._name), step=name, because=conflict.code)
        except (ModakError, psycopg.Error) as raised:
            failure = translate(raised) if isinstance(raised, psycopg.Error) else raised
            if failure.code in FATAL:
                raise failure from raised
            error = f"{failure.code}: {failure.message}"
            self._begin()
            log.error(
                "maintenance.failed",
                table=str(self._name),
                step=name,
                code=failure.code,
                error=failure.message,
                hint=failure.hint,
            )
        except InjectedFault:
            raise
        except Exception as crash:
            error = f"maintenance.crashed: {type(crash).__name__}"
            self._begin()
            log.exception("maintenance.crashed", table=str(self._name), step=name)
        seconds = self._site.clock.monotonic() - started
        return PassReport(name, counters, seconds, None if counters or error else skipped, error)

    def _rounds(self, name: Pass, counters: dict[str, Any]) -> str | None:
        """Execute a step as often as there is more of it than one commit may hold."""
        for _ in range(MOST_COMMITS):
            step, did = self._step(name)
            if isinstance(step, str):
                return step
            if did is None:
                return "nothing was found"
            for key, value in did.items():
                counters[key] = counters.get(key, 0) + value
            if not (isinstance(step, RewriteStep) and step.more) or self._stopping():
                return None
        return None

    def _step(self, name: Pass) -> tuple[Step | str, dict[str, int] | None]:
        for again in range(REPLANS):
            policy = of(self._site, self._site.reader.state(self._name).table)
            seen = observe(self._site, self._name, policy, files=name in ("debt", "pack"), ours=(self._op_id,))
            plan = plan_maintenance(seen, policy)
            step = plan.steps.get(name)
            if step is None:
                return plan.skipped[name], None
            if not isinstance(step, OrphanStep):
                self._begin()
            self._tell(name, 0, 0)
            try:
                return step, self._execute(name, plan, step, policy)
            except Conflict as conflict:
                # The world changed between plan and commit: look again and plan from what is there.
                if again == REPLANS - 1:
                    raise
                log.info("maintenance.again", table=str(self._name), step=name, because=conflict.code)
                self._site.clock.sleep(0.1 * (again + 1))
        raise AssertionError("unreachable")

    def _execute(self, name: Pass, plan: MaintenancePlan, step: Step, policy: Policy) -> dict[str, int] | None:
        def progress(done: int, total: int) -> None:
            self._tell(name, done, total)

        match step:
            case RewriteStep():
                return rewrite(self._site, self._writer, self._engine, plan, step, progress)
            case ManifestStep():
                return rewrite_manifests(self._site, self._writer, plan, step)
            case ExpiryStep():
                return expire(self._site, self._writer, self._engine, plan, policy, (self._op_id,))
            case OrphanStep():
                found = sweep(self._site, self._writer, self._engine, plan, step)
                if found is not None:
                    self._begin()
                return found

    def _tell(self, name: Pass, done: int, total: int) -> None:
        self._on_progress({"pass": name, "done": done, "total": total})

    def _begin(self) -> None:
        """A pass that does something is in the journal from then on."""
        if self._journaled:
            return
        table_id = self._site.reader.state(self._name).table.table_id
        plan = {"table": [self._name.schema, self._name.name], "engine": self._engine.name}
        reach("maintenance.before_begin")
        Journal(self._writer).begin(self._op_id, table_id, "maintenance", plan)
        self._journaled = True
        reach("maintenance.after_begin")

    def _end(self, done: list[PassReport]) -> None:
        if not self._journaled:
            return
        report = MaintenanceReport(self._name, tuple(done))
        counters = {name: what for name, what in report.plain().items() if "skipped" not in what}
        errors = "; ".join(f"{one.name}: {one.error}" for one in report.failed)
        journal = Journal(self._writer)
        reach("maintenance.before_end")
        if not counters:
            journal.abandon(self._op_id, OpPhase.PLANNED)
            self._journaled = False
            return
        journal.phase(
            self._op_id, OpPhase.PLANNED, OpPhase.PREPARED, attempt=0, counters=counters, error=errors or None
        )
        with self._writer.transaction(self._op_id) as tx:
            tx.tidy_later(tidied=True)
        reach("maintenance.after_end")
        landed = self._site.reader.op(self._op_id)
        assert landed is not None
        tidy_landed(self._site, self._writer, self._site.reader.state(self._name), landed)


def _quietly(_: Mapping[str, Any]) -> None:
    return None
