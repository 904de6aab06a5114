"""The place where a flow runs: settings, clock and lazily opened rooms.

A command that needs no lake opens no JVM, and one that needs no Spark starts none. The runners of the flows take a
`Site` and say in their signature nothing else about the world.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from modak.catalog.lease import Epoch
from modak.catalog.read import CatalogReader
from modak.catalog.write import CatalogWriter
from modak.config import Settings
from modak.core.clock import Clock, SystemClock
from modak.postgres.dsn import Dsn
from modak.postgres.pool import Pool

if TYPE_CHECKING:
    import psycopg
    from pyspark.sql import SparkSession

    from modak.lake.iceberg.catalog import IcebergLake
    from modak.storage.access import Key
    from modak.storage.stores import Stores


@dataclass
class Site:
    """Everything a flow needs of the world; close it when done."""

    settings: Settings
    dsn: Dsn
    clock: Clock = field(default_factory=SystemClock)
    told: set[tuple[int, str]] = field(default_factory=set)
    """Findings that were said already, so that a cycle of seconds does not repeat them."""
    services: dict[str, Any] = field(default_factory=dict)
    """What runs beside the flows while we lead (`measurements`, …), for those who are asked about it."""

    @cached_property
    def pool(self) -> Pool:
        """Connections for short steps."""
        return Pool(self.dsn)

    @cached_property
    def reader(self) -> CatalogReader:
        """Reads the catalog; cannot change it."""
        return CatalogReader(self.pool)

    def writer(self, epoch: Epoch | None) -> CatalogWriter:
        """Changes the catalog in the name of a leader's epoch (or of a person at the CLI: None)."""
        return CatalogWriter(self.dsn, epoch, clock=self.clock)

    @contextmanager
    def connect(self, *, autocommit: bool = False) -> Iterator[psycopg.Connection[Any]]:
        """A connection for one step."""
        with self.pool.connection(autocommit=autocommit) as conn:
            yield conn

    @cached_property
    def spark(self) -> SparkSession:
        """The Spark session; the first use takes seconds."""
        from modak.spark import session

        spark = session.start(self.settings, self.settings.home.path, schemes=self._schemes())
        self.use_catalog(spark)
        return spark

    def use(self, spark: SparkSession) -> None:
        """Work with a session that the caller has, instead of one of our own."""
        self.use_catalog(spark)
        self.__dict__["spark"] = spark

    @cached_property
    def keys(self) -> dict[int, Key]:
        """The roots of the storage profiles and what opens them, by profile; the process can then open their files."""
        from modak.storage import access
        from modak.tables.profiles import keys_of

        found = keys_of(self.settings, self.reader.profiles())
        access.use(found.values())
        return found

    def key_of(self, profile_id: int) -> Key:
        """The root of a profile and what opens it."""
        if profile_id not in self.keys:
            self.follow_profiles()
        return self.keys[profile_id]

    def root_of(self, profile_id: int) -> str:
        """The root of a profile; one whose credentials are not there is refused by the name of their variable."""
        from modak.storage.access import unusable

        key = self.key_of(profile_id)
        if (refusal := unusable(key)) is not None:
            raise refusal
        return key.root

    def follow_profiles(self) -> None:
        """Take in the profiles that were created since they were last read."""
        known = self.__dict__.pop("keys", None)
        if known is None or self.keys == known:
            return
        self.__dict__.pop("store", None)
        # The old one is not closed: another thread may be in the middle of a commit with it.
        if self.__dict__.pop("lake", None) is not None:
            _ = self.lake
        if "spark" in self.__dict__:
            self.use_catalog(self.spark)

    def _schemes(self) -> frozenset[str]:
        from modak.spark.credentials import needed_schemes

        return needed_schemes(self.keys.values())

    def use_catalog(self, spark: SparkSession) -> None:
        """Point a session at the lake, with the keys of every profile."""
        from modak.spark import session

        keys = tuple(self.keys.values())
        session.use_catalog(spark, self.dsn, self.settings.lake.warehouse, keys=keys)

    @cached_property
    def lake(self) -> IcebergLake:
        """The lake, through Spark's JVM where there is one, else through a JVM of its own."""
        from modak.lake.iceberg.catalog import IcebergLake
        from modak.spark import gateway, session

        if "spark" in self.__dict__:
            opened = session.gateway_of(self.spark)
        else:
            opened = gateway.open_gateway(self.settings.home.path, self.settings, self._schemes())
        return IcebergLake(
            opened,
            self.dsn,
            self.settings.lake.warehouse,
            self.settings.lake.namespace,
            keys=tuple(self.keys.values()),
        )

    @cached_property
    def store(self) -> Stores:
        """The files below the roots of all storage profiles."""
        from modak.storage.stores import Stores

        return Stores(self.keys.values())

    def close(self) -> None:
        """Give back what was opened; Spark stays with the process."""
        opened: IcebergLake | None = self.__dict__.pop("lake", None)
        if opened is not None:
            opened.close()
        if "pool" in self.__dict__:
            self.pool.close()
