"""Keys as one text, the same in Python and in `modak.image_sql`.

A single key is its Postgres text as it is. A composite joins the parts with chr(31), with a backslash before every
backslash and separator inside a part, so that different keys never meet in one text.
"""

from __future__ import annotations

from collections.abc import Sequence

SEPARATOR = "\x1f"


def encode(parts: Sequence[str]) -> str:
    """The key text of the Postgres texts of the key columns, in the order of registration."""
    if len(parts) == 1:
        return parts[0]
    return SEPARATOR.join(part.replace("\\", "\\\\").replace(SEPARATOR, "\\" + SEPARATOR) for part in parts)


def decode(text: str, columns: int) -> tuple[str, ...]:
    """The texts of the key columns back from the key text."""
    if columns == 1:
        return (text,)
    parts: list[str] = [""]
    escaped = False
    for char in text:
        if not escaped and char == "\\":
            escaped = True
        elif not escaped and char == SEPARATOR:
            parts.append("")
        else:
            parts[-1] += char
            escaped = False
    if len(parts) != columns or escaped:
        raise ValueError(f"{text!r} is not a key of {columns} columns")
    return tuple(parts)
