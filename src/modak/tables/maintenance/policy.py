"""The policy in force for a table: the worker's settings first, then what the table's own policy says.

Editing is one compare-and-swap on `modak.tables.maintenance_policy`: all changes of a command or none of them. Only
what a command changes is checked: neither the fleet's settings nor a column that has gone hold up another key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, LiteralString

from modak.core.errors import Conflict, UsageError
from modak.core.faults import reach
from modak.core.names import TableName
from modak.lake.policy import PolicyKey, Value, check_together, key_of, keys_of

if TYPE_CHECKING:
    from modak.catalog.records import TableRecord
    from modak.config import Settings
    from modak.tables.site import Site

Source = Literal["table", "default"]

_BY_COLUMNS = ("rewrite_sort_columns", "rewrite_zorder_columns")

_COLUMNS: LiteralString = """
    SELECT a.attname, t.typcategory = 'A' FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
    WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
"""
_EDIT: LiteralString = """
    UPDATE modak.tables SET maintenance_policy = %s WHERE table_id = %s AND maintenance_policy = %s
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of a policy in force, and where its value comes from."""

    key: PolicyKey
    value: Value
    source: Source


class Policy(Mapping[str, Any]):
    """Every key of a table's policy with the value that maintenance runs with."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        self.settings = {each.key.name: each for each in settings}

    def __getitem__(self, name: str) -> Any:
        return self.settings[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self.settings)

    def __len__(self) -> int:
        return len(self.settings)

    def plain(self) -> dict[str, Value]:
        """Names and values."""
        return {name: each.value for name, each in self.settings.items()}

    def columns(self, name: str) -> tuple[str, ...]:
        """A list of columns."""
        return tuple(part for part in str(self[name]).split(",") if part)


def resolve(settings: Settings, own: Mapping[str, Any], lake_format: str = "iceberg") -> Policy:
    """The policy in force: defaults, then the table's own values; a stored value that makes no sense is refused."""
    found: list[Setting] = []
    for key in keys_of(lake_format).values():
        if key.name in own:
            found.append(Setting(key, key.check(own[key.name]), "table"))
        elif key.setting is not None:
            found.append(Setting(key, getattr(settings.maintenance, key.setting), "default"))
        else:
            assert key.default is not None
            found.append(Setting(key, key.default, "default"))
    return Policy(found)


def of(site: Site, record: TableRecord) -> Policy:
    """The policy in force for a table."""
    return resolve(site.settings, record.maintenance_policy)


def parse(assignments: Mapping[str, str], removed: Sequence[str] = ()) -> dict[str, Value]:
    """Values as typed; unknown keys, other kinds and senseless values are refused before anything is opened."""
    keys = keys_of("iceberg")
    for name in removed:
        key_of(keys, name)
        if name in assignments:
            raise UsageError("usage.unset", f"{name} is both set and unset.")
    return {name: key_of(keys, name).parse(text) for name, text in assignments.items()}


def edit(site: Site, name: TableName, values: Mapping[str, Value], removed: Sequence[str], *, reset: bool) -> Policy:
    """Change a table's own policy, all at once; returns the policy then in force."""
    from psycopg.types.json import Jsonb

    record = site.reader.state(name).table
    own = {} if reset else {key: value for key, value in record.maintenance_policy.items() if key not in removed}
    own |= values
    becomes = resolve(site.settings, own)
    stored = record.maintenance_policy
    changed = {key for key in {*stored, *own} if key in values or (key in stored) != (key in own)}
    check_together(becomes, own, changed)
    _check_columns(site, record, becomes, changed)
    reach("policy.before_edit")
    with site.writer(None).step() as tx:
        done = tx.conn.execute(_EDIT, (Jsonb(own), record.table_id, Jsonb(dict(record.maintenance_policy)))).rowcount
        if done != 1:
            raise Conflict("policy.changed", f"Somebody else is changing the policy of {name}.", hint="Try again.")
    reach("policy.after_edit")
    return becomes


def _check_columns(site: Site, record: TableRecord, policy: Policy, changed: Collection[str]) -> None:
    asked = {name for key in _BY_COLUMNS if key in changed for name in policy.columns(key)}
    if not asked:
        return
    with site.connect(autocommit=True) as conn:
        arrays = {str(name): bool(is_array) for name, is_array in conn.execute(_COLUMNS, (record.relid,))}
    if missing := asked - set(arrays):
        raise UsageError(
            "usage.set", f"{record.name} has no column {min(missing)!r}.", hint=f"It has: {', '.join(arrays)}."
        )
    for name in policy.columns("rewrite_zorder_columns"):
        if arrays.get(name):
            raise UsageError(
                "usage.set",
                f"{name} holds arrays, which have no place on a z-curve.",
                hint="Sort by it instead: rewrite_sort_columns.",
            )
