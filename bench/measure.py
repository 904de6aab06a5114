"""What a contestant used: wall time, CPU of all its processes (never Postgres') and peak memory, sampled from
outside.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import psutil

T = TypeVar("T")

_INTERVAL = 0.5
"""A sample walks over every process of the machine, which costs milliseconds on the cores that are measured."""


@dataclass
class Used:
    """One measured run."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_rss_mb: float = 0.0


@dataclass
class _Watch:
    """Sums this process and its children; a child's CPU is kept when it ends."""

    root: psutil.Process
    cpu: dict[int, float] = field(default_factory=dict)
    peak: int = 0

    def sample(self) -> None:
        rss = 0
        for process in [self.root, *self.root.children(recursive=True)]:
            try:
                if process.name().startswith("postgres"):
                    continue
                times = process.cpu_times()
                # Forked Spark workers share pages with their daemon; USS would be exact but is slow to read.
                rss += process.memory_info().rss
            except psutil.Error:
                continue
            self.cpu[process.pid] = times.user + times.system
        self.peak = max(self.peak, rss)

    def total(self) -> float:
        return sum(self.cpu.values())


def measured(work: Callable[[], T]) -> tuple[T, Used]:
    """Run `work` and say what it used."""
    watch = _Watch(psutil.Process())
    watch.sample()
    before, done = watch.total(), threading.Event()

    def loop() -> None:
        while not done.wait(_INTERVAL):
            watch.sample()

    sampler = threading.Thread(target=loop, daemon=True)
    sampler.start()
    started = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - started
    done.set()
    sampler.join()
    watch.sample()
    return result, Used(seconds, watch.total() - before, watch.peak / 2**20)
