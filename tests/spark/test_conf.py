from __future__ import annotations

from pathlib import Path

from modak.spark import files
from modak.spark.conf import launch_conf, properties
from tests.spark_fixtures import Options


def test_the_users_settings_win(tmp_path: Path) -> None:
    conf = launch_conf(Options(conf={"spark.driver.memory": "8g"}), tmp_path, ())

    assert conf["spark.driver.memory"] == "8g"


def test_own_java_options_do_not_remove_ours(tmp_path: Path) -> None:
    conf = launch_conf(Options(conf={"spark.driver.extraJavaOptions": "-Dmine=1"}), tmp_path, ())

    options = conf["spark.driver.extraJavaOptions"].split()
    assert "-Dmine=1" in options
    assert "-XX:+ExitOnOutOfMemoryError" in options


def test_a_cluster_is_sent_the_jars_and_a_local_session_is_not(tmp_path: Path) -> None:
    jars = (tmp_path / "a.jar",)

    assert "spark.jars" not in launch_conf(Options("local[*]"), tmp_path, jars)
    assert launch_conf(Options("spark://host:7077"), tmp_path, jars)["spark.jars"] == jars[0].as_uri()


def test_properties_escape_what_java_would_misread() -> None:
    assert properties({"a b": " c:\\d\n= e"}) == "a\\ b=\\ c:\\\\d\\n= e\n"


def test_scratch_of_a_dead_process_is_removed_and_ours_is_kept(tmp_path: Path) -> None:
    own = files.scratch(tmp_path)
    (own / "live").touch()
    left = own.parent / "left"
    (left / "blocks").mkdir(parents=True)

    files._sweep(own.parent)

    assert (own / "live").exists()
    assert not left.exists()
    assert files.scratch(tmp_path) == own
