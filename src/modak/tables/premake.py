"""Empty partitions ahead of the write frontier, so that an INSERT never fails for lack of one.

The plan is pure. The runner creates each partition detached and attaches it (a weaker lock than CREATE … PARTITION
OF), with a lock timeout of milliseconds: when the table is busy it gives up and the next cycle tries again, so no
user ever queues behind us.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import psycopg
import structlog
from psycopg import sql

from modak.core.axis import Axis, TierKey, Width
from modak.core.errors import ModakError, NotLeader
from modak.core.faults import reach
from modak.core.names import TableName, quote
from modak.postgres import ddl
from modak.tables.tiering.plan import Finding, TableState

log = structlog.get_logger()

_NAME_LIMIT = 63


@dataclass(frozen=True, slots=True)
class NewPartition:
    """A partition to make."""

    name: str
    lower: TierKey
    upper: TierKey


@dataclass(frozen=True, slots=True)
class PremakePlan:
    """The partitions that keep the promised number of empty widths ahead."""

    table: TableName
    make: tuple[NewPartition, ...]


@dataclass(frozen=True, slots=True)
class Premade:
    """What was made, and what stood in the way."""

    made: tuple[NewPartition, ...]
    findings: tuple[Finding, ...] = ()


def plan_premake(state: TableState, ahead: int, zone: str = "UTC") -> PremakePlan:
    """Widths are read off the topmost partition; `ahead` of them must be empty above the highest tier key."""
    nothing = PremakePlan(state.table, ())
    bounded = [(p.lower, p.upper) for p in state.partitions if p.lower is not None and p.upper is not None]
    open_ended = any(p.upper is None and not p.is_default for p in state.partitions)
    if not ahead or state.high_water is None or not bounded or open_ended:
        return nothing
    lower, top = max(bounded)
    width = Width.between(lower, top, state.axis, zone)
    covering = next((upper for low, upper in bounded if low <= state.high_water < upper), top)
    wanted = covering
    for _ in range(ahead):
        wanted = width.after(wanted, state.axis)
    made: list[NewPartition] = []
    taken = {p.name for p in state.partitions}
    while top < wanted and len(made) < 1000:
        upper = width.after(top, state.axis)
        name = partition_name(state.table.name, top, state.axis, taken)
        taken.add(name)
        made.append(NewPartition(name, top, upper))
        top = upper
    return PremakePlan(state.table, tuple(made))


def partition_name(table: str, lower: TierKey, axis: Axis, taken: set[str]) -> str:
    """`events_p200`, `events_p20260101`, `events_p20260101_0600`; made unique and kept within Postgres' limit."""
    if axis is Axis.INTEGER:
        suffix = f"_p{lower}" if lower >= 0 else f"_pm{-lower}"
    else:
        moment = axis.moment(lower)
        midnight = not (moment.hour or moment.minute or moment.second or moment.microsecond)
        suffix = f"_p{moment:%Y%m%d}" if midnight else f"_p{moment:%Y%m%d_%H%M%S}"
    for attempt in range(1000):
        ending = suffix if not attempt else f"{suffix}_{attempt}"
        room = _NAME_LIMIT - len(ending.encode())
        name = table.encode()[:room].decode(errors="ignore") + ending
        if name not in taken:
            return name
    raise AssertionError("a thousand partitions of one name")


def run(plan: PremakePlan, conn: psycopg.Connection, axis: Axis, hold: ddl.Hold, lock_millis: int = 50) -> Premade:
    """Make what the plan says; a busy table, or one that refuses, leaves the rest to the next cycle."""
    made: list[NewPartition] = []
    taken = _taken(conn, plan) if plan.make else set()
    for wanted in plan.make:
        partition = wanted
        if wanted.name in taken:
            partition = replace(wanted, name=partition_name(plan.table.name, wanted.lower, axis, taken))
        taken.add(partition.name)
        reach("premake.before_attach")
        try:
            done = ddl.attempt(conn, _create_and_attach(plan.table, partition, axis), lock_millis, hold)
        except NotLeader:
            raise
        except ModakError as error:
            # Rows of the DEFAULT partition in the way, for example. Tiering goes on; the operator is told.
            log.warning("premake.failed", table=str(plan.table), partition=partition.name, because=error.message)
            message = f"Partition {quote(partition.name)} cannot be made ahead. {error.message}"
            return Premade(tuple(made), (Finding("premake.failed", message),))
        if not done:
            log.info("premake.deferred", table=str(plan.table), partition=partition.name, reason="the table is busy")
            break
        reach("premake.after_attach")
        log.info("premake.made", table=str(plan.table), partition=partition.name)
        made.append(partition)
    return Premade(tuple(made))


def _taken(conn: psycopg.Connection, plan: PremakePlan) -> set[str]:
    """Names that any relation of the schema has: a partition's name must be free there, not only below its table."""
    rows = conn.execute(
        "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s",
        (plan.table.schema,),
    )
    return {str(name) for (name,) in rows}


def _create_and_attach(table: TableName, partition: NewPartition, axis: Axis) -> sql.Composed:
    parent, child = sql.Identifier(table.schema, table.name), sql.Identifier(table.schema, partition.name)
    create = sql.SQL(
        "CREATE TABLE {child} (LIKE {parent}"
        " INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING GENERATED INCLUDING STORAGE)"
    ).format(child=child, parent=parent)
    give = sql.SQL("SELECT modak.give_to_owner({}::regclass, {}::regclass)").format(
        *(sql.Literal(relation.as_string(None)) for relation in (child, parent))
    )
    attach = sql.SQL("ALTER TABLE {parent} ATTACH PARTITION {child} FOR VALUES FROM ({low}) TO ({high})").format(
        parent=parent,
        child=child,
        low=sql.Literal(axis.literal(partition.lower)),
        high=sql.Literal(axis.literal(partition.upper)),
    )
    return sql.SQL("{}; {}; {}").format(create, give, attach)
