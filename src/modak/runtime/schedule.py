"""Which piece of work comes next: each table in its turn, a few at a time, and one that fails waits alone.

`Schedule` decides and does nothing else: no I/O, no thread, no clock of its own. A round offers what is due; `take`
hands out the item whose table has waited longest, never two of one table at once. An item that failed is not handed out
again before its pause is over, which doubles from failure to failure. A table with more to do than a round has time for
goes on in the next one where it was left. Memory: a few numbers per table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from modak.catalog.fleet import Glance
from modak.core.errors import ModakError
from modak.core.names import TableName

LONGEST_BACKOFF_SECONDS = 300.0
REST_SECONDS = 3600.0
"""However still a table is, a whole pass looks at it once in so long."""


class Kind(StrEnum):
    """Work on one table, in the order in which it is done when several kinds are due."""

    TIER = "tier"
    FOLD = "fold"
    RETAIN = "retain"
    PUBLISH = "publish"


_ORDER = {kind: at for at, kind in enumerate(Kind)}


@dataclass(frozen=True, slots=True)
class Item:
    """One piece of work."""

    table_id: int
    name: TableName
    kind: Kind
    mark: str = ""
    """The table's mark when it was offered."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Work that failed, and waits."""

    item: Item
    code: str
    times: int
    until: float
    message: str = ""
    hint: str = ""


@dataclass
class Schedule:
    """What is due, what runs and what waits after a failure."""

    backoff_seconds: float = 10.0
    running: dict[int, tuple[Item, float]] = field(default_factory=dict)
    failures: dict[tuple[int, Kind], Failure] = field(default_factory=dict)
    _due: dict[int, dict[Kind, Item]] = field(default_factory=dict)
    _served: dict[int, float] = field(default_factory=dict)
    _rested: dict[tuple[int, Kind], tuple[str, float]] = field(default_factory=dict)
    _reached: dict[int, Kind] = field(default_factory=dict)
    """How far a table's pass has come that is not over; where everything due was begun, the next one begins anew."""

    def offer(self, seen: Iterable[Glance], now: float, *, publishing: bool = False) -> None:
        """Take in what a round has seen; what was due before and has not begun is decided anew."""
        tables = {each.table_id: each for each in seen}
        for table_id in [known for known in self._served if known not in tables]:
            self._forget(table_id)
        self._due = {}
        for each in tables.values():
            wanted = [kind for kind in Kind if self._wants(each, kind, now, publishing)]
            if wanted:
                self._due[each.table_id] = {
                    kind: Item(each.table_id, each.name, kind, each.mark)
                    for kind in sorted(wanted, key=_ORDER.get)  # type: ignore[arg-type]
                }
            self._served.setdefault(each.table_id, float("-inf"))

    def _wants(self, each: Glance, kind: Kind, now: float, publishing: bool) -> bool:
        if each.paused or not each.has_lines:
            return False
        if kind is Kind.PUBLISH:
            return publishing and each.metadata_location != each.published
        if each.mode != "tiered":
            return False
        if kind is Kind.FOLD:
            return each.has_delta
        if kind is Kind.RETAIN and not each.has_retention:
            return False
        mark, at = self._rested.get((each.table_id, kind), ("", 0.0))
        return not each.can_rest or mark != each.mark or now - at >= REST_SECONDS

    def take(self, now: float) -> Item | None:
        """The next item to begin, or none that may begin now."""
        ready = [
            (self._served.get(table_id, float("-inf")), item)
            for table_id, items in self._due.items()
            if table_id not in self.running and (item := self._first(items, now)) is not None
        ]
        if not ready:
            return None
        _, item = min(ready, key=lambda pair: (pair[0], pair[1].table_id))
        del self._due[item.table_id][item.kind]
        if self._due[item.table_id]:
            self._reached[item.table_id] = item.kind
        else:
            del self._due[item.table_id]
            self._reached.pop(item.table_id, None)
        self.running[item.table_id] = (item, now)
        self._served[item.table_id] = now
        return item

    def _first(self, items: dict[Kind, Item], now: float) -> Item | None:
        """What comes next of one table: in the order of a pass, behind what the pass under way has reached."""
        ready = [
            item
            for item in items.values()
            if (failed := self.failures.get((item.table_id, item.kind))) is None or now >= failed.until
        ]
        return min(ready, default=None, key=self._turn)

    def _turn(self, item: Item) -> tuple[bool, int]:
        # An offer comes before a busy fleet is through: the first kind alone would otherwise be due for ever.
        reached = self._reached.get(item.table_id)
        return reached is not None and _ORDER[item.kind] <= _ORDER[reached], _ORDER[item.kind]

    def ended(self, item: Item, now: float, *, rests: bool) -> None:
        """The item is done; `rests`: it found nothing to do, and would not until the table's mark changes."""
        self.running.pop(item.table_id, None)
        self.failures.pop((item.table_id, item.kind), None)
        if rests:
            self._rested[item.table_id, item.kind] = (item.mark, now)
        else:
            self._rested.pop((item.table_id, item.kind), None)

    def failed(self, item: Item, now: float, code: str, error: Exception | None = None) -> float:
        """The item failed; returns how many seconds it waits."""
        self.running.pop(item.table_id, None)
        self._rested.pop((item.table_id, item.kind), None)
        before = self.failures.get((item.table_id, item.kind))
        times = before.times + 1 if before else 1
        pause = min(self.backoff_seconds * 2.0 ** min(times - 1, 20), LONGEST_BACKOFF_SECONDS)
        told = (error.message, error.hint) if isinstance(error, ModakError) else ()
        self.failures[item.table_id, item.kind] = Failure(item, code, times, now + pause, *told)
        return pause

    @property
    def waiting(self) -> int:
        """How many items are due and have not begun."""
        return sum(map(len, self._due.values()))

    def drained(self, now: float) -> bool:
        """Whether nothing runs and nothing could begin."""
        return not self.running and not any(self._first(items, now) for items in self._due.values())

    def shown(self, now: float, most: int = 50) -> dict[str, Any]:
        """What people see of it: at most so many entries of each kind, and how many there are."""
        return {
            "running": [
                {"table": str(item.name), "kind": item.kind.value, "seconds": round(now - since, 1)}
                for item, since in list(self.running.values())[:most]
            ],
            "waiting": self.waiting,
            "tables": len(self._served),
            "counts": {"running": len(self.running), "failing": len(self.failures)},
            "failing": [
                {
                    "table": str(each.item.name),
                    "kind": each.item.kind.value,
                    "code": each.code,
                    "message": each.message,
                    "hint": each.hint,
                    "times": each.times,
                    "again_in_seconds": round(max(each.until - now, 0.0), 1),
                }
                for each in list(self.failures.values())[:most]
            ],
        }

    def _forget(self, table_id: int) -> None:
        self._served.pop(table_id, None)
        self._reached.pop(table_id, None)
        for kind in Kind:
            self.failures.pop((table_id, kind), None)
            self._rested.pop((table_id, kind), None)
