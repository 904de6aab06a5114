"""The child process of a job: inputs in, merge, outputs up under their final names; the parent commits.

Every job has a folder of its own below the temporary folder and holds a lock on it, so what a killed child left is
known for certain. Outputs carry the job's id in their names: until the parent commits the job's manifest, no reader
counts them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import resource
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from modak.core import faults
from modak.core.errors import ModakError, Refused
from modak.core.faults import Fault, reach
from modak.measurements.isolation import SECRETS_VARIABLE, SubprocessJobConfig, SubprocessJobResult
from modak.measurements.layout import Stamp, output_name, parse_name
from modak.storage.objects import Objects

JOB_LOCK = ".lock"
_FETCHERS = 8
_GLOB = re.compile(r"[*?\[\]{}]")
_UNITS = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}


def run_subprocess_job(config: SubprocessJobConfig) -> SubprocessJobResult:
    """Do the job in this process."""
    from modak.measurements.merge import MergeOrder, merge

    begun = time.monotonic()
    objects = _objects(config)
    with _workplace(Path(config.temp_directory), config.job_id) as work:
        inputs, lost = _inputs(objects, config, work)
        order = MergeOrder(
            inputs=inputs,
            work=work,
            target_bytes=config.target_bytes or config.target_size_mb << 20,
            sort_keys=config.sort_keys,
            memory_bytes=memory_bytes(config.memory_limit),
            threads=config.threads,
        )
        merged = merge(order)
        etags = dict(zip(config.files, (etag for _, etag in config.pins), strict=False))
        aside = lost + tuple((path, etags.get(path, ""), reason) for path, reason in merged.aside)
        if not merged.used:
            told = "; ".join(f"{path}: {reason}" for path, _, reason in aside[:5]) or "there are no files"
            return SubprocessJobResult(False, f"no valid input: {told}", aside=aside, reason="no_valid_input")
        stamp = newest_stamp(merged.used, config)
        outputs = []
        for part, output in enumerate(merged.outputs):
            name = output_name(config.measurement, stamp, config.job_id, part, config.tier_word)
            reach("job.before_upload")
            meta = objects.upload(f"{config.partition_path}/{name}", output.file)
            reach("job.uploaded")
            outputs.append((meta.path, output.size, output.sha256, meta.etag, output.rows))
        before = sum(inputs[path].stat().st_size for path in merged.used)
    return SubprocessJobResult(
        True,
        files_compacted=len(merged.used),
        bytes_before=before,
        bytes_after=sum(output.size for output in merged.outputs),
        output_file=outputs[0][0] if outputs else "",
        outputs=tuple(outputs),
        used=merged.used,
        aside=aside,
        rows_in=merged.rows_in,
        rows_out=merged.rows_out,
        duplicates=merged.duplicates,
        seconds=round(time.monotonic() - begun, 3),
    )


def _objects(config: SubprocessJobConfig) -> Objects:
    place = json.loads(config.storage_config)
    secrets = json.loads(os.environ.get(SECRETS_VARIABLE, "{}"))
    return Objects.of(place["root"], {**place.get("props", {}), **secrets})


@contextlib.contextmanager
def _workplace(temp: Path, job_id: str) -> Iterator[Path]:
    if _GLOB.search(str(temp)):
        # The engine would read the folder's name as a pattern and find nothing in it.
        raise Refused(
            "measurements.temp", f"{temp} has characters of patterns in it, and cannot be a temporary folder."
        )
    work = temp / job_id
    work.mkdir(mode=0o700, parents=True)
    try:
        with (work / JOB_LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            reach("job.workplace_made")
            yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _inputs(
    objects: Objects, config: SubprocessJobConfig, work: Path
) -> tuple[dict[str, Path], tuple[tuple[str, str, str], ...]]:
    """The inputs as local files under names without surprises; those that are gone or changed are named."""
    folder = work / "in"
    folder.mkdir()
    pins = config.pins or ((-1, ""),) * len(config.files)

    def bring(item: tuple[int, str, tuple[int, str]]) -> tuple[str, Path | None, str]:
        number, path, (size, etag) = item
        target = folder / f"{number:06d}.parquet"
        try:
            local = objects.local(path)
            if local is None:
                meta = objects.fetch(path, target)
            else:
                found = objects.head(path)
                if found is None:
                    return path, None, "it is gone"
                meta = found
                target.symlink_to(local)
        except ModakError as error:
            if error.code != "storage.not_found":
                raise
            return path, None, "it is gone"
        if etag and (meta.size, meta.etag) != (size, etag):
            return path, None, "it has changed since it was listed"
        return path, target, ""

    items = [(number, path, pin) for number, (path, pin) in enumerate(zip(config.files, pins, strict=True))]
    with ThreadPoolExecutor(_FETCHERS) as pool:
        brought = list(pool.map(bring, items))
    found = {path: file for path, file, _ in brought if file is not None}
    # Without an etag nobody remembers them: the next listing tells what is there then.
    return found, tuple((path, "", why) for path, file, why in brought if file is None)


def newest_stamp(used: tuple[str, ...], config: SubprocessJobConfig) -> Stamp:
    """The newest flush among the inputs, which the outputs keep."""
    said = (parse_name(path.rpartition("/")[2]) for path in used)
    stamps = [each.stamp for each in said if each is not None and each.stamp is not None]
    return max(stamps, default=Stamp.of(config.partition_time or datetime(1970, 1, 1, tzinfo=UTC)))


def memory_bytes(text: str) -> int:
    """`8GB`, `512MB` or a number of bytes."""
    for unit, factor in _UNITS.items():
        if text.upper().endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    return int(text)


def main(source: IO[str] | None = None) -> int:
    """Read the order, do the job, print the answer."""
    given = source if source is not None else sys.stdin
    try:
        config = SubprocessJobConfig.from_json(given.readline())
    except ModakError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if config.watched:
        threading.Thread(target=_leave_with_parent, args=(given,), daemon=True).start()
    if config.fault:
        point, action, after = config.fault
        faults.arm(Fault(point, "kill" if action == "kill" else "raise", after))
    try:
        result = run_subprocess_job(config)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        sys.stderr.write(text + "\n")
        result = SubprocessJobResult.failed(text)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    sys.stdout.write(replace(result, peak_bytes=peak).to_json() + "\n")
    sys.stdout.flush()
    return 0


def _leave_with_parent(source: IO[str]) -> None:
    source.read()
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main())
