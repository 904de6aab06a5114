"""One small frozen model per concern; every room is handed the one it needs and reads no environment itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, SecretStr

from modak.config.fields import Concern, setting
from modak.config.kinds import (
    BYTES,
    FLAG,
    HEAP,
    HOST,
    LAG,
    LAKE_PROPS,
    NAMESPACE,
    PORT,
    SECONDS,
    SECRET,
    SPARK_MASTER,
    TEXT,
    choice,
    whole,
)
from modak.config.pairs import Pairs, SecretPairs
from modak.config.places import CATALOG_URI, ENDPOINT, FILES, FOLDER, POSTGRES_URL, WAREHOUSE, local_uri, read_folder
from modak.core.errors import Refused
from modak.core.loopback import is_loopback

CREDENTIALS_PREFIX = "MODAK_CREDENTIALS_"
SPARK_CONF_PREFIX = "MODAK_SPARK_CONF_"
MIB = 1 << 20


def default_home() -> Path:
    """Where Modak keeps its own things when nobody says otherwise."""
    return read_folder("~/.modak")


class HomeSettings(Concern):
    """The folder of the embedded server, the local lake and caches."""

    path: Annotated[Path, FOLDER] = setting(
        "MODAK_HOME",
        None,
        "Folder of the embedded server, the local lake and caches.",
        factory=default_home,
        shown="~/.modak",
    )


class PostgresSettings(Concern):
    """The Postgres that holds the catalog and the hot tier."""

    url: Annotated[str | None, POSTGRES_URL] = setting(
        "MODAK_PG_URL",
        None,
        "Postgres for catalog and hot tier, `postgresql://…` or `jdbc:postgresql://…`. "
        "User and password in it win over the two variables below. Unset: the embedded server.",
        shown="unset (the embedded server)",
    )
    user: Annotated[str, TEXT] = setting("MODAK_PG_USER", "postgres", "User, when the URL names none.")
    password: Annotated[SecretStr, SECRET] = setting(
        "MODAK_PG_PASSWORD", SecretStr(""), "Password, when the URL has none.", shown="empty", secret=True
    )


class LakeSettings(Concern):
    """The default lake, access to its storage, and the foreign catalog into which tables are published."""

    warehouse: Annotated[str, WAREHOUSE] = setting(
        "MODAK_WAREHOUSE",
        None,
        "Root of the default lake: a folder, `s3://`, `gs://` or `abfs://`.",
        factory=lambda: local_uri(default_home() / "warehouse"),
        shown="$MODAK_HOME/warehouse",
    )
    s3_endpoint: Annotated[str | None, ENDPOINT] = setting(
        "MODAK_S3_ENDPOINT", None, "S3-compatible server, `host:port` or an address with `http://` or `https://`."
    )
    s3_access_key: Annotated[SecretStr | None, SECRET] = setting(
        "MODAK_S3_ACCESS_KEY", None, "Access key. Unset: the provider's own chain.", secret=True
    )
    s3_secret_key: Annotated[SecretStr | None, SECRET] = setting(
        "MODAK_S3_SECRET_KEY", None, "Secret of the access key.", secret=True
    )
    s3_region: Annotated[str | None, TEXT] = setting("MODAK_S3_REGION", None, "Region.")
    s3_ssl: Annotated[bool, FLAG] = setting(
        "MODAK_S3_SSL", False, "Whether an endpoint written without `http://` or `https://` is reached over TLS."
    )
    catalog_uri: Annotated[str | None, CATALOG_URI] = setting(
        "MODAK_CATALOG_URI", None, "A foreign Iceberg REST catalog into which tables are published."
    )
    catalog_warehouse: Annotated[str | None, TEXT] = setting(
        "MODAK_CATALOG_WAREHOUSE", None, "Warehouse name that the foreign catalog asks for."
    )
    catalog_token: Annotated[SecretStr | None, SECRET] = setting(
        "MODAK_CATALOG_TOKEN", None, "Bearer token of the foreign catalog.", secret=True
    )
    namespace: Annotated[str, NAMESPACE] = setting(
        "MODAK_CATALOG_NAMESPACE", "modak", "First level of every lake table's namespace."
    )
    vend_credentials: Annotated[bool, FLAG] = setting(
        "MODAK_ICEBERG_VEND_CREDENTIALS",
        False,
        "Whether the Iceberg REST catalog under `/iceberg` gives the S3 keys above to its clients.",
    )
    format: Annotated[str, choice("iceberg")] = setting("MODAK_LAKE_FORMAT", "iceberg", "Lake format plugin.")
    props: Annotated[Pairs, LAKE_PROPS] = setting(
        "MODAK_LAKE_PROPS",
        Pairs(),
        "`key=value` pairs with `;` between; keys under `iceberg.catalog.`, `iceberg.table.` or `hadoop.`.",
        shown="empty",
    )
    target_file_bytes: Annotated[int, BYTES] = setting(
        "MODAK_TARGET_FILE_BYTES", 256 * MIB, "Data files roll at this size."
    )

    @property
    def s3_endpoint_url(self) -> str | None:
        """The S3 endpoint with its scheme; one that the endpoint itself names wins over `s3_ssl`."""
        if self.s3_endpoint is None or "://" in self.s3_endpoint:
            return self.s3_endpoint
        return f"{'https' if self.s3_ssl else 'http'}://{self.s3_endpoint}"


class TieringSettings(Concern):
    """When rows move, and when their heap copy goes; the unit of a lag is that of the table's tier key."""

    cycle_interval_seconds: Annotated[float, SECONDS] = setting(
        "MODAK_CYCLE_INTERVAL_SECONDS", 10.0, "Pause between two rounds of the scheduler. 0 is refused."
    )
    tiering_lag: Annotated[str, LAG] = setting(
        "MODAK_TIERING_LAG",
        "0",
        "A partition stays hot until max(tier key) − lag has passed it; for time keys also `7d`, `12h`.",
    )
    reclaim_lag: Annotated[str, LAG] = setting(
        "MODAK_RECLAIM_LAG",
        None,
        "A tiered partition is dropped when max(tier key) − this lag has passed it (not added to the tiering lag).",
        factory=lambda read: read["tiering_lag"],
        shown="the tiering lag",
    )
    premake_partitions: Annotated[int, whole(0, 10_000)] = setting(
        "MODAK_PREMAKE_PARTITIONS", 2, "Empty partition widths kept ahead; 0 switches it off."
    )
    concurrent_tables: Annotated[int, whole(1, 64)] = setting(
        "MODAK_CONCURRENT_TABLES", 2, "Tables that the leader works on at the same time."
    )


