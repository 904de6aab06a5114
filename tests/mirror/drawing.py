"""Which fault points of a list run in the gate: a few, drawn by `--randomly-seed`; the full run takes all of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest


def give(metafunc: pytest.Metafunc, fixture: str, points: Sequence[str], sample: int) -> None:
    """Parametrize a test by points; those that were not drawn are for the full run."""
    if fixture in metafunc.fixturenames:
        drawn = set(random.Random(int(metafunc.config.getoption("randomly_seed", 0))).sample(list(points), sample))
        marks = {point: () if point in drawn else (pytest.mark.full,) for point in points}
        metafunc.parametrize(fixture, [pytest.param(point, marks=marks[point]) for point in points])
