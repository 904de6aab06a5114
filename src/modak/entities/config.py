"""What governs an entity store: the constants, the configuration of capture and of compaction, and their defaults.

Plain frozen values, so that a program can make its own; `from_settings` makes them from `MODAK_ENTITIES_*`. A number
that is not positive counts as missing where zero would mean nothing, and `with_defaults` fills it in.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from modak.core.errors import UsageError

if TYPE_CHECKING:
    from modak.config import EntitySettings

DEFAULT_PARQUET_COMPRESSION = "zstd"
DEFAULT_PARQUET_COMPRESSION_LEVEL = 3
DEFAULT_MIN_RECORDS = 20_000
DEFAULT_MAX_AGE_MS = 3_600_000
DEFAULT_ESTIMATED_ROW_BYTES = 1024
DEFAULT_MAX_BATCH_BYTES = 50 * 1024 * 1024
DEFAULT_BATCH_SIZE = 10_000
DEFAULT_TARGET_BASE_SIZE_MB = 256
DEFAULT_TARGET_FILE_SIZE_MB = 256
DEFAULT_MAX_BATCH_SIZE = 10_000_000
DEFAULT_MAX_DELTA_SIZE_MB = 50
DEFAULT_DIRTY_RATIO_PCT = 5
DEFAULT_MAX_RETRIES = 5
DEFAULT_BASE_BACKOFF_MS = 100
DEFAULT_MAX_BACKOFF_MS = 10_000
DEFAULT_PG_SSL_MODE = "require"
DEFAULT_MANIFEST_TEMPLATE = "manifest/{{.SchemaID}}.json"

SCHEMA_MARK = "{{.SchemaID}}"
MIB = 1 << 20


@dataclass(frozen=True)
class ManifestConfig:
    """Where manifests are: a prefix inside the store and a path template that varies by schema."""

    bucket: str = ""
    prefix: str = ""
    path_template: str = DEFAULT_MANIFEST_TEMPLATE
    path: str = ""
    """The one manifest that is meant, whatever the template says."""

    def key(self, schema_id: int) -> str:
        """The path of a schema's manifest."""
        if self.path:
            return self.path
        template = self.path_template or DEFAULT_MANIFEST_TEMPLATE
        if SCHEMA_MARK not in template:
            raise UsageError(
                "entities.manifest_template",
                f"The manifest template {template!r} is the same for every schema.",
                hint=f"Put {SCHEMA_MARK} into it, as in {DEFAULT_MANIFEST_TEMPLATE}.",
            )
        path = template.replace(SCHEMA_MARK, str(schema_id)).strip("/")
        return f"{self.prefix.strip('/')}/{path}" if self.prefix.strip("/") else path


