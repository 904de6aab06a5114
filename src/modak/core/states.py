"""State machines of the house: what a partition and an operation can be, and which steps are legal."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class PartitionState(StrEnum):
    """The life of a heap partition. Once sealed it never goes back: the capture trigger stays until the drop."""

    HOT = "hot"
    SEALING = "sealing"
    TIERING = "tiering"
    TIERED = "tiered"
    DROPPED = "dropped"


PARTITION_STEPS: Mapping[PartitionState, frozenset[PartitionState]] = {
    PartitionState.HOT: frozenset({PartitionState.SEALING}),
    PartitionState.SEALING: frozenset({PartitionState.TIERING}),
    PartitionState.TIERING: frozenset({PartitionState.TIERED, PartitionState.SEALING}),
    PartitionState.TIERED: frozenset({PartitionState.DROPPED}),
    PartitionState.DROPPED: frozenset(),
}


class OpPhase(StrEnum):
    """The life of a journaled operation. `COMMITTED` is written by the one transaction and by nothing else.

    One that does not land ends as `FAILED` when an error made its process give it up, and as `ABANDONED` when a crash
    cut it off or there was nothing to do; either way what it had written is gone.
    """

    PLANNED = "planned"
    WRITING = "writing"
    PREPARED = "prepared"
    COMMITTED = "committed"
    DONE = "done"
    FAILED = "failed"
    ABANDONED = "abandoned"


OP_STEPS: Mapping[OpPhase, frozenset[OpPhase]] = {
    OpPhase.PLANNED: frozenset({OpPhase.WRITING, OpPhase.PREPARED, OpPhase.FAILED, OpPhase.ABANDONED}),
    OpPhase.WRITING: frozenset({OpPhase.PREPARED, OpPhase.FAILED, OpPhase.ABANDONED}),
    OpPhase.PREPARED: frozenset({OpPhase.PREPARED, OpPhase.COMMITTED, OpPhase.FAILED, OpPhase.ABANDONED}),
    OpPhase.COMMITTED: frozenset({OpPhase.DONE}),
    OpPhase.DONE: frozenset(),
    OpPhase.FAILED: frozenset(),
    OpPhase.ABANDONED: frozenset(),
}

LANDED = frozenset({OpPhase.COMMITTED, OpPhase.DONE})
"""Phases in which the lake commit of the operation is visible."""
