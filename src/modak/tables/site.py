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
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn

if TYPE_CHECKING:
    import psycopg
    from pyspark.sql import SparkSession

    from modak.lake.iceberg.catalog import IcebergLake
    from modak.storage.store import Store


@dataclass
class Site:
    """Everything a flow needs of the world; close it when done."""

    settings: Settings
    dsn: Dsn
    clock: Clock = field(default_factory=SystemClock)
    told: set[tuple[int, str]] = field(default_factory=set)
    """Findings that were said already, so that a cycle of seconds does not repeat them."""

    @cached_property
    def reader(self) -> CatalogReader:
        """Reads the catalog; cannot change it."""
        return CatalogReader(self.dsn)

    def writer(self, epoch: Epoch | None) -> CatalogWriter:
        """Changes the catalog in the name of a leader's epoch (or of a person at the CLI: None)."""
        return CatalogWriter(self.dsn, epoch, clock=self.clock)

    @contextmanager
    def connect(self, *, autocommit: bool = False) -> Iterator[psycopg.Connection[Any]]:
        """A connection for one step."""
        conn = connect(self.dsn, autocommit=autocommit)
        try:
            with conn:
                yield conn
        finally:
            conn.close()

    @cached_property
    def spark(self) -> SparkSession:
        """The Spark session; the first use takes seconds."""
        from modak.spark import session

        spark = session.start(self.settings, self.settings.home.path)
        session.use_catalog(spark, self.dsn, self.settings.lake.warehouse)
        return spark

    @cached_property
    def lake(self) -> IcebergLake:
        """The lake, through Spark's JVM where there is one, else through a JVM of its own."""
        from modak.lake.iceberg.catalog import IcebergLake
        from modak.spark import gateway, session

        if "spark" in self.__dict__:
            opened = session.gateway_of(self.spark)
        else:
            opened = gateway.open_gateway(self.settings.home.path, self.settings)
        return IcebergLake(opened, self.dsn, self.settings.lake.warehouse, self.settings.lake.namespace)

    @cached_property
    def store(self) -> Store:
        """The default warehouse's objects."""
        from modak.storage.store import Store

        return Store.of(self.settings.lake.warehouse, {})

    def close(self) -> None:
        """Give back what was opened; Spark stays with the process."""
        opened: IcebergLake | None = self.__dict__.pop("lake", None)
        if opened is not None:
            opened.close()
