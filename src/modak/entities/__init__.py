"""Entity stores: changes of entities in Postgres, captured into base and delta Parquet files with a manifest.

A change meets the files in this order: `triggers.sql` → `changelog.py` → `flushing.py` → `rows.py` → `export.py` →
`manifest.py` → `reading.py`, and later `compaction.py`. Names are resolved on first use: importing the room is light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modak.entities.changelog import (
        get_change_log_stats,
        mark_flushed,
        mark_flushed_ids_at_snapshot,
        select_batch_row_ids,
    )
    from modak.entities.clients import S3FullClient, S3ObjectClient, copy_tmp_to_final
    from modak.entities.compaction import compact
    from modak.entities.config import (
        DEFAULT_BASE_BACKOFF_MS,
        DEFAULT_BATCH_SIZE,
        DEFAULT_DIRTY_RATIO_PCT,
        DEFAULT_ESTIMATED_ROW_BYTES,
        DEFAULT_MAX_AGE_MS,
        DEFAULT_MAX_BACKOFF_MS,
        DEFAULT_MAX_BATCH_BYTES,
        DEFAULT_MAX_BATCH_SIZE,
        DEFAULT_MAX_DELTA_SIZE_MB,
        DEFAULT_MAX_RETRIES,
        DEFAULT_MIN_RECORDS,
        DEFAULT_PARQUET_COMPRESSION,
        DEFAULT_PARQUET_COMPRESSION_LEVEL,
        DEFAULT_PG_SSL_MODE,
        DEFAULT_TARGET_BASE_SIZE_MB,
        DEFAULT_TARGET_FILE_SIZE_MB,
        CDCConfig,
        CompactionConfig,
        ManifestConfig,
    )
    from modak.entities.export import DuckExporter, SnapshotExporter
    from modak.entities.flushing import flush, run_once
    from modak.entities.health import status
    from modak.entities.initial import init
    from modak.entities.lock import acquire_schema_lock, release_schema_lock
    from modak.entities.manifest import Manifest, ManifestEntry
    from modak.entities.paths import build_base_path, build_base_temp_path, build_delta_path, build_temp_path
    from modak.entities.reading import read
    from modak.entities.reconciling import reconcile
    from modak.entities.registry import Registry, load_registry
    from modak.entities.store import EntityStore
    from modak.entities.tables import install
    from modak.entities.verifying import verify

_HOMES = {
    "changelog": ("get_change_log_stats", "mark_flushed", "mark_flushed_ids_at_snapshot", "select_batch_row_ids"),
    "clients": ("S3FullClient", "S3ObjectClient", "copy_tmp_to_final"),
    "compaction": ("compact",),
    "export": ("DuckExporter", "SnapshotExporter"),
    "flushing": ("flush", "run_once"),
    "initial": ("init",),
    "lock": ("acquire_schema_lock", "release_schema_lock"),
    "manifest": ("Manifest", "ManifestEntry"),
    "paths": ("build_base_path", "build_base_temp_path", "build_delta_path", "build_temp_path"),
    "reading": ("read",),
    "reconciling": ("reconcile",),
    "registry": ("Registry", "load_registry"),
    "health": ("status",),
    "store": ("EntityStore",),
    "tables": ("install",),
    "verifying": ("verify",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"modak.entities.{_HOME_OF.get(name, 'config')}"), name)
    globals()[name] = value
    return value


__all__ = [
    "DEFAULT_BASE_BACKOFF_MS",
    "DEFAULT_BATCH_SIZE",
    "DEFAULT_DIRTY_RATIO_PCT",
    "DEFAULT_ESTIMATED_ROW_BYTES",
    "DEFAULT_MAX_AGE_MS",
    "DEFAULT_MAX_BACKOFF_MS",
    "DEFAULT_MAX_BATCH_BYTES",
    "DEFAULT_MAX_BATCH_SIZE",
    "DEFAULT_MAX_DELTA_SIZE_MB",
    "DEFAULT_MAX_RETRIES",
    "DEFAULT_MIN_RECORDS",
    "DEFAULT_PARQUET_COMPRESSION",
    "DEFAULT_PARQUET_COMPRESSION_LEVEL",
    "DEFAULT_PG_SSL_MODE",
    "DEFAULT_TARGET_BASE_SIZE_MB",
    "DEFAULT_TARGET_FILE_SIZE_MB",
    "CDCConfig",
    "CompactionConfig",
    "DuckExporter",
    "EntityStore",
    "Manifest",
    "ManifestConfig",
    "ManifestEntry",
    "Registry",
    "S3FullClient",
    "S3ObjectClient",
    "SnapshotExporter",
    "acquire_schema_lock",
    "build_base_path",
    "build_base_temp_path",
    "build_delta_path",
    "build_temp_path",
    "compact",
    "copy_tmp_to_final",
    "flush",
    "get_change_log_stats",
    "init",
    "install",
    "load_registry",
    "mark_flushed",
    "mark_flushed_ids_at_snapshot",
    "read",
    "reconcile",
    "release_schema_lock",
    "run_once",
    "select_batch_row_ids",
    "status",
    "verify",
]
