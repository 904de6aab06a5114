"""Cases of which the everyday run takes a few, drawn by `--randomly-seed`, and the full run all.

The name of a test says which case it is, so whatever fails can be run again by its name.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest


def sample(metafunc: pytest.Metafunc, argument: str, cases: Iterable[str], number: int) -> None:
    """Parametrise the tests that take `argument`; cases that were not drawn are marked `full`."""
    if argument not in metafunc.fixturenames:
        return
    every = list(cases)
    # Each test draws for itself, so that together they see more of the cases.
    dice = random.Random(f"{metafunc.config.getoption('randomly_seed', 0)} {metafunc.function.__name__}")
    drawn = set(dice.sample(every, number))
    marked = [pytest.param(case, marks=() if case in drawn else (pytest.mark.full,)) for case in every]
    metafunc.parametrize(argument, marked)
