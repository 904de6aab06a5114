"""Where jobs run: in Spark tasks or in child processes of this one. Either way each has a process of its own.

A task of Spark that crashes takes the whole Spark job with it and its exit code is lost. So the task starts a child,
and what happens to the child comes back as data.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from modak.measurements.isolation import Children, SubprocessJobConfig, SubprocessJobResult, run_job_in_subprocess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Runner(Protocol):
    """Runs jobs side by side."""

    @property
    def slots(self) -> int:
        """How many jobs run at the same time."""

    def threads(self, jobs: int) -> int:
        """How many threads a job may use when so many run."""

    def run(self, orders: Sequence[SubprocessJobConfig]) -> list[SubprocessJobResult]:
        """Run all jobs; answers in the order of the orders, failures among them."""


class ProcessRunner:
    """Jobs as children of this process."""

    def __init__(self, max_concurrent: int = 2) -> None:
        self.slots = max(max_concurrent, 1)

    def threads(self, jobs: int) -> int:
        return max((os.cpu_count() or 1) // max(min(jobs, self.slots), 1), 1)

    def run(self, orders: Sequence[SubprocessJobConfig]) -> list[SubprocessJobResult]:
        children = Children()
        with ThreadPoolExecutor(self.slots) as pool:
            try:
                return list(pool.map(children.run, orders))
            except BaseException:
                # Whoever interrupts us is not kept waiting until the jobs are done; the manifests tell what they were.
                children.end()
                raise


class SparkRunner:
    """Jobs as children of Spark tasks: one Spark job, a task each."""

    def __init__(self, spark: SparkSession, max_concurrent: int | None = None) -> None:
        self._spark = spark
        self._cores = int(spark.sparkContext.defaultParallelism)
        self._local = (spark.sparkContext.master or "").startswith("local")
        self.slots = max(min(max_concurrent or self._cores, self._cores), 1)

    def threads(self, jobs: int) -> int:
        # On a cluster a task owns one core of a machine that others use too; at home the idle ones are ours.
        return max(self._cores // max(min(jobs, self.slots), 1), 1) if self._local else 1

    def run(self, orders: Sequence[SubprocessJobConfig]) -> list[SubprocessJobResult]:
        from modak.spark.distribute import distribute

        return distribute(self._spark, run_job_in_subprocess, orders)

    def sort(self, order: SubprocessJobConfig) -> SubprocessJobResult:
        """Run one large job as a sort over all cores."""
        from modak.measurements.sort import sort_in_spark

        return sort_in_spark(self._spark, order)
