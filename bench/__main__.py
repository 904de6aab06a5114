"""`python -m bench [name|all] [--rows N]`: run one benchmark, or all of them."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = (
    "tiering",
    "seam",
    "verify",
    "fold",
    "decoding",
    "copy",
    "pump",
    "freshness",
    "maintenance",
    "adopt",
    "load",
    "entities",
    "measurements",
)


def main() -> int:
    name, *options = sys.argv[1:] or ["all"]
    if name not in (*BENCHMARKS, "all"):
        print(f"There is no benchmark {name}; known are: {', '.join(BENCHMARKS)} and all.", file=sys.stderr)
        return 2
    for chosen in BENCHMARKS if name == "all" else (name,):
        importlib.import_module(f"bench.{chosen}").main(options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
