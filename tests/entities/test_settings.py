"""Every setting reaches the field that it is for, and every field does what it says."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from structlog.testing import capture_logs

from modak import config
from modak.core.errors import Refused, UsageError
from modak.core.names import TableName
from modak.entities.compaction import compact
from modak.entities.config import CDCConfig, CompactionConfig, from_settings
from modak.entities.flushing import flush
from modak.entities.initial import init
from modak.entities.lock import acquire_schema_lock
from modak.entities.reconciling import reconcile
from modak.entities.store import objects_of
from modak.entities.tables import EntityTables, install
from tests.entities.world import SCHEMA, World

OTHER = {
    "CHANGE_LOG_TABLE": "other.log",
    "ENTITY_MAIN_TABLE": "other.main",
    "EAV_DATA_TABLE": "other.eav",
    "SCHEMAS": "7,8",
    "MIN_RECORDS": "11",
    "MAX_AGE_MS": "12",
    "BATCH_SIZE": "13",
    "PG_HOST": "db.example",
    "PG_PORT": "15",
    "PG_USER": "somebody",
    "PG_PASSWORD": "hidden",
    "PG_DB": "shop",
    "PG_USE_IAM": "true",
    "PG_TOKEN_COMMAND": "print-token",
    "PG_SSL_MODE": "verify-full",
    "DUCKDB_PATH": "/tmp/kernel",
    "DUCK_THREADS": "3",
    "DUCK_MEM_LIMIT": "2GiB",
    "QUERY_TIMEOUT": "60",
    "PARQUET_COMPRESSION": "snappy",
    "PARQUET_COMPRESSION_LEVEL": "5",
    "ESTIMATED_ROW_BYTES": "2048",
    "MAX_BATCH_BYTES": "1048576",
    "TARGET_FILE_SIZE_MB": "17",
    "MAX_BATCH_SIZE": "18",
    "S3_BUCKET": "things",
    "PREFIX": "elsewhere",
    "S3_ENDPOINT": "s3.example:9000",
    "S3_REGION": "eu-north-1",
    "S3_USE_SSL": "false",
    "S3_USE_PATH": "true",
    "MANIFEST_PREFIX": "lists",
    "MANIFEST_TEMPLATE": "m/{{.SchemaID}}.json",
    "MAX_RETRIES": "6",
    "BASE_BACKOFF_MS": "7",
    "MAX_BACKOFF_MS": "8",
    "SCHEMA_ID": "9",
    "MANIFEST_PATH": "one.json",
    "TARGET_BASE_SIZE_MB": "19",
    "MAX_DELTA_SIZE_MB": "20",
    "DIRTY_RATIO_PCT": "21",
    "COMPACT_INTERVAL_SECONDS": "22",
    "TEMP_PREFIX": "rewriting",
    "MAX_PARALLEL_FILES": "4",
}


def test_every_setting_reaches_its_field() -> None:
    settings = config.load({f"MODAK_ENTITIES_{name}": value for name, value in OTHER.items()})
    capture, compaction = from_settings(settings.entities)
    for given, default in ((capture, CDCConfig()), (compaction, CompactionConfig())):
        same = [field.name for field in fields(default) if getattr(given, field.name) == getattr(default, field.name)]
        assert not same
        for name, value in OTHER.items():
            # Each to its own: no two of the numbers are the same.
            if hasattr(given, name.lower()) and value.isdigit():
                assert getattr(given, name.lower()) == int(value), name
    assert (compaction.base_backoff, compaction.max_backoff) == (0.007, 0.008)
    assert (capture.pg_password, capture.pg_token_command) == ("hidden", "print-token")
    assert (capture.s3_prefix, capture.schemas, compaction.run_interval) == ("elsewhere", (7, 8), 22)
    assert "hidden" not in repr(settings) + repr(capture)


def test_a_bucket_is_reached_as_its_settings_say() -> None:
    lake = {
        "MODAK_WAREHOUSE": "s3://lake/here",
        "MODAK_S3_ENDPOINT": "lake.example:9000",
        "MODAK_S3_REGION": "us-east-1",
        "MODAK_S3_ACCESS_KEY": "the-key",
        "MODAK_S3_SECRET_KEY": "the-secret",
    }
    settings = config.load({**lake, **{f"MODAK_ENTITIES_{name}": value for name, value in OTHER.items()}})
    capture, _ = from_settings(settings.entities)
    keys = {"s3.access-key-id": "the-key", "s3.secret-access-key": "the-secret"}
    own = {**keys, "s3.endpoint": "http://s3.example:9000", "client.region": "eu-north-1"}
    by_path = {"s3.path-style-access": "true"}
    assert reached(settings, capture) == ("s3://things", own | by_path)
    assert reached(settings, replace(capture, s3_use_path=False)) == ("s3://things", own)
    over_tls = {**own, "s3.endpoint": "https://s3.example:9000"}
    assert reached(settings, replace(capture, s3_use_ssl=True, s3_use_path=False)) == ("s3://things", over_tls)
    # What is not said of the entities' own bucket, and all of the lake, is as for the lake.
    blank = CDCConfig(s3_bucket="things")
    of_lake = {**keys, "s3.endpoint": "http://lake.example:9000", "client.region": "us-east-1"}
    assert reached(settings, blank) == ("s3://things", of_lake)
    assert reached(settings, CDCConfig()) == ("s3://lake/here", of_lake | by_path)


def reached(settings: config.Settings, capture: CDCConfig) -> tuple[str, dict[str, str]]:
    objects = objects_of(settings, capture)
    return objects.root, objects._props


def test_one_pass_is_bounded(world: World) -> None:
    world.many(0, 7)
    world.configure(batch_size=3, max_batch_size=4)
    assert flush(world.store)[0].rows == 4
    assert world.dirty() == 3


def test_a_rewrite_writes_below_the_prefix_that_is_named_for_it(world: World) -> None:
    world.many(0, 3)
    flush(world.store)
    world.compaction = CompactionConfig(temp_prefix="rewriting")
    written: list[str] = []
    put = type(world.objects).upload

    def upload(objects: object, path: str, *more: object) -> object:
        written.append(path)
        return put(objects, path, *more)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(world.objects), "upload", upload)
        assert compact(world.store)[0].rows == 3
    assert [path.split("/")[0] for path in written] == ["rewriting"]
    assert [entry.path.split("/")[0] for entry in world.manifest.base] == ["entities"]
    # What a crash leaves there is found and collected as everywhere.
    left = f"rewriting/base/{SCHEMA}/_tmp/left.parquet"
    world.objects.put(left, b"half")
    assert reconcile(world.store, SCHEMA).found.leftovers == (left,)
    reconcile(world.store, SCHEMA, gc=True, grace_ms=0)
    assert left not in world.paths()


def test_one_schema_and_one_manifest_can_be_compacted_alone(world: World) -> None:
    world.many(0, 3)
    flush(world.store)
    named = "elsewhere/invoices.json"
    world.objects.put(named, world.objects.get("entities/manifest/7.json").data)
    world.compaction = CompactionConfig(manifest_path=named)
    with pytest.raises(UsageError, match="not whose it is"):
        compact(world.store)
    world.compaction = CompactionConfig(manifest_path=named, schema_id=SCHEMA)
    (report,) = compact(world.store)
    assert (report.schema_id, report.rows) == (SCHEMA, 3)
    assert replace(world.store, manifest_path=named).manifests.load(SCHEMA).manifest.delta == ()
    assert len(world.manifest.delta) == 1


def test_the_lock_is_that_of_one_schema_of_one_log(world: World) -> None:
    with world.connect() as conn:
        conn.execute("CREATE SCHEMA other")
        names = (OTHER["ENTITY_MAIN_TABLE"], OTHER["EAV_DATA_TABLE"], OTHER["CHANGE_LOG_TABLE"])
        install(conn, EntityTables(*map(TableName.parse, names)))
    with world.connect() as one, world.connect() as two:
        assert acquire_schema_lock(one, SCHEMA)
        assert not acquire_schema_lock(two, SCHEMA)
        assert acquire_schema_lock(two, SCHEMA + 1)
        assert acquire_schema_lock(two, SCHEMA, "other.log")


def test_a_lock_of_a_log_that_is_not_there_is_refused(world: World) -> None:
    with world.connect() as conn, pytest.raises(Refused, match=r"no table public\.changelog") as caught:
        acquire_schema_lock(conn, SCHEMA, "changelog")
    assert (caught.value.code, "entities install" in caught.value.hint) == ("entities.no_tables", True)


def test_the_progress_of_an_init_is_told(world: World) -> None:
    world.many(0, 6)
    world.configure(batch_size=2, target_file_size_mb=0)
    with capture_logs() as said:
        init(world.store, SCHEMA)
    told = [(each["tasks"], each["of"], each["rows"]) for each in said if each["event"] == "entities.init_progress"]
    assert told == [(1, 3, 6), (2, 3, 6), (3, 3, 6)]
