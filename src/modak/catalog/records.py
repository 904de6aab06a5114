"""Rows of schema `modak` as values: what the reader returns and what a registration brings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Literal

from modak.core.axis import Axis, TierKey, Width
from modak.core.ids import OpId
from modak.core.names import TableName
from modak.core.states import LANDED, OpPhase, PartitionState
from modak.lake.model import LakeName

Mode = Literal["tiered", "mirrored"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConfig:
    """What a user decided when registering a table."""

    name: TableName
    relid: int
    mode: Mode
    pk_columns: tuple[str, ...]
    pk_attnums: tuple[int, ...]
    tier_key: str
    tier_attnum: int
    axis: Axis
    width: Width | None
    profile_id: int
    lake: LakeName
    location: str
    layout: Mapping[str, Any] = field(default_factory=dict)
    keep_heap: bool = False
    heap_retention: int | None = None
    lake_retention: int | None = None
    chunk_rows: int | None = None
    numeric_as: str = "decimal:18"

    def differences(self, other: TableConfig) -> tuple[str, ...]:
        """The names of the settings in which two registrations differ."""
        return tuple(each.name for each in fields(TableConfig) if getattr(self, each.name) != getattr(other, each.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRecord(TableConfig):
    """A registered table."""

    table_id: int
    maintenance_policy: Mapping[str, Any]
    frozen: Mapping[str, Any] | None
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPartition:
    """A leaf that the catalog does not know yet. No bound: MINVALUE or MAXVALUE."""

    name: str
    lower: TierKey | None
    upper: TierKey | None
    leaf_oid: int
    leaf_schema: str
    relfilenode: int | None = None
    state: PartitionState = PartitionState.HOT
    problem: str | None = None
    attachment: str = ""
    """Which ATTACH has put it below its table, where that matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRecord(NewPartition):
    """A leaf and how far it has come."""

    partition_id: int
    table_id: int
    trigger_oid: int | None
    updated_at: datetime
    sealed_lsn: str | None = None
    dropped_lsn: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutline:
    """The lines of a table that move together: T, S and its pointer, F, R."""

    table_id: int
    t: TierKey | None
    snapshot_id: int | None
    metadata_location: str
    frontier: str | None = None
    retention_line: TierKey | None = None
    first_floor: TierKey | None = None
    lake_props: Mapping[str, Any] = field(default_factory=dict)
    updated_at: datetime | None = None
    generation: int = 0
    """Counts the moves of S; Postgres keeps it."""
    heal_until: str | None = None
    """Mirrored: changes up to here may be in the lake already."""


@dataclass(frozen=True, slots=True)
class LakeColumns:
    """The names that a lake table has for the columns of its heap."""

    numbers: Mapping[str, str]
    """Attribute number in Postgres → name; empty when the lake knows another table by number."""
    names: tuple[str, ...]
    """All of them, also those whose heap column was dropped."""


@dataclass(frozen=True, slots=True)
class DeltaRange:
    """Delta rows from a place (included) to another (excluded), in the order of tier key and key text.

    Without a key text a place is before all rows of its tier key.
    """

    lower: TierKey
    upper: TierKey
    lower_pk: str | None = None
    upper_pk: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRecord:
    """A journaled operation."""

    op_id: OpId
    table_id: int | None
    kind: str
    phase: OpPhase
    started_at: datetime
    finished_at: datetime | None
    counters: Mapping[str, Any]
    error: str | None
    plan: Mapping[str, Any]
    epoch: int | None
    attempt: int
    folders: tuple[str, ...]
    backend_pid: int | None
    xact_id: int | None
    cleanup: Mapping[str, Any]

    @property
    def landed(self) -> bool:
        """Whether its lake commit is visible."""
        return self.phase in LANDED


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A reader's hold on one state of a table."""

    pin_id: int
    table_id: int
    snapshot_id: int | None
    t: TierKey | None
    retention_line: TierKey | None
    metadata_location: str
    created_at: datetime
    expires_at: datetime
    holder: str
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRow:
    """A row of `modak.status`."""

    table_id: int
    name: TableName
    mode: Mode
    axis: Axis
    keep_heap: bool
    cutline_t: TierKey | None
    cutline_s: int | None
    metadata_location: str | None
    mirror_frontier: str | None
    retention_line: TierKey | None
    cutline_updated_at: datetime | None
    delta_backlog: int
    delta_oldest_at: datetime | None
    read_pins: int
    staged_loads: int
    copying: bool
    partition_states: Mapping[str, int]
    problems: tuple[Mapping[str, str], ...]
    frozen: Mapping[str, Any] | None
    unfinished_ops: int
    last_error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableState:
    """Everything that a planner may know about one table, read under one snapshot."""

    table: TableRecord
    cutline: Cutline
    partitions: tuple[PartitionRecord, ...]
    pins: tuple[Pin, ...]
    unfinished: tuple[OpRecord, ...]
    staged_loads: int = 0
    """Labels of Stream Load whose files wait to be adopted."""

    def living(self) -> tuple[PartitionRecord, ...]:
        """The partitions that are not dropped."""
        return tuple(part for part in self.partitions if part.state is not PartitionState.DROPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A storage profile. No warehouse: the one that the worker is configured with."""

    profile_id: int
    name: str
    warehouse: str | None
    format: str
    config: Mapping[str, str]
    credentials_ref: str | None
    is_default: bool
