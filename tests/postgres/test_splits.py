from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from modak.postgres.splits import ctid_predicate, ctid_splits

_PAGES = st.integers(0, 2**32 - 2)


@given(pages=_PAGES, toast=st.integers(0, 2**40), target=st.integers(1 << 20, 2**40), cores=st.integers(1, 512))
def test_every_page_belongs_to_exactly_one_split(pages: int, toast: int, target: int, cores: int) -> None:
    splits = ctid_splits(pages % 5_000_000, pages % 5_000_000 * 8192 + toast % (1 << 36), target, cores)
    assert splits[0][0] == 0
    assert splits[-1][1] is None
    for (first, end), (following, _) in pairwise(splits):
        assert end == following
        assert first < following


@given(pages=st.integers(1, 1_000_000), cores=st.integers(1, 64))
def test_splits_are_of_equal_size_to_a_page(pages: int, cores: int) -> None:
    splits = ctid_splits(pages, pages * 8192, 256 << 20, cores)
    sizes = [(pages if end is None else end) - first for first, end in splits]
    assert sum(sizes) == pages
    assert max(sizes) - min(sizes) <= 1


def test_a_small_table_is_one_task_and_a_large_one_uses_every_core() -> None:
    assert ctid_splits(0, 0, 256 << 20, 8) == ((0, None),)
    assert len(ctid_splits(100, 100 * 8192, 256 << 20, 8)) == 1
    assert len(ctid_splits(20_000, 20_000 * 8192, 256 << 20, 8)) == 8
    assert len(ctid_splits(1_000_000, 8_192_000_000, 256 << 20, 8)) == 31


def test_a_predicate_is_a_range_of_pages() -> None:
    assert ctid_predicate((0, 10)) == "ctid >= '(0,0)'::tid AND ctid < '(10,0)'::tid"
    assert ctid_predicate((10, None)) == "ctid >= '(10,0)'::tid"
