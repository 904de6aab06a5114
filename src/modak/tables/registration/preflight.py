"""Everything that could be wrong with a registration, found before anything is changed and told in one list.

`inspect` is pure: it turns a described table and a request into a `Preflight`. The same value tells how much will
move and about how long that takes, so the user decides with open eyes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from modak.core.axis import Axis, TierKey, Width
from modak.core.errors import Refused
from modak.core.names import quote
from modak.lake.model import LakeTable, Layout, layout_for
from modak.lake.types import MappedColumn, TypeRefusal, identity_refusal, map_column, name_clashes
from modak.postgres.describe import Leaf, PgColumn, PgTable, axis_of
from modak.tables.registration.request import RegisterRequest, length, numeric_rule

EXPECTED_ROWS_PER_SECOND = 500_000
"""A careful guess for the estimate shown to people: half of what two cores move when warm."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that forbids the registration, and what to do about it."""

    code: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Preflight:
    """What was found: problems (any of them refuses), notes, and how much will move."""

    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    partitions: int
    rows: int
    bytes: int
    wal_bytes: int = 0
    """Mirrored: about so much WAL the server keeps while the first copy runs."""
    registered: bool = False
    """Whether the table is in the house already, as asked."""

    @property
    def seconds(self) -> float:
        """About how long the first tiering takes."""
        return max(1.0, self.rows / EXPECTED_ROWS_PER_SECOND)

    def refuse_if_wrong(self, table: object) -> None:
        """Raise one error that lists every problem."""
        if self.problems:
            lines = "\n".join(f"  - {p.message}" + (f" {p.hint}" if p.hint else "") for p in self.problems)
            count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
            raise Refused(
                "register.preflight",
                f"{table} cannot be registered, {count}:\n{lines}",
                hint="Nothing was changed.",
            )


@dataclass(frozen=True, slots=True)
class Shape:
    """What registration settles for good: axis, width, layout, columns and the first cut-line."""

    axis: Axis
    width: Width | None
    layout: Layout
    columns: tuple[MappedColumn, ...]
    cut_line: TierKey | None
    """Where it begins; none for a mirrored table whose heap keeps everything."""


def inspect(
    table: PgTable,
    request: RegisterRequest,
    existing: LakeTable | None,
    default_rows: bool,
    low_rows: Collection[str] = (),
) -> tuple[Preflight, Shape | None]:
    """Find everything wrong; the shape is there only when nothing is.

    `low_rows`: partitions from MINVALUE that hold rows.
    """
    problems = [
        *_problems(table, request, default_rows),
        *map(_low_problem, low_rows),
        *lake_problems(request, existing),
    ]
    grid = bounded(table)
    preflight = Preflight(
        tuple(problems),
        tuple(notes(table, existing)),
        len(grid),
        round(sum(max(leaf.rows_estimate, 0) for leaf in grid)),
        sum(leaf.bytes for leaf in grid),
    )
    return preflight, None if problems else _shape(table, request)


def bounded(table: PgTable) -> list[Leaf]:
    """The partitions that can age, lowest first."""
    grid = [leaf for leaf in table.leaves if not leaf.is_default and not leaf.is_spill]
    finite = [leaf for leaf in grid if leaf.lower is not None and leaf.upper is not None]
    return sorted(finite, key=lambda leaf: leaf.lower or 0)


def open_below(table: PgTable) -> list[Leaf]:
    """The plain partitions that start at MINVALUE."""
    if table.partition_strategy != "range":
        return []
    return [x for x in table.leaves if x.lower is None and x.kind == "r" and not x.is_default and not x.is_spill]


def map_columns(table: PgTable, numeric_as: str, keys: frozenset[str]) -> tuple[list[MappedColumn], list[Problem]]:
    """The lake columns of a table; keys are required there, everything else may be NULL."""
    rule = numeric_rule(numeric_as)
    mapped: list[MappedColumn] = []
    problems: list[Problem] = []
    for column in table.columns:
        result = map_column(column, numeric=rule.kind, numeric_scale=rule.scale)
        if isinstance(result, TypeRefusal):
            problems.append(Problem("register.column_type", result.reason, result.hint))
        else:
            mapped.append(replace(result, column=replace(result.column, required=column.name in keys)))
    return mapped, problems


