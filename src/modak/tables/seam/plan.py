"""What a seam read has to look at, decided from the pin's lines and the asked range of tier keys. Pure.

Rows at or above T come from the heap, rows below from the lake with the delta laid over it, and nothing below R. A
part that cannot hold a wanted row is not in the plan, and so is never opened: a hot query does not touch the lake, a
cold one not the heap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from modak.catalog.records import Pin
from modak.core.axis import TierKey
from modak.postgres.model import Leaf


@dataclass(frozen=True, slots=True)
class Span:
    """Tier keys from `lower` on and before `upper`; `None` = without end."""

    lower: TierKey | None = None
    upper: TierKey | None = None

    @property
    def empty(self) -> bool:
        """Whether no key is in it."""
        return self.lower is not None and self.upper is not None and self.lower >= self.upper

    def within(self, other: Span) -> Span:
        """What both hold."""
        lowers = [edge for edge in (self.lower, other.lower) if edge is not None]
        uppers = [edge for edge in (self.upper, other.upper) if edge is not None]
        return Span(max(lowers, default=None), min(uppers, default=None))

    def around(self, other: Span) -> Span:
        """The smallest span that holds both."""
        if self.empty or other.empty:
            return other if self.empty else self
        lower = None if self.lower is None or other.lower is None else min(self.lower, other.lower)
        upper = None if self.upper is None or other.upper is None else max(self.upper, other.upper)
        return Span(lower, upper)


EVERYTHING = Span()
NOTHING = Span(0, 0)


@dataclass(frozen=True, slots=True)
class SeamPlan:
    """The parts of a read and the tier keys that each one answers for; `None` = not needed."""

    heap: Span | None
    lake: Span | None
    delta: Span | None


def plan_seam(pin: Pin, asked: Span = EVERYTHING) -> SeamPlan:
    """Split what is asked for at the pinned lines."""
    if pin.t is None:
        # Nothing was ever moved: the heap has every row.
        return SeamPlan(_unless_empty(asked), None, None)
    hot = _unless_empty(asked.within(Span(pin.t, None)))
    cold = _unless_empty(asked.within(Span(pin.retention_line, pin.t)))
    return SeamPlan(hot, cold if pin.snapshot_id is not None else None, cold)


def plan_lake(pin: Pin, asked: Span = EVERYTHING) -> SeamPlan:
    """Everything from the lake, corrections laid over what has left the heap: a mirror has all rows there."""
    lake = _unless_empty(asked.within(Span(pin.retention_line, None)))
    cold = NOTHING if pin.t is None else asked.within(Span(pin.retention_line, pin.t))
    return SeamPlan(None, lake if pin.snapshot_id is not None else None, cold)


def leaves_of(leaves: Iterable[Leaf], span: Span) -> tuple[Leaf, ...]:
    """The partitions that may hold rows of a span; the spill never holds any."""
    return tuple(
        leaf
        for leaf in leaves
        if not leaf.is_spill and (leaf.is_default or not span.within(Span(leaf.lower, leaf.upper)).empty)
    )


def _unless_empty(span: Span) -> Span | None:
    return None if span.empty else span
