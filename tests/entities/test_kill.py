"""Real processes, ended by SIGKILL in the middle of their work: nothing is lost, nothing is there twice."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from modak.entities.compaction import compact
from modak.entities.flushing import flush
from modak.entities.initial import init
from modak.entities.reconciling import reconcile
from tests.entities.test_crash import (
    IN_A_COLLECTION,
    IN_A_COMPACTION,
    IN_A_FLUSH,
    IN_A_REPAIR,
    IN_AN_INIT,
    IN_AN_INSTALL,
    Life,
    harm,
)
from tests.entities.world import INVOICE, SCHEMA, World

STRUCK = [
    (act, point)
    for act, points in (
        ("flush", IN_A_FLUSH),
        ("init", IN_AN_INIT),
        ("compact", IN_A_COMPACTION),
        ("gc", IN_A_COLLECTION),
        ("repair", IN_A_REPAIR),
        ("install", IN_AN_INSTALL),
    )
    for point in sorted(points)
]
KILLED = {point for _, point in STRUCK}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every point; all but two that are drawn only to the full run."""
    if "struck" in metafunc.fixturenames:
        drawn = random.Random(int(metafunc.config.getoption("randomly_seed", 0))).sample(STRUCK, 2)
        metafunc.parametrize(
            "struck",
            [
                pytest.param(each, id=" ".join(each), marks=() if each in drawn else (pytest.mark.full,))
                for each in STRUCK
            ],
        )


def test_after_a_kill_the_next_run_goes_on(world: World, tmp_path: Path, struck: tuple[str, str]) -> None:
    act, point = struck
    life = Life(world)
    for _ in range(2):
        life.change()
        flush(world.store)
    if act in ("flush", "init"):
        life.change()
    if act == "gc":
        compact(world.store)
        world.objects.put(f"entities/delta/{SCHEMA}/_tmp/left.parquet", b"half")
    if act == "repair":
        harm(life)
    (tmp_path / "registry.json").write_text(json.dumps(INVOICE))
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("MODAK_")},
        **world.environ,
        "MODAK_HOME": str(tmp_path / "home"),
        "MODAK_ENTITIES_REGISTRY": str(tmp_path / "registry.json"),
        "MODAK_ENTITIES_MIN_RECORDS": "1",
        "MODAK_ENTITIES_MAX_AGE_MS": "0",
    }
    command = [sys.executable, "-m", "tests.entities.worker", act, "--kill", point]
    done = subprocess.run(command, env=environ, timeout=120, check=False, capture_output=True)
    assert done.returncode == -9, done.stderr.decode()[-2000:]
    if act == "repair":
        # Until it is repaired, a read of a store that has lost a file is an error.
        reconcile(world.store, SCHEMA, repair=True)
    life.check()
    flush(world.store)
    life.check()
    if act == "init":
        init(world.store, SCHEMA, replace_delta=True)
    compact(world.store)
    life.check()
    reconcile(world.store, SCHEMA, gc=True, grace_ms=0)
    life.check()
    assert set(world.paths()) == world.manifest.paths
