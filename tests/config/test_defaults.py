"""Names and defaults are those that scripts and habits rely on."""

from __future__ import annotations

from pathlib import Path

import pytest

from modak.config import Settings, explain, load
from modak.config.fields import declared
from modak.config.settings import concerns

MIB = 1 << 20

TABLES: dict[str, tuple[str, object]] = {
    "MODAK_PG_URL": ("postgres.url", None),
    "MODAK_PG_USER": ("postgres.user", "postgres"),
    "MODAK_PG_PASSWORD": ("postgres.password", ""),
    "MODAK_HOME": ("home.path", Path.home() / ".modak"),
    "MODAK_WAREHOUSE": ("lake.warehouse", f"file://{Path.home()}/.modak/warehouse"),
    "MODAK_S3_ENDPOINT": ("lake.s3_endpoint", None),
    "MODAK_S3_ACCESS_KEY": ("lake.s3_access_key", None),
    "MODAK_S3_SECRET_KEY": ("lake.s3_secret_key", None),
    "MODAK_S3_REGION": ("lake.s3_region", None),
    "MODAK_S3_SSL": ("lake.s3_ssl", False),
    "MODAK_CATALOG_URI": ("lake.catalog_uri", None),
    "MODAK_CATALOG_WAREHOUSE": ("lake.catalog_warehouse", None),
    "MODAK_CATALOG_TOKEN": ("lake.catalog_token", None),
    "MODAK_CATALOG_NAMESPACE": ("lake.namespace", "modak"),
    "MODAK_ICEBERG_VEND_CREDENTIALS": ("lake.vend_credentials", False),
    "MODAK_LAKE_FORMAT": ("lake.format", "iceberg"),
    "MODAK_LAKE_PROPS": ("lake.props", {}),
    "MODAK_TARGET_FILE_BYTES": ("lake.target_file_bytes", 256 * MIB),
    "MODAK_CYCLE_INTERVAL_SECONDS": ("tiering.cycle_interval_seconds", 10),
    "MODAK_TIERING_LAG": ("tiering.tiering_lag", "0"),
    "MODAK_RECLAIM_LAG": ("tiering.reclaim_lag", "0"),
    "MODAK_PREMAKE_PARTITIONS": ("tiering.premake_partitions", 2),
    "MODAK_CONCURRENT_TABLES": ("tiering.concurrent_tables", 2),
    "MODAK_COMPACTION_BATCH": ("corrections.compaction_batch", 1_000_000),
    "MODAK_DELTA_BACKLOG_WARN_ROWS": ("corrections.delta_backlog_warn_rows", 100_000),
    "MODAK_MIRROR_BATCH": ("mirror.batch", 100_000),
    "MODAK_MIRROR_FLUSH_MILLIS": ("mirror.flush_millis", 2000),
    "MODAK_MIRROR_MAX_BUFFERED_ROWS": ("mirror.max_buffered_rows", 100_000),
    "MODAK_SLOT_WARN_BYTES": ("mirror.slot_warn_bytes", 1024 * MIB),
    "MODAK_SLOT_POLICY": ("mirror.slot_policy", "warn"),
    "MODAK_CAMPAIGN_INTERVAL_SECONDS": ("leader.campaign_interval_seconds", 5),
    "MODAK_LEASE_SECONDS": ("leader.lease_seconds", 15),
    "MODAK_MAINTENANCE_ENABLED": ("maintenance.enabled", True),
    "MODAK_MAINTENANCE_INTERVAL_SECONDS": ("maintenance.interval_seconds", 3600),
    "MODAK_MAINTENANCE_ENGINE": ("maintenance.engine", "spark"),
    "MODAK_LAKE_STATS_INTERVAL_SECONDS": ("maintenance.lake_stats_interval_seconds", 60),
    "MODAK_REWRITE_TARGET_BYTES": ("maintenance.rewrite_target_bytes", 128 * MIB),
    "MODAK_REWRITE_MIN_INPUT_FILES": ("maintenance.rewrite_min_input_files", 8),
    "MODAK_SNAPSHOT_RETENTION_HOURS": ("maintenance.snapshot_retention_hours", 24),
    "MODAK_SNAPSHOT_MIN_RETAINED": ("maintenance.snapshot_min_retained", 5),
    "MODAK_REWRITE_ENABLED": ("maintenance.rewrite_enabled", True),
    "MODAK_DELETE_COMPACTION_ENABLED": ("maintenance.delete_compaction_enabled", True),
    "MODAK_MANIFEST_REWRITE_ENABLED": ("maintenance.manifest_rewrite_enabled", True),
    "MODAK_SNAPSHOT_EXPIRY_ENABLED": ("maintenance.snapshot_expiry_enabled", True),
    "MODAK_ORPHAN_SWEEP_ENABLED": ("maintenance.orphan_sweep_enabled", False),
    "MODAK_METRICS_PORT": ("http.metrics_port", None),
    "MODAK_CONSOLE_PORT": ("http.console_port", 9090),
    "MODAK_CONSOLE_SQL": ("http.console_sql", True),
    "MODAK_HTTP_HOST": ("http.host", "127.0.0.1"),
    "MODAK_API_TOKEN": ("http.api_token", None),
    "MODAK_API_READ_TOKEN": ("http.api_read_token", None),
    "MODAK_QUERY_TIMEOUT_SECONDS": ("http.query_timeout_seconds", 60),
    "MODAK_QUERY_MAX_ROWS": ("http.query_max_rows", 10_000),
    "MODAK_QUERY_MEMORY": ("http.query_memory", 1024 * MIB),
    "MODAK_QUERY_PG_USER": ("http.query_pg_user", None),
    "MODAK_QUERY_PG_PASSWORD": ("http.query_pg_password", ""),
    "MODAK_LOAD_TOKEN": ("load.token", None),
    "MODAK_LOAD_SPOOL_THRESHOLD": ("load.spool_threshold", 1000),
    "MODAK_LOAD_MAX_BYTES": ("load.max_bytes", 8 << 30),
    "MODAK_SPARK_MASTER": ("spark.master", "local[*]"),
    "MODAK_SPARK_JARS": ("spark.jars", ()),
    "MODAK_LOG": ("log.format", "console"),
    "MODAK_OTLP_ENDPOINT": ("log.otlp_endpoint", None),
}

