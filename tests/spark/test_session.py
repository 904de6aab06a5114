from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.spark.session import gateway_of, start, use_catalog, warm
from tests.spark_fixtures import Chosen

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.bare]

CATALOG_TABLES = """
    CREATE SCHEMA modak_iceberg;
    CREATE TABLE modak_iceberg.iceberg_tables (
        catalog_name varchar(255) NOT NULL, table_namespace varchar(255) NOT NULL, table_name varchar(255) NOT NULL,
        metadata_location varchar(1000), previous_metadata_location varchar(1000), iceberg_type varchar(5),
        PRIMARY KEY (catalog_name, table_namespace, table_name));
    CREATE TABLE modak_iceberg.iceberg_namespace_properties (
        catalog_name varchar(255) NOT NULL, namespace varchar(255) NOT NULL, property_key varchar(255),
        property_value varchar(1000), PRIMARY KEY (catalog_name, namespace, property_key));
"""


def with_catalog(dsn: Dsn) -> Dsn:
    with connect(dsn, autocommit=True) as conn:
        conn.execute(CATALOG_TABLES)  # type: ignore[arg-type,unused-ignore]
    return dsn


@pytest.fixture
def lake(spark: SparkSession, fresh_database: Dsn, tmp_path: Path) -> Dsn:
    use_catalog(spark, with_catalog(fresh_database), (tmp_path / "warehouse").as_uri())
    return fresh_database


def test_the_session_reads_and_writes_the_lake_that_the_database_knows(spark: SparkSession, lake: Dsn) -> None:
    spark.sql("CREATE NAMESPACE modak.shop")
    spark.sql(
        "CREATE TABLE modak.shop.orders (id bigint, at timestamp) USING iceberg TBLPROPERTIES ('format-version'='3')"
    )
    spark.sql("INSERT INTO modak.shop.orders VALUES (1, TIMESTAMP '2026-01-01 00:00:00')")

    assert spark.sql("SELECT id, cast(at AS string) FROM modak.shop.orders").collect() == [(1, "2026-01-01 00:00:00")]
    with connect(lake) as conn:
        rows = conn.execute("SELECT catalog_name, table_namespace, table_name FROM modak_iceberg.iceberg_tables")
        assert rows.fetchall() == [("modak", "shop", "orders")]


def test_a_commit_of_somebody_else_is_seen_at_once(spark: SparkSession, lake: Dsn) -> None:
    spark.sql("CREATE NAMESPACE modak.shop")
    spark.sql("CREATE TABLE modak.shop.orders (id bigint) USING iceberg")
    spark.table("modak.shop.orders").count()

    with connect(lake, autocommit=True) as conn:
        conn.execute("DELETE FROM modak_iceberg.iceberg_tables")

    assert not spark.catalog.tableExists("modak.shop.orders")


def test_another_database_replaces_the_first(spark: SparkSession, lake: Dsn, database: Dsn, tmp_path: Path) -> None:
    spark.sql("CREATE NAMESPACE modak.first")
    use_catalog(spark, with_catalog(database), (tmp_path / "other").as_uri())

    assert spark.sql("SHOW NAMESPACES IN modak").collect() == []


def test_the_password_is_on_no_command_line_and_in_no_configuration(spark: SparkSession, lake: Dsn) -> None:
    assert len(lake.password) > 8

    shown = str(spark.sparkContext.getConf().getAll()) + str(spark.sql("SET -v").collect())
    for process in Path("/proc").glob("[0-9]*"):
        try:
            shown += (process / "cmdline").read_text(errors="replace")
        except OSError:
            continue

    assert lake.password not in shown


def test_there_is_one_session_per_process(spark: SparkSession, spark_home: Path) -> None:
    assert start(Chosen(), spark_home) is spark


def test_settings_suit_a_quiet_worker(spark: SparkSession) -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.sparkContext.uiWebUrl is None
    options = gateway_of(spark).jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments()
    assert {"-Xmx2g", "-XX:+ExitOnOutOfMemoryError"} <= set(options)
    assert "--add-modules=jdk.incubator.vector" not in options


def test_ctrl_c_stays_with_whoever_started_the_session(spark: SparkSession) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_warming_needs_nothing_but_the_session(spark: SparkSession) -> None:
    warm(spark)
