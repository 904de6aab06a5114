"""What a setting's text may be: one `Kind` per sort of value, which reads it, names what it expects and shows it.

A kind is plain Python, so that reading, error messages and documentation agree with each other; the models attach kinds
to their fields, and pydantic calls them through `__get_pydantic_core_schema__`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from modak.config.pairs import Malformed, Pairs, read_pairs
from modak.core.axis import Axis
from modak.core.errors import UsageError

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

_MAX = 2**63 - 1
_LEAST_HEAP = 512 << 20
_WHOLE = re.compile(r"-?\d+(?:_\d+)*", re.ASCII)
_NUMBER = re.compile(r"-?(?:\d+(?:\.\d*)?|\.\d+)", re.ASCII)
_BYTES = re.compile(r"(\d+(?:_\d+)*(?:\.\d+)?)\s*([KMGTP]i?B|B)?", re.ASCII | re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", re.ASCII)
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_NAMESPACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*", re.ASCII)
_MASTER = re.compile(r"local(\[(\*|\d+)(\s*,\s*\d+)?\])?|local-cluster\[\d+,\d+,\d+\]|yarn|(spark|k8s)://\S+", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9_.:%-]{1,253}", re.ASCII)
_YES = frozenset({"true", "yes", "on", "1"})
_NO = frozenset({"false", "no", "off", "0"})
_LAKE_PREFIXES = ("iceberg.catalog.", "iceberg.table.", "hadoop.")


def plain(value: object) -> str:
    """A value for people, when its kind knows no better."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


