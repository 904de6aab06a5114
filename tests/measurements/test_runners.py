"""Where jobs run: what happens to a child is an answer, in a task of Spark as well."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from modak.measurements.isolation import SubprocessJobConfig
from modak.measurements.runners import ProcessRunner, SparkRunner
from modak.storage.objects import Objects
from tests.measurements.support import HOUR, data_files, fill

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_children_that_die_in_spark_tasks_are_answers_and_their_neighbours_go_on(
    spark: SparkSession, folder: Objects, tmp_path: Path
) -> None:
    fill(folder, files=2)
    sound = SubprocessJobConfig(
        database="db",
        measurement="cpu",
        partition_path=f"db/cpu/{HOUR:%Y/%m/%d/%H}",
        files=tuple(data_files(folder)),
        tier="hourly",
        target_size_mb=512,
        temp_directory=str(tmp_path / "temp"),
        storage_config=json.dumps({"root": folder.root}),
        job_id="sound",
    )
    orders = [sound]
    # The child meets its end while the interpreter starts, as it would from outside at any other moment.
    for word, end in (("killed", "os.kill(os.getpid(), 9)"), ("broken", "os._exit(1)"), ("memory", "os._exit(137)")):
        start = tmp_path / word / "sitecustomize.py"
        start.parent.mkdir()
        start.write_text(f"import os\n{end}\n")
        orders.append(replace(sound, job_id=word, extra_env={"PYTHONPATH": str(start.parent)}))
    merged, killed, broken, memory = SparkRunner(spark).run(orders)
    assert (merged.success, merged.files_compacted) == (True, 2)
    assert (killed.success, killed.recoverable, killed.reason) == (False, True, "killed")
    assert (broken.success, broken.recoverable, broken.reason) == (False, True, "unknown")
    assert (memory.success, memory.recoverable, memory.reason) == (False, True, "oom_killed")


class Interrupted(BaseException):
    """As a timeout or Ctrl-C comes: out of a signal, in the thread that waits."""


def test_whoever_interrupts_jobs_ends_their_children(tmp_path: Path) -> None:
    start = tmp_path / "start" / "sitecustomize.py"
    start.parent.mkdir()
    start.write_text(
        "import os, pathlib, time\n"
        "told = pathlib.Path(__file__).parent.parent\n"
        "(told / f'begun-{os.getpid()}').touch()\n"
        "time.sleep(30)\n"
        "(told / 'lasted').touch()\n"
    )
    order = SubprocessJobConfig(
        database="db",
        measurement="cpu",
        partition_path=f"db/cpu/{HOUR:%Y/%m/%d/%H}",
        files=(),
        tier="hourly",
        target_size_mb=512,
        temp_directory=str(tmp_path / "temp"),
        extra_env={"PYTHONPATH": str(start.parent)},
    )

    def begun() -> list[int]:
        return [int(file.name.partition("-")[2]) for file in tmp_path.glob("begun-*")]

    def interrupt() -> None:
        while len(begun()) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    def interrupted(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupted)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(Interrupted):
            ProcessRunner(2).run([order] * 4)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(begun()) == 2
    assert not (tmp_path / "lasted").exists()
    for pid in begun():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
