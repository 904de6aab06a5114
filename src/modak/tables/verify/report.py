"""What a verification found, as values: counts per band, differences by key and column, findings about structure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from modak.core.axis import TierKey
from modak.core.names import TableName

Kind = Literal["changed", "missing", "extra", "duplicated"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong with the lake or the delta itself."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Difference:
    """A row that heap and lake do not agree on: `missing` and `extra` say what the lake has.

    `duplicated`: the lake has it more than once. Values are texts; None is NULL, and so it is where there is no row.
    """

    kind: Kind
    key: str
    tier_key: str
    column: str | None = None
    heap: str | None = None
    lake: str | None = None
    copies: int = 1


@dataclass(frozen=True, slots=True)
class BandCount:
    """The rows of one band. `heap_rows` is none where only the lake has the band."""

    lower: str | None
    upper: str
    partition: str | None
    heap_rows: int | None
    lake_rows: int
    delta_rows: int
    differing: int
    """Buckets of keys that differ."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The answer of one verification."""

    table: TableName
    cut_line: str | None
    retention_line: str | None
    snapshot_id: int | None
    bands: tuple[BandCount, ...]
    skipped_bands: int
    differing_rows: int
    at_least: bool
    """Whether there may be more differing rows than were counted."""
    differences: tuple[Difference, ...]
    findings: tuple[Finding, ...]
    left_out: tuple[str, ...]
    compared_rows: int
    seconds: float
    since: TierKey | None = None
    sample: float | None = None
    repaired: int | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def lake_only_rows(self) -> int:
        """Rows whose heap copy is gone: keys, place and files were checked, their values cannot be."""
        return sum(band.lake_rows for band in self.bands if band.heap_rows is None)

    @property
    def sound(self) -> bool:
        """Whether nothing at all is wrong."""
        return not self.differing_rows and not self.findings
