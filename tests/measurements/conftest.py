"""Every test of a whole store runs on a folder and on a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from modak.storage.objects import Objects
from tests.s3_fixtures import S3Server, s3_server

__all__ = ["s3_server"]


@pytest.fixture(params=["folder", "bucket"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    """An empty store."""
    if request.param == "folder":
        return Objects.of(str(tmp_path / "store"))
    server: S3Server = request.getfixturevalue("s3_server")
    return Objects.of(f"s3://{server.new_bucket()}/store", server.props)


@pytest.fixture
def props(objects: Objects) -> dict[str, str]:
    """How a job reaches the store."""
    return objects._props


@pytest.fixture
def folder(tmp_path: Path) -> Objects:
    """An empty store in a folder."""
    return Objects.of(str(tmp_path / "store"))


@pytest.fixture(autouse=True)
def _no_reader_stays() -> Iterator[None]:
    """Frames hold their files for an hour, and tests end sooner than that."""
    yield
    from modak.measurements.reading import release_all

    release_all()
