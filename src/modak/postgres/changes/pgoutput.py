"""The decoder of pgoutput: messages in, changes as Arrow columns out, and no I/O.

It reads plain transactions: a begin, changes, a commit. What the protocol sends in other order (streamed and prepared
transactions) has been put in order by `transactions.py`. All row messages of a table are decoded together; Python loops
only over announcements of tables, truncations and the tables of a batch. Memory: one batch of messages and its arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from modak.core.errors import ModakError
from modak.postgres.changes.batch import HEADER, Changes, Image, Old, Op, Piece, Truncation
from modak.postgres.changes.cells import Cells, walk
from modak.postgres.changes.columns import needs_text, reads_binary
from modak.postgres.changes.relation import Relation, TypeLookup, read_relation
from modak.postgres.changes.wire import Mask, Messages, Places, malformed

EPOCH = 946_684_800_000_000
"""Microseconds from 1970 to 2000, where Postgres' clock begins."""
_BEGIN, _COMMIT, _INSERT, _UPDATE, _DELETE, _TRUNCATE, _RELATION = (np.uint8(ord(kind)) for kind in "BCIUDTR")
_KNOWN = np.zeros(256, bool)
_KNOWN[np.frombuffer(b"BCIUDTRYOM", np.uint8)] = True
_ROWS = np.zeros(256, np.uint8)
_ROWS[[_INSERT, _UPDATE, _DELETE]] = Op.INSERT, Op.UPDATE, Op.DELETE
_OLDS = np.zeros(256, np.uint8)
_OLDS[[ord("K"), ord("O")]] = Old.KEY, Old.FULL


@dataclass(frozen=True, slots=True)
class Transaction:
    """What a transaction is known by; LSNs are numbers, the time is microseconds since 1970."""

    commit_lsn: int
    end_lsn: int | None
    commit_time: int
    xid: int


@dataclass(frozen=True, slots=True)
class _Span:
    """Transactions of a batch, and for each message to which it belongs and how many changes came before it there."""

    commit_lsn: npt.NDArray[np.uint64]
    end_lsn: npt.NDArray[np.uint64]
    ended: Mask
    time: Places
    xid: npt.NDArray[np.uint32]
    of_message: Places
    position: Places

    def header(self, op: npt.NDArray[np.uint8], old: npt.NDArray[np.uint8], at: Places) -> pa.RecordBatch:
        which = self.of_message[at]
        columns = [
            pa.array(op),
            pa.array(old),
            pa.array(self.commit_lsn[which]),
            pa.array(self.end_lsn[which], mask=~self.ended[which]),
            pa.array(self.time[which]).cast(HEADER.field("commit_time").type),
            pa.array(self.xid[which]),
            pa.array(self.position[at]),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=HEADER)


