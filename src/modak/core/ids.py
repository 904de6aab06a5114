"""Identifiers of operations: sortable by time, safe in a path, unique without coordination."""

from __future__ import annotations

import re
import secrets
from typing import NewType

from modak.core.clock import Clock

OpId = NewType("OpId", str)

_SHAPE = re.compile(r"[0-9]{8}t[0-9]{9}-[0-9a-f]{8}")


def new_op_id(clock: Clock) -> OpId:
    """An id such as `20261116t093012123-1f0c9a7e`: the moment, then chance."""
    now = clock.now()
    return OpId(f"{now:%Y%m%dt%H%M%S}{now.microsecond // 1000:03d}-{secrets.token_hex(4)}")


def is_op_id(text: str) -> bool:
    """Whether a folder name found in storage can be one of ours."""
    return _SHAPE.fullmatch(text) is not None
