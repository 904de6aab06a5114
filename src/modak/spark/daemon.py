"""The process that forks Spark's Python workers, with the libraries of the kernels already in memory.

Spark runs it by name (`spark.python.daemon.module`). Every worker is a fork of it, so what is imported here is loaded
once and shared, and a task starts without paying for it. Standard output belongs to Spark's protocol: nothing may print
there.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import sys
import zipimport

KERNELS = (
    "numpy",
    "pyarrow",
    "pyarrow.compute",
    "pyarrow.parquet",
    "adbc_driver_postgresql.dbapi",
    "pyroaring",
    "modak.core.faults",
    "modak.spark.distribute",
    "modak.tables.seam.streams",
    "modak.tables.fold.write",
    "modak.lake.iceberg.locate",
)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def load_kernels() -> None:
    """Import what tasks use; one that is missing is reported by the task that needs it."""
    for name in KERNELS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def keep_archives() -> None:
    """Trust what is known of the archives on the path; Spark has every one of its packages read again for each task."""
    # They do not change while a worker lives, and listing pyspark.zip sixteen times costs a tenth of a second.
    zipimport.zipimporter.invalidate_caches = lambda self: None  # type: ignore[method-assign]


def reuse_memory() -> None:
    """Keep what one batch has freed for the next; else every page of every batch is asked of the system again."""
    # Only glibc has these knobs, and the second one goes no further than this.
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, 256 << 20)
        mallopt(_MMAP_THRESHOLD, 32 << 20)


def quieten() -> None:
    """Let only warnings of tasks reach the terminal, and only on standard error."""
    import structlog

    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def main() -> None:
    """Load, then serve forks until Spark closes the pipe."""
    from pyspark import daemon

    reuse_memory()
    load_kernels()
    keep_archives()
    quieten()
    # Objects that the collector never visits stay in pages that parent and workers share.
    gc.freeze()
    daemon.manager()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