def column_problems(table: PgTable, request: RegisterRequest) -> Iterator[Problem]:
    """Columns that are named, but not there."""
    here = [column.name for column in table.columns]
    for name in dict.fromkeys((*request.pk, request.tier_key)):
        if name not in here:
            known = ", ".join(quote(column) for column in here)
            yield Problem("register.no_column", f"There is no column {quote(name)}.", f"Columns are: {known}.")


def _problems(table: PgTable, request: RegisterRequest, default_rows: bool) -> Iterator[Problem]:
    by_name = {column.name: column for column in table.columns}
    yield from column_problems(table, request)
    yield from grid_problems(table, request, default_rows)
    yield from key_problems(table, request, by_name)
    yield from map_columns(table, request.numeric_as, frozenset())[1]
    yield from name_problems(table)
    if not {"owner", "owner_of_partitions"} <= table.privileges:
        yield Problem(
            "register.privileges",
            f"The worker's role does not own {table.name} and all its partitions,"
            " so it cannot add triggers or drop partitions.",
            f"Run: GRANT {quote(table.owner)} TO <the worker's role>.",
        )
    yield from schema_problem(table)
    if not request.keep_heap:
        yield from foreign_key_problem(table, "Drop those foreign keys, or keep the heap with --keep-heap.")


def schema_problem(table: PgTable) -> Iterator[Problem]:
    """Partitions are made beside the table."""
    if not {"create_in_schema", "usage_of_schema"} <= table.privileges:
        schema = quote(table.name.schema)
        yield Problem(
            "register.privileges",
            f"The worker's role may not create partitions in schema {schema}.",
            f"Run: GRANT CREATE ON SCHEMA {schema} TO <the worker's role>.",
        )


def foreign_key_problem(table: PgTable, hint: str) -> Iterator[Problem]:
    """What other tables refer to cannot leave the heap."""
    if table.inbound_foreign_keys:
        yield Problem(
            "register.foreign_keys",
            f"Other tables refer to it ({', '.join(table.inbound_foreign_keys)}), so partitions cannot be dropped.",
            hint,
        )


def grid_problems(table: PgTable, request: RegisterRequest, default_rows: bool) -> Iterator[Problem]:
    """What keeps partitions from aging."""
    kept = request.mode == "mirrored"
    if table.partition_strategy != "range":
        found = f"partitioned by {table.partition_strategy}" if table.partition_strategy else "not partitioned"
        yield Problem(
            "register.not_partitioned",
            f"The table is {found}; {'--heap-retention' if kept else 'a tiered table'} needs PARTITION BY RANGE on its"
            " tier key.",
        )
        return
    if table.partition_columns != (request.tier_key,):
        columns = ", ".join(quote(column) for column in table.partition_columns)
        yield Problem(
            "register.partition_key",
            f"The table is partitioned by ({columns}), not by the tier key {quote(request.tier_key)}.",
        )
        return
    for leaf in table.leaves:
        if leaf.kind != "r":
            what = "partitioned again" if leaf.kind == "p" else "not a plain table"
            yield Problem(
                "register.partition_kind", f"Partition {quote(leaf.name)} is {what}.", "Only one level is tiered."
            )
    if default_rows:
        name = next(leaf.name for leaf in table.leaves if leaf.is_default)
        yield Problem(
            "register.default_rows",
            f"The DEFAULT partition {quote(name)} holds rows, which would never be tiered.",
            "Move them into range partitions first.",
        )
    if not bounded(table):
        yield Problem(
            "register.no_partitions", "There is no partition with two plain bounds.", "Create the first partitions."
        )


def _low_problem(leaf: str) -> Problem:
    return Problem(
        "register.minvalue_rows",
        f"Partition {quote(leaf)} starts at MINVALUE and holds rows: they would lie below the cut-line and in no read.",
        "Move them into partitions with two bounds first.",
    )


