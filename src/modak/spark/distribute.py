"""Runs a plain Python function over items in Spark tasks, one item per task, and brings the results back in order.

The items travel as an RDD with one partition each: a task gets its own item only, the item is Spark's unit of retry,
and no schema stands in between (tasks and driver exchange small descriptions of files, never rows). Memory in the
driver is bounded by the results, in a task by what the function holds.

Errors come back as values, not as Java stack traces. A `ModakError` that cannot be helped by another try, and an
injected fault, ends the job at once; everything else is left to Spark's retries and comes back after the last one. When
`distribute` returns or raises, no task of it runs any more, so the caller may clean up what they wrote.
"""

from __future__ import annotations

import pickle
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import uuid4

from modak.core import faults
from modak.core.errors import ModakError
from modak.core.faults import Fault, InjectedFault
from modak.spark.gateway import Gateway, lost
from modak.storage import access

if TYPE_CHECKING:
    from pyspark import Accumulator, SparkContext
    from pyspark.sql import SparkSession

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int, int], None]
Failures = list[tuple[int, bytes]]

_POLL_SECONDS = 0.1
_SETTLE_SECONDS = 60.0
_TRACEBACK_LINES = 6
_SECRET_NAME = re.compile(r"password|secret|token|access[_.-]?key|account[_.-]?key|credential", re.IGNORECASE)
_SECRET_TEXT = re.compile(
    r"((?:password|secret|token)\w*['\"]?\s*[=:]\s*)('[^']*'|\"[^\"]*\"|[^\s,;&)]+)", re.IGNORECASE
)
_SECRET_URL = re.compile(r"(://[^\s/:@]*:)[^\s/@]+@")


def distribute(
    spark: SparkSession,
    work: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    on_progress: Progress | None = None,
) -> list[Result]:
    """Apply `work` to every item in Spark tasks; results in the order of the items, the first error as itself."""
    if not items:
        return []
    job = _Job(spark.sparkContext, work, list(items), on_progress)
    with job.gateway.guard():
        return job.run()


@dataclass(frozen=True)
class _Task(Generic[Item, Result]):
    """What is shipped to the workers."""

    work: Callable[[Item], Result]
    fault: Fault | None
    tries: int
    done: Accumulator[int]
    failed: Accumulator[Failures]
    keys: tuple[access.Key, ...] = ()
    """What opens the stores that the work reads and writes."""

    def __call__(self, index: int, items: Iterable[Item]) -> Iterator[tuple[int, bytes]]:
        for item in items:
            result = self._attempt(index, item)
            if result is not None:
                self.done.add(1)
                yield index, result

    def _attempt(self, index: int, item: Item) -> bytes | None:
        faults.arm(self.fault)
        access.use(self.keys)
        try:
            return pickle.dumps(self.work(item))
        except Exception as error:
            said = told(error, (item, self.keys))
            if _may_help(error) and not self._last_try():
                raise RuntimeError(str(said)) from None
            self.failed.add([(index, pickle.dumps(said))])
            return None
        finally:
            # The worker process serves other jobs after this one.
            faults.arm(None)

    def _last_try(self) -> bool:
        from pyspark import TaskContext

        context = TaskContext.get()
        return context is None or context.attemptNumber() + 1 >= self.tries


class _Listing:
    """Tells Spark how to gather lists from tasks; has the shape of its `AccumulatorParam` without importing it here."""

    def zero(self, _: Failures) -> Failures:
        return []

    def addInPlace(self, some: Failures, more: Failures) -> Failures:  # noqa: N802 - Spark's name
        return some + more


