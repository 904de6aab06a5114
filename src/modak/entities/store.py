"""An entity store: its Postgres, its objects, its registry and its configuration, opened from the settings or by hand.

`Crew` decides who does the work: a few rows are done in this process, without the seconds that Spark takes to start;
more go to Spark tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from modak.core.clock import Clock, SystemClock
from modak.core.errors import ModakError, UsageError
from modak.core.faults import InjectedFault
from modak.entities.address import Address, address_of
from modak.entities.clients import ObjectsClient, S3FullClient, S3ObjectClient
from modak.entities.config import CDCConfig, CompactionConfig, from_settings
from modak.entities.files import Compression
from modak.entities.manifests import Manifests
from modak.entities.registry import Registry, load_registry
from modak.entities.tables import EntityTables
from modak.postgres.connect import connect, translate
from modak.postgres.place import dsn_of
from modak.storage.objects import Objects

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from modak.config import Settings
    from modak.postgres.dsn import Dsn

Item = TypeVar("Item")
Result = TypeVar("Result")
DRIVER_ROWS = 50_000
"""So many rows are done in this process; more are worth Spark tasks."""


@dataclass(frozen=True)
class Crew:
    """Who does the work of a flow."""

    spark: Callable[[], SparkSession] | None = None
    driver_rows: int = DRIVER_ROWS

    @property
    def cores(self) -> int:
        """Tasks that can run at the same time."""
        from modak.spark.conf import cores

        if self.spark is None:
            return 1
        return cores()

    @property
    def threads(self) -> int:
        """Cores that a single task may use: all of them where tasks run on this machine."""
        if self.spark is None:
            return 1
        return self.cores if (self.spark().sparkContext.master or "").startswith("local") else 1

    def run(
        self,
        work: Callable[[Item], Result],
        items: Sequence[Item],
        rows: int,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Result]:
        """Apply `work` to every item; `rows` is how many rows that concerns altogether."""
        if self.spark is None or rows <= self.driver_rows:
            done: list[Result] = []
            for item in items:
                done.append(_here(work, item))
                if on_progress is not None:
                    on_progress(len(done), len(items))
            return done
        from modak.spark.distribute import distribute

        return distribute(self.spark(), work, items, on_progress=on_progress)


def _here(work: Callable[[Item], Result], item: Item) -> Result:
    """Do a task in this process; what goes wrong comes out as it would out of Spark."""
    try:
        return work(item)
    except (ModakError, InjectedFault):
        raise
    except Exception as error:
        from modak.spark.distribute import told

        raise told(error, item, "A task in this process") from error


@dataclass(frozen=True)
class EntityStore:
    """Everything that the flows of an entity store need of the world."""

    config: CDCConfig
    compaction: CompactionConfig
    address: Address
    objects: Objects
    registry: Registry
    crew: Crew = field(default_factory=Crew)
    clock: Clock = field(default_factory=SystemClock)
    client: S3ObjectClient | None = None
    """A client of the caller's own for copies, deletes and, if it can, manifests."""
    manifest_path: str = ""
    """The one manifest that is meant, where it is not found by the template."""

    @classmethod
    def open(
        cls,
        settings: Settings | None = None,
        dsn: Dsn | None = None,
        *,
        spark: Callable[[], SparkSession] | None = None,
        clock: Clock | None = None,
    ) -> EntityStore:
        """The store that the settings describe, those of the environment if none are given.

        `dsn` is the database where the settings name none for entities; without it, the one that all commands use.
        """
        if settings is None:
            from modak.config import load

            settings = load()
        config, compaction = from_settings(settings.entities)
        if settings.entities.s3_use_ssl is None:
            config = replace(config, s3_use_ssl=settings.lake.s3_ssl)
        place = settings.entities.registry
        if place is None:
            raise UsageError(
                "entities.no_registry",
                "No attribute registry is named.",
                hint="Set MODAK_ENTITIES_REGISTRY to a JSON file or a folder of them.",
            )
        return cls(
            config,
            compaction,
            address_of(config, dsn or (None if config.pg_host else dsn_of(settings))),
            objects_of(settings, config),
            load_registry(place),
            Crew(spark),
            clock or SystemClock(),
        )

    @property
    def tables(self) -> EntityTables:
        """The names of the three tables."""
        return EntityTables.of(self.config)

    @property
    def copier(self) -> S3ObjectClient:
        """Who copies and deletes."""
        return self.client or ObjectsClient(self.objects)

    @property
    def manifests(self) -> Manifests:
        """The manifests of the store."""
        full: S3FullClient = self.client if isinstance(self.client, S3FullClient) else ObjectsClient(self.objects)
        return Manifests(full, replace(self.config.manifests, path=self.manifest_path), self.clock)

    @property
    def compression(self) -> Compression:
        """How files are compressed."""
        return Compression(self.config.parquet_compression, self.config.parquet_compression_level)

    @property
    def now_ms(self) -> int:
        """The time in epoch milliseconds."""
        return int(self.clock.now().timestamp() * 1000)

    @contextmanager
    def connect(self, *, autocommit: bool = True) -> Iterator[psycopg.Connection[Any]]:
        """A connection for one step, in READ COMMITTED; what Postgres refuses comes out as our own errors."""
        conn = connect(self.address.fresh(), autocommit=autocommit, application="modak entities")
        try:
            with conn:
                yield conn
        except psycopg.Error as error:
            raise translate(error) from error
        finally:
            conn.close()

    def schema_ids(self) -> tuple[int, ...]:
        """The schemas to serve: those of the settings, or all of the registry."""
        known = tuple(schema.schema_id for schema in self.registry.schemas)
        return tuple(self.config.schemas) or known


def objects_of(settings: Settings, config: CDCConfig) -> Objects:
    """Where files lie: a bucket of their own where one is named, else the default lake."""
    lake = settings.lake
    key, secret = lake.s3_access_key, lake.s3_secret_key
    endpoint = config.s3_endpoint or lake.s3_endpoint_url or ""
    if endpoint and "://" not in endpoint:
        endpoint = f"{'https' if config.s3_use_ssl else 'http'}://{endpoint}"
    props = {
        "s3.endpoint": endpoint,
        "client.region": config.s3_region or lake.s3_region or "",
        "s3.access-key-id": key.get_secret_value() if key else "",
        "s3.secret-access-key": secret.get_secret_value() if secret else "",
        "s3.path-style-access": "true" if config.s3_use_path or (not config.s3_bucket and endpoint) else "",
    }
    root = f"s3://{config.s3_bucket}" if config.s3_bucket else lake.warehouse
    return Objects.of(root, {name: value for name, value in props.items() if value})


def tries_of(config: CDCConfig | CompactionConfig) -> int:
    """How often a flow begins anew after a conflict."""
    return config.max_retries + 1


def backoff(base_seconds: float, most_seconds: float, attempt: int, chance: float) -> float:
    """The pause before another try: doubling, bounded, and spread by `chance` (0 … 1) so that rivals part."""
    return float(min(base_seconds * 2.0**attempt, most_seconds) * (0.5 + chance))