MEASUREMENTS: dict[str, object] = {
    "ROOT": None,
    "ENABLED": False,
    "HOURLY_ENABLED": True,
    "HOURLY_MIN_AGE_HOURS": 1,
    "HOURLY_MIN_FILES": 10,
    "HOURLY_TARGET_SIZE_MB": 512,
    "HOURLY_SCHEDULE": "5 * * * *",
    "DAILY_ENABLED": True,
    "DAILY_MIN_AGE_HOURS": 24,
    "DAILY_MIN_FILES": 12,
    "DAILY_TARGET_SIZE_MB": 2048,
    "DAILY_SCHEDULE": "0 3 * * *",
    "WEEKLY_ENABLED": False,
    "WEEKLY_MIN_AGE_HOURS": 168,
    "WEEKLY_MIN_FILES": 7,
    "WEEKLY_TARGET_SIZE_MB": 2048,
    "WEEKLY_SCHEDULE": "0 4 * * 1",
    "MONTHLY_ENABLED": False,
    "MONTHLY_MIN_AGE_HOURS": 720,
    "MONTHLY_MIN_FILES": 4,
    "MONTHLY_TARGET_SIZE_MB": 2048,
    "MONTHLY_SCHEDULE": "0 5 1 * *",
    "GRACE_SECONDS": 900,
    "CLAIM_SECONDS": 60,
    "MAX_CONCURRENT": 2,
    "MEMORY_LIMIT": None,
    "TEMP_DIRECTORY": Path.home() / ".modak" / "compaction",
    "SORT_KEYS": {},
    "BATCH_FILES": 30,
    "ISOLATION": "spark",
    "RETENTION": {},
    "EXPORT_KEPT": 86_400,
}

