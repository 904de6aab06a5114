"""The same calls on a standalone cluster of two workers on loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from modak.spark.java import find_java
from tests.spark.processes import finish, spawn

pytestmark = [pytest.mark.spark, pytest.mark.full]


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    import pyspark

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"spark://127.0.0.1:{port}"
    spark_home = Path(pyspark.__file__).parent
    environ = {**os.environ, "SPARK_HOME": str(spark_home), "JAVA_HOME": str(find_java(tmp_path).path)}
    deploy = [str(spark_home / "bin" / "spark-class")]
    commands = [["org.apache.spark.deploy.master.Master", "--port", str(port)]] + [
        ["org.apache.spark.deploy.worker.Worker", "-c", "1", "-m", "1g", "-d", str(tmp_path / name), address]
        for name in ("one", "two")
    ]
    processes = [
        subprocess.Popen(
            [*deploy, command[0], "--host", "127.0.0.1", "--webui-port", "0", *command[1:]],
            env=environ,
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for command in commands
    ]
    yield address
    for process in reversed(processes):
        process.terminate()
        process.wait(20)


def test_a_cluster_spreads_the_work_and_tries_again_what_may_be_tried_again(master: str, tmp_path: Path) -> None:
    (tmp_path / "cwd").mkdir()
    body = f"""
        from modak.core.errors import ModakError
        conf = {{"spark.driver.host": "127.0.0.1", "spark.executor.memory": "512m", "spark.executor.cores": "1",
                "spark.scheduler.minRegisteredResourcesRatio": "1.0", "spark.cores.max": "2"}}
        spark = session.start(Chosen(Options({master!r}, conf)), home)
        traces = str(home / "traces-")

        def parent(n):
            import os, time
            time.sleep(1)
            return os.getppid()

        def tried(retryable):
            def work(n):
                with open(traces + str(retryable), "a") as file:
                    file.write(".")
                if os.path.getsize(traces + str(retryable)) == 1:
                    raise ModakError("test.once", "The first try fails.", retryable=retryable)
                return n
            return work

        said = {{"daemons": len(set(distribute(spark, parent, range(6)))),
                "again": distribute(spark, tried(True), [7])}}
        try:
            distribute(spark, tried(False), [7])
        except ModakError as error:
            said["error"] = error.code
        said["tries"] = Path(traces + "False").stat().st_size
        print(json.dumps(said))
    """

    out, _ = finish(spawn(body, tmp_path / "home", tmp_path / "cwd"))

    assert json.loads(out.splitlines()[-1]) == {
        "daemons": 2,
        "again": [7],
        "error": "test.once",
        "tries": 1,
    }
