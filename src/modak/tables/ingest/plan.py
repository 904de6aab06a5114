"""What an ingest will do with each source: adopt the file as it is, write its rows anew, or refuse. Pure.

`inspect.py` brings the facts out of footers; here they meet the lines of the table. A file is adopted only when
nothing has to be believed: statistics prove that every row lies in [R, T), the columns are the lake's own, and the
whole file lies in one lake partition. One refusal refuses the whole input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from modak.catalog.records import TableState
from modak.core.axis import Axis, TierKey
from modak.core.names import TableName
from modak.tables.ingest.inputs import Source

SHOWN = 20
"""How many refusals are told one by one."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason why the input does not fit."""

    source: str
    reason: str
    row: int | None = None

    def __str__(self) -> str:
        where = self.source if self.row is None else f"{self.source}, row {self.row:,}"
        return f"{where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Room:
    """Where ingested rows may lie: R ≤ tier key < T, and not where the heap still has a leaf."""

    axis: Axis
    lower: TierKey | None
    upper: TierKey
    leaves: tuple[tuple[TierKey, TierKey], ...] = ()

    def refusal(self, low: TierKey, high: TierKey) -> str | None:
        """Why rows with tier keys from `low` to `high` (both included) cannot come in."""
        span = self.axis.literal(low) if low == high else f"{self.axis.literal(low)} to {self.axis.literal(high)}"
        if high >= self.upper:
            return f"tier key {span} is not below the cut-line {self.axis.literal(self.upper)}"
        if self.lower is not None and low < self.lower:
            return f"tier key {span} is below the retention line {self.axis.literal(self.lower)}"
        for start, end in self.leaves:
            if low < end and high >= start:
                leaf = f"{self.axis.literal(start)} to {self.axis.literal(end)}"
                return f"tier key {span} lies in a partition that the heap still has ({leaf})"
        return None


def room_of(state: TableState) -> Room:
    """The room of a table."""
    line = state.cutline
    leaves = tuple(
        (part.lower, part.upper)
        for part in state.living()
        if part.lower is not None and part.upper is not None and line.t is not None and part.lower < line.t
    )
    return Room(state.table.axis, line.retention_line, -(2**63) if line.t is None else line.t, leaves)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the footer of a Parquet file says, measured against the lake table."""

    source: Source
    rows: int
    columns: tuple[str, ...] = ()
    has_ids: bool = False
    lower: TierKey | None = None
    upper: TierKey | None = None
    """The tier keys, both included, where statistics prove them."""
    one_partition: bool = False
    misfits: tuple[str, ...] = ()
    """What no rewriting can mend."""
    rough: tuple[str, ...] = ()
    """Why the file cannot be adopted as it is."""


@dataclass(frozen=True, slots=True)
class IngestPlan:
    """What one ingest takes in. Printed by --dry-run, executed by `run`."""

    table: TableName
    adopt: tuple[Facts, ...] = ()
    rewrite: tuple[Facts, ...] = ()
    known: tuple[Source, ...] = ()
    """Sources that the lake has already, in the same version."""
    refusals: tuple[Refusal, ...] = ()
    why: Mapping[str, str] = field(default_factory=dict)
    """Source → why it is written anew."""

    @property
    def rows(self) -> int:
        """Rows of the sources; for JSON lines not known before they are read."""
        return sum(facts.rows for facts in (*self.adopt, *self.rewrite))


def plan_ingest(
    table: TableName,
    room: Room,
    facts: Sequence[Facts],
    known: Set[tuple[str, str]],
    *,
    rewrite: bool,
) -> IngestPlan:
    """Decide about every source; `known` has the sources that are in the lake, with their versions."""
    adopt: list[Facts] = []
    anew: list[Facts] = []
    there: list[Source] = []
    refusals: list[Refusal] = []
    why: dict[str, str] = {}
    for one in facts:
        if (one.source.uri if one.source.shown != "-" else "-", one.source.version) in known:
            there.append(one.source)
            continue
        wrong = [*one.misfits]
        if one.lower is not None and one.upper is not None:
            outside = room.refusal(one.lower, one.upper)
            wrong += [outside] if outside else []
        refusals += [Refusal(one.source.shown, reason) for reason in wrong]
        if wrong or (not one.rows and one.source.kind == "parquet"):
            continue
        rough = _rough(one)
        if not rough:
            adopt.append(one)
        elif rewrite or one.source.kind == "jsonl":
            anew.append(one)
            why[one.source.shown] = "; ".join(rough)
        else:
            refusals.append(
                Refusal(one.source.shown, f"cannot be adopted as it is: {'; '.join(rough)} (--rewrite can)")
            )
    return IngestPlan(table, tuple(adopt), tuple(anew), tuple(there), tuple(refusals), why)


def _rough(one: Facts) -> tuple[str, ...]:
    if one.source.kind == "jsonl":
        return ("JSON lines become Parquet",)
    rough = [*one.rough]
    if one.lower is None or one.upper is None:
        rough.append("its footer has no statistics of the tier key")
    elif not one.one_partition:
        rough.append("it spans partition bands of the lake")
    return tuple(rough)