@dataclass(frozen=True)
class Kind:
    """How one sort of value is read and shown, and what a reader is told to write."""

    expects: str
    read: Callable[[str], Any]
    show: Callable[[Any], str] = plain
    confidential: bool = False
    """Whether a malformed text may hold a secret and must not be repeated in an error."""

    def accept(self, value: object) -> object:
        """Read a text (or a number given in code); values already of the right type pass through."""
        if isinstance(value, str):
            return self.read(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self.read(str(value))
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(self.accept, handler(source))


def whole(least: int = 0, most: int = _MAX, unit: str = "") -> Kind:
    """Whole numbers within bounds; `1_000_000` may be written with underscores."""

    def read(text: str) -> int:
        if not _WHOLE.fullmatch(text.strip()):
            raise Malformed
        number = int(text)
        if not least <= number <= most:
            raise Malformed
        return number

    bounds = f"of at least {least}" if most == _MAX else f"from {least} to {most}"
    return Kind(f"a whole number {unit + ' ' if unit else ''}{bounds}", read)


def _read_seconds(text: str) -> float:
    if not _NUMBER.fullmatch(text.strip()):
        raise Malformed
    number = float(text)
    if not 0 < number <= 1e9:
        raise Malformed
    return number


def read_duration(text: str) -> float:
    """Seconds from `90s`, `5m`, `1h`, `30d` or a plain number."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise Malformed
    return _read_seconds(repr(float(match[1]) * _DURATION_UNITS[match[2] or "s"]))


def _read_flag(text: str) -> bool:
    word = text.strip().lower()
    if word not in _YES | _NO:
        raise Malformed
    return word in _YES


def read_bytes(text: str) -> int:
    """Bytes from `256MiB`, `1GiB`, `128MB` or a plain number; `MiB` counts in 1024s, `MB` in 1000s."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise Malformed
    unit = (match[2] or "B").upper()
    power = "BKMGTP".index(unit[0])
    amount = Fraction(match[1].replace("_", "")) * (1024 if "I" in unit else 1000) ** power
    if amount.denominator != 1:
        raise Malformed("not a whole number of bytes")
    if not 1 <= amount <= _MAX:
        raise Malformed
    return int(amount)


def show_bytes(count: int) -> str:
    """The shortest exact text that `read_bytes` reads back."""
    for base, units in ((1024, "KMGTP"), (1000, "KMGTP")):
        for power in range(len(units), 0, -1):
            if count and count % base**power == 0:
                return f"{count // base**power} {units[power - 1]}{'iB' if base == 1024 else 'B'}"
    return str(count)


def _read_heap(text: str) -> int:
    count = read_bytes(text)
    if count < _LEAST_HEAP:
        raise Malformed("Spark does not start with less")
    return count


def _read_lag(text: str) -> str:
    try:
        length = Axis.TIMESTAMPTZ.span(text)
    except UsageError:
        raise Malformed from None
    if length > _MAX:
        raise Malformed("longer than the axis")
    return text.strip()


def _read_text(text: str) -> str:
    stripped = text.strip()
    if not stripped or any(ord(character) < 32 for character in stripped):
        raise Malformed
    return stripped


def _matching(pattern: re.Pattern[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if not pattern.fullmatch(text.strip()):
            raise Malformed
        return text.strip()

    return read


def _read_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _read_numbers(text: str) -> tuple[int, ...]:
    numbers = _read_list(text)
    if not all(_WHOLE.fullmatch(number) and 0 <= int(number) <= 32_767 for number in numbers):
        raise Malformed
    return tuple(dict.fromkeys(int(number) for number in numbers))


def _show_list(values: tuple[object, ...]) -> str:
    return ",".join(str(value) for value in values)


def _read_lake_props(text: str) -> Pairs:
    pairs = read_pairs(text)
    for key in pairs:
        if not any(key.startswith(prefix) and key != prefix for prefix in _LAKE_PREFIXES):
            raise Malformed(f"the key {key} has none of these prefixes")
    return Pairs(pairs)


def _read_sort_keys(text: str) -> Pairs:
    pairs = read_pairs(text)
    for measurement, keys in pairs.items():
        if not all(key.strip() for key in keys.split(",")):
            raise Malformed(f"the keys of {measurement} have a gap")
    return Pairs({measurement: ",".join(_read_list(keys)) for measurement, keys in pairs.items()})


def _read_retention(text: str) -> Pairs:
    pairs = read_pairs(text)
    for measurement, kept in pairs.items():
        try:
            read_duration(kept)
        except Malformed:
            raise Malformed(f"the time of {measurement} is no duration") from None
    return Pairs(pairs)


def _read_template(text: str) -> str:
    if "{{.SchemaID}}" not in text:
        raise Malformed("it would be the same file for every schema")
    return _read_text(text)


def choice(*options: str) -> Kind:
    """One of a few words."""

    def read(text: str) -> str:
        word = text.strip().lower()
        if word not in options:
            raise Malformed
        return word

    return Kind(" or ".join(filter(None, (", ".join(options[:-1]), options[-1]))), read)


SECONDS = Kind("a number of seconds above 0", _read_seconds)
DURATION = Kind("a duration such as 90s, 5m or 1h (a plain number is seconds)", read_duration)
FLAG = Kind("true or false", _read_flag)
BYTES = Kind("a size such as 256MiB, 1GiB, 128MB or a number of bytes", read_bytes, show_bytes)
HEAP = Kind("a size of at least 512MiB, such as 1GiB or 1500MB", _read_heap, show_bytes)
LAG = Kind("a whole number, or for time keys a duration such as 7d or 12h", _read_lag)
TEXT = Kind("text without line breaks", _read_text)
SECRET = Kind("a text", str, confidential=True)
NAMESPACE = Kind("a name of letters, digits, _ and -", _matching(_NAMESPACE))
SPARK_MASTER = Kind("local[*], local[4], spark://host:port, k8s://… or yarn", _matching(_MASTER))
HOST = Kind("an address or a host name", _matching(_HOST))
PORT = whole(1, 65_535)
LIST = Kind("a list with commas between", _read_list, _show_list)
SCHEMA_IDS = Kind("a list of schema ids (0 to 32767) with commas between", _read_numbers, _show_list)
LAKE_PROPS = Kind(
    "key=value;… with keys under iceberg.catalog., iceberg.table. or hadoop.",
    _read_lake_props,
    Pairs.shown,
    confidential=True,
)
SORT_KEYS = Kind(
    "measurement=key,key;… (the measurement * stands for all others)",
    _read_sort_keys,
    Pairs.shown,
)
RETENTION = Kind(
    "measurement=duration;… such as cpu=30d;*=365d (the measurement * stands for all others)",
    _read_retention,
    Pairs.shown,
)
MANIFEST_TEMPLATE = Kind("a path that contains {{.SchemaID}}", _read_template)
