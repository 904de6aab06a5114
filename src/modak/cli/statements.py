"""Cutting typed lines into statements: a semicolon ends one, unless it stands in quotes or in a comment. Pure."""

from __future__ import annotations

import re

_PIECE = re.compile(
    r"""
    '(?:[^'\\]|\\.|'')*(?:'|\Z)      # text
  | "(?:[^"\\]|\\.|"")*(?:"|\Z)
  | `(?:[^`]|``)*(?:`|\Z)            # identifier
  | --[^\n]*                         # comments
  | /\*.*?(?:\*/|\Z)
  | ;
  | [^'"`;/-]+ | .
    """,
    re.VERBOSE | re.DOTALL,
)


def split(text: str) -> tuple[list[str], str]:
    """The finished statements of a text, and what is left after the last semicolon."""
    statements: list[str] = []
    begun = ""
    for piece in _PIECE.findall(text):
        if piece != ";":
            begun += piece
        else:
            if not blank(begun):
                statements.append(begun.strip())
            begun = ""
    return statements, begun


def blank(text: str) -> bool:
    """Whether there is nothing in it but space and comments."""
    return not re.sub(r"--[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL).strip()
