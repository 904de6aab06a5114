"""What a user asked for at registration, and the rules its flags obey among themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from modak.core.axis import Axis
from modak.core.errors import UsageError
from modak.core.names import TableName

MODES = ("tiered", "mirrored")
CHUNK_ROWS = 50_000
"""Rows per chunk of a first copy, unless --chunk-rows says otherwise."""


@dataclass(frozen=True, slots=True)
class RegisterRequest:
    """One `register` command; lengths stay text until the axis is known."""

    table: TableName
    pk: tuple[str, ...]
    tier_key: str
    mode: str = "tiered"
    heap_retention: str | None = None
    lake_retention: str | None = None
    keep_heap: bool = False
    chunk_rows: int | None = None
    partition_width: str | None = None
    profile: str | None = None
    numeric_as: str = "decimal:18"


@dataclass(frozen=True, slots=True)
class NumericRule:
    """How numeric columns without a usable precision are kept."""

    kind: Literal["decimal", "string"]
    scale: int


def check_flags(request: RegisterRequest) -> None:
    """Refuse combinations that make no sense, before anything is looked at."""
    if request.mode not in MODES:
        raise UsageError("usage.mode", f"Unknown mode {request.mode!r}.", hint="Use tiered or mirrored.")
    if not request.pk or not all(request.pk):
        raise UsageError("usage.pk", "--pk names no column.", hint="Write --pk id, or --pk tenant_id,device_id.")
    if len(set(request.pk)) != len(request.pk):
        raise UsageError("usage.pk", "--pk names a column twice.")
    _refuse(tuple(_contradictions(request)))
    if request.chunk_rows is not None and request.chunk_rows < 1:
        raise UsageError("usage.chunk_rows", "--chunk-rows must be at least 1.")
    numeric_rule(request.numeric_as)


def _contradictions(request: RegisterRequest) -> Iterator[UsageError]:
    tiered_only = {"--lake-retention": request.lake_retention, "--keep-heap": request.keep_heap or None}
    mirrored_only = {"--heap-retention": request.heap_retention, "--chunk-rows": request.chunk_rows}
    wrong = tiered_only if request.mode == "mirrored" else mirrored_only
    for flag, value in wrong.items():
        if value is not None:
            needed = "tiered" if request.mode == "mirrored" else "mirrored"
            yield UsageError("usage.mode_flag", f"{flag} is for {needed} tables only.", hint=f"Leave out {flag}.")
    if request.keep_heap and request.lake_retention is not None:
        yield UsageError(
            "usage.keep_heap",
            "--keep-heap and --lake-retention exclude each other: keep-heap deletes nothing anywhere.",
            hint="Choose one.",
        )
    if request.lake_retention is not None and _is_zero(request.partition_width):
        yield UsageError(
            "usage.width", "--lake-retention needs a partition width.", hint="Leave out --partition-width 0."
        )


def _refuse(wrong: tuple[UsageError, ...]) -> None:
    """Say everything that contradicts at once."""
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        lines = "\n".join(f"  - {error.message} {error.hint}" for error in wrong)
        raise UsageError("usage.flags", f"These flags do not go together:\n{lines}", hint="Nothing was changed.")


def _is_zero(width: str | None) -> bool:
    return width is not None and Axis.TIMESTAMPTZ.span(width) == 0


def numeric_rule(text: str) -> NumericRule:
    """Read `string` or `decimal:<scale>`."""
    kind, _, scale = text.partition(":")
    if kind == "string" and not scale:
        return NumericRule("string", 0)
    if kind == "decimal" and (not scale or (scale.isdigit() and int(scale) <= 38)):
        return NumericRule("decimal", int(scale or 18))
    raise UsageError("usage.numeric_as", f"--numeric-as {text!r} is not known.", hint="Use string or decimal:<0-38>.")


def length(text: str | None, axis: Axis, flag: str) -> int | None:
    """A retention or width flag on the table's axis."""
    if text is None:
        return None
    try:
        return axis.span(text)
    except UsageError as error:
        raise UsageError(error.code, f"{flag}: {error.message}", hint=error.hint) from None
