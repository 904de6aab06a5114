"""Functions that travel are nested, because workers do not import test modules."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from modak.core import faults
from modak.core.errors import Conflict, ModakError, Refused
from modak.core.faults import Fault, InjectedFault
from modak.spark.distribute import distribute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_results_come_in_the_order_of_the_items(spark: SparkSession) -> None:
    def work(item: tuple[int, float]) -> int:
        import time

        time.sleep(item[1])
        return item[0] * 10

    assert distribute(spark, work, [(0, 0.4), (1, 0.0), (2, 0.1), (3, 0.0)]) == [0, 10, 20, 30]


def test_no_items_need_no_job(spark: SparkSession) -> None:
    assert distribute(spark, lambda item: item, []) == []


def test_none_is_a_result(spark: SparkSession) -> None:
    assert distribute(spark, lambda _: None, [1, 2]) == [None, None]


def test_tasks_find_the_kernels_loaded(spark: SparkSession) -> None:
    def work(_: int) -> list[str]:
        import sys

        return [name for name in ("pyarrow.parquet", "adbc_driver_postgresql.dbapi") if name in sys.modules]

    assert distribute(spark, work, [0]) == [["pyarrow.parquet", "adbc_driver_postgresql.dbapi"]]


def test_no_task_reads_the_archives_on_the_path_again(spark: SparkSession) -> None:
    """Before each task Spark makes Python forget what it knows of them."""

    def work(_: int) -> list[str]:
        import importlib
        import zipimport
        from typing import Any

        module: Any = zipimport
        lists, read = module._read_directory, []
        module._read_directory = lambda archive: read.append(archive) or lists(archive)
        try:
            importlib.invalidate_caches()
        finally:
            module._read_directory = lists
        return read

    assert distribute(spark, work, [0]) == [[]]


@pytest.mark.parametrize("kind", [ModakError, Refused, Conflict])
def test_an_error_of_ours_arrives_as_itself(spark: SparkSession, kind: type[ModakError]) -> None:
    def work(item: int) -> int:
        if item == 1:
            raise kind("types.overflow", "Column n overflows.", hint="Widen it.", retryable=False)
        return item

    with pytest.raises(kind) as caught:
        distribute(spark, work, [0, 1, 2])

    error = caught.value
    assert type(error) is kind
    assert (error.code, error.message, error.hint, error.retryable) == (
        "types.overflow",
        "Column n overflows.",
        "Widen it.",
        False,
    )


def test_an_unexpected_error_shows_where_but_no_secret_of_the_item(spark: SparkSession) -> None:
    def work(item: dict[str, str]) -> None:
        raise ValueError(f"cannot reach host with s3cr3t-{item['password']} and postgresql://u:pw123@h/db")

    with pytest.raises(ModakError) as caught:
        distribute(spark, work, [{"password": "hunter2"}])

    assert caught.value.code == "spark.task_failed"
    assert "ValueError: cannot reach host" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "pw123" not in str(caught.value)


def test_a_result_that_cannot_travel_is_an_error_of_the_task(spark: SparkSession) -> None:
    with pytest.raises(ModakError, match="pickle") as caught:
        distribute(spark, lambda _: (n for n in [1]), [1])

    assert caught.value.code == "spark.task_failed"


def test_an_armed_fault_travels_and_comes_back(spark: SparkSession) -> None:
    def work(item: int) -> int:
        from modak.core.faults import reach

        reach("test.in_task")
        return item

    faults.arm(Fault("test.in_task"))
    with pytest.raises(InjectedFault, match=r"test\.in_task"):
        distribute(spark, work, [1, 2])

    faults.arm(None)
    assert distribute(spark, work, [1, 2]) == [1, 2]


def test_a_killed_worker_is_an_error_that_may_be_tried_again(spark: SparkSession) -> None:
    def work(item: int) -> int:
        from modak.core.faults import reach

        reach("test.in_task")
        return item

    faults.arm(Fault("test.in_task", "kill"))
    with pytest.raises(ModakError) as caught:
        distribute(spark, work, [1, 2])

    assert (caught.value.code, caught.value.retryable) == ("spark.task_failed", True)
    faults.arm(None)
    assert distribute(spark, work, [1, 2]) == [1, 2]


def test_progress_counts_up_to_all_items(spark: SparkSession) -> None:
    def work(_: int) -> None:
        import time

        time.sleep(0.3)

    seen: list[tuple[int, int]] = []
    distribute(spark, work, range(6), on_progress=lambda done, total: seen.append((done, total)))

    assert seen == sorted(set(seen))
    assert seen[-1] == (6, 6)
    assert len(seen) > 2


def test_nothing_of_a_job_stays_in_the_driver(spark: SparkSession) -> None:
    from pyspark import accumulators

    before = len(accumulators._accumulatorRegistry)
    distribute(spark, lambda n: n, [1, 2])

    assert len(accumulators._accumulatorRegistry) == before


def test_two_threads_share_the_session(spark: SparkSession) -> None:
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(distribute, spark, lambda n: n + 1, range(start, start + 3)) for start in (0, 100)]

    assert [run.result() for run in runs] == [[1, 2, 3], [101, 102, 103]]


@pytest.fixture
def trail(tmp_path: Path) -> Iterator[Path]:
    """A file that tasks of `restless` write to until somebody stops them."""
    path = tmp_path / "trail"
    path.touch()
    yield path
    # Ends them even when the test fails.
    path.unlink()


def restless(trail: Path) -> object:
    def work(item: int) -> int:
        import os
        import time

        from modak.core.errors import Refused

        if item == 1:
            time.sleep(1)
            raise Refused("test.refused", "No.")
        for _ in range(400):
            if not os.path.exists(trail):
                break
            with open(trail, "a") as file:
                file.write(".")
            time.sleep(0.05)
        return item

    return work


def still_written(trail: Path) -> bool:
    before = trail.stat().st_size
    time.sleep(0.5)
    return trail.stat().st_size != before


def test_after_a_refusal_no_task_runs_any_more(spark: SparkSession, trail: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(Refused):
        distribute(spark, restless(trail), [0, 1, *range(2, 50)])  # type: ignore[arg-type]

    assert not still_written(trail)
    assert time.monotonic() - begun < 30


def test_ctrl_c_cancels_the_job(spark: SparkSession, trail: Path) -> None:
    begun = time.monotonic()
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        distribute(spark, restless(trail), [0, 2, 3])  # type: ignore[arg-type]

    assert not still_written(trail)
    assert time.monotonic() - begun < 30
    assert distribute(spark, lambda n: n, [1]) == [1]


def test_a_listener_that_fails_cancels_the_job(spark: SparkSession, trail: Path) -> None:
    def listener(done: int, total: int) -> None:
        raise ZeroDivisionError

    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        distribute(spark, restless(trail), [0, 2, 3, 4, 5, 6], on_progress=listener)  # type: ignore[arg-type]

    assert not still_written(trail)
    assert time.monotonic() - begun < 30