class CorrectionSettings(Concern):
    """Delta debt: how much is folded at once, and when it is too much."""

    compaction_batch: Annotated[int, whole(1)] = setting(
        "MODAK_COMPACTION_BATCH", 1_000_000, "Delta rows folded per commit."
    )
    delta_backlog_warn_rows: Annotated[int, whole(1)] = setting(
        "MODAK_DELTA_BACKLOG_WARN_ROWS",
        100_000,
        "Delta rows of a table from which on to warn; an error at four times as many.",
    )


class MirrorSettings(Concern):
    """The pump of mirrored tables."""

    batch: Annotated[int, whole(1)] = setting("MODAK_MIRROR_BATCH", 100_000, "Rows until a mirror commit.")
    flush_millis: Annotated[int, whole(1)] = setting(
        "MODAK_MIRROR_FLUSH_MILLIS", 2000, "Milliseconds until a mirror commit, however few rows there are."
    )
    max_buffered_rows: Annotated[int, whole(1)] = setting(
        "MODAK_MIRROR_MAX_BUFFERED_ROWS", 100_000, "Rows of one transaction held in memory."
    )
    slot_warn_bytes: Annotated[int, BYTES] = setting(
        "MODAK_SLOT_WARN_BYTES", 1024 * MIB, "WAL retained by a slot from which on to warn."
    )
    slot_policy: Annotated[str, choice("warn", "pause", "reanchor")] = setting(
        "MODAK_SLOT_POLICY",
        "warn",
        "What happens beyond that: only `warn`; give up the slot and `pause`; or give it up and `reanchor`.",
    )


