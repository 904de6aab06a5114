"""The cold rows of a batch: few wait in memory for the delta, more are staged in files of the lake.

Memory is bounded by `KEPT_BYTES` of waiting rows and the buffer of the staging writer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from modak.catalog.records import TableState
from modak.tables.ingest.rows import Intake
from modak.tables.load.stage import Staged, Staging
from modak.tables.site import Site

if TYPE_CHECKING:
    import pyarrow as pa

    from modak.lake.model import LakeTable

KEPT_BYTES = 16 << 20
"""Cold rows of so many bytes are staged, few as they may be: until then they wait in memory."""


class NotHere(Exception):
    """Cold rows of this batch need what only Postgres can give them."""


class Batch(Protocol):
    """What the cold rows must know of their batch."""

    @property
    def site(self) -> Site:
        """The surroundings."""

    @property
    def state(self) -> TableState:
        """The table as the batch found it."""

    @property
    def label(self) -> str:
        """The name that makes the batch unique."""

    @property
    def threshold(self) -> int:
        """So many cold rows are staged."""

    @property
    def defaulted(self) -> frozenset[str]:
        """Columns that have a default."""

    def lake_intake(self, documents: frozenset[str]) -> tuple[LakeTable, Intake]:
        """The lake table, and the shape of the rows with its columns and their ids; `NotHere` if one is lacking."""


class Cold:
    """The cold rows of a batch: kept until they are too many for the delta, then staged."""

    def __init__(self, load: Batch, intake: Intake, may_stage: bool) -> None:
        self._load = load
        self._intake = intake
        self.may_stage = may_stage
        self._kept: list[tuple[pa.RecordBatch, pa.RecordBatch]] = []
        self._rows = 0
        self._bytes = 0
        self._staging: Staging | None = None
        self._staged_intake: Intake | None = None

    @property
    def stage_id(self) -> str | None:
        """The stage that the rows went to."""
        return None if self._staging is None else self._staging.stage.stage_id

    def take(self, texts: pa.RecordBatch, rows: pa.RecordBatch) -> None:
        """Some more cold rows, as texts and in the lake's types."""
        self._rows += len(rows)
        if self._staging is None:
            self._kept.append((texts, rows))
            self._bytes += texts.nbytes + rows.nbytes
            if self._rows < self._load.threshold and self._bytes < KEPT_BYTES:
                return
            lake, self._staged_intake = self._load.lake_intake(self._intake.documents)
            self._staging = Staging(self._load.site, self._load.state, lake, self._staged_intake, self._load.label)
            waiting, self._kept = self._kept, []
            for _, earlier in waiting:
                self._stage(earlier)
            return
        self._stage(rows)

    def close(self) -> Staged | None:
        """Finish what was staged."""
        return None if self._staging is None else self._staging.close()

    def leftover(self) -> Iterator[pa.RecordBatch]:
        """Texts of cold rows that were few enough for the delta."""
        for texts, _ in self._kept:
            yield texts

    def discard(self) -> None:
        """Take away what was staged."""
        if self._staging is not None:
            self._staging.discard()

    def _stage(self, rows: pa.RecordBatch) -> None:
        import pyarrow as pa

        assert self._staging is not None
        assert self._staged_intake is not None
        for column, values in zip(self._intake.shape.columns, rows.columns, strict=True):
            if values.null_count and (column.required or column.name in self._load.defaulted):
                # Defaults, and the refusal of a NULL with its reason, are Postgres' own business.
                raise NotHere
        named = {column.name: values for column, values in zip(self._intake.shape.columns, rows.columns, strict=True)}
        columns = self._staged_intake.shape.columns
        self._staging.write(
            pa.RecordBatch.from_arrays([named[one.name] for one in columns], names=[one.name for one in columns])
        )
