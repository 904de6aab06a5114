"""One job in a process of its own, so that its memory is returned and its crash is an answer like any other.

The parent writes the order as one line of JSON to the child's standard input and keeps the pipe open; the child answers
with one line of JSON on standard output and logs to standard error. Credentials travel in the environment only. A job
that fails is an answer (`success: false`, exit code 0); exit code 1 says that the child could not even begin. A child
whose parent has died sees its input end and goes away.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any

from modak.core import faults
from modak.core.errors import ModakError

SECRETS_VARIABLE = "MODAK_JOB_SECRETS"
_KEPT_LINES = 20
_SECRET = re.compile(r"key|secret|token|password", re.IGNORECASE)

_SQL_ERRORS = ("parser error", "binder error", "catalog error", "syntax error", "analysisexception", "parseexception")
_MEMORY_ERRORS = ("out of memory", "cannot allocate")
_PERMANENT_ERRORS = ("permission denied", "no such file", "access denied", "not found")


@dataclass(frozen=True)
class SubprocessJobConfig:
    """The order for one job, as JSON; `extra_env` goes into the child's environment and never into the JSON."""

    database: str
    measurement: str
    partition_path: str
    files: tuple[str, ...]
    tier: str
    target_size_mb: int
    temp_directory: str
    sort_keys: tuple[str, ...] = ()
    memory_limit: str = "1GB"
    storage_type: str = "local"
    storage_config: str = "{}"
    job_id: str = ""
    completion_dir: str = ""
    partition_time: datetime | None = None
    target_bytes: int = 0
    tier_word: str = "compacted"
    pins: tuple[tuple[int, str], ...] = ()
    threads: int = 1
    watched: bool = False
    fault: tuple[str, str, int] | None = None
    extra_env: Mapping[str, str] = field(default_factory=dict, repr=False)

    def to_json(self) -> str:
        """The order on one line."""
        plain = {name: value for name, value in asdict(self).items() if name != "extra_env"}
        plain["partition_time"] = self.partition_time.isoformat() if self.partition_time else None
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: str) -> SubprocessJobConfig:
        """The order that a line says; `measurements.order` where it says none."""
        try:
            given = json.loads(text)
            known = {each.name for each in fields(cls)}
            given = {name: value for name, value in given.items() if name in known and name != "extra_env"}
            given["files"], given["sort_keys"] = tuple(given["files"]), tuple(given.get("sort_keys") or ())
            given["pins"] = tuple((int(size), str(etag)) for size, etag in given.get("pins") or ())
            given["fault"] = tuple(given["fault"]) if given.get("fault") else None
            if given.get("partition_time"):
                given["partition_time"] = datetime.fromisoformat(given["partition_time"])
            return cls(**given)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModakError(
                "measurements.order", "Standard input holds no order for a job.", hint="Write one JSON object."
            ) from error


