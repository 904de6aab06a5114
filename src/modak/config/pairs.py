"""`key=value;…` texts as frozen mappings that do not give their secrets away.

Lake properties, Spark configuration and credentials all arrive as pairs. They hold secrets next to harmless values, so
the mapping itself decides what may be shown: printing one, by accident or on purpose, never prints a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

MASK = "********"
_SENSITIVE_KEY = re.compile(
    r"secret|passw|passphrase|token|credential|private|access[-_.]?key|account[-_.]?key|\bsas\b|signature", re.I
)
# A harmless key can carry a secret inside: a JDBC URL, a Java option, an address with user and password.
_SENSITIVE_VALUE = re.compile(r"(?:secret|passw|token)[^=\s]*=|://[^/\s@]*:[^/\s@]*@", re.IGNORECASE)
_ESCAPED = re.compile(r"([;\\])")
_ESCAPE = re.compile(r"\\([;\\])")
_ENTRY = re.compile(r"((?:[^;\\]|\\[\s\S]|\\\Z)*)(?:;|\Z)")


class Malformed(ValueError):
    """A text that cannot be read; the message says what is wrong without repeating the text."""


class Pairs(Mapping[str, str]):
    """A frozen mapping of texts; shown with the values of secret-looking keys masked."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, str] | None = None) -> None:
        self._items = dict(items or {})

    def __getitem__(self, key: str) -> str:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown()})"

    def hides(self, key: str) -> bool:
        """Whether the value of this key is not for display."""
        return _SENSITIVE_KEY.search(key) is not None or _SENSITIVE_VALUE.search(self[key]) is not None

    @classmethod
    def of(cls, value: object) -> Self:
        """The same pairs as this class, from any mapping."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise Malformed("not a mapping")
        return cls({str(key): str(each) for key, each in value.items()})

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        shown = core_schema.plain_serializer_function_ser_schema(cls.shown, when_used="json")
        return core_schema.no_info_plain_validator_function(cls.of, serialization=shown)

    def shown(self) -> str:
        """The pairs as text for people."""
        return write_pairs({key: MASK if value and self.hides(key) else value for key, value in self.items()})


class SecretPairs(Pairs):
    """Pairs of which no value is ever shown."""

    __slots__ = ()

    def hides(self, key: str) -> bool:
        return True


def read_pairs(text: str) -> dict[str, str]:
    r"""Read `key=value;…`; a value may hold `=`, and `;` or `\` written as `\;` and `\\`."""
    pairs: dict[str, str] = {}
    for number, entry in enumerate(_entries(text), start=1):
        if not entry.strip():
            continue
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not equals or not key:
            raise Malformed(f"entry {number} is not key=value")
        if key in pairs:
            raise Malformed(f"the key {key} comes twice")
        pairs[key] = _ESCAPE.sub(r"\1", value)
    return pairs


def write_pairs(pairs: Mapping[str, str]) -> str:
    """The text that `read_pairs` reads back to the same pairs."""
    return ";".join(key + "=" + _ESCAPED.sub(r"\\\1", value) for key, value in pairs.items())


def _entries(text: str) -> list[str]:
    return [match[1] for match in _ENTRY.finditer(text)]
