"""Which line of a CSV body each record begins on: records may span lines, and some are no rows of the table.

Arrow numbers the records that it refuses and gives the others without numbers, so the others get the numbers that are
left. It may refuse records of the block after the one that it gives; those wait. Blank lines are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Fault = tuple[int, str]


class Numbering:
    """Follows a reader through its batches; `refuse` is its handler for records with too few or too many values."""

    def __init__(self, header: Sequence[str]) -> None:
        self._record = 2
        self._ahead = sum(name.count("\n") for name in header)
        """Lines that earlier records had beyond their first."""
        self._odd: dict[int, tuple[int, str]] = {}

    def refuse(self, row: Any) -> str:
        """Leave a record out."""
        why = f"has {row.actual_columns} values, not {row.expected_columns}"
        self._odd[row.number] = (row.text.strip("\r\n").count("\n"), why)
        return "skip"

    def number(self, batch: pa.RecordBatch) -> tuple[pa.Array, list[Fault]]:
        """The lines of the rows of the next batch, and the records between them that were refused."""
        if not len(batch):
            return pa.array([], pa.int64()), []
        candidates = np.arange(self._record, self._record + len(batch) + len(self._odd))
        records = candidates[~np.isin(candidates, list(self._odd))][: len(batch)]
        more = np.zeros(len(batch), np.int64)
        for column in batch.columns:
            more += np.asarray(pc.fill_null(pc.count_substring(column, "\n"), 0))
        lines, faults = self._counted(int(records[-1]) + 1, records, more)
        return pa.array(lines), faults

    def rest(self) -> list[Fault]:
        """What was refused after the last row."""
        if not self._odd:
            return []
        none = np.array([], np.int64)
        return self._counted(max(self._odd) + 1, none, none)[1]

    def _counted(self, end: int, records: Any, more: Any) -> tuple[Any, list[Fault]]:
        start, self._record = self._record, end
        beyond = np.zeros(end - start, np.int64)
        beyond[records - start] = more
        here = {number: self._odd.pop(number) for number in sorted(self._odd) if number < end}
        for number, (lines, _) in here.items():
            beyond[number - start] = lines
        begins = np.arange(start, end) + self._ahead + np.cumsum(beyond) - beyond
        self._ahead += int(beyond.sum())
        faults = [(int(begins[number - start]), why) for number, (_, why) in here.items()]
        return begins[records - start], faults
