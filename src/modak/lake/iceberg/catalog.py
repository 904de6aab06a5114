"""The Iceberg plugin as the rest of the house sees it: load, look, prepare.

Tables are found through Iceberg's own JDBC catalog, over the two tables that our migration created. Nothing here makes
a commit visible and nothing deletes a file: what is prepared is published by the catalog room, what is listed is
deleted through storage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, LiteralString, TypeVar

from modak.core.errors import ModakError, Refused
from modak.lake.changes import Change, Range
from modak.lake.iceberg import prepare, reaching, read
from modak.lake.iceberg.java import Java, JavaFailure, plainly
from modak.lake.iceberg.told import Told
from modak.lake.model import (
    CATALOG,
    EqualityDeletes,
    ForeignSnapshot,
    LakeColumn,
    LakeFile,
    LakeName,
    LakeTable,
    Layout,
    Prepared,
    Snapshot,
    table_location,
)
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.spark.credentials import FILE_IO, needed_schemes, unlock
from modak.spark.gateway import Gateway
from modak.storage import remote
from modak.storage.access import Key, unusable, whose
from modak.storage.retry import TRIES, patiently, pause
from modak.storage.stores import Stores
from modak.storage.uri import local_path, normal

Value = TypeVar("Value")

_FILE_IO = FILE_IO
_BROKEN = frozenset({"lake.storage"})
_LOCATION: LiteralString = """
    SELECT metadata_location FROM modak_iceberg.iceberg_tables
    WHERE catalog_name = %s AND table_namespace = %s AND table_name = %s
