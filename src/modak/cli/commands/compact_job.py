"""`compact-job`: one compaction job in this process, for whoever started it."""

from __future__ import annotations

import typer


def compact_job() -> None:
    """Run one compaction job; JSON in, JSON out.

    The order comes on stdin, the answer goes to stdout. A job that fails is an answer (success: false); exit code 1
    says that there was no order.
    """
    from modak.measurements.child import main

    code = main()
    if code:
        raise typer.Exit(code)