@dataclass(slots=True)
class Decoder:
    """Decodes the messages of one session, batch by batch.

    Transactions that committed before `after` are passed over: `after` is an end LSN, and a transaction whose commit
    record begins right there is the next one.
    """

    types: TypeLookup
    after: int = 0
    _relations: dict[int, Relation] = field(default_factory=dict)
    _versions: dict[int, int] = field(default_factory=dict)
    _open: Transaction | None = None
    _done: int = 0

    @property
    def unfinished(self) -> bool:
        """Whether a transaction has begun whose end has not been read."""
        return self._open is not None

    def feed(self, messages: Messages, within: Transaction | None = None) -> Piece:
        """Decode the next messages; `within` a transaction when they came without their begin and commit."""
        try:
            return self._decode(messages, within)
        except IndexError as error:
            raise malformed("a message ends too early") from error

    def announce(self, messages: Messages) -> None:
        """Take note of the tables that messages announce, whose changes come later."""
        for at in np.flatnonzero(messages.kinds == _RELATION).tolist():
            self._note(read_relation(messages.wire, int(messages.starts[at]), self.types))

    def finish(self, transaction: Transaction) -> Piece:
        """The end of a transaction that was fed with `within`."""
        self._open, self._done = None, 0
        return Piece((), transaction.end_lsn, unfinished=False)

    def _decode(self, messages: Messages, within: Transaction | None) -> Piece:
        unknown = np.flatnonzero(~_KNOWN[messages.kinds])
        if len(unknown):
            raise _unknown_message(int(messages.kinds[unknown[0]]))
        span = self._within(messages, within) if within else self._spanned(messages)
        items: list[Changes | Truncation] = []
        begin = 0
        special = np.flatnonzero((messages.kinds == _RELATION) | (messages.kinds == _TRUNCATE))
        for at in special.tolist():
            if messages.kinds[at] == _RELATION:
                relation = read_relation(messages.wire, int(messages.starts[at]), self.types)
                if relation.oid in self._relations:
                    items += self._changes(messages, span, begin, at)
                    begin = at
                self._note(relation)
            else:
                items += self._changes(messages, span, begin, at)
                items += self._truncation(messages, span, at)
                begin = at
        items += self._changes(messages, span, begin, len(messages))
        ended = span.end_lsn[span.ended]
        frontier = int(ended.max()) if within is None and len(ended) else None
        return Piece(tuple(items), frontier, self.unfinished)

    def _spanned(self, messages: Messages) -> _Span:
        wire = messages.wire
        begins, commits = (np.flatnonzero(messages.kinds == kind) for kind in (_BEGIN, _COMMIT))
        at, to = messages.starts[begins], messages.starts[commits]
        carried = [] if self._open is None else [self._open]
        count = len(carried) + len(begins)

        def joined(of_carried: list[int], of_begun: Places) -> Places:
            return np.concatenate([np.array(of_carried, np.int64), of_begun])

        end_lsn, ended = np.zeros(count, np.uint64), np.zeros(count, bool)
        end_lsn[: len(commits)] = wire.i8(to + 9).astype(np.uint64)
        ended[: len(commits)] = True
        commit_lsn = joined([each.commit_lsn for each in carried], wire.i8(at)).astype(np.uint64)
        time = joined([each.commit_time for each in carried], wire.i8(at + 8) + EPOCH)
        xid = joined([each.xid for each in carried], wire.u4(at + 16)).astype(np.uint32)
        if len(commits) > count or np.any(commit_lsn[: len(commits)] != wire.i8(to + 1).astype(np.uint64)):
            raise malformed("a commit does not fit its begin")
        of_message = np.cumsum(messages.kinds == _BEGIN) - 1 + len(carried)
        changes = (_ROWS[messages.kinds] > 0) | (messages.kinds == _TRUNCATE)
        if np.any(of_message[changes] < 0):
            raise malformed("a change belongs to no transaction")
        before = np.cumsum(changes) - changes
        base = joined([-self._done for _ in carried], before[begins])
        position = before - base[of_message] if count else before
        if len(commits) == count:
            self._open, self._done = None, 0
        else:
            self._open = Transaction(int(commit_lsn[-1]), None, int(time[-1]), int(xid[-1]))
            self._done = int(position[-1] + changes[-1]) if len(messages) else self._done
        return _Span(commit_lsn, end_lsn, ended, time, xid, of_message, position)

    def _within(self, messages: Messages, one: Transaction) -> _Span:
        changes = (_ROWS[messages.kinds] > 0) | (messages.kinds == _TRUNCATE)
        position = np.cumsum(changes) - changes + self._done
        self._open, self._done = one, self._done + int(changes.sum())
        return _Span(
            np.array([one.commit_lsn], np.uint64),
            np.array([one.end_lsn or 0], np.uint64),
            np.array([one.end_lsn is not None]),
            np.array([one.commit_time], np.int64),
            np.array([one.xid], np.uint32),
            np.zeros(len(messages), np.int64),
            position,
        )

    def _changes(self, messages: Messages, span: _Span, begin: int, end: int) -> list[Changes]:
        """The row changes between two messages, table by table."""
        at = begin + np.flatnonzero(_ROWS[messages.kinds[begin:end]])
        if self.after:
            at = at[span.commit_lsn[span.of_message[at]] >= np.uint64(self.after)]
        tables = messages.wire.u4(messages.starts[at])
        # np.unique would sort; the tables of a batch are few.
        found = []
        while len(at):
            oid = int(tables[0])
            mine = tables == oid
            found.append(self._of_table(messages, span, oid, at[mine]))
            at, tables = at[~mine], tables[~mine]
        return found

    def _of_table(self, messages: Messages, span: _Span, oid: int, at: Places) -> Changes:
        relation = self._known(oid)
        wire, width = messages.wire, len(relation.columns)
        op = _ROWS[messages.kinds[at]]
        tuples = messages.starts[at] + 4
        old = _OLDS[wire.u1(tuples)]
        with_old = np.flatnonzero(old)
        before: Image | None = None
        if len(with_old):
            cells, behind = walk(wire, tuples[with_old] + 1, width)
            tuples[with_old] = behind
            _require_readable(relation, cells)
            before = Image(relation, wire, cells, _subset(with_old, len(at)), len(at))
        with_new = np.flatnonzero(op != Op.DELETE)
        after: Image | None = None
        if len(with_new):
            if np.any(wire.u1(tuples[with_new]) != ord("N")):
                raise malformed("a change has no new row")
            cells, behind = walk(wire, tuples[with_new] + 1, width)
            tuples[with_new] = behind
            _require_readable(relation, cells)
            after = Image(relation, wire, cells, _subset(with_new, len(at)), len(at))
        if np.any(tuples != messages.ends[at]):
            raise malformed("a change does not end where it should")
        return Changes(relation, self._versions[oid], span.header(op, old, at), after, before)

    def _truncation(self, messages: Messages, span: _Span, at: int) -> list[Truncation]:
        which = span.of_message[at]
        if span.commit_lsn[which] < self.after:
            return []
        start, wire = messages.starts[at : at + 1], messages.wire
        options = int(wire.u1(start + 4)[0])
        oids = wire.u4(start[0] + 5 + 4 * np.arange(wire.u4(start)[0]))
        return [
            Truncation(
                tuple(map(self._known, oids.tolist())),
                cascade=bool(options & 1),
                restart_identity=bool(options & 2),
                commit_lsn=int(span.commit_lsn[which]),
                position=int(span.position[at]),
            )
        ]

    def _note(self, relation: Relation) -> None:
        self._relations[relation.oid] = relation
        self._versions[relation.oid] = self._versions.get(relation.oid, 0) + 1

    def _known(self, oid: int) -> Relation:
        relation = self._relations.get(oid)
        if relation is None:
            raise malformed(f"the table with oid {oid} was never announced")
        return relation


def _require_readable(relation: Relation, cells: Sequence[Cells]) -> None:
    # Now and not when the column is looked at: whoever opened the session has to ask for text instead.
    for column, sent in zip(relation.columns, cells, strict=True):
        if sent.form == "binary" and not reads_binary(column.type):
            raise needs_text(column.type)


def _subset(rows: Places, count: int) -> Places | None:
    return None if len(rows) == count else rows


def _unknown_message(kind: int) -> ModakError:
    return ModakError(
        "changes.unknown_message",
        f"The change stream of Postgres holds a message of the unknown kind {chr(kind)!r}.",
        hint="The server is newer than this worker; nothing was applied. Update the worker.",
    )