@dataclass(frozen=True)
class CDCConfig:
    """How changes are flushed and bases exported. The address parts are for stores with a Postgres of their own."""

    change_log_table: str = "change_log"
    entity_main_table: str = "entity_main"
    eav_data_table: str = "eav_data"
    schemas: tuple[int, ...] = ()
    """Schemas to serve; empty means all."""

    min_records: int = DEFAULT_MIN_RECORDS
    max_age_ms: int = DEFAULT_MAX_AGE_MS
    batch_size: int = DEFAULT_BATCH_SIZE

    pg_host: str = ""
    pg_port: int = 5432
    pg_user: str = "postgres"
    pg_password: str = field(default="", repr=False)
    pg_db: str = ""
    pg_use_iam: bool = False
    pg_token_command: str = field(default="", repr=False)
    """What prints the password of the moment, with `pg_use_iam`."""
    pg_ssl_mode: str = DEFAULT_PG_SSL_MODE

    duckdb_path: str = ""
    duck_threads: int = 0
    duck_mem_limit: int | str = 0
    """Bytes, or a size such as `4GB`."""
    query_timeout: float = 0.0
    parquet_compression: str = DEFAULT_PARQUET_COMPRESSION
    parquet_compression_level: int = DEFAULT_PARQUET_COMPRESSION_LEVEL
    estimated_row_bytes: int = DEFAULT_ESTIMATED_ROW_BYTES
    max_batch_bytes: int = DEFAULT_MAX_BATCH_BYTES

    target_file_size_mb: int = DEFAULT_TARGET_FILE_SIZE_MB
    """Size of base files; 0 lets `batch_size` decide."""
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE

    s3_bucket: str = ""
    s3_prefix: str = "entities"
    s3_endpoint: str = ""
    s3_region: str = ""
    s3_use_ssl: bool = True
    s3_use_path: bool = False

    manifest_prefix: str = ""
    """Prefix of manifests; empty means the store's own prefix."""
    manifest_template: str = DEFAULT_MANIFEST_TEMPLATE

    max_retries: int = DEFAULT_MAX_RETRIES
    base_backoff_ms: int = DEFAULT_BASE_BACKOFF_MS
    max_backoff_ms: int = DEFAULT_MAX_BACKOFF_MS

    def with_defaults(self) -> CDCConfig:
        """A copy with missing fields set to their defaults."""
        blank = CDCConfig()
        tables = ("change_log_table", "entity_main_table", "eav_data_table")
        texts = (*tables, "pg_user", "pg_ssl_mode", "parquet_compression", "manifest_template")
        counts = ("min_records", "batch_size", "estimated_row_bytes", "max_batch_bytes", "max_batch_size", "pg_port")
        more = ("parquet_compression_level", "base_backoff_ms", "max_backoff_ms")
        filled: dict[str, Any] = {name: getattr(blank, name) for name in texts if not getattr(self, name)}
        filled |= {name: getattr(blank, name) for name in (*counts, *more) if getattr(self, name) <= 0}
        zeroes = ("max_age_ms", "target_file_size_mb", "max_retries")
        filled |= {name: getattr(blank, name) for name in zeroes if getattr(self, name) < 0}
        return replace(self, **filled)

    @property
    def chunk_rows(self) -> int:
        """Rows of one exported delta file."""
        return max(1, self.max_batch_bytes // self.estimated_row_bytes)

    @property
    def manifests(self) -> ManifestConfig:
        """Where this store keeps its manifests."""
        return ManifestConfig(self.s3_bucket, self.manifest_prefix or self.s3_prefix, self.manifest_template)


@dataclass(frozen=True)
class CompactionConfig:
    """When base and delta files become new base files, and how hard a conflict is tried again."""

    schema_id: int = 0
    """Compact only this schema; 0 means all."""
    manifest_path: str = ""
    """The one manifest to compact; empty means by the template."""
    target_base_size_mb: int = DEFAULT_TARGET_BASE_SIZE_MB
    max_delta_size_mb: int = DEFAULT_MAX_DELTA_SIZE_MB
    dirty_ratio_pct: int = DEFAULT_DIRTY_RATIO_PCT
    run_interval: float = 3600.0
    """Seconds between two compactions when run in a loop."""
    temp_prefix: str = ""
    max_parallel_files: int = 0
    """Row-id ranges rewritten at the same time; 0 means the cores."""
    max_retries: int = DEFAULT_MAX_RETRIES
    base_backoff: float = DEFAULT_BASE_BACKOFF_MS / 1000
    max_backoff: float = DEFAULT_MAX_BACKOFF_MS / 1000

    def with_defaults(self) -> CompactionConfig:
        """A copy with missing fields set to their defaults."""
        blank = CompactionConfig()
        counts = ("target_base_size_mb", "max_delta_size_mb", "run_interval", "base_backoff", "max_backoff")
        filled: dict[str, Any] = {name: getattr(blank, name) for name in counts if getattr(self, name) <= 0}
        zeroes = ("dirty_ratio_pct", "max_retries")
        filled |= {name: getattr(blank, name) for name in zeroes if getattr(self, name) < 0}
        return replace(self, **filled)


def from_settings(settings: EntitySettings) -> tuple[CDCConfig, CompactionConfig]:
    """The configuration that the environment gives."""
    given = settings
    capture = CDCConfig(
        change_log_table=given.change_log_table,
        entity_main_table=given.entity_main_table,
        eav_data_table=given.eav_data_table,
        schemas=given.schemas,
        min_records=given.min_records,
        max_age_ms=given.max_age_ms,
        batch_size=given.batch_size,
        pg_host=given.pg_host or "",
        pg_port=given.pg_port,
        pg_user=given.pg_user,
        pg_password=given.pg_password.get_secret_value() if given.pg_password else "",
        pg_db=given.pg_db or "",
        pg_use_iam=given.pg_use_iam,
        pg_token_command=given.pg_token_command or "",
        pg_ssl_mode=given.pg_ssl_mode,
        duckdb_path=given.duckdb_path or "",
        duck_threads=given.duck_threads or 0,
        duck_mem_limit=given.duck_mem_limit or 0,
        query_timeout=given.query_timeout or 0.0,
        parquet_compression=given.parquet_compression,
        parquet_compression_level=given.parquet_compression_level,
        estimated_row_bytes=given.estimated_row_bytes,
        max_batch_bytes=given.max_batch_bytes,
        target_file_size_mb=given.target_file_size_mb,
        max_batch_size=given.max_batch_size,
        s3_bucket=given.s3_bucket or "",
        s3_prefix=given.prefix,
        s3_endpoint=given.s3_endpoint or "",
        s3_region=given.s3_region or "",
        s3_use_ssl=given.s3_use_ssl if given.s3_use_ssl is not None else True,
        s3_use_path=given.s3_use_path,
        manifest_prefix=given.manifest_prefix or "",
        manifest_template=given.manifest_template,
        max_retries=given.max_retries,
        base_backoff_ms=given.base_backoff_ms,
        max_backoff_ms=given.max_backoff_ms,
    )
    compaction = CompactionConfig(
        schema_id=given.schema_id,
        manifest_path=given.manifest_path or "",
        target_base_size_mb=given.target_base_size_mb,
        max_delta_size_mb=given.max_delta_size_mb,
        dirty_ratio_pct=given.dirty_ratio_pct,
        run_interval=given.compact_interval_seconds,
        temp_prefix=given.temp_prefix or "",
        max_parallel_files=given.max_parallel_files or 0,
        max_retries=given.max_retries,
        base_backoff=given.base_backoff_ms / 1000,
        max_backoff=given.max_backoff_ms / 1000,
    )
    return capture, compaction