class LeaderSettings(Concern):
    """The lease that makes one worker the leader."""

    campaign_interval_seconds: Annotated[float, SECONDS] = setting(
        "MODAK_CAMPAIGN_INTERVAL_SECONDS", 5.0, "How often a standby tries to take the lease."
    )
    lease_seconds: Annotated[float, SECONDS] = setting(
        "MODAK_LEASE_SECONDS", 15.0, "How long a lease lasts without renewal; must exceed the campaign interval."
    )


class MaintenanceSettings(Concern):
    """Fleet-wide defaults of lake maintenance; a table's policy goes over them."""

    enabled: Annotated[bool, FLAG] = setting(
        "MODAK_MAINTENANCE_ENABLED", True, "Whether tables get maintenance passes."
    )
    interval_seconds: Annotated[float, SECONDS] = setting(
        "MODAK_MAINTENANCE_INTERVAL_SECONDS", 3600.0, "Time between two passes of a table."
    )
    engine: Annotated[str, choice("spark", "embedded")] = setting(
        "MODAK_MAINTENANCE_ENGINE", "spark", "Where passes run: `spark`, or `embedded` in the worker."
    )
    lake_stats_interval_seconds: Annotated[float, SECONDS] = setting(
        "MODAK_LAKE_STATS_INTERVAL_SECONDS", 60.0, "Time between two looks at lake health."
    )
    rewrite_target_bytes: Annotated[int, BYTES] = setting(
        "MODAK_REWRITE_TARGET_BYTES", 128 * MIB, "Data files smaller than this are candidates for bin-packing."
    )
    rewrite_min_input_files: Annotated[int, whole(2)] = setting(
        "MODAK_REWRITE_MIN_INPUT_FILES", 8, "Small files that must have gathered before a rewrite."
    )
    snapshot_retention_hours: Annotated[int, whole(0)] = setting(
        "MODAK_SNAPSHOT_RETENTION_HOURS", 24, "Snapshots older than this may expire."
    )
    snapshot_min_retained: Annotated[int, whole(1)] = setting(
        "MODAK_SNAPSHOT_MIN_RETAINED", 5, "Snapshots always kept, whatever their age."
    )
    rewrite_enabled: Annotated[bool, FLAG] = setting("MODAK_REWRITE_ENABLED", True, "Small-file bin-packing.")
    delete_compaction_enabled: Annotated[bool, FLAG] = setting(
        "MODAK_DELETE_COMPACTION_ENABLED", True, "Delete-debt compaction."
    )
    manifest_rewrite_enabled: Annotated[bool, FLAG] = setting(
        "MODAK_MANIFEST_REWRITE_ENABLED", True, "Manifest rewrite."
    )
    snapshot_expiry_enabled: Annotated[bool, FLAG] = setting("MODAK_SNAPSHOT_EXPIRY_ENABLED", True, "Snapshot expiry.")
    orphan_sweep_enabled: Annotated[bool, FLAG] = setting(
        "MODAK_ORPHAN_SWEEP_ENABLED", False, "Sweep of orphan files by listing."
    )


