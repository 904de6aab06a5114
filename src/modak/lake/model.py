"""What a lake table is, as values: names, columns, layout, files, and a prepared commit.

Planners and runners pass these around; the plugin (`lake/iceberg`) reads and makes them. Nothing here does I/O or knows
Java. Where things lie is also decided here, so that the journal can name a folder before anything is written into it.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from modak.core.axis import Axis, Width

Transform = Literal["truncate", "hour", "day", "month", "year"]

CATALOG = "modak"
"""The name under which foreign tools find our tables in Iceberg's JDBC catalog tables."""
OP_ID = "modak.op-id"
"""Snapshot summary key that tells our snapshots from foreign ones."""
KIND = "modak.kind"
"""Snapshot summary key: which flow made the snapshot."""
PIN_TAG = "modak-pin-"
PUBLISHED_TAG = "modak-published"
"""The tag of S: a foreign rewrite puts a snapshot on top of it, and a foreign expiry must not take it then."""

_WIDEST_TRUNCATE = 2**31 - 1
_HOUR = 3_600_000_000
_DAY = 24 * _HOUR
_FIELD_SAFE = re.compile(r"[A-Za-z0-9_-]+")
_METADATA_NAMES = uuid.UUID("6f1d3f6e-2b0c-5d0e-9c53-6d6f64616b21")


@dataclass(frozen=True, slots=True)
class LakeName:
    """Where a table is found in the lake's catalog: namespace levels, then the name."""

    namespace: tuple[str, ...]
    name: str

    @property
    def namespace_text(self) -> str:
        """The namespace as `iceberg_tables.table_namespace` holds it."""
        return ".".join(self.namespace)

    def __str__(self) -> str:
        return f"{self.namespace_text}.{self.name}"


@dataclass(frozen=True, slots=True)
class LakeColumn:
    """A top-level column. The type is Iceberg's text without blanks: `long`, `decimal(10,2)`, `list<string>`."""

    name: str
    type: str
    required: bool = False
    field_id: int | None = None
    element_id: int | None = None
    initial_default: str | None = None
    """JSON single value that rows of older files show: `5`, `"2024-01-01"`, `true`."""
    file_names: tuple[str, ...] | None = field(default=None, compare=False)
    """What files without field ids call it, by the table's name mapping; no mapping: its own name."""

    @property
    def element(self) -> str | None:
        """The element type of a list, else nothing."""
        return self.type[5:-1] if self.type.startswith("list<") else None


@dataclass(frozen=True, slots=True)
class Layout:
    """How rows are grouped into lake partitions. No transform: unpartitioned (`column` is then still the tier key)."""

    transform: Transform | None = None
    width: int | None = None
    column: str | None = None


def layout_for(axis: Axis, width: Width | None, column: str) -> Layout:
    """The lake partitioning that fits heap partitions of this width; time buckets are UTC."""
    if width is None:
        return Layout(None, None, column)
    if not axis.is_time:
        # Wider bands have no transform: such a table stays unpartitioned and its files are cut at the Postgres bounds.
        fits = 0 < width.amount <= _WIDEST_TRUNCATE
        return Layout("truncate", width.amount, column) if fits else Layout(None, None, column)
    return Layout(_time_transform(axis, width), None, column)


