"""Write the reference page of all settings: `python -m modak.config docs/configuration.md`, or to standard output."""

from __future__ import annotations

import sys
from pathlib import Path

from modak.config.explaining import document


def main(arguments: list[str]) -> None:
    """Write the page to the file named, or to standard output."""
    if arguments:
        Path(arguments[0]).write_text(document(), encoding="utf-8")
    else:
        sys.stdout.write(document())


if __name__ == "__main__":
    main(sys.argv[1:])
