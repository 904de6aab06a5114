"""Where the rows of a batch belong: the heap, the cold side, or nowhere. Pure, on whole columns of tier keys.

A row is the heap's where a leaf for its tier key is attached; T alone never decides. Below T without a leaf it is cold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from modak.catalog.records import TableState
from modak.core.axis import Axis, TierKey
from modak.postgres.model import PgTable

HOT, COLD, NOWHERE = 0, 1, 2
_LOW, _HIGH = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class Routes:
    """The attached leaves and the lines of a table."""

    axis: Axis
    t: TierKey | None
    r: TierKey | None
    leaves: tuple[tuple[TierKey, TierKey], ...]
    """Both ends included."""
    all_hot: bool

    def of(self, keys: Any) -> Any:
        """The route of each tier key."""
        if self.all_hot:
            return np.zeros(len(keys), np.int8)
        routes = np.full(len(keys), NOWHERE, np.int8)
        if self.t is not None:
            routes[keys < self.t] = COLD
        if self.r is not None:
            routes[keys < self.r] = NOWHERE
        for low, high in self.leaves:
            routes[(keys >= low) & (keys <= high)] = HOT
        return routes

    def why_not(self, key: TierKey) -> str:
        """Why a tier key belongs nowhere."""
        shown = self.axis.literal(key)
        if self.r is not None and key < self.r:
            return f"tier key {shown} is below the retention line {self.axis.literal(self.r)}"
        return f"no partition takes tier key {shown}"


def routes_of(state: TableState, heap: PgTable) -> Routes:
    """The routes of a table as it is now."""
    line, record = state.cutline, state.table
    leaves = [leaf for leaf in heap.leaves if not leaf.is_spill and not leaf.detach_pending]
    whole = record.mode == "mirrored" and record.heap_retention is None
    default = any(leaf.is_default for leaf in leaves)
    spans = tuple(
        (_LOW if leaf.lower is None else leaf.lower, _HIGH if leaf.upper is None else leaf.upper - 1)
        for leaf in leaves
        if not leaf.is_default
    )
    return Routes(record.axis, line.t, line.retention_line, spans, whole or default or not leaves)
