"""A small entity store on real parts: tables with triggers, objects in a folder or a bucket, users who write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from modak.core.clock import Clock, SystemClock
from modak.entities.address import Address
from modak.entities.changelog import get_change_log_stats
from modak.entities.config import CDCConfig, CompactionConfig
from modak.entities.kernel import newest
from modak.entities.manifest import Manifest
from modak.entities.plan import KeyRange
from modak.entities.reading import hot_rows, hot_shares, merges, settle
from modak.entities.registry import EntitySchema, Registry, read_registry
from modak.entities.snapshot import Snapshot
from modak.entities.store import Crew, EntityStore
from modak.entities.tables import install
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.storage.objects import Objects

SCHEMA = 7
INVOICE: Mapping[str, Any] = {
    "schema_id": SCHEMA,
    "name": "invoice",
    "attributes": {
        "title": {"id": 1, "type": "text", "column": "text_01"},
        "due": {"id": 2, "type": "date", "column": "bigint_01", "encoding": "unix_ms"},
        "amount": {"id": 3, "type": "numeric", "precision": 12, "scale": 2},
        "qty": {"id": 4, "type": "smallint"},
        "tags": {"id": 5, "type": "list", "items": "text"},
        "paid": {"id": 6, "type": "bool"},
        "seen": {"id": 8, "type": "datetime"},
    },
}
NUMBERS = frozenset({"amount", "qty"})
Row = dict[str, Any]


def key(number: int) -> str:
    """A row id, spread over all keys so that ranges have something to cut."""
    return str(UUID(int=(number * 0x9E3779B97F4A7C15F39CC0605CEDC835) % 2**128))


def registry(*described: Mapping[str, Any]) -> Registry:
    return read_registry(described or (INVOICE,))


def changed(**attributes: Any) -> Mapping[str, Any]:
    """The invoice schema with other attributes; `None` takes one away."""
    merged = {**INVOICE["attributes"], **attributes}
    return {**INVOICE, "attributes": {name: each for name, each in merged.items() if each is not None}}


@dataclass
class World:
    """The store, and how users change it."""

    dsn: Dsn
    objects: Objects
    config: CDCConfig = field(default_factory=lambda: CDCConfig(min_records=1, max_age_ms=0))
    compaction: CompactionConfig = field(default_factory=CompactionConfig)
    registry: Registry = field(default_factory=registry)
    crew: Crew = field(default_factory=Crew)
    clock: Clock = field(default_factory=SystemClock)
    client: Any = None
    access: Mapping[str, str] = field(default_factory=dict)
    """What a process needs in its environment to reach the objects."""

    def __post_init__(self) -> None:
        with connect(self.dsn) as conn:
            install(conn, self.store.tables)

    @property
    def store(self) -> EntityStore:
        return EntityStore(
            self.config,
            self.compaction,
            Address(self.dsn),
            self.objects,
            self.registry,
            self.crew,
            self.clock,
            self.client,
        )

    @property
    def environ(self) -> dict[str, str]:
        """The settings of a process that works on this store."""
        return {"MODAK_PG_URL": self.dsn.uri(), "MODAK_WAREHOUSE": self.objects.root, **self.access}

    def configure(self, **changes: Any) -> None:
        self.config = replace(self.config, **changes)

    @property
    def schema(self) -> EntitySchema:
        return self.registry.resolve(SCHEMA)

    @property
    def manifest(self) -> Manifest:
        return self.store.manifests.load(SCHEMA).manifest

    @contextmanager
    def connect(self) -> Iterator[Any]:
        with connect(self.dsn, autocommit=True) as conn:
            yield conn

    def sql(self, text: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self.connect() as conn:
            done = conn.execute(text, values)
            return done.fetchall() if done.description else []

    # What users do.

    def put(self, number: int, schema_id: int = SCHEMA, **values: Any) -> None:
        """Insert or overwrite an entity with all its attributes, in one transaction."""
        with connect(self.dsn) as conn:
            conn.execute(
                "INSERT INTO entity_main (ltbase_schema_id, ltbase_row_id, text_01, bigint_01, ltbase_created_at,"
                " ltbase_updated_at) VALUES (%s, %s, %s, %s, 1, 2) ON CONFLICT (ltbase_schema_id, ltbase_row_id) DO"
                " UPDATE SET text_01 = excluded.text_01, bigint_01 = excluded.bigint_01, ltbase_deleted_at = NULL",
                (schema_id, key(number), values.pop("title", None), values.pop("due", None)),
            )
            conn.execute("DELETE FROM eav_data WHERE schema_id = %s AND row_id = %s", (schema_id, key(number)))
            for name, value in values.items():
                self._attribute(conn, schema_id, number, name, value)

    def attribute(self, number: int, name: str, value: Any, index: str = "") -> None:
        """Write one raw attribute row."""
        with connect(self.dsn) as conn:
            self._raw(conn, SCHEMA, number, name, index, value)

    def _attribute(self, conn: Any, schema_id: int, number: int, name: str, value: Any) -> None:
        if isinstance(value, list):
            for at, item in enumerate(value):
                self._raw(conn, schema_id, number, name, str(at), item)
            if not value:
                self._raw(conn, schema_id, number, name, "[]", None)
        elif value is not None:
            self._raw(conn, schema_id, number, name, "", value)

    def _raw(self, conn: Any, schema_id: int, number: int, name: str, index: str, value: Any) -> None:
        numeric = value if not isinstance(value, str) else None
        text = value if isinstance(value, str) else None
        conn.execute(
            "INSERT INTO eav_data VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT (schema_id, row_id, attr_id,"
            " array_indices) DO UPDATE SET value_text = excluded.value_text, value_numeric = excluded.value_numeric",
            (schema_id, key(number), INVOICE["attributes"][name]["id"], index, text, numeric),
        )

    def many(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            self.put(number, title=f"row {number}", qty=number % 100)

    def delete(self, number: int) -> None:
        with connect(self.dsn) as conn:
            conn.execute("DELETE FROM eav_data WHERE schema_id = %s AND row_id = %s", (SCHEMA, key(number)))
            conn.execute(
                "DELETE FROM entity_main WHERE ltbase_schema_id = %s AND ltbase_row_id = %s", (SCHEMA, key(number))
            )

    def bury(self, number: int) -> None:
        """Delete softly: the row stays, marked."""
        self.sql("UPDATE entity_main SET ltbase_deleted_at = 99 WHERE ltbase_row_id = %s", (key(number),))

    # What can be seen.

    def dirty(self) -> int:
        with self.connect() as conn:
            return get_change_log_stats(conn, "change_log", SCHEMA)[0]

    def paths(self) -> list[str]:
        """All Parquet objects."""
        return [meta.path for meta in self.objects.list() if meta.path.endswith(".parquet")]

    def read(self) -> dict[str, Row]:
        """The whole store as a reader sees it, by row id; done in this process, by the tasks that Spark would run."""
        store = self.store

        def hot(snapshot: Snapshot) -> list[Row]:
            shares = hot_shares(store, self.schema, snapshot)
            return [row for share in shares for batch in hot_rows(share) for row in batch.to_pylist()]

        manifest, changes = settle(store, self.schema, hot)
        dirty = {row["row_id"] for row in changes}
        found = [
            row
            for merge in merges(store, manifest, self.schema.attributes, [KeyRange()])
            for batch in newest(merge)
            for row in batch.to_pylist()
            if row["row_id"] not in dirty
        ]
        found += [row for row in changes if row["deleted_at"] == 0]
        rows = {row["row_id"]: row for row in found}
        assert len(rows) == len(found), "a row is there twice"
        return rows

    def titles(self) -> dict[int, Any]:
        """The titles by the numbers of the rows, for stores whose rows have small numbers."""
        numbers = {key(number): number for number in range(2_000)}
        return {numbers[row_id]: row["title"] for row_id, row in self.read().items()}

    def check_objects(self) -> None:
        """Every listed object exists and is as long as it should be."""
        for entry in self.manifest.entries:
            found = self.objects.head(entry.path)
            assert found is not None, entry.path
            assert found.size == entry.size_bytes