class HttpSettings(Concern):
    """Where HTTP listens and who may talk to it."""

    host: Annotated[str, HOST] = setting(
        "MODAK_HTTP_HOST", "127.0.0.1", "Address on which HTTP listens; beyond loopback `MODAK_API_TOKEN` is required."
    )
    metrics_port: Annotated[int | None, PORT] = setting(
        "MODAK_METRICS_PORT",
        None,
        "Port on which the headless worker serves `/metrics`, health, the API and the Iceberg catalog.",
        shown="unset (off)",
    )
    console_port: Annotated[int, PORT] = setting("MODAK_CONSOLE_PORT", 9090, "Port of the console.")
    console_sql: Annotated[bool, FLAG] = setting("MODAK_CONSOLE_SQL", True, "The console's SQL playground.")
    api_token: Annotated[SecretStr | None, SECRET] = setting(
        "MODAK_API_TOKEN", None, "Token that may read and change.", secret=True
    )
    api_read_token: Annotated[SecretStr | None, SECRET] = setting(
        "MODAK_API_READ_TOKEN", None, "Token that may only read.", secret=True
    )
    query_timeout_seconds: Annotated[float, SECONDS] = setting(
        "MODAK_QUERY_TIMEOUT_SECONDS", 60.0, "Longest time of one query over HTTP."
    )
    query_max_rows: Annotated[int, whole(1, 1_000_000)] = setting(
        "MODAK_QUERY_MAX_ROWS", 10_000, "Rows that one query over HTTP returns at most."
    )
    query_memory: Annotated[int, HEAP] = setting(
        "MODAK_QUERY_MEMORY", 1024 * MIB, "Heap of each of the JVMs in which queries over HTTP run, at most two."
    )
    query_pg_user: Annotated[str | None, TEXT] = setting(
        "MODAK_QUERY_PG_USER",
        None,
        "Role of Postgres with whose rights queries over HTTP read.",
        shown="unset (the worker's)",
    )
    query_pg_password: Annotated[SecretStr, SECRET] = setting(
        "MODAK_QUERY_PG_PASSWORD", SecretStr(""), "Its password.", shown="empty", secret=True
    )

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the HTTP server."""
        return is_loopback(self.host)


class LoadSettings(Concern):
    """Stream Load over HTTP."""

    token: Annotated[SecretStr | None, SECRET] = setting(
        "MODAK_LOAD_TOKEN", None, "Token of the load endpoint. Unset: there is no endpoint.", secret=True
    )
    spool_threshold: Annotated[int, whole(0)] = setting(
        "MODAK_LOAD_SPOOL_THRESHOLD", 1000, "Cold rows of a batch from which on they are staged as a file."
    )
    max_bytes: Annotated[int, BYTES] = setting(
        "MODAK_LOAD_MAX_BYTES", 8192 * MIB, "Largest body of a load, before and after decompression."
    )


class SparkSettings(Concern):
    """The engine that moves data."""

    master: Annotated[str, SPARK_MASTER] = setting("MODAK_SPARK_MASTER", "local[*]", "Spark master.")
    jars: Annotated[tuple[str, ...], FILES] = setting(
        "MODAK_SPARK_JARS",
        (),
        "Jars to use instead of resolving them, with commas between.",
        shown="empty (resolved once, then kept under $MODAK_HOME)",
    )
    conf: Pairs = Field(default_factory=Pairs)


class CredentialSettings(Concern):
    """Secrets that storage profiles refer to by name."""

    refs: dict[str, SecretPairs] = Field(default_factory=dict)

    @staticmethod
    def variable(ref: str) -> str:
        """The variable that holds the credentials of a reference: `prod-s3` → `MODAK_CREDENTIALS_PROD_S3`."""
        return CREDENTIALS_PREFIX + re.sub(r"[^A-Z0-9]", "_", ref.upper())

    def merged(self, ref: str, config: Mapping[str, str]) -> dict[str, str]:
        """A profile's config with the credentials laid over it; a blank value removes the inherited key."""
        variable = self.variable(ref)
        pairs = self.refs.get(variable.removeprefix(CREDENTIALS_PREFIX))
        if pairs is None:
            raise Refused(
                "config.no_credentials",
                f"{variable} is not set.",
                hint=f"The credentials {ref!r} are read from it; write key=value;… into it.",
            )
        together: dict[str, Any] = {**config, **pairs}
        return {key: value for key, value in together.items() if value or key not in pairs}


class LogSettings(Concern):
    """How log events are written, and where traces go."""

    format: Annotated[str, choice("console", "json")] = setting(
        "MODAK_LOG", "console", "Log events for a person at a terminal (`console`) or for a machine (`json`)."
    )
    otlp_endpoint: Annotated[str | None, ENDPOINT] = setting(
        "MODAK_OTLP_ENDPOINT",
        None,
        "OpenTelemetry collector of traces, such as `http://collector:4318`; needs the extra `tracing`.",
        shown="unset (no traces)",
    )
