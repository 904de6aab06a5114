"""Random statements, rows and columns alike, with the pump running in between: the lake is the heap after every turn.

How often the table is looked after is drawn too: at every turn, at some, or at the first of a worker alone. Seeded and
replayable: a failing seed is printed and taken by MODAK_TEST_SEED. A short life runs every day, ten minutes of lives in
the full run.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest

from modak.core.names import TableName
from modak.tables.mirror.names import slot_name
from modak.tables.mirror.pump.run import Pump
from tests.mirror.pumping import Mirrored
from tests.mirror.world import Make

LONG = "(SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 300))"


@dataclass
class Author:
    """Writes statements that fit the table as it is at that moment."""

    seed: int
    columns: dict[str, str] = field(default_factory=lambda: {"body": "text", "n": "int"})
    next_id: int = 1000
    made: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def statement(self) -> str:
        draw = self.random.random()
        if draw < 0.30:
            return self._insert()
        if draw < 0.58:
            return self._update()
        if draw < 0.70:
            return f"DELETE FROM @ WHERE {self._some()}"
        if draw < 0.77:
            shift = self.random.randint(1_000_000, 9_000_000) * self.random.choice((1, 1, 1))
            return f"UPDATE @ SET id = id + {shift * 100} WHERE {self._some()} AND id < 1000000"
        if draw < 0.84:
            return f"UPDATE @ SET ts = ts + {self.random.choice((-60, -5, 5, 60))} WHERE {self._some()}"
        if draw < 0.87:
            return "TRUNCATE @"
        return self._alter()

    def transaction(self) -> list[str]:
        statements = [self.statement() for _ in range(self.random.randint(1, 4))]
        if self.random.random() < 0.15:
            statements += [*self._undone(), self.statement()]
        return statements

    def happening(self) -> str | None:
        """Now and then something that is no transaction of rows and columns."""
        if self.random.random() > 0.15:
            return None
        return self.random.choice(("rename", "move", "key-only identity", "lost slot"))

    def _undone(self) -> list[str]:
        """What a savepoint takes back, columns too."""
        before = dict(self.columns)
        undone = [self.statement() for _ in range(self.random.randint(1, 3))]
        self.columns = before
        return ["SAVEPOINT s", *undone, "ROLLBACK TO s"]

    def _some(self) -> str:
        return f"id % {self.random.randint(2, 9)} = {self.random.randint(0, 3)}"

    def _value(self, kind: str) -> str:
        if self.random.random() < 0.15:
            return "NULL"
        if kind == "text":
            return self.random.choice(("'short'", "'é \"quoted\"'", LONG, f"'{self.random.random()}'"))
        return str(self.random.randint(-1000, 1000))

    def _insert(self) -> str:
        names = [name for name in self.columns if self.random.random() < 0.8]
        count = self.random.randint(1, 30)
        first = self.next_id
        self.next_id += count
        values = "".join(f", {self._value(self.columns[name])}" for name in names)
        columns = "".join(f", {name}" for name in names)
        series = f"generate_series({first}, {first + count - 1}) AS i"
        return f"INSERT INTO @ (id, ts{columns}) SELECT i, i % 97{values} FROM {series}"

    def _update(self) -> str:
        if not self.columns:
            return self._insert()
        name = self.random.choice(list(self.columns))
        return f"UPDATE @ SET {name} = {self._value(self.columns[name])} WHERE {self._some()}"

    def _alter(self) -> str:
        step = self.random.choice(("add", "add", "drop", "rename", "widen", "retype", "rewrite"))
        if step == "drop" and len(self.columns) > 1:
            name = self.random.choice(list(self.columns))
            del self.columns[name]
            return f"ALTER TABLE @ DROP COLUMN {name}"
        if step == "rename" and self.columns:
            name = self.random.choice(list(self.columns))
            new = self._new_name()
            self.columns[new] = self.columns.pop(name)
            return f"ALTER TABLE @ RENAME COLUMN {name} TO {new}"
        narrow = [name for name, kind in self.columns.items() if kind == "int"]
        if step == "widen" and narrow:
            name = self.random.choice(narrow)
            self.columns[name] = "bigint"
            return f"ALTER TABLE @ ALTER {name} TYPE bigint"
        if step == "rewrite" and self.columns:
            name = self.random.choice(list(self.columns))
            kind = self.columns[name]
            using = f"{name} || '!'" if kind == "text" else f"-{name}"
            if kind == "int" and self.random.random() < 0.5:
                kind = self.columns[name] = "bigint"
            return f"ALTER TABLE @ ALTER {name} DROP DEFAULT, ALTER {name} TYPE {kind} USING {using}"
        if step == "retype" and self.columns:
            name = self.random.choice(list(self.columns))
            kind, using = ("text", "'n' || {}") if self.columns[name] != "text" else ("int", "length({})")
            self.columns[name] = kind
            # A default of the old type would be in the way.
            return f"ALTER TABLE @ ALTER {name} DROP DEFAULT, ALTER {name} TYPE {kind} USING {using.format(name)}"
        name = self._new_name()
        kind = self.random.choice(("text", "int", "bigint"))
        self.columns[name] = kind
        if kind == "bigint" and self.random.random() < 0.3:
            return f"ALTER TABLE @ ADD COLUMN {name} bigint DEFAULT (random() * 1000)::bigint"
        default = self.random.choice(("", "", f" DEFAULT {self._value(kind)}"))
        if "md5" in default:
            default = " DEFAULT 'constant'"
        return f"ALTER TABLE @ ADD COLUMN {name} {kind}{default}"

    def _new_name(self) -> str:
        # Few names, so that some come again.
        free = [name for name in ("a", "b", "c", "d", "e", "f", "g", "h") if name not in self.columns]
        if free:
            return self.random.choice(free)
        self.made += 1
        return f"x{self.made}"


def live(table: Mirrored, author: Author, steps: int) -> Iterator[str]:
    """So many transactions, each with a turn of the pump after some of them."""
    for _ in range(steps):
        statements = author.transaction()
        yield "; ".join(statements)
        if "SAVEPOINT s" in statements or author.random.random() < 0.5:
            table.together(*statements)
        else:
            table.sql(*statements)
        if happening := author.happening():
            yield happening
            happen(table, happening)
        if author.random.random() < 0.35:
            table.pump(fresh=author.random.random() < 0.3)
            settle(table)
            assert table.is_same()
    settle(table)
    assert table.is_same()


def happen(table: Mirrored, what: str) -> None:
    """Something befalls the table."""
    name = table.name
    if what == "rename":
        table.name = TableName(name.schema, f"{name.name}x")
        table.sql(f"ALTER TABLE {name} RENAME TO {table.name.name}")
    elif what == "move":
        table.name = TableName("apart" if name.schema == "public" else "public", name.name)
        table.sql("CREATE SCHEMA IF NOT EXISTS apart", f"ALTER TABLE {name} SET SCHEMA {table.name.schema}")
    elif what == "key-only identity":
        table.sql("ALTER TABLE @ REPLICA IDENTITY DEFAULT")
    else:
        table.close()
        slot = slot_name(table.known_id, table.site.dsn.dbname)
        # It may be lost already.
        table.sql(f"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = '{slot}'")


def settle(table: Mirrored) -> None:
    """Turns until there is nothing to do: columns that changed last are followed by a turn of their own."""
    for _ in range(20):
        turn = table.pump()
        if turn.reanchored or turn.flushes:
            continue
        # Names, and columns without a row after them, are followed by a turn that looks after the table.
        table.pumps[0]._looked_after = None
        turn = table.pump()
        known = any(record.name == table.name for record in table.site.reader.tables())
        if known and not (turn.reanchored or turn.flushes) and not table.cycles():
            return
    raise AssertionError("the pump does not come to rest")


def run_life(make: Make, seed: int, steps: int) -> None:
    drawn = random.Random(seed)
    often = drawn.choice((1.0, 0.3, 0.0))

    def is_due(pump: Pump) -> bool:
        return pump._looked_after is None or drawn.random() < often

    with patch.object(Pump, "_is_due", is_due):
        _run_life(make, seed, steps)


def _run_life(make: Make, seed: int, steps: int) -> None:
    table = make(
        columns="id bigint PRIMARY KEY, ts bigint NOT NULL, body text, n int",
        rows="SELECT i, i, 'row ' || i, i FROM generate_series(1, 60) AS i",
        partition_width=str(random.Random(seed).choice((0, 20))),
    )
    history: list[str] = []
    try:
        for said in live(table, Author(seed), steps):
            history.append(said)
    except BaseException:
        print(f"MODAK_TEST_SEED={seed}")
        print("\n".join(history))
        raise
    table.remove()


def test_a_random_life_ends_with_lake_and_heap_alike(make: Make, request: pytest.FixtureRequest) -> None:
    seed = int(os.environ.get("MODAK_TEST_SEED") or request.config.getoption("randomly_seed", 0))
    run_life(make, seed, 25)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_ten_minutes_of_random_lives(make: Make, request: pytest.FixtureRequest) -> None:
    seed = int(os.environ.get("MODAK_TEST_SEED") or request.config.getoption("randomly_seed", 0))
    deadline = time.monotonic() + float(os.environ.get("MODAK_TEST_SECONDS", "600"))
    while time.monotonic() < deadline:
        seed += 1
        run_life(make, seed, 40)
