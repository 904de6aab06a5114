"""One Spark session per run, in a home of its own; the jars come from the cache that all homes share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from modak.spark.gateway import Gateway


@dataclass(frozen=True)
class Options:
    """Spark's settings, without the environment."""

    master: str = "local[2]"
    conf: Mapping[str, str] = field(default_factory=dict)
    jars: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chosen:
    """All settings, as far as the Spark room reads them."""

    spark: Options = field(default_factory=Options)


@pytest.fixture(scope="session")
def spark_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of the session."""
    return tmp_path_factory.mktemp("spark-home")


@pytest.fixture(scope="session")
def spark(spark_home: Path) -> Iterator[SparkSession]:
    """The session of the run; `use_catalog` points it at a test's database."""
    from modak.spark import session

    yield session.start(Chosen(), spark_home)
    session.stop()


@pytest.fixture(scope="session")
def gateway(spark: SparkSession) -> Gateway:
    """Java, in the session's JVM."""
    from modak.spark.session import gateway_of

    return gateway_of(spark)
