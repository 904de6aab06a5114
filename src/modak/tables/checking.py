"""`profile check`: does a warehouse keep the promises that a lake needs? Each step timed, the first failure explained.

Writes one small object below `.modak-check/` and takes it away again. Needs neither Spark nor Java.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from secrets import token_hex

from modak.core.errors import ModakError
from modak.storage.access import Key, unusable
from modak.storage.objects import Objects

FOLDER = ".modak-check"


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was tried."""

    name: str
    seconds: float
    problem: str | None = None
    hint: str = ""


def check(key: Key, clock: Callable[[], float] = time.monotonic) -> list[Step]:
    """Write, read, conditional put, list and delete, in this order; ends at the first that fails."""
    if (refusal := unusable(key)) is not None:
        return [Step("credentials", 0.0, refusal.message, refusal.hint)]
    steps: list[Step] = []
    begun = clock()
    try:
        probe = _Probe(Objects.of(key.root, key.props))
    except ModakError as error:
        return [Step("open", clock() - begun, error.message, error.hint)]
    done = False
    try:
        for name, act in probe.acts():
            begun = clock()
            try:
                act()
                steps.append(Step(name, clock() - begun))
            except ModakError as error:
                steps.append(Step(name, clock() - begun, error.message, error.hint))
                return steps
        done = True
    finally:
        if not done:
            probe.clean_up()
    return steps


class _Probe:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._path = f"{FOLDER}/{token_hex(8)}"
        self._data = token_hex(32).encode()

    def acts(self) -> tuple[tuple[str, Callable[[], None]], ...]:
        return (
            ("write", self._write),
            ("read", self._read),
            ("conditional put", self._conditional),
            ("list", self._list),
            ("delete", self._delete),
        )

    def clean_up(self) -> None:
        try:
            self._objects.delete([self._path])
        except ModakError:
            return

    def _write(self) -> None:
        self._objects.put(self._path, self._data)

    def _read(self) -> None:
        if self._objects.get(self._path).data != self._data:
            raise _broken("gives back other bytes than were written")

    def _conditional(self) -> None:
        if self._objects.create(self._path, b"other") is not None:
            raise _broken("overwrites an object that it was told to create only where there is none")
        seen = self._objects.get(self._path).meta
        if self._objects.swap(self._path, self._data + b"2", seen) is None:
            raise _broken("refuses to replace the version that is there")
        if self._objects.swap(self._path, b"other", seen) is not None:
            raise _broken("replaces a version that is gone")

    def _list(self) -> None:
        if self._path not in [meta.path for meta in self._objects.list(FOLDER)]:
            raise _broken("does not list an object that was just written")

    def _delete(self) -> None:
        self._objects.delete([self._path])
        if self._objects.head(self._path) is not None:
            raise _broken("still has an object that was deleted")


def _broken(what: str) -> ModakError:
    return ModakError("storage.promise", f"The store {what}.", hint="It cannot hold a lake safely.")
