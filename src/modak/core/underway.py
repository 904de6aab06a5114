"""Which operations this process is working on right now.

Tiering, folds, the pump and maintenance run side by side on one table. Each tidies what earlier ones left unfinished,
and must not take the unfinished work of a neighbour for the leftovers of a crash. An operation belongs to the thread
that began it for as long as that thread lives: to itself it may be a leftover, to the others it is under way. Inside
`working` it is under way to everybody. Only the leader's process works, so the process knows; after a crash nothing is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from modak.core.ids import OpId

_lock = threading.Lock()
_held: set[OpId] = set()
_owners: dict[OpId, threading.Thread] = {}


def begun(op_id: OpId) -> None:
    """This thread has begun an operation."""
    with _lock:
        _owners[op_id] = threading.current_thread()


def ended(op_id: OpId) -> None:
    """An operation has come to its end."""
    with _lock:
        _owners.pop(op_id, None)


def let_go() -> None:
    """This thread has done what it had to do; what it left unfinished is anybody's."""
    with _lock:
        mine = [op_id for op_id, owner in _owners.items() if owner is threading.current_thread()]
        for op_id in mine:
            del _owners[op_id]


@contextmanager
def working(op_id: OpId) -> Iterator[None]:
    """An operation is being worked on until the block ends, however it ends; afterwards anybody may tidy it."""
    with _lock:
        _held.add(op_id)
    try:
        yield
    finally:
        with _lock:
            _held.discard(op_id)
            _owners.pop(op_id, None)


def is_under_way(op_id: OpId) -> bool:
    """Whether somebody else in this process is at work on an operation."""
    with _lock:
        owner = _owners.get(op_id)
        others = owner is not None and owner is not threading.current_thread() and owner.is_alive()
        return op_id in _held or others
