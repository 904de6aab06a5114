"""Setting up the log: events with fields, for people at a terminal or, with MODAK_LOG=json, for machines.

Everything goes to stderr. Our rooms log through structlog; libraries that use the standard library's logging are kept
to their warnings and take the same way out, so that every line passes the mask. The known steps of a table's life are
told as sentences (`life.py`), everything else as event and fields.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from modak.cli.errors import debugging
from modak.cli.life import DETAIL, PASSING, describe
from modak.cli.masking import mask_fields
from modak.cli.output import on_terminal, paint

Fields = MutableMapping[str, Any]

_QUIET = ("py4j", "pyspark", "urllib3", "asyncio", "psycopg", "psycopg.pool")
_CLEAR = "\x1b[2K"
"""Wipes the line that a passing event has left."""

_COLOURS = {"warning": "yellow", "error": "red", "critical": "red", "debug": "dim"}


def configure(form: str = "console", *, level: str = "info") -> None:
    """Send the events of this process to stderr, as text or as JSON."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        mask_fields,
    ]
    render = structlog.processors.JSONRenderer(ensure_ascii=False, default=str) if form == "json" else _console
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(_level(level)),
        logger_factory=_Stderr,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(_Late())
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processor=render, foreign_pre_chain=shared))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)


class _Late:
    """Writes to whatever stderr is at that moment, which tests and daemons may replace."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


class _Stderr:
    """The last link of the chain: one line to stderr, and never an exception because nobody reads it any more."""

    def __init__(self, *_: object) -> None:
        pass

    def msg(self, message: str) -> None:
        try:
            sys.stderr.write(message if message.endswith("\r") else message + "\n")
            sys.stderr.flush()
        except (BrokenPipeError, ValueError):
            pass

    debug = info = warning = warn = error = critical = exception = fatal = log = failure = err = msg


def _console(_logger: object, _method: str, event: Fields) -> str:
    fields = dict(event)
    name = str(fields.pop("event", ""))
    level = str(fields.pop("level", "info"))
    moment = str(fields.pop("timestamp", ""))
    trouble = fields.pop("exception", None)
    fields = {key: value for key, value in fields.items() if not key.startswith("_")}
    if on_terminal(sys.stderr):
        if name in DETAIL and not debugging():
            raise structlog.DropEvent
        line = _CLEAR + _for_people(name, level, moment, fields)
        if name in PASSING:
            return f"{line}\r"
    else:
        line = " ".join(part for part in (moment, f"{level:<7}", name, _pairs(fields)) if part)
    return f"{line}\n{trouble}" if trouble else line


def _for_people(name: str, level: str, moment: str, fields: dict[str, Any]) -> str:
    clock = paint(moment[11:19], "dim", sys.stderr)
    step = describe(name, fields)
    if step is None:
        text = f"{name}  {paint(_pairs(fields), 'dim', sys.stderr)}".rstrip()
    else:
        colour = _COLOURS.get(level, step.colour)
        text = f"{paint(step.verb.ljust(10), colour, sys.stderr)} {step.text}"
    if level in ("warning", "error", "critical") and step is None:
        text = f"{paint(level, _COLOURS[level], sys.stderr)} {text}"
    return f"{clock}  {text}"


def _pairs(fields: dict[str, Any]) -> str:
    return " ".join(f"{key}={_value(value)}" for key, value in fields.items() if value is not None)


def _value(value: Any) -> str:
    text = str(value)
    return repr(text) if " " in text or not text else text


def _level(name: str) -> int:
    return logging.getLevelNamesMapping().get(name.upper(), logging.INFO)
