"""Every name of the seed is public, documented and does its job."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace

import pytest

import modak.entities as entities
from modak.core.clock import FrozenClock
from modak.core.errors import UsageError
from modak.entities.changelog import get_change_log_stats, mark_flushed, select_batch_row_ids
from modak.entities.config import CDCConfig, CompactionConfig, ManifestConfig, from_settings
from modak.entities.export import SnapshotExporter
from modak.entities.flushing import run_once
from modak.entities.paths import build_base_path, build_base_temp_path, build_delta_path, build_temp_path, uuid7
from modak.entities.snapshot import holding
from modak.entities.store import backoff
from modak.entities.tables import check
from tests.entities.world import SCHEMA, World, key

SEED_FUNCTIONS = [
    "acquire_schema_lock",
    "release_schema_lock",
    "build_base_path",
    "build_base_temp_path",
    "build_delta_path",
    "build_temp_path",
    "copy_tmp_to_final",
    "get_change_log_stats",
    "mark_flushed",
    "mark_flushed_ids_at_snapshot",
    "run_once",
    "select_batch_row_ids",
]
SEED_TYPES = [
    "CDCConfig",
    "CompactionConfig",
    "DuckExporter",
    "Manifest",
    "ManifestConfig",
    "ManifestEntry",
    "S3FullClient",
    "S3ObjectClient",
]
SEED_CONSTANTS = {
    "DEFAULT_PARQUET_COMPRESSION": "zstd",
    "DEFAULT_PARQUET_COMPRESSION_LEVEL": 3,
    "DEFAULT_MIN_RECORDS": 20000,
    "DEFAULT_MAX_AGE_MS": 3600000,
    "DEFAULT_ESTIMATED_ROW_BYTES": 1024,
    "DEFAULT_MAX_BATCH_BYTES": 50 * 1024 * 1024,
    "DEFAULT_BATCH_SIZE": 10000,
    "DEFAULT_TARGET_BASE_SIZE_MB": 256,
    "DEFAULT_TARGET_FILE_SIZE_MB": 256,
    "DEFAULT_MAX_BATCH_SIZE": 10000000,
    "DEFAULT_MAX_DELTA_SIZE_MB": 50,
    "DEFAULT_DIRTY_RATIO_PCT": 5,
    "DEFAULT_MAX_RETRIES": 5,
    "DEFAULT_BASE_BACKOFF_MS": 100,
    "DEFAULT_MAX_BACKOFF_MS": 10000,
    "DEFAULT_PG_SSL_MODE": "require",
}
SEED_CDC_FIELDS = [
    "change_log_table",
    "entity_main_table",
    "eav_data_table",
    "min_records",
    "max_age_ms",
    "batch_size",
    "pg_host",
    "pg_port",
    "pg_user",
    "pg_password",
    "pg_db",
    "pg_use_iam",
    "pg_ssl_mode",
    "duckdb_path",
    "duck_threads",
    "duck_mem_limit",
    "query_timeout",
    "parquet_compression",
    "parquet_compression_level",
    "estimated_row_bytes",
    "max_batch_bytes",
    "target_file_size_mb",
    "max_batch_size",
    "s3_bucket",
    "s3_prefix",
    "s3_endpoint",
    "s3_region",
    "s3_use_ssl",
    "s3_use_path",
    "manifest_prefix",
    "manifest_template",
]
SEED_COMPACTION_FIELDS = [
    "schema_id",
    "manifest_path",
    "target_base_size_mb",
    "max_delta_size_mb",
    "dirty_ratio_pct",
    "run_interval",
    "temp_prefix",
    "max_parallel_files",
    "max_retries",
    "base_backoff",
    "max_backoff",
]
SEED_ENTRY_FIELDS = ["path", "min_row_id", "max_row_id", "min_time_slot", "max_time_slot", "size_bytes", "level"]


@pytest.mark.parametrize("name", [*SEED_FUNCTIONS, *SEED_TYPES])
def test_every_function_and_type_of_the_seed_is_public_and_documented(name: str) -> None:
    assert name in entities.__all__
    assert (getattr(entities, name).__doc__ or "").strip()


def test_every_constant_of_the_seed_has_its_value() -> None:
    assert {name: getattr(entities, name) for name in SEED_CONSTANTS} == SEED_CONSTANTS


def test_every_field_of_the_seed_exists() -> None:
    assert set(SEED_CDC_FIELDS) <= {field.name for field in fields(CDCConfig)}
    assert set(SEED_COMPACTION_FIELDS) <= {field.name for field in fields(CompactionConfig)}
    assert set(SEED_ENTRY_FIELDS) <= {field.name for field in fields(entities.ManifestEntry)}
    assert {"schema_id", "base", "delta"} <= {field.name for field in fields(entities.Manifest)}
    assert {"bucket", "prefix", "path_template"} <= {field.name for field in fields(ManifestConfig)}


def test_importing_the_room_loads_nothing_heavy() -> None:
    heavy = ["pyspark", "pyarrow", "duckdb", "psycopg", "pydantic", "obstore"]
    code = f"import sys, modak.entities; sys.exit(any(name in sys.modules for name in {heavy}))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_missing_fields_get_their_defaults_and_meaningful_zeroes_stay() -> None:
    blank = CDCConfig(min_records=0, batch_size=-1, change_log_table="", target_file_size_mb=0, max_age_ms=0)
    filled = blank.with_defaults()
    assert (filled.min_records, filled.batch_size, filled.change_log_table) == (20_000, 10_000, "change_log")
    assert (filled.target_file_size_mb, filled.max_age_ms) == (0, 0)
    assert CompactionConfig(target_base_size_mb=0, dirty_ratio_pct=-1).with_defaults() == CompactionConfig()


def test_settings_become_configuration() -> None:
    from modak import config

    settings = config.load({"MODAK_ENTITIES_MIN_RECORDS": "5", "MODAK_ENTITIES_BASE_BACKOFF_MS": "50"})
    capture, compaction = from_settings(settings.entities)
    assert (capture.min_records, compaction.base_backoff) == (5, 0.05)
    assert replace(capture, min_records=20_000, base_backoff_ms=100) == CDCConfig()
    assert replace(compaction, base_backoff=0.1) == CompactionConfig()


def test_paths_are_those_of_the_seed_and_ours() -> None:
    assert build_delta_path("p/", 7, "u") == "p/delta/7/u.parquet"
    assert build_temp_path("p", 7, "u") == "p/delta/7/_tmp/u.parquet"
    assert build_base_path("p", 7, "a", "b") == "p/base/7/a_b.parquet"
    assert build_base_path("p", 7, "a", "b", "u") == "p/base/7/a_b_u.parquet"
    assert build_base_temp_path("", 7, "u") == "base/7/_tmp/u.parquet"
    first = uuid7(FrozenClock())
    assert first[14] == "7"
    assert first[19] in "89ab"
    assert len({uuid7(FrozenClock()) for _ in range(100)}) == 100


def test_a_manifest_template_must_vary_by_schema() -> None:
    assert ManifestConfig(prefix="x").key(3) == "x/manifest/3.json"
    with pytest.raises(UsageError, match="same for every schema"):
        ManifestConfig(path_template="manifest/all.json").key(3)


def test_a_pause_doubles_up_to_its_limit() -> None:
    assert [backoff(0.1, 10, attempt, 0.5) for attempt in (0, 1, 2, 20)] == [0.1, 0.2, 0.4, 10]
    assert backoff(0.1, 10, 0, 0.0) == 0.05


def test_the_seeds_functions_work_on_a_store(world: World) -> None:
    world.many(0, 5)
    with world.connect() as conn:
        count, oldest = get_change_log_stats(conn, "change_log", SCHEMA)
        ids, newest = select_batch_row_ids(conn, "change_log", SCHEMA, 3)
        assert (count, len(ids)) == (5, 3)
        assert 0 < oldest <= newest
        assert {str(each) for each in ids} == {key(number) for number in range(3)}
        marked = entities.mark_flushed_ids_at_snapshot(conn, "change_log", SCHEMA, ids, newest, 5)
        assert set(marked) == set(ids)
        assert entities.mark_flushed_ids_at_snapshot(conn, "change_log", SCHEMA, ids, newest, 5) == []
        assert mark_flushed(conn, "change_log", SCHEMA, 0, 6) == 0
        assert mark_flushed(conn, "change_log", SCHEMA, 2**62, 6) == 2
        assert get_change_log_stats(conn, "change_log", SCHEMA) == (0, 0)
        assert entities.acquire_schema_lock(conn, SCHEMA)
        assert entities.release_schema_lock(conn, SCHEMA)
        assert not entities.release_schema_lock(conn, SCHEMA)


def test_run_once_needs_no_store_and_takes_a_client(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.many(0, 5)
    config = replace(
        world.config,
        pg_host=world.dsn.host,
        pg_port=world.dsn.port,
        pg_db=world.dsn.dbname,
        pg_user=world.dsn.user,
        pg_password=world.dsn.password,
    )
    from modak.entities.clients import ObjectsClient

    client = ObjectsClient(world.objects)
    assert isinstance(client, entities.S3FullClient)
    (dry,) = run_once(config, client, dry_run=True, registry=world.registry, objects=world.objects)
    assert (dry.rows, world.dirty()) == (0, 5)
    for name, value in world.environ.items():
        monkeypatch.setenv(name, value)
    (done,) = run_once(config, registry=world.registry)
    assert (done.rows, world.dirty()) == (5, 0)
    assert world.dsn.password not in repr(config)


def test_an_exporter_writes_temporary_files(world: World) -> None:
    world.many(0, 5)
    exporter = SnapshotExporter(world.store)
    with world.connect() as conn:
        installed = check(conn, world.store.tables)
    with holding(world.store, installed) as snapshot:
        delta = exporter.export_snapshot_to_tmp(SCHEMA, snapshot.id, [key(1), key(2)])
        base = exporter.export_base_file_to_tmp(SCHEMA, snapshot.id)
    assert (delta.rows, base.rows) == (2, 5)
    assert sorted(world.paths()) == sorted([delta.drafts[0].tmp, base.drafts[0].tmp])
    assert exporter.config is world.store.config
    client = world.store.copier
    entities.copy_tmp_to_final(client, "", delta.drafts[0].tmp, "entities/final.parquet")
    assert "entities/final.parquet" in world.paths()
    assert delta.drafts[0].tmp not in world.paths()