ENTITIES: dict[str, object] = {
    "ENABLED": False,
    "SCHEMAS": (),
    "PREFIX": "entities",
    "REGISTRY": None,
    "FLUSH_INTERVAL_SECONDS": 60,
    "COMPACT_INTERVAL_SECONDS": 3600,
    "CHANGE_LOG_TABLE": "change_log",
    "ENTITY_MAIN_TABLE": "entity_main",
    "EAV_DATA_TABLE": "eav_data",
    "MIN_RECORDS": 20_000,
    "MAX_AGE_MS": 3_600_000,
    "BATCH_SIZE": 10_000,
    "MAX_BATCH_SIZE": 10_000_000,
    "ESTIMATED_ROW_BYTES": 1024,
    "MAX_BATCH_BYTES": 50 * MIB,
    "TARGET_FILE_SIZE_MB": 256,
    "TARGET_BASE_SIZE_MB": 256,
    "MAX_DELTA_SIZE_MB": 50,
    "DIRTY_RATIO_PCT": 5,
    "SCHEMA_ID": 0,
    "MAX_PARALLEL_FILES": None,
    "TEMP_PREFIX": None,
    "MAX_RETRIES": 5,
    "BASE_BACKOFF_MS": 100,
    "MAX_BACKOFF_MS": 10_000,
    "PARQUET_COMPRESSION": "zstd",
    "PARQUET_COMPRESSION_LEVEL": 3,
    "MANIFEST_PREFIX": None,
    "MANIFEST_TEMPLATE": "manifest/{{.SchemaID}}.json",
    "MANIFEST_PATH": None,
    "PG_HOST": None,
    "PG_PORT": 5432,
    "PG_DB": None,
    "PG_USER": "postgres",
    "PG_PASSWORD": None,
    "PG_USE_IAM": False,
    "PG_TOKEN_COMMAND": None,
    "PG_SSL_MODE": "require",
    "S3_BUCKET": None,
    "S3_ENDPOINT": None,
    "S3_REGION": None,
    "S3_USE_SSL": None,
    "S3_USE_PATH": False,
    "DUCKDB_PATH": None,
    "DUCK_THREADS": None,
    "DUCK_MEM_LIMIT": None,
    "QUERY_TIMEOUT": None,
}

ALL: dict[str, tuple[str, object]] = {
    **TABLES,
    **{f"MODAK_MEASUREMENTS_{name}": (f"measurements.{name.lower()}", value) for name, value in MEASUREMENTS.items()},
    **{f"MODAK_ENTITIES_{name}": (f"entities.{name.lower()}", value) for name, value in ENTITIES.items()},
    "MODAK_COMPACTION_PROFILE": ("measurements.profile", False),
}


def at(settings: Settings, path: str) -> object:
    concern, field = path.split(".")
    value = getattr(getattr(settings, concern), field)
    return value.get_secret_value() if hasattr(value, "get_secret_value") else value


@pytest.mark.parametrize("variable", sorted(ALL))
def test_a_setting_that_is_not_given_has_its_documented_default(variable: str) -> None:
    path, default = ALL[variable]
    assert at(load({}), path) == default


def test_the_settings_are_exactly_these() -> None:
    assert {item.variable for model in concerns().values() for item in declared(model)} == set(ALL)
    assert {setting.name for setting in explain({})} == set(ALL)


@pytest.mark.parametrize("concern", sorted(concerns()))
def test_defaults_pass_the_validation_that_given_values_pass(concern: str) -> None:
    part = getattr(load({}), concern)
    again = type(part).model_validate({name: getattr(part, name) for name in type(part).model_fields})
    assert again == part


def test_a_shown_value_can_be_given_back_and_changes_nothing() -> None:
    words = ("unset", "empty", "********")
    shown = {each.name: each.value_for_display for each in explain({}) if not each.value_for_display.startswith(words)}
    assert load(shown) == load({})


def test_blank_counts_as_unset() -> None:
    assert load(dict.fromkeys(ALL, "")) == load({})


def test_the_reclaim_lag_follows_the_tiering_lag_unless_it_is_given() -> None:
    assert load({"MODAK_TIERING_LAG": "7d"}).tiering.reclaim_lag == "7d"
    assert load({"MODAK_TIERING_LAG": "7d", "MODAK_RECLAIM_LAG": "14d"}).tiering.reclaim_lag == "14d"


def test_places_follow_the_home_folder_unless_they_are_given(tmp_path: Path) -> None:
    home = {"MODAK_HOME": str(tmp_path)}
    assert load(home).lake.warehouse == f"file://{tmp_path}/warehouse"
    assert load(home).measurements.temp_directory == tmp_path / "compaction"
    assert load({**home, "MODAK_WAREHOUSE": "s3://bucket/lake/"}).lake.warehouse == "s3://bucket/lake"


def test_the_environment_of_the_process_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODAK_PREMAKE_PARTITIONS", "7")
    assert load().tiering.premake_partitions == 7
