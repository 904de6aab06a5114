"""A process that has a child for queries: `python -m tests.runtime.asker SQL`.

It prints the process ids of its child and of the child's JVM, then asks SQL and waits for the answer.
"""

from __future__ import annotations

import os
import sys

from modak import config
from modak.runtime.opening import open_site
from modak.runtime.web.queries import Queries


def main() -> None:
    """Ask until killed."""
    with open_site(config.load(os.environ)) as site:
        queries = Queries(site, 3600, 10)
        queries.ask("SELECT 1")
        [child] = queries.children
        sys.stdout.write(" ".join(map(str, child.pids)) + "\n")
        sys.stdout.flush()
        queries.ask(sys.argv[1])


if __name__ == "__main__":
    main()