def key_problems(table: PgTable, request: RegisterRequest, by_name: dict[str, PgColumn]) -> Iterator[Problem]:
    """What keeps rows from being known by their key."""
    identity = {*request.pk, request.tier_key}
    tier = by_name.get(request.tier_key)
    if tier is not None and axis_of(tier.type) is None:
        yield Problem(
            "register.tier_key_type",
            f"The tier key {quote(request.tier_key)} is of type {tier.type.name}.",
            "It must be an integer, date, timestamp or timestamptz.",
        )
    if not table.primary_key:
        yield Problem("register.no_primary_key", "The table has no primary key.", "Add one that --pk can name.")
    elif not set(table.primary_key) <= identity:
        needed = ", ".join(quote(column) for column in table.primary_key)
        yield Problem(
            "register.pk_not_covering",
            f"--pk {','.join(request.pk)} and the tier key do not cover the primary key ({needed}),"
            " so they do not identify a row.",
            f"Use --pk {','.join(column for column in table.primary_key if column != request.tier_key)}.",
        )
    for name in request.pk:
        column = by_name.get(name)
        if column is None:
            continue
        refusal = identity_refusal(column)
        if refusal is not None:
            yield Problem("register.key_type", refusal.reason, refusal.hint)
        elif not column.not_null:
            yield Problem("register.key_null", f"Key column {quote(name)} may be NULL.", "Set it NOT NULL.")


def lake_problems(request: RegisterRequest, existing: LakeTable | None) -> Iterator[Problem]:
    """What is wrong with a lake table that was left behind."""
    if existing is not None and existing.layout.column not in (None, request.tier_key):
        yield Problem(
            "register.lake_differs",
            f"The lake table at {existing.location} is laid out by another column, {quote(existing.layout.column)}.",
            "Register it as it was before, or drop that lake table first.",
        )


def name_problems(table: PgTable) -> Iterator[Problem]:
    """Names, persistence and policies that the lake cannot follow."""
    if "." in table.name.schema or "." in table.name.name:
        yield Problem(
            "register.dotted_name", f"A dot in a name ({table.name}) cannot be told from a namespace in the lake."
        )
    for clash in name_clashes(column.name for column in table.columns):
        yield Problem("register.overlapping_names", clash.reason, clash.hint)
    if table.persistence == "t":
        yield Problem("register.temporary", "The table is temporary; it would vanish with its session.")
    if table.row_security:
        yield Problem(
            "register.row_security",
            "Row security would hide rows from the worker's role, and hidden rows would be lost.",
            "Grant the role BYPASSRLS, or make it the owner without FORCE ROW LEVEL SECURITY.",
        )


def notes(table: PgTable, existing: LakeTable | None) -> Iterator[str]:
    """What somebody should know, though it forbids nothing."""
    if existing is not None:
        yield f"The lake table at {existing.location} exists and is taken over with the rows it has."
    for leaf in table.leaves:
        if leaf.is_spill:
            continue
        if leaf.is_default:
            yield f"DEFAULT partition {quote(leaf.name)}: recent rows that land in it are not tiered."
        elif leaf.lower is None:
            yield f"Partition {quote(leaf.name)} starts at MINVALUE: it is not tiered; cold INSERTs are not diverted."
        elif leaf.upper is None:
            yield f"Partition {quote(leaf.name)} ends at MAXVALUE: it is not tiered, and no partitions are made ahead."


def _shape(table: PgTable, request: RegisterRequest) -> Shape:
    tier = next(column for column in table.columns if column.name == request.tier_key)
    axis = axis_of(tier.type)
    grid = bounded(table)
    assert axis is not None
    assert grid[0].lower is not None
    assert grid[0].upper is not None
    given = length(request.partition_width, axis, "--partition-width")
    inferred = Width.between(grid[0].lower, grid[0].upper, axis, table.time_zone)
    width = inferred if given is None else Width(given) if given else None
    keys = frozenset({*request.pk, request.tier_key})
    columns, _ = map_columns(table, request.numeric_as, keys)
    return Shape(axis, width, layout_for(axis, width, request.tier_key), tuple(columns), grid[0].lower)