class _Job(Generic[Item, Result]):
    """One call of `distribute`: a thread runs the Spark job, the caller's thread watches it."""

    def __init__(
        self, context: SparkContext, work: Callable[[Item], Result], items: list[Item], on_progress: Progress | None
    ) -> None:
        py4j: Any = context._gateway
        self.gateway = Gateway(py4j)
        self._context = context
        self._items = items
        self._on_progress = on_progress
        self._reported = -1
        self._group = f"modak-{uuid4().hex}"
        self._ended = threading.Event()
        self._rows: list[tuple[int, bytes]] = []
        self._error: BaseException | None = None
        self._done = context.accumulator(0)
        gather: Any = _Listing()
        self._failed: Accumulator[Failures] = context.accumulator([], gather)
        self._task = _Task(work, faults.armed(), _tries(context), self._done, self._failed, access.carried())

    def run(self) -> list[Result]:
        from pyspark import InheritableThread

        # In a thread of its own, Ctrl-C cannot break the conversation with the JVM in the middle of an answer.
        InheritableThread(target=self._collect, daemon=True).start()
        try:
            self._watch()
        except BaseException:
            self._cancel()
            raise
        finally:
            self._forget()
        if self._failed.value or self._error is not None:
            raise self._reason()
        return [pickle.loads(result) for _, result in sorted(self._rows, key=lambda row: row[0])]  # noqa: S301 - our own

    def _forget(self) -> None:
        """Take the accumulators out of pyspark's registry, which would keep them for the life of the worker."""
        from pyspark import accumulators

        # The driver drops the updates of a job that has ended, so nobody asks for them any more.
        if self._ended.is_set():
            for gathered in (self._done, self._failed):
                accumulators._accumulatorRegistry.pop(gathered.aid, None)

    def _collect(self) -> None:
        try:
            self._context.setJobGroup(self._group, f"modak: {len(self._items)} items")
            rdd = self._context.parallelize(self._items, len(self._items))
            self._rows = rdd.mapPartitionsWithIndex(self._task).collect()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            self._report()
            if self._failed.value:
                self._cancel()
        self._report()

    def _report(self) -> None:
        done = self._done.value
        if self._on_progress is not None and done != self._reported:
            self._reported = done
            self._on_progress(done, len(self._items))

    def _cancel(self) -> None:
        """Stop the job, and wait until its last task has let go."""
        until = time.monotonic() + _SETTLE_SECONDS
        # Again and again, because Spark forgets a cancellation that comes before the job was handed to it.
        while self.gateway.alive() and not self._ended.is_set() and time.monotonic() < until:
            self._context.cancelJobGroup(self._group)
            self._ended.wait(_POLL_SECONDS)
        if not self.gateway.alive():
            return
        while self._active_tasks() and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def _active_tasks(self) -> int:
        tracker = self._context.statusTracker()
        jobs = map(tracker.getJobInfo, tracker.getJobIdsForGroup(self._group))
        stages = (tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds)
        return sum(stage.numActiveTasks for stage in stages if stage is not None)

    def _reason(self) -> BaseException:
        if self._failed.value:
            _, told = min(self._failed.value, key=lambda failure: failure[0])
            error: BaseException = pickle.loads(told)  # noqa: S301 - our own
            return error
        error = self._error or lost()
        if self.gateway.is_loss(error):
            return lost()
        if not isinstance(error, Exception):
            return error
        text = _scrubbed(_java_message(error), (*self._items, self._task.keys))
        crashed = "exited unexpectedly" in text or "ExecutorLostFailure" in text
        return ModakError(
            "spark.task_failed",
            "A Spark worker process ended in the middle of its task." if crashed else f"A Spark job failed: {text}",
            hint="The machine may have run out of memory." if crashed else "",
            retryable=crashed,
        )


def _tries(context: SparkContext) -> int:
    """How often Spark runs a task before it gives up: on `local[N]` once, whatever the settings say."""
    local = re.fullmatch(r"local(?:\[[^,\]]+(?:,\s*(\d+))?\])?", context.master or "")
    return int(local[1] or 1) if local else int(context.getConf().get("spark.task.maxFailures", "4") or 4)


def _may_help(error: Exception) -> bool:
    if isinstance(error, ModakError):
        return error.retryable
    return not isinstance(error, InjectedFault)


def told(error: Exception, item: object, what: str = "A Spark task") -> Exception:
    """The error of a task as it leaves it: any that is not ours as one of ours, without what the item keeps secret."""
    if isinstance(error, ModakError | InjectedFault):
        return error
    lines = "".join(traceback.format_exception(error)).strip().splitlines()[-_TRACEBACK_LINES:]
    return ModakError("spark.task_failed", f"{what} failed:\n" + _scrubbed("\n".join(lines), [item]))


def _java_message(error: Exception) -> str:
    java: Any = getattr(error, "java_exception", None)
    lines = (str(java.getMessage()) if java is not None else str(error)).strip().splitlines()
    # A Python traceback inside a Java message says what happened in its last line; Java itself in its first.
    python = [line.strip() for line in lines if re.match(r"\s*[\w.]+(Error|Exception): ", line)]
    return python[-1] if python else (lines[0] if lines else type(error).__name__)


def _scrubbed(text: str, items: Iterable[object]) -> str:
    """The text without anything in it that an item holds as a secret."""
    for secret in {secret for item in items for secret in _secrets(item, "", 0)}:
        text = text.replace(secret, "***")
    return _SECRET_URL.sub(r"\1***@", _SECRET_TEXT.sub(r"\1***", text))


def _secrets(value: object, name: str, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        if value and _SECRET_NAME.search(name):
            yield value
    elif depth > 5:
        return
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _secrets(part, str(key), depth + 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _secrets(getattr(value, field.name), field.name, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for part in value:
            yield from _secrets(part, name, depth + 1)
