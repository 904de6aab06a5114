"""Which column of a change is which: names in the stream, attribute numbers everywhere else.

The change stream announces a table by names, in the order of its attribute numbers, as it was at that point of the
WAL. A number is given once and never again, so a rename keeps it and a column dropped and added again gets another.
`align` finds the numbers from three things: the columns at the frontier, the catalog of now (which numbers live, which
were dropped and by which transaction) and the transaction that made the change. Pure; a few values per column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from modak.core.errors import Refused
from modak.core.names import TableName
from modak.postgres.changes.relation import Relation, RelationColumn

_IMPOSSIBLE = -1_000_000
_UNLIKELY = -1_000
_SAME_NAME, _NAME_OF_NOW, _TYPE_OF_NOW = 8, 6, 3


@dataclass(frozen=True, slots=True)
class Attribute:
    """A column of the catalog of now. A dropped one has no name; `xid` is the transaction that last touched it."""

    number: int
    name: str | None
    type_oid: int
    xid: int
    published: bool = True
    """Whether it comes in the stream; generated columns may not."""

    @property
    def dropped(self) -> bool:
        """Whether the column is gone."""
        return self.name is None


@dataclass(frozen=True, slots=True)
class Definition:
    """The columns of a table at a point of the WAL, by attribute number."""

    numbers: tuple[int, ...]
    columns: tuple[RelationColumn, ...]

    @property
    def names(self) -> dict[int, str]:
        """Attribute number → name."""
        return {number: column.name for number, column in zip(self.numbers, self.columns, strict=True)}

    def pairs(self) -> Iterator[tuple[int, RelationColumn]]:
        """Numbers with their columns."""
        return zip(self.numbers, self.columns, strict=True)


def align(
    relation: Relation, before: Mapping[int, str], now: Sequence[Attribute], xid: int, table: TableName
) -> Definition:
    """The attribute numbers of an announced table whose change was made by transaction `xid`.

    `before` are the columns as they were last known, earlier in the WAL; `now` is read after the announcement.
    """
    last = max(before, default=0)
    possible = [each for each in now if each.published and (each.number in before or each.number > last)]
    best = _Search(relation.columns, possible, before, xid).run()
    if best is None:
        names = ", ".join(column.name for column in relation.columns)
        raise Refused(
            "mirror.definition",
            f"The columns of {table} in the change stream ({names}) cannot be told apart.",
            hint="Anchor the table anew: the lake is compared with the heap and follows it from there.",
        )
    return Definition(tuple(possible[at].number for at in best), relation.columns)


class _Search:
    """The best way to lay announced columns over attribute numbers, both in their order."""

    def __init__(
        self, columns: Sequence[RelationColumn], possible: Sequence[Attribute], before: Mapping[int, str], xid: int
    ) -> None:
        self._columns = columns
        self._possible = possible
        self._before = before
        self._xid = xid

    def run(self) -> list[int] | None:
        """For each column the place of its attribute, or nothing when no way is left."""
        rows, places = len(self._columns), len(self._possible)
        if rows > places:
            return None
        # score[open][i]: the best for columns i… over the attributes from `at` on. Not open: a column that lives was
        # passed over because it had not been added yet, so no later one can have been there either.
        score = {True: [_IMPOSSIBLE] * (rows + 1), False: [_IMPOSSIBLE] * (rows + 1)}
        score[True][rows] = score[False][rows] = 0
        used: list[list[bool]] = []
        for at in range(places - 1, -1, -1):
            here = self._possible[at]
            skip, ends = self._skipped(here), self._ends(here)
            after_open, after_shut = score[True], score[False]
            opened, taken = [], []
            for i in range(rows + 1):
                passing = skip + (after_shut if ends else after_open)[i]
                using = self._used(here, self._columns[i]) + after_open[i + 1] if i < rows else _IMPOSSIBLE
                opened.append(max(passing, using))
                taken.append(using >= passing)
            shut = [self._skipped(here) + after_shut[i] for i in range(rows + 1)]
            score = {True: opened, False: shut}
            used.append(taken)
        if score[True][0] < _IMPOSSIBLE // 2:
            return None
        used.reverse()
        chosen, i = [], 0
        for at in range(places):
            if i < rows and used[at][i]:
                chosen.append(at)
                i += 1
        return chosen

    def _ends(self, here: Attribute) -> bool:
        """Whether nothing added later can have been there when this one was not yet."""
        return here.number not in self._before and (not here.dropped or _earlier(self._xid, here.xid))

    def _used(self, here: Attribute, column: RelationColumn) -> int:
        score = _SAME_NAME if self._before.get(here.number) == column.name else 0
        if here.dropped:
            return score + (_UNLIKELY if _earlier(here.xid, self._xid) else 0)
        score += _NAME_OF_NOW if here.name == column.name else 0
        return score + (_TYPE_OF_NOW if here.type_oid == column.type_oid else 0)

    def _skipped(self, here: Attribute) -> int:
        if here.number in self._before:
            if not here.dropped:
                return _IMPOSSIBLE
            return 0 if _earlier(here.xid, self._xid) else _UNLIKELY if here.xid != self._xid else 0
        # Added before the change, as far as one can see; a later touch hides that.
        return _UNLIKELY if not here.dropped and _earlier(here.xid, self._xid) else 0


def _earlier(one: int, other: int) -> bool:
    """Whether a transaction id was given before another; the numbers go round."""
    return 0 < (other - one) % 2**32 < 2**31
