"""`python -m bench [name|all]`: run one benchmark, or all of them."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = ("tiering",)


def main() -> int:
    names = sys.argv[1:] or ["all"]
    chosen = BENCHMARKS if names == ["all"] else tuple(names)
    unknown = [name for name in chosen if name not in BENCHMARKS]
    if unknown:
        print(f"There is no benchmark {', '.join(unknown)}; known are: {', '.join(BENCHMARKS)}.", file=sys.stderr)
        return 2
    for name in chosen:
        importlib.import_module(f"bench.{name}").main()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