def _time_transform(axis: Axis, width: Width) -> Transform:
    if width.months:
        return "year" if width.amount >= 12 else "month"
    micros = width.amount * axis.unit
    if micros < _DAY:
        return "hour"
    if micros < 28 * _DAY:
        return "day"
    return "month" if micros < 365 * _DAY else "year"


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file: what Iceberg must know about it, as ContentFileParser JSON, and what people ask about it."""

    json: str
    rows: int
    bytes: int
    path: str


@dataclass(frozen=True, slots=True)
class Vector:
    """A deletion vector: the deleted positions of one data file, as ContentFileParser JSON of a Puffin delete file."""

    json: str
    rows: int
    bytes: int
    path: str
    data_file: str


@dataclass(frozen=True, slots=True)
class EqualityDeletes:
    """A delete file of somebody else that hides rows by value, as ContentFileParser JSON."""

    json: str
    rows: int
    bytes: int
    path: str
    sequence_number: int
    field_ids: tuple[int, ...]
    spec_id: int
    partition: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class LakeFile:
    """A live data file as a scan sees it: with its vectors, and with the bounds of one column where they are known."""

    file: DataFile
    lower: int | None = None
    upper: int | None = None
    sequence_number: int | None = None
    vectors: tuple[Vector, ...] = ()
    foreign_deletes: int = 0
    """Equality or positional delete files of somebody else that also apply."""

    @property
    def deletes(self) -> int:
        """Delete files that the data file carries."""
        return len(self.vectors) + self.foreign_deletes

    @property
    def deleted_rows(self) -> int:
        """Rows that its vectors hide."""
        return sum(vector.rows for vector in self.vectors)


@dataclass(frozen=True, slots=True)
class LakeTable:
    """A lake table at one metadata location."""

    identifier: LakeName
    location: str
    metadata_location: str
    snapshot_id: int | None
    schema: tuple[LakeColumn, ...]
    spec_id: int
    layout: Layout
    format_version: int
    properties: Mapping[str, str]
    snapshot_count: int
    tags: Mapping[str, int]
    sequence_number: int = 0
    oldest_metadata: str | None = None
    """The oldest metadata file of the log."""
    refs: Mapping[str, int] = field(default_factory=dict)
    """Every branch and tag, the tag of S among them, which `tags` leaves out."""

    def column(self, name: str) -> LakeColumn | None:
        """The column of that name."""
        return next((column for column in self.schema if column.name == name), None)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot of a table, as its metadata lists it."""

    id: int
    parent: int | None
    sequence_number: int
    at_millis: int
    operation: str
    summary: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ForeignSnapshot:
    """A snapshot that is not ours. Operation `unrelated`: the line from `since` to the present is broken."""

    id: int
    operation: str
    summary: Mapping[str, str]

    @property
    def changes_rows(self) -> bool:
        """Whether it may have changed rows; a `replace` only rearranges them."""
        return self.operation != "replace"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A lake commit that is written but not visible: it lands when the pointer moves from base to new location."""

    identifier: LakeName
    base_location: str | None
    new_location: str
    snapshot_id: int | None
    base_snapshot_id: int | None
    attempt_folder: str
    obsolete: tuple[str, ...] = ()
    tagged: frozenset[int] = frozenset()
    """Snapshots that were asked to be kept: each has its pin tag in this commit, new or from before."""
    new_tags: frozenset[int] = frozenset()
    """Those of them whose tag this commit makes, and has to see gone when the pins lapse."""
    summary: Mapping[str, str] = field(default_factory=dict)
    expired_from: str | None = None
    """The metadata file that still lists the snapshots which this commit expires: the way to files that may go."""
    location: str = ""
    """The table's location."""


def pin_tag(snapshot_id: int) -> str:
    """The tag that keeps a pinned snapshot through any expiry."""
    return f"{PIN_TAG}{snapshot_id}"


def table_location(warehouse: str, name: LakeName) -> str:
    """Where a table's files lie: `<warehouse>/<namespace>/<schema>/<table>`, each part safe in a URI."""
    return "/".join([warehouse.rstrip("/"), *(_path_part(part) for part in (*name.namespace, name.name))])


def data_folder(location: str, op_id: str) -> str:
    """The folder of all data files that an operation writes."""
    return f"{location}/data/op-{op_id}"


def attempt_folder(location: str, op_id: str, attempt: int) -> str:
    """The folder of everything that one attempt to prepare a commit writes, except the metadata JSON itself."""
    return f"{location}/metadata/op-{op_id}-{attempt}"


def metadata_stem(version: int, op_id: str, attempt: int) -> str:
    """An attempt's metadata JSON, without extension: known in advance, so that a crash leaves no nameless file."""
    return f"{version:05d}-{uuid.uuid5(_METADATA_NAMES, f'{op_id}-{attempt}')}"


def _path_part(part: str) -> str:
    if _FIELD_SAFE.fullmatch(part):
        return part
    # Odd names keep what is readable of them; the digest keeps two of them apart.
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", part).strip("-")
    return f"{slug}-{hashlib.sha256(part.encode()).hexdigest()[:10]}".lstrip("-")
