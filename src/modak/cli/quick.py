"""Keeping short commands short."""

from __future__ import annotations

import sys


def structlog_without_rich() -> None:
    """Import structlog without the libraries that it would draw tracebacks with; ours are plain text.

    Importing rich costs a fifth of the time that `modak-worker status` has. A module that is None in `sys.modules`
    counts as not installed, and structlog then does without it.
    """
    if "rich" in sys.modules or "structlog" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
