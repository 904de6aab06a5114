"""Hands over to the cluster what jobs did, as their completion manifests tell it.

Files are looked at in the order of their names. Where the output is written, it is registered once and the file stays;
where the sources are deleted as well, both go to the cluster in one call and the file goes. Not being the leader is no
error: the file stays, and is tried again. Any other failure keeps the file too, and is counted.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from dataclasses import dataclass
from pathlib import Path

import structlog

from modak.core.errors import ModakError, NotLeader, UsageError
from modak.core.faults import InjectedFault, reach
from modak.measurements.cluster import CompactedFile, DeleteSourceOp, ManifestBridge
from modak.measurements.completion import CompletionManifest, CompletionState, pending_completions, read_completion

_log = structlog.get_logger()


@dataclass(frozen=True)
class CompletionWatcherConfig:
    """What a watcher needs: the folder, the bridge, how often to look and how long one call may take (seconds)."""

    dir: Path | str
    bridge: ManifestBridge | None
    poll_interval: float = 1.0
    apply_timeout: float = 5.0


class CompletionWatcher:
    """Looks at the folder of completion manifests again and again."""

    def __init__(self, config: CompletionWatcherConfig) -> None:
        if not str(config.dir):
            raise UsageError("measurements.watcher", "The watcher needs a folder to look at.")
        if config.bridge is None:
            raise UsageError("measurements.watcher", "The watcher needs a bridge to the cluster.")
        self._folder = Path(config.dir)
        self._bridge = config.bridge
        self._interval = config.poll_interval or 1.0
        self._timeout = config.apply_timeout or 5.0
        self._registered: set[str] = set()
        self._hanging: dict[str, Future[None]] = {}
        self._counts = dict.fromkeys(("polls", "registered", "deleted", "completed", "not_leader", "errors"), 0)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._guard = threading.Lock()

    def start(self) -> None:
        """Begin to look; doing it twice is fine."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._loop, daemon=True, name="measurements-watcher")
        self._thread.start()

    def stop(self) -> None:
        """Look once more, then end; doing it twice is fine, and `start` may follow."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None

    def stats(self) -> dict[str, int]:
        """What has been done so far."""
        with self._guard:
            waiting = sum(1 for _ in pending_completions(self._folder))
            return {**self._counts, "pending": waiting, "running": int(self._thread is not None)}

    def poll(self) -> None:
        """Look at every file once."""
        self._count("polls")
        names = set()
        for path in pending_completions(self._folder):
            names.add(path.stem)
            try:
                told = read_completion(path)
                if told is not None:
                    self._apply(path, told)
            except NotLeader:
                self._count("not_leader")
            except InjectedFault:
                raise
            except TooLate:
                self._count("errors")
                _log.error("measurements.completion_failed", file=path.name, error="it took too long")
            except Exception as error:
                # Whatever a bridge does, the file stays and the others get their turn.
                self._count("errors")
                told_as = error.message if isinstance(error, ModakError) else f"{type(error).__name__}: {error}"
                code = error.code if isinstance(error, ModakError) else "measurements.crashed"
                _log.error("measurements.completion_failed", code=code, file=path.name, error=told_as)
        # A job is never heard of again once its file is gone.
        self._registered &= names

    def _loop(self) -> None:
        while not self._stop.wait(self._interval):
            self.poll()
        self.poll()

    def _apply(self, path: Path, told: CompletionManifest) -> None:
        if told.state is CompletionState.WRITING_OUTPUT:
            return
        known = told.job_id in self._registered
        registers = [] if known else [CompactedFile.of(output) for output in told.outputs]
        done = told.state is CompletionState.SOURCES_DELETED
        deletes = [DeleteSourceOp(source) for source in told.deleted_sources] if done else []
        if registers or deletes:
            reach("watcher.before_apply")
            self._within_time(told.job_id, registers, deletes)
            reach("watcher.applied")
            self._count("registered", len(registers))
            self._count("deleted", len(deletes))
        self._registered.add(told.job_id)
        if done:
            path.unlink(missing_ok=True)
            reach("watcher.file_removed")
            self._registered.discard(told.job_id)
            self._count("completed")

    def _within_time(self, job_id: str, registers: list[CompactedFile], deletes: list[DeleteSourceOp]) -> None:
        """One call of the bridge; one that hangs does not hold up the others, and is not made twice meanwhile."""
        earlier = self._hanging.get(job_id)
        if earlier is not None and not earlier.done():
            raise TooLate
        call: Future[None] = Future()

        def ask() -> None:
            try:
                self._bridge.batch_file_ops(registers, deletes)
                call.set_result(None)
            except BaseException as error:
                call.set_exception(error)

        # Not a thread of a pool: those are waited for when the process ends, and this one may never come back.
        threading.Thread(target=ask, daemon=True, name="measurements-bridge").start()
        self._hanging[job_id] = call
        call.result(self._timeout)
        del self._hanging[job_id]

    def _count(self, name: str, by: int = 1) -> None:
        with self._guard:
            self._counts[name] += by
