"""Settings of the two other contexts: measurement stores and entity stores."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import SecretStr

from modak.config.cron import CRON
from modak.config.fields import Concern, setting
from modak.config.kinds import (
    BYTES,
    DURATION,
    FLAG,
    HOST,
    MANIFEST_TEMPLATE,
    PORT,
    RETENTION,
    SCHEMA_IDS,
    SECONDS,
    SECRET,
    SORT_KEYS,
    TEXT,
    choice,
    read_duration,
    whole,
)
from modak.config.models import MIB, default_home
from modak.config.pairs import Pairs
from modak.config.places import ENDPOINT, FOLDER, WAREHOUSE


class MeasurementSettings(Concern):
    """Compaction of time-partitioned Parquet files."""

    enabled: Annotated[bool, FLAG] = setting(
        "MODAK_MEASUREMENTS_ENABLED", False, "Whether the worker compacts measurements."
    )
    root: Annotated[str | None, WAREHOUSE] = setting(
        "MODAK_MEASUREMENTS_ROOT", None, "Root of the measurement store: a folder or an object store."
    )
    hourly_enabled: Annotated[bool, FLAG] = setting("MODAK_MEASUREMENTS_HOURLY_ENABLED", True, "The hourly tier.")
    hourly_min_age_hours: Annotated[int, whole(1)] = setting(
        "MODAK_MEASUREMENTS_HOURLY_MIN_AGE_HOURS", 1, "Hours younger than this are left alone."
    )
    hourly_min_files: Annotated[int, whole(1)] = setting(
        "MODAK_MEASUREMENTS_HOURLY_MIN_FILES", 10, "Files that must have gathered in an hour."
    )
    hourly_target_size_mb: Annotated[int, whole(1)] = setting(
        "MODAK_MEASUREMENTS_HOURLY_TARGET_SIZE_MB", 512, "Hourly outputs roll at this size."
    )
    hourly_schedule: Annotated[str, CRON] = setting(
        "MODAK_MEASUREMENTS_HOURLY_SCHEDULE", "5 * * * *", "When the hourly tier runs (cron, UTC)."
    )
    daily_enabled: Annotated[bool, FLAG] = setting("MODAK_MEASUREMENTS_DAILY_ENABLED", True, "The daily tier.")
    daily_min_age_hours: Annotated[int, whole(0)] = setting(
        "MODAK_MEASUREMENTS_DAILY_MIN_AGE_HOURS", 24, "Days younger than this are left alone."
    )
    daily_min_files: Annotated[int, whole(1)] = setting(
        "MODAK_MEASUREMENTS_DAILY_MIN_FILES", 12, "Files that must have gathered in a day."
    )
    daily_target_size_mb: Annotated[int, whole(1)] = setting(
        "MODAK_MEASUREMENTS_DAILY_TARGET_SIZE_MB", 2048, "Daily outputs roll at this size."
    )
    daily_schedule: Annotated[str, CRON] = setting(
        "MODAK_MEASUREMENTS_DAILY_SCHEDULE", "0 3 * * *", "When the daily tier runs (cron, UTC)."
    )
    weekly_enabled: Annotated[bool, FLAG] = setting(
        "MODAK_MEASUREMENTS_WEEKLY_ENABLED", False, "The weekly tier (days 1–7, 8–14, 15–21 and 22–end of a month)."
    )
    weekly_min_age_hours: Annotated[int, whole(0)] = setting(
        "MODAK_MEASUREMENTS_WEEKLY_MIN_AGE_HOURS", 168, "Weeks younger than this are left alone."
    )
    weekly_min_files: Annotated[int, whole(1)] = setting(
        "MODAK_MEASUREMENTS_WEEKLY_MIN_FILES", 7, "Files that must have gathered in a week."
    )
    weekly_target_size_mb: Annotated[int, whole(1)] = setting(
        "MODAK_MEASUREMENTS_WEEKLY_TARGET_SIZE_MB", 2048, "Weekly outputs roll at this size."
    )
    weekly_schedule: Annotated[str, CRON] = setting(
        "MODAK_MEASUREMENTS_WEEKLY_SCHEDULE", "0 4 * * 1", "When the weekly tier runs (cron, UTC)."
    )
    monthly_enabled: Annotated[bool, FLAG] = setting("MODAK_MEASUREMENTS_MONTHLY_ENABLED", False, "The monthly tier.")
    monthly_min_age_hours: Annotated[int, whole(0)] = setting(
        "MODAK_MEASUREMENTS_MONTHLY_MIN_AGE_HOURS", 720, "Months younger than this are left alone."
    )
    monthly_min_files: Annotated[int, whole(1)] = setting(
        "MODAK_MEASUREMENTS_MONTHLY_MIN_FILES", 4, "Files that must have gathered in a month."
    )
    monthly_target_size_mb: Annotated[int, whole(1)] = setting(
        "MODAK_MEASUREMENTS_MONTHLY_TARGET_SIZE_MB", 2048, "Monthly outputs roll at this size."
    )
    monthly_schedule: Annotated[str, CRON] = setting(
        "MODAK_MEASUREMENTS_MONTHLY_SCHEDULE", "0 5 1 * *", "When the monthly tier runs (cron, UTC)."
    )
    grace_seconds: Annotated[int, whole(0)] = setting(
        "MODAK_MEASUREMENTS_GRACE_SECONDS", 900, "How long inputs outlive the commit; longer than any listing takes."
    )
    claim_seconds: Annotated[int, whole(1)] = setting(
        "MODAK_MEASUREMENTS_CLAIM_SECONDS", 60, "A compactor that is silent for so long has lost its claims."
    )
    max_concurrent: Annotated[int, whole(1, 1024)] = setting(
        "MODAK_MEASUREMENTS_MAX_CONCURRENT", 2, "Partitions compacted at the same time; they share the memory limit."
    )
    memory_limit: Annotated[int | None, BYTES] = setting(
        "MODAK_MEASUREMENTS_MEMORY_LIMIT", None, "Memory of all jobs together.", shown="unset (half of the machine's)"
    )
    temp_directory: Annotated[Path, FOLDER] = setting(
        "MODAK_MEASUREMENTS_TEMP_DIRECTORY",
        None,
        "Folder for outputs before they are published.",
        factory=lambda: default_home() / "compaction",
        shown="$MODAK_HOME/compaction",
    )
    sort_keys: Annotated[Pairs, SORT_KEYS] = setting(
        "MODAK_MEASUREMENTS_SORT_KEYS",
        Pairs(),
        "`measurement=key,key` pairs with `;` between; the measurement `*` stands for all others.",
        shown="empty (sorted by time)",
    )
    batch_files: Annotated[int, whole(2, 500)] = setting(
        "MODAK_MEASUREMENTS_BATCH_FILES", 30, "Files that a batch holds at least, if it has reached the target size."
    )
    isolation: Annotated[str, choice("spark", "process")] = setting(
        "MODAK_MEASUREMENTS_ISOLATION", "spark", "Whether a job runs in a Spark task or in a child process."
    )
    retention: Annotated[Pairs, RETENTION] = setting(
        "MODAK_MEASUREMENTS_RETENTION",
        Pairs(),
        "How long measurements are kept, `measurement=duration` pairs with `;` between; `*` stands for all others.",
        shown="empty (for ever)",
    )
    export_kept: Annotated[float, DURATION] = setting(
        "MODAK_MEASUREMENTS_EXPORT_KEPT",
        86_400.0,
        "How long a snapshot of an exported Iceberg table stays readable after the next one.",
    )
    profile: Annotated[bool, FLAG] = setting(
        "MODAK_COMPACTION_PROFILE", False, "Memory profile of every compaction job."
    )

    def sort_keys_of(self, measurement: str) -> tuple[str, ...]:
        """The sort keys of a measurement, without `time`, which always comes last."""
        text = self.sort_keys.get(measurement, self.sort_keys.get("*", ""))
        return tuple(key for key in text.split(",") if key)

    def kept(self) -> dict[str, timedelta]:
        """How long measurements are kept, by name; `*` for all others."""
        return {name: timedelta(seconds=read_duration(text)) for name, text in self.retention.items()}


class EntitySettings(Concern):
    """Flush and compaction of entity stores."""

    enabled: Annotated[bool, FLAG] = setting(
        "MODAK_ENTITIES_ENABLED", False, "Whether the worker flushes and compacts entities."
    )
    schemas: Annotated[tuple[int, ...], SCHEMA_IDS] = setting(
        "MODAK_ENTITIES_SCHEMAS", (), "Schema ids to serve, with commas between.", shown="empty (all)"
    )
    prefix: Annotated[str, TEXT] = setting(
        "MODAK_ENTITIES_PREFIX", "entities", "Prefix of base and delta files inside the lake or the bucket."
    )
    registry: Annotated[str | None, TEXT] = setting(
        "MODAK_ENTITIES_REGISTRY", None, "Attribute registry: a JSON file or a folder of them."
    )
    flush_interval_seconds: Annotated[float, SECONDS] = setting(
        "MODAK_ENTITIES_FLUSH_INTERVAL_SECONDS", 60.0, "Time between two looks for dirty rows."
    )
    compact_interval_seconds: Annotated[float, SECONDS] = setting(
        "MODAK_ENTITIES_COMPACT_INTERVAL_SECONDS", 3600.0, "Time between two compactions of base and delta."
    )
    change_log_table: Annotated[str, TEXT] = setting(
        "MODAK_ENTITIES_CHANGE_LOG_TABLE", "change_log", "Table of changes."
    )
    entity_main_table: Annotated[str, TEXT] = setting(
        "MODAK_ENTITIES_ENTITY_MAIN_TABLE", "entity_main", "Table of entities."
    )
    eav_data_table: Annotated[str, TEXT] = setting("MODAK_ENTITIES_EAV_DATA_TABLE", "eav_data", "Table of attributes.")
    min_records: Annotated[int, whole(1)] = setting(
        "MODAK_ENTITIES_MIN_RECORDS", 20_000, "Dirty rows from which on a schema is flushed."
    )
    max_age_ms: Annotated[int, whole(0)] = setting(
        "MODAK_ENTITIES_MAX_AGE_MS", 3_600_000, "Age of the oldest dirty row from which on its schema is flushed."
    )
    batch_size: Annotated[int, whole(1)] = setting("MODAK_ENTITIES_BATCH_SIZE", 10_000, "Rows selected at once.")
    max_batch_size: Annotated[int, whole(1)] = setting(
        "MODAK_ENTITIES_MAX_BATCH_SIZE", 10_000_000, "Rows of one batch at most, whatever the sizes say."
    )
    estimated_row_bytes: Annotated[int, BYTES] = setting(
        "MODAK_ENTITIES_ESTIMATED_ROW_BYTES", 1024, "Rough size of a row."
    )
    max_batch_bytes: Annotated[int, BYTES] = setting(
        "MODAK_ENTITIES_MAX_BATCH_BYTES", 50 * MIB, "Bytes of one exported chunk."
    )
    target_file_size_mb: Annotated[int, whole(0)] = setting(
        "MODAK_ENTITIES_TARGET_FILE_SIZE_MB", 256, "Size of base files written by init; 0 lets the batch size decide."
    )
    target_base_size_mb: Annotated[int, whole(1)] = setting(
        "MODAK_ENTITIES_TARGET_BASE_SIZE_MB", 256, "Size at which compacted base files roll and deltas are promoted."
    )
    max_delta_size_mb: Annotated[int, whole(1)] = setting(
        "MODAK_ENTITIES_MAX_DELTA_SIZE_MB", 50, "Delta files above this are compacted even below the dirty ratio."
    )
    dirty_ratio_pct: Annotated[int, whole(0, 100)] = setting(
        "MODAK_ENTITIES_DIRTY_RATIO_PCT", 5, "Delta rows in percent of base rows above which the base is rewritten."
    )
    schema_id: Annotated[int, whole(0, 32_767)] = setting(
        "MODAK_ENTITIES_SCHEMA_ID", 0, "Compact only this schema; 0 means all."
    )
    max_parallel_files: Annotated[int | None, whole(1)] = setting(
        "MODAK_ENTITIES_MAX_PARALLEL_FILES",
        None,
        "Row-id ranges rewritten at the same time.",
        shown="unset (the cores)",
    )
    temp_prefix: Annotated[str | None, TEXT] = setting(
        "MODAK_ENTITIES_TEMP_PREFIX",
        None,
        "Prefix of files of a rewrite before it is published.",
        shown="unset (under the prefix)",
    )
    max_retries: Annotated[int, whole(0, 1000)] = setting("MODAK_ENTITIES_MAX_RETRIES", 5, "Tries after a conflict.")
    base_backoff_ms: Annotated[int, whole(1)] = setting(
        "MODAK_ENTITIES_BASE_BACKOFF_MS", 100, "First pause between tries."
    )
    max_backoff_ms: Annotated[int, whole(1)] = setting(
        "MODAK_ENTITIES_MAX_BACKOFF_MS", 10_000, "Longest pause between tries."
    )
    parquet_compression: Annotated[str, choice("zstd", "snappy", "gzip", "none")] = setting(
        "MODAK_ENTITIES_PARQUET_COMPRESSION", "zstd", "Compression of Parquet files."
    )
    parquet_compression_level: Annotated[int, whole(1, 22)] = setting(
        "MODAK_ENTITIES_PARQUET_COMPRESSION_LEVEL", 3, "Level of the compression, where it has levels."
    )
    manifest_prefix: Annotated[str | None, TEXT] = setting(
        "MODAK_ENTITIES_MANIFEST_PREFIX", None, "Prefix of manifests."
    )
    manifest_template: Annotated[str, MANIFEST_TEMPLATE] = setting(
        "MODAK_ENTITIES_MANIFEST_TEMPLATE", "manifest/{{.SchemaID}}.json", "Path of a schema's manifest."
    )
    manifest_path: Annotated[str | None, TEXT] = setting(
        "MODAK_ENTITIES_MANIFEST_PATH", None, "The one manifest to compact.", shown="unset (by the template)"
    )
    pg_host: Annotated[str | None, HOST] = setting(
        "MODAK_ENTITIES_PG_HOST", None, "Postgres of the entity tables.", shown="unset (as MODAK_PG_URL)"
    )
    pg_port: Annotated[int, PORT] = setting("MODAK_ENTITIES_PG_PORT", 5432, "Its port.")
    pg_db: Annotated[str | None, TEXT] = setting("MODAK_ENTITIES_PG_DB", None, "Its database.")
    pg_user: Annotated[str, TEXT] = setting("MODAK_ENTITIES_PG_USER", "postgres", "User there.")
    pg_password: Annotated[SecretStr | None, SECRET] = setting(
        "MODAK_ENTITIES_PG_PASSWORD", None, "Password there.", secret=True
    )
    pg_use_iam: Annotated[bool, FLAG] = setting(
        "MODAK_ENTITIES_PG_USE_IAM", False, "Fetch an IAM token as the password at every connect."
    )
    pg_token_command: Annotated[str | None, TEXT] = setting(
        "MODAK_ENTITIES_PG_TOKEN_COMMAND", None, "Command that prints the IAM token; it is run without a shell."
    )
    pg_ssl_mode: Annotated[str, choice("disable", "allow", "prefer", "require", "verify-ca", "verify-full")] = setting(
        "MODAK_ENTITIES_PG_SSL_MODE",
        "require",
        "TLS mode, where the address names none; `require` means none on this machine.",
    )
    s3_bucket: Annotated[str | None, TEXT] = setting(
        "MODAK_ENTITIES_S3_BUCKET", None, "Bucket of the entity store.", shown="unset (the default lake)"
    )
    s3_endpoint: Annotated[str | None, ENDPOINT] = setting(
        "MODAK_ENTITIES_S3_ENDPOINT", None, "Its S3-compatible server.", shown="unset (as MODAK_S3_ENDPOINT)"
    )
    s3_region: Annotated[str | None, TEXT] = setting(
        "MODAK_ENTITIES_S3_REGION", None, "Its region.", shown="unset (as MODAK_S3_REGION)"
    )
    s3_use_ssl: Annotated[bool | None, FLAG] = setting(
        "MODAK_ENTITIES_S3_USE_SSL", None, "Whether it is reached over TLS.", shown="unset (as MODAK_S3_SSL)"
    )
    s3_use_path: Annotated[bool, FLAG] = setting(
        "MODAK_ENTITIES_S3_USE_PATH", False, "Path-style addresses, as most S3-compatible servers want them."
    )
    duckdb_path: Annotated[str | None, TEXT] = setting(
        "MODAK_ENTITIES_DUCKDB_PATH", None, "File of the kernel inside a task.", shown="unset (in memory)"
    )
    duck_threads: Annotated[int | None, whole(1, 1024)] = setting(
        "MODAK_ENTITIES_DUCK_THREADS", None, "Threads of the kernel.", shown="unset (1)"
    )
    duck_mem_limit: Annotated[int | None, BYTES] = setting(
        "MODAK_ENTITIES_DUCK_MEM_LIMIT", None, "Memory of the kernel.", shown="unset (1 GiB)"
    )
    query_timeout: Annotated[float | None, DURATION] = setting(
        "MODAK_ENTITIES_QUERY_TIMEOUT", None, "Longest time of one export.", shown="unset (no limit)"
    )
