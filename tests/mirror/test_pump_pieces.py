"""Pieces of the change stream, cut anywhere: what is committed is always exactly the transactions up to the frontier.

No server: messages made by hand go through the decoder, the pump's own reading loop, the fold and its decisions, onto a
table in memory. Transactions insert, update, delete, move keys and truncate; pieces end in the middle of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modak.lake.model import LakeColumn
from modak.lake.types import MappedColumn
from modak.postgres.changes.batch import Piece
from modak.postgres.changes.lsn import write_lsn
from modak.postgres.changes.pgoutput import Decoder
from modak.postgres.changes.wire import Messages
from modak.tables.mirror.pump.buffer import Buffer
from modak.tables.mirror.pump.definition import Definition
from modak.tables.mirror.pump.events import Shape
from modak.tables.mirror.pump.find import Hit, Wanted
from modak.tables.mirror.pump.lander import Lander, Landing
from modak.tables.mirror.pump.plan import Pace
from modak.tables.mirror.pump.run import Pump
from modak.tables.mirror.pump.write import Applied, Target, apply_part
from tests.postgres.changes.build import INT8, TEXT, begin, commit, delete, insert, relation, truncate, types, update

OID = 99
COLUMNS = (("id", INT8), ("ts", INT8), ("body", TEXT))
LAKE = (LakeColumn("id", "long", True, 1), LakeColumn("ts", "long", True, 2), LakeColumn("body", "string", False, 3))
Row = tuple[int, int, str]


@dataclass
class World:
    """The heap as transactions make it, and its messages."""

    heap: dict[int, Row] = field(default_factory=dict)
    messages: list[bytes] = field(default_factory=lambda: [relation(OID, "t", COLUMNS, key=3)])
    history: dict[int, dict[int, Row]] = field(default_factory=dict)
    lsn: int = 1000

    def transaction(self, steps: list[tuple[str, int, int]]) -> None:
        self.messages.append(begin(self.lsn))
        for kind, key, value in steps:
            self._step(kind, key, value)
        self.messages.append(commit(self.lsn, self.lsn + 50))
        self.history[self.lsn + 50] = dict(self.heap)
        self.lsn += 100

    def _step(self, kind: str, key: int, value: int) -> None:
        row = self.heap.get(key)
        if kind == "truncate":
            self.heap.clear()
            self.messages.append(truncate([OID]))
        elif row is None:
            self.heap[key] = (key, value, f"v{value}")
            self.messages.append(insert(OID, self.heap[key]))
        elif kind == "delete":
            self.messages.append(delete(OID, self.heap.pop(key)))
        elif kind == "move" and value not in self.heap:
            self.heap[value] = (value, row[1], row[2])
            self.messages.append(update(OID, self.heap[value], self.heap.pop(key)))
        else:
            self.heap[key] = (key, value, f"w{value}")
            self.messages.append(update(OID, self.heap[key], row))


class Memory(Pump):
    """A pump whose lake is a dictionary and whose server is a list of messages."""

    def __init__(self, folder: Path, room: int, batch: int) -> None:
        self.lake: dict[int, Row] = {}
        self.flushed: list[int] = []
        self.commits: list[dict[int, Row]] = []
        self.confirmed: list[int] = []
        self._buffer, self._other = Buffer(folder / "batch"), Buffer(folder / "other")
        self._lander = Lander("landing")
        self._site = cast(
            "Any",
            SimpleNamespace(
                clock=SimpleNamespace(monotonic=lambda: 0.0),
                settings=SimpleNamespace(mirror=SimpleNamespace(max_buffered_rows=room)),
            ),
        )
        self.pace = Pace(batch, 1.0)
        self._last_commit = 0.0
        self._confirmed = 0
        mapped = tuple(MappedColumn(column, column.name, "plain") for column in LAKE)
        self._columns = cast("Any", FixedColumns(mapped))

    def follow(self, pieces: Iterator[Piece]) -> None:
        """One turn over these pieces."""
        source = SimpleNamespace(read=lambda *_: pieces, safe_lsn=0, way="peek", confirm=self.confirmed.append)
        self._source = cast("Any", source)
        table = SimpleNamespace(relid=OID, heap_retention=None, name="t")
        line = SimpleNamespace(frontier=write_lsn(1), heal_until=None, lake_props={})
        self._read(cast("Any", SimpleNamespace(table=table, cutline=line)), lambda: False)
        self._lander.close()

    def _require_slot(self, *_: object) -> None:
        return

    def _idle(self, *_: object) -> None:
        return

    def _land(self, state: Any, batch: Buffer, columns: Any, frontier: int) -> Landing:
        target = Target(LAKE, (1, 2, 3), cast("Any", None), "ts", "", 0)
        if batch.truncated:
            self.lake = {}
        for part in list(batch.parts()):
            keys, applied = list(self.lake), Applied()

            def find(wanted: Wanted, keys: list[int] = keys) -> list[Hit]:
                asked = wanted.columns[0].to_pylist()
                found = [(keys.index(key), at) for at, key in enumerate(asked) if key in keys]
                for (_, at), place in zip(found, wanted.tiers[[at for _, at in found]].tolist(), strict=True):
                    # Where a key is said to be, it is.
                    assert not wanted.placed[at] or self.lake[asked[at]][1] == place
                places = np.array(found, np.int64).reshape(-1, 2)
                return [Hit("lake", places[:, 0], places[:, 1])] if found else []

            rows = [row for batch in apply_part(part, target, find, lambda some: some, applied) for row in _rows(batch)]
            assert not applied.missing
            for position in applied.gone.get("lake", ()):
                del self.lake[keys[position]]
            for row in rows:
                assert row[0] not in self.lake
                self.lake[row[0]] = row
        batch.clear()
        self.flushed.append(frontier)
        self.commits.append(dict(self.lake))
        return Landing(state, frontier, 0.0)


class FixedColumns:
    """The definition never changes."""

    def __init__(self, mapped: tuple[MappedColumn, ...]) -> None:
        self.seen: Any = None
        self.before: dict[int, str] = {}
        self._mapped = mapped

    def restart(self) -> None:
        return

    def at(self, found: Any, _version: int, _xid: int) -> tuple[Any, dict[int, Any]]:
        if self.seen is None:
            self.seen = SimpleNamespace(shape=Shape(Definition((1, 2, 3), found.columns), self._mapped, (1,), 2))
        return self.seen, {}


def _rows(batch: pa.RecordBatch) -> list[Row]:
    return [tuple(row.values()) for row in batch.to_pylist()]


def cut(messages: list[bytes], sizes: list[int]) -> Iterator[Piece]:
    decoder, at = Decoder(types), 0
    for size in [*sizes, len(messages)]:
        some = messages[at : at + size]
        at += len(some)
        if some:
            yield decoder.feed(Messages.of_parts(some))


_KINDS = st.sampled_from(["put", "put", "put", "delete", "move", "truncate"])
_STEPS = st.tuples(_KINDS, st.integers(0, 12), st.integers(0, 20))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(_STEPS, min_size=1, max_size=12), min_size=1, max_size=10),
    st.lists(st.integers(1, 15), max_size=20),
    st.sampled_from([3, 1000]),
    st.sampled_from([1, 7, 1000]),
)
def test_every_commit_is_a_state_of_the_heap(
    tmp_path: Path, transactions: list[list[tuple[str, int, int]]], sizes: list[int], room: int, batch: int
) -> None:
    world = World()
    for steps in transactions:
        world.transaction(steps)
    pump = Memory(tmp_path / "batch", room, batch)
    states = dict(world.history)
    pump.follow(cut(world.messages, sizes))
    for frontier, then in zip(pump.flushed, pump.commits, strict=True):
        assert frontier not in states or then == states[frontier]
    # Each batch is confirmed once, and only what has landed.
    assert pump.confirmed == pump.flushed[-1:]
    assert pump.lake == world.heap


def test_a_transaction_that_is_not_complete_waits(tmp_path: Path) -> None:
    world = World()
    world.transaction([("put", 1, 1)])
    world.transaction([("put", key, 1) for key in range(2, 9)])
    pump = Memory(tmp_path / "batch", 1000, 1)
    pump.follow(cut(world.messages, [6, 2, 2]))
    assert pump.flushed == [1050, 1150]
    assert pump.lake == world.heap
