from __future__ import annotations

from pathlib import Path

import pytest

from modak.core.errors import ModakError, UsageError
from modak.spark import jars
from tests.spark_fixtures import Chosen, Options


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "modak" / "jars"


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stands in for the resolver and counts how often it was asked."""
    asked: list[int] = []
    jar = tmp_path / "origin" / "iceberg.jar"
    jar.parent.mkdir()
    jar.write_bytes(b"jar")

    def resolver(*_: object) -> list[Path]:
        asked.append(1)
        return [jar]

    monkeypatch.setattr(jars, "_resolved_by_ivy", resolver)
    return asked


def test_jars_are_fetched_once_for_all_homes(tmp_path: Path, cache: Path, fetched: list[int]) -> None:
    first = jars.resolve(tmp_path / "one", Chosen())
    second = jars.resolve(tmp_path / "two", Chosen())

    assert first == second
    assert first[0].is_relative_to(cache)
    assert len(fetched) == 1


@pytest.mark.parametrize("damage", ["shorter", "gone", "no list"])
def test_a_damaged_set_is_fetched_again(tmp_path: Path, cache: Path, fetched: list[int], damage: str) -> None:
    (jar,) = jars.resolve(tmp_path, Chosen())
    match damage:
        case "shorter":
            jar.write_bytes(b"j")
        case "gone":
            jar.unlink()
        case "no list":
            (jar.parent / "complete.json").unlink()

    (again,) = jars.resolve(tmp_path, Chosen())

    assert again.read_bytes() == b"jar"
    assert len(fetched) == 2
    assert [entry.name for entry in cache.iterdir() if entry.name.startswith(".fetch")] == []


def test_a_set_copied_into_the_home_needs_no_cache(tmp_path: Path, cache: Path, fetched: list[int]) -> None:
    (jar,) = jars.resolve(tmp_path, Chosen())
    home = tmp_path / "home"
    (home / "jars").mkdir(parents=True)
    jar.parent.rename(home / "jars" / jar.parent.name)

    (found,) = jars.resolve(home, Chosen())

    assert found.is_relative_to(home)
    assert len(fetched) == 1


def test_a_cache_that_cannot_be_made_falls_back_to_the_home(
    tmp_path: Path, fetched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))

    (found,) = jars.resolve(tmp_path / "home", Chosen())

    assert found.is_relative_to(tmp_path / "home" / "jars")


def test_given_jars_are_used_as_they_are(tmp_path: Path, fetched: list[int]) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("folder/a.jar", "folder/b.jar", "c.jar"):
        (tmp_path / name).touch()

    found = jars.resolve(tmp_path, Chosen(Options(jars=(str(tmp_path / "folder"), str(tmp_path / "c.jar")))))

    assert [jar.name for jar in found] == ["a.jar", "b.jar", "c.jar"]
    assert fetched == []


def test_a_given_jar_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.jar"):
        jars.resolve(tmp_path, Chosen(Options(jars=(str(tmp_path / "nowhere.jar"),))))


def test_without_network_and_cache_the_error_names_the_way_out(tmp_path: Path, cache: Path) -> None:
    nothing = tmp_path / "ivysettings.xml"
    pattern = tmp_path / "none" / "[artifact].[ext]"
    nothing.write_text(
        f"""<ivysettings><settings defaultResolver="none"/>
        <resolvers><filesystem name="none"><artifact pattern="{pattern}"/></filesystem></resolvers></ivysettings>"""
    )
    conf = {"spark.jars.ivySettings": str(nothing), "spark.jars.ivy": str(tmp_path / "ivy")}

    with pytest.raises(ModakError) as caught:
        jars.resolve(tmp_path, Chosen(Options(conf=conf)))

    assert caught.value.code == "spark.jars_unavailable"
    assert "MODAK_SPARK_JARS" in caught.value.hint
    assert not any(entry.is_dir() for entry in cache.iterdir())


def test_the_library_of_a_store_is_fetched_only_when_it_is_needed(
    tmp_path: Path, cache: Path, fetched: list[int]
) -> None:
    plain = jars.resolve(tmp_path, Chosen())
    both = jars.resolve(tmp_path, Chosen(), {"s3"})
    assert both[: len(plain)] == plain
    assert both[-1].parent.name == "iceberg-aws-bundle-1.11.0"
    assert jars.resolve(tmp_path, Chosen(), {"s3"}) == both
    assert len(jars.resolve(tmp_path, Chosen(), {"abfs", "abfss"})) == len(plain) + 1
    assert len(fetched) == 3
