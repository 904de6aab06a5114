"""Table names as users write them: `schema.table`, quoted where Postgres would want it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from modak.core.errors import UsageError

_PLAIN = re.compile(r"[a-z_][a-z0-9_$]*")
_PART = re.compile(r'"((?:[^"]|"")+)"|([^".\s]+)')


@dataclass(frozen=True, slots=True, order=True)
class TableName:
    """A schema-qualified table name; the parts are unquoted, as the Postgres catalog holds them."""

    schema: str
    name: str

    @classmethod
    def parse(cls, text: str) -> TableName:
        """Read `schema.table`; unquoted parts fold to lower case as in SQL, a bare table name means `public`."""
        parts: list[str] = []
        at = 0
        while True:
            match = _PART.match(text, at)
            if match is None:
                raise _malformed(text)
            parts.append(match[1].replace('""', '"') if match[1] is not None else match[2].lower())
            at = match.end()
            if at == len(text):
                break
            if text[at] != "." or len(parts) == 2:
                raise _malformed(text)
            at += 1
        if len(parts) == 1:
            parts.insert(0, "public")
        return cls(parts[0], parts[1])

    def __str__(self) -> str:
        return f"{quote(self.schema)}.{quote(self.name)}"


def quote(identifier: str) -> str:
    """An identifier for people: quoted only where it must be. For SQL, compose with `psycopg.sql`."""
    return identifier if _PLAIN.fullmatch(identifier) else '"' + identifier.replace('"', '""') + '"'


def _malformed(text: str) -> UsageError:
    return UsageError(
        "usage.table_name",
        f"{text!r} is not a table name.",
        hint='Write schema.table, for instance public.events, or "Odd Schema"."Odd.Table".',
    )