@dataclass(frozen=True)
class SubprocessJobResult:
    """The answer of one job. `outputs` are (path, size, sha256, etag, rows); `aside` are (path, etag, reason)."""

    success: bool
    error: str = ""
    files_compacted: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    output_file: str = ""
    outputs: tuple[tuple[str, int, str, str, int], ...] = ()
    used: tuple[str, ...] = ()
    aside: tuple[tuple[str, str, str], ...] = ()
    rows_in: int = 0
    rows_out: int = 0
    duplicates: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    recoverable: bool = False
    reason: str = ""

    def to_json(self) -> str:
        """The answer on one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SubprocessJobResult:
        """The answer that a line says; fields of a later version are passed over."""
        known = {each.name for each in fields(cls)}
        given: dict[str, Any] = {name: value for name, value in json.loads(text).items() if name in known}
        for name in ("outputs", "aside"):
            given[name] = tuple(tuple(each) for each in given.get(name, ()))
        given["used"] = tuple(given.get("used", ()))
        return cls(**given)

    @classmethod
    def failed(cls, error: str, stderr: str = "") -> SubprocessJobResult:
        """A failure, with the word for it and whether fewer files may help."""
        recoverable, reason = classify_subprocess_error(error, stderr)
        return cls(False, error, recoverable=recoverable, reason=reason)


def classify_subprocess_error(error: BaseException | str | None, stderr: str = "") -> tuple[bool, str]:
    """Whether a smaller batch may help, and what happened in one word; the first evidence decides."""
    told = str(error) if error is not None else ""
    evidence = f"{told}\n{stderr}".lower()
    exit_code = re.search(r"exit (?:status|code) (\d+)", evidence)
    if not told and not stderr:
        answer = (False, "empty")
    elif "segmentation fault" in evidence or "segfault" in evidence:
        answer = (True, "segfault")
    elif "signal: killed" in evidence:
        answer = (True, "killed")
    elif exit_code and exit_code[1] == "137":
        answer = (True, "oom_killed")
    elif exit_code and exit_code[1] == "139":
        answer = (True, "segfault")
    elif any(word in evidence for word in _SQL_ERRORS):
        answer = (False, "sql_error")
    elif any(word in evidence for word in _MEMORY_ERRORS):
        answer = (True, "memory_error")
    elif any(word in evidence for word in _PERMANENT_ERRORS):
        answer = (False, "permanent_error")
    else:
        answer = (True, "unknown")
    return answer


def run_job_in_subprocess(config: SubprocessJobConfig) -> SubprocessJobResult:
    """Run a job in a child process; whatever happens to the child comes back as an answer."""
    return Children().run(config)


class Children:
    """The children of one caller, who can end them while other threads wait for their answers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._over = False

    def run(self, config: SubprocessJobConfig) -> SubprocessJobResult:
        """Run a job in a child; refused once they have been ended."""
        with self._lock:
            if self._over:
                return SubprocessJobResult.failed(_signal_text(signal.SIGKILL))
            child = _started(config)
            self._running.add(child)
        try:
            return _answer(child, config)
        finally:
            with self._lock:
                self._running.discard(child)

    def end(self) -> None:
        """Kill those that run, and start no more."""
        with self._lock:
            self._over = True
            for child in self._running:
                child.kill()


def _started(config: SubprocessJobConfig) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "modak.measurements.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**_environment(), **config.extra_env},
    )


def _answer(child: subprocess.Popen[str], config: SubprocessJobConfig) -> SubprocessJobResult:
    assert child.stdin is not None
    try:
        armed = faults.armed()
        fault = (armed.point, armed.action, armed.after) if armed else None
        order = SubprocessJobConfig(**{**_shallow(config), "watched": True, "fault": fault}).to_json()
        try:
            child.stdin.write(order + "\n")
            child.stdin.flush()
        except BrokenPipeError:
            pass
        out, log = _drained(child)
    except BaseException:
        child.kill()
        raise
    finally:
        child.stdin.close()
        child.wait()
    tail = "\n".join(log.splitlines()[-_KEPT_LINES:])
    if child.returncode < 0:
        return SubprocessJobResult.failed(_signal_text(-child.returncode), tail)
    if child.returncode:
        return SubprocessJobResult.failed(f"exit code {child.returncode}: {_last(tail)}", tail)
    try:
        return SubprocessJobResult.from_json(out.strip().splitlines()[-1])
    except (IndexError, ValueError, TypeError):
        return SubprocessJobResult.failed("the child gave no answer", tail)


def _drained(child: subprocess.Popen[str]) -> tuple[str, str]:
    """Both outputs to their end, with the input left open: its end would tell the child that nobody waits any more."""
    assert child.stdout is not None
    assert child.stderr is not None
    log: list[str] = []
    stderr = child.stderr
    listener = threading.Thread(target=lambda: log.extend(stderr), daemon=True)
    listener.start()
    out = child.stdout.read()
    listener.join()
    child.stdout.close()
    stderr.close()
    return out, "".join(log)


def _environment() -> dict[str, str]:
    """What a child needs of our environment: no setting of ours, because a job's order says everything."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MODAK_")}


def _shallow(config: SubprocessJobConfig) -> dict[str, Any]:
    return {each.name: getattr(config, each.name) for each in fields(config)}


def _signal_text(number: int) -> str:
    names = {9: "signal: killed", 11: "signal: segmentation fault", 6: "signal: aborted"}
    return names.get(number, f"signal: {number}")


def _last(text: str) -> str:
    return text.splitlines()[-1] if text else "no word from the child"


def split_secrets(props: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Storage properties that may be shown, and those that may not."""
    secret = {name: value for name, value in props.items() if _SECRET.search(name)}
    return {name: value for name, value in props.items() if name not in secret}, secret
