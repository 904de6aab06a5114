"""Secrets never reach a log, an error or a terminal.

A secret is known by the name of its field, or inside a text by the shape of a Postgres URL or a key=value pair.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from typing import Any

HIDDEN = "***"

_NAMES = re.compile(r"password|passwd|secret|token|access_key|credential", re.IGNORECASE)
_URL = re.compile(r"(?P<head>\b(?:jdbc:)?postgres(?:ql)?://[^\s:/@]*):(?P<secret>[^\s/]*)@", re.IGNORECASE)
_PAIR = re.compile(
    r"(?P<head>\b[\w.-]*(?:password|passwd|secret|token|access_key)[\w.-]*\s*=\s*)(?P<secret>'(?:[^'\\]|\\.)*'|\"[^\"]*\"|[^\s&;,'\"]+)",
    re.IGNORECASE,
)


def mask(text: str) -> str:
    """The text with every password in it replaced."""
    return _PAIR.sub(rf"\g<head>{HIDDEN}", _URL.sub(rf"\g<head>:{HIDDEN}@", text))


def mask_fields(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor that masks secret fields and secrets inside texts."""
    for name, value in event.items():
        event[name] = _masked(name, value)
    return event


def _masked(name: str, value: Any) -> Any:
    if value is not None and _NAMES.search(name):
        return HIDDEN
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        return {key: _masked(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked("", item) for item in value]
    return value
