"""One Spark session per run, in a home of its own; the jars come from the cache that all homes share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cloud_fixtures import CLOUDS, program

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from modak.spark.gateway import Gateway


QUICK_JAVA: Mapping[str, str] = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""For the short lives of JVMs in tests: a start costs little more than half, and no thread compiles for a later day."""


@dataclass(frozen=True)
class Options:
    """Spark's settings, without the environment."""

    master: str = "local[2]"
    conf: Mapping[str, str] = field(default_factory=lambda: QUICK_JAVA)
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
def spark(request: pytest.FixtureRequest, spark_home: Path) -> Iterator[SparkSession]:
    """The session of the run; `use_catalog` points it at a test's database."""
    from modak.spark import session

    _without_a_jvm()
    yield session.start(Chosen(), spark_home, schemes=schemes(request))
    session.stop()


@pytest.fixture(scope="session")
def gateway(request: pytest.FixtureRequest, spark_home: Path) -> Iterator[Gateway]:
    """Java: in the session's JVM where the run has a session, else in one of its own, which starts in half the time."""
    from modak.spark.gateway import open_gateway
    from modak.spark.session import gateway_of

    if any(item.get_closest_marker("spark") for item in request.session.items):
        yield gateway_of(request.getfixturevalue("spark"))
        return
    _without_a_jvm()
    opened = open_gateway(spark_home, Chosen(), schemes(request))
    yield opened
    opened.shut_down()


def schemes(request: pytest.FixtureRequest) -> frozenset[str]:
    """Object stores that tests of this run have lakes on: the one JVM of the run must know them from the start."""
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    here = {"s3", *(cloud for cloud in CLOUDS if program(cloud))}
    return frozenset(scheme for scheme in here if f"{scheme}_lake" in wanted)


def _without_a_jvm() -> None:
    """End one that the site of an earlier test has opened for itself: it knows only the stores which that test had."""
    from modak.spark.gateway import current

    if (found := current()) is not None:
        found.shut_down()
