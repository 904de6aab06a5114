"""How one heap file is cut into tasks: ranges of pages of roughly equal bytes. Pure.

The last range is open-ended, so rows that land on new pages after the file was measured are still read by one task.
"""

from __future__ import annotations

Split = tuple[int, int | None]
"""First page and the page after the last one; `None` = to the end of the file, however long it is by then."""

_SMALLEST = 8 << 20


def ctid_splits(pages: int, bytes: int, target_bytes: int, cores: int) -> tuple[Split, ...]:  # noqa: A002 - the word of the domain
    """Cut a heap of `pages` pages and `bytes` bytes (TOAST included) so that tasks are large and every core has one."""
    if pages <= 1:
        return ((0, None),)
    by_size = -(-bytes // max(target_bytes, 1))
    by_cores = min(max(cores, 1), bytes // _SMALLEST)
    count = min(max(by_size, by_cores, 1), pages)
    edges = [pages * index // count for index in range(count)]
    return tuple(zip(edges, [*edges[1:], None], strict=True))


def ctid_predicate(split: Split) -> str:
    """The WHERE condition of a split; Postgres answers it with a TID range scan."""
    first, end = split
    lower = f"ctid >= '({first},0)'::tid"
    return lower if end is None else f"{lower} AND ctid < '({end},0)'::tid"