"""


class IcebergLake:
    """The lake of one warehouse, whose pointers lie in one Postgres."""

    def __init__(
        self,
        gateway: Gateway,
        dsn: Dsn,
        warehouse: str,
        namespace: str = CATALOG,
        *,
        catalog_schema: str = "modak_iceberg",
        properties: Mapping[str, str] | None = None,
        keys: Sequence[Key] = (),
    ) -> None:
        self._gateway = gateway
        self._dsn = dsn
        self._catalog_schema = catalog_schema
        self._properties = dict(properties or {})
        self._keys = tuple(keys)
        self._identifiers: dict[LakeName, Any] = {}
        self._let_in: set[str] = set()
        """Roots whose store has taken their key."""
        self.warehouse = normal(warehouse)
        self.namespace = namespace

    def name(self, schema: str, table: str) -> LakeName:
        """Where a Postgres table is found in the lake."""
        return LakeName((self.namespace, schema), table)

    def location(self, name: LakeName, root: str | None = None) -> str:
        """Where a new table's files will lie: below the root of its profile, or the default warehouse."""
        return table_location(root or self.warehouse, name)

    def load(self, name: LakeName) -> LakeTable | None:
        """The table as it is now, or nothing."""

        def once() -> LakeTable | None:
            table = self._table(name)
            if table is None:
                return None
            with self._java.doing(f"reading {name}"):
                current = table.operations().current()
                return read.table_of(name, current.metadataFileLocation(), read.metadata_of(self._java, current))

        return self._patiently(once, name)

    def load_at(self, name: LakeName, metadata_location: str) -> LakeTable:
        """The table as a metadata file describes it, current or not."""
        return read.table_of(name, metadata_location, self._metadata(metadata_location))

    def snapshots(self, table: LakeTable) -> list[Snapshot]:
        """Every snapshot the table has, oldest first."""
        return read.snapshots_of(self._metadata(table.metadata_location))

    def foreign_snapshots(self, table: LakeTable, since: int | None) -> list[ForeignSnapshot]:
        """Snapshots after `since` that no operation of ours made, oldest first."""
        if table.snapshot_id == since:
            return []
        return read.foreign_since(self._metadata(table.metadata_location), since)

    def prepare_create(
        self,
        name: LakeName,
        columns: Sequence[LakeColumn],
        layout: Layout,
        properties: Mapping[str, str],
        op_id: str,
        *,
        attempt: int = 0,
        location: str | None = None,
    ) -> Prepared:
        """Write the first metadata of a new table; it exists once its pointer row is inserted."""
        place = location or self.location(name)
        with self._naming_keys(place), self._java.doing(f"creating {name}"):
            new = prepare.NewTable(name, place, columns, layout, properties)
            identifier = self._identifier(name)
            return prepare.prepare_create(self._java, self._catalog, identifier, new, prepare.Attempt(op_id, attempt))

    def prepare(
        self,
        name: LakeName,
        op_id: str,
        attempt: int,
        changes: Sequence[Change],
        *,
        tag: Iterable[int] = (),
        kind: str | None = None,
        published: str | None = None,
    ) -> Prepared:
        """Write one commit of all changes without making it visible; `tag` keeps snapshots that pins need."""
        table = self._existing(name)
        with self._naming_keys(name), self._java.doing(f"preparing a commit to {name}"):
            return prepare.prepare(
                self._java,
                table,
                name,
                prepare.Attempt(op_id, attempt, kind),
                changes,
                tag=tag,
                published=published,
            )

    def overlapping_files(self, name: LakeName, column: str, lower: int | None, upper: int | None) -> int:
        """How many live data files may hold rows with `lower <= column < upper`."""
        rows = Range(column, lower, upper)
        return self._patiently(lambda: read.count_files(self._java, self._existing(name), rows), name)

    def files(
        self, name: LakeName, snapshot_id: int, *, column: str | None = None, rows: Range | None = None
    ) -> Iterator[LakeFile]:
        """The data files of a snapshot, streamed; with the bounds of `column`, and only those that may hold `rows`."""
        return self._streamed(
            lambda: read.live_files(self._java, self._existing(name), snapshot_id, column=column, rows=rows),
            lambda found: found.file.path,
            name,
        )

    def equality_deletes(self, name: LakeName, snapshot_id: int) -> Iterator[EqualityDeletes]:
        """The equality delete files of a snapshot, streamed."""
        return self._streamed(
            lambda: read.equality_deletes(self._java, self._existing(name), snapshot_id), lambda found: found.path, name
        )

    def needed_deletes(self, name: LakeName, snapshot_id: int, without: Iterable[str]) -> set[str]:
        """Delete files that a snapshot's data files need, leaving some data files out."""
        gone = list(without)
        return self._patiently(lambda: read.needed_deletes(self._java, self._existing(name), snapshot_id, gone), name)

    def partitions(self, name: LakeName, snapshot_id: int) -> list[str]:
        """The lake partitions of a snapshot's live files, by Iceberg's own names."""
        return self._patiently(lambda: read.partitions(self._java, self._existing(name), snapshot_id), name)

    def manifests(self, name: LakeName, snapshot_id: int) -> tuple[list[int], list[int]]:
        """The sizes of a snapshot's data manifests and delete manifests."""
        return self._patiently(lambda: read.manifests(self._java, self._existing(name), snapshot_id), name)

    def reachable(self, name: LakeName) -> Iterator[str]:
        """Every data and delete file that any snapshot reaches, streamed; some come more than once."""
        return map(normal, self._restarted(lambda: reaching.reachable(self._java, self._existing(name)), name))

    def freed(self, name: LakeName, before: str) -> reaching.Freed:
        """What the metadata file `before` reaches and the table as it is now does not."""
        return self._patiently(lambda: reaching.freed(self._java, self._existing(name), before), name)

    def java_table(self, name: LakeName) -> Any:
        """Iceberg's own table, as other clients of the catalog have it."""
        return self._existing(name)

    def java_table_at(self, name: LakeName, metadata_location: str) -> Any:
        """Iceberg's own table as a metadata file describes it, for Spark to read."""
        with self._java.doing(f"reading {metadata_location}"):
            # Spark asks the file system for its scheme, which the bare local one of our commits does not tell.
            plain = self._java.jvm.org.apache.hadoop.conf.Configuration()
            file_io = self._java.jvm.org.apache.iceberg.CatalogUtil.loadFileIO
            reading = file_io(_FILE_IO, self._map(self._properties), plain)
            unlock(self._java.jvm, reading, self._keys)
            operations = self._java.iceberg.StaticTableOperations(metadata_location, reading)
            return self._java.iceberg.BaseTable(operations, str(name))

    def referenced_in(self, folder_uri: str, metadata_location: str) -> set[str]:
        """Which files of an attempt's folder the metadata references; reads the manifest list of every snapshot."""
        folder = normal(folder_uri)
        return self._patiently(
            lambda: read.referenced(self._java, self._io, metadata_location, folder, every_snapshot=True), folder
        )

    def unreferenced(self, folder_uri: str, metadata_location: str) -> list[str]:
        """Files of a landed attempt's folder that the metadata which it wrote does not reference."""
        folder = normal(folder_uri)
        # Only the attempt's own snapshots can have brought its manifests in, and its own metadata lists all of them.
        used = self._patiently(
            lambda: read.referenced(self._java, self._io, metadata_location, folder, every_snapshot=False), folder
        )
        return sorted(set(self._listed(folder)) - used)

    def _listed(self, folder: str) -> list[str]:
        """Every file below a folder. Iceberg lists Azure by a protocol that not every server of its blobs speaks."""
        if local_path(folder) is None:
            return [entry.uri for entry in Stores(self._keys).list(folder)]
        return self._patiently(lambda: read.listed(self._java, self._io, folder), folder)

    def purge(self, name: LakeName) -> str | None:
        """The folder that holds everything of a table, to be deleted after its pointer row is gone."""
        table = self.load(name)
        if table is None:
            return None
        location = normal(table.location)
        if not location.startswith(self.warehouse.rstrip("/") + "/"):
            raise Refused(
                "lake.outside_warehouse",
                f"The files of {name} lie in {location}, outside the warehouse {self.warehouse}.",
                hint="Drop the table without purging it and delete that folder yourself.",
            )
        return location

    def close(self) -> None:
        """Close the catalog's connections."""
        if "_catalog" in self.__dict__ and self._gateway.alive():
            self._catalog.close()
            del self.__dict__["_catalog"]

    @cached_property
    def _java(self) -> Java:
        return Java(self._gateway)

    @cached_property
    def _io(self) -> Any:
        self._gateway.require(needed_schemes(self._keys))
        file_io = self._java.jvm.org.apache.iceberg.CatalogUtil.loadFileIO
        opened = file_io(_FILE_IO, self._map(self._properties), self._configuration)
        unlock(self._java.jvm, opened, self._keys)
        return opened

    @cached_property
    def _configuration(self) -> Any:
        made = self._java.jvm.org.apache.hadoop.conf.Configuration()
        # Hadoop's checksummed local file system would leave a .crc file beside every file, unknown to any clean-up of
        # ours. The cache is off because it is shared by the whole JVM and may already hold that one.
        made.set("fs.file.impl", "org.apache.hadoop.fs.RawLocalFileSystem")
        made.set("fs.file.impl.disable.cache", "true")
        return made

    @cached_property
    def _catalog(self) -> Any:
        with self._java.doing("opening the lake's catalog"):
            handles = self._java.jvm.java.lang.invoke.MethodHandles
            always = handles.constant(self._java.type("java.lang.Object"), self._io)
            same_io = handles.dropArguments(always, 0, self._java.objects([self._java.type("java.lang.Object")]))
            catalog = self._java.iceberg.jdbc.JdbcCatalog(self._java.function(same_io), None, False)
            catalog.setConf(self._configuration)
            catalog.initialize(CATALOG, self._map(self._catalog_properties()))
            return catalog

    def _catalog_properties(self) -> dict[str, str]:
        return {
            "uri": self._dsn.jdbc({"currentSchema": self._catalog_schema, "ApplicationName": "modak"}),
            "jdbc.user": self._dsn.user,
            "jdbc.password": self._dsn.password,
            "jdbc.schema-version": "V1",
            "warehouse": self.warehouse,
            "io-impl": _FILE_IO,
            **self._properties,
        }

    def _map(self, values: Mapping[str, str]) -> Any:
        made = self._java.jvm.java.util.HashMap()
        for key, value in values.items():
            made.put(key, value)
        return made

    def _identifier(self, name: LakeName) -> Any:
        if name not in self._identifiers:
            names = self._java.iceberg.catalog
            levels = self._java.array("java.lang.String", name.namespace)
            self._identifiers[name] = names.TableIdentifier.of(names.Namespace.of(levels), name.name)
        return self._identifiers[name]

    def _table(self, name: LakeName) -> Any | None:
        self._require_keys(name)
        try:
            with self._java.failures():
                return self._catalog.loadTable(self._identifier(name))
        except JavaFailure as failure:
            if failure.simple_name == "NoSuchTableException":
                return None
            with self._naming_keys(name):
                raise plainly(failure, f"loading {name}") from failure

    def _require_keys(self, name: LakeName) -> None:
        """A key that is not there or not let in is told at once."""
        unsure = [key for key in self._keys if needed_schemes([key]) and key.root not in self._let_in]
        pointer = self._pointer(name) if unsure else None
        for key in unsure:
            if pointer is None or not key.holds(pointer):
                continue
            if (refusal := unusable(key)) is not None:
                raise refusal
            remote.knock(pointer)
            self._let_in.add(key.root)

    def _pointer(self, name: LakeName) -> str | None:
        with connect(self._dsn) as conn:
            row = conn.execute(_LOCATION, (CATALOG, name.namespace_text, name.name)).fetchone()
        return None if row is None else normal(row[0])

    def _existing(self, name: LakeName) -> Any:
        table = self._table(name)
        if table is None:
            raise Refused("lake.no_such_table", f"The lake has no table {name}.")
        return table

    def _metadata(self, location: str) -> read.Metadata:
        def once() -> read.Metadata:
            with self._java.doing(f"reading {location}"):
                parser = self._java.iceberg.TableMetadataParser
                return read.metadata_of(self._java, parser.read(self._io, location))

        return self._patiently(once, location)

    @contextmanager
    def _naming_keys(self, place: LakeName | str) -> Iterator[None]:
        """Say whose key it was that the store of a table, or of a URI, refused."""
        try:
            yield
        except ModakError as error:
            if error.code != "storage.denied":
                raise
            self._let_in.clear()
            remote.forget_who_was_let_in()
            uri = place if isinstance(place, str) else self._pointer(place)
            said = whose(uri) if uri is not None else ""
            if said in error.message:
                raise
            raise ModakError(error.code, f"{error.message.rstrip()}.{said}", hint=error.hint) from error

    def _patiently(self, work: Callable[[], Value], place: LakeName | str) -> Value:
        """Look again when a store's answer broke off: Iceberg's client asks again for a request, not for a body."""
        if not self._is_remote:
            return work()
        with self._naming_keys(place):
            return patiently(work, only=_BROKEN)

    def _streamed(
        self, begin: Callable[[], Iterator[Value]], name: Callable[[Value], str], table: LakeName
    ) -> Iterator[Value]:
        """A listing that begins anew when the store breaks off in the middle of it; nothing is told twice."""
        if not self._is_remote:
            yield from begin()
            return
        told = Told()

        def again() -> Iterator[Value]:
            told.begin_again()
            return begin()

        yield from (each for each in self._restarted(again, table) if told.is_new(name(each)))

    def _restarted(self, begin: Callable[[], Iterator[Value]], table: LakeName) -> Iterator[Value]:
        """A listing that begins anew when the store breaks off in the middle of it; what was told is told again."""
        if not self._is_remote:
            yield from begin()
            return
        for attempt in range(1, TRIES + 1):
            try:
                with self._naming_keys(table):
                    yield from begin()
                return
            except ModakError as error:
                if error.code not in _BROKEN or attempt == TRIES:
                    raise
                time.sleep(pause(attempt))

    @property
    def _is_remote(self) -> bool:
        return bool(needed_schemes(self._keys))
