"""Ownership of pages: the law of their number, adjacency and eviction."""

from __future__ import annotations

import pytest

from diffusionlm.inference.pages import PagePool


def counts(pool: PagePool) -> tuple[int, int, int]:
    assert pool.num_free + pool.num_owned + pool.num_cached == pool.num_pages
    return pool.num_free, pool.num_owned, pool.num_cached


def test_pages_are_adjacent_where_they_can_be() -> None:
    pool = PagePool(16)
    texts = [pool.allocate(1), pool.allocate(1)]
    for _ in range(3):
        for pages in texts:
            pages += pool.allocate(1, pages[-1])
    assert texts == [[0, 1, 2, 3], [8, 9, 10, 11]]
    pool.release(texts[0])
    assert pool.allocate(8) == list(range(8)), "the longest place"
    assert sorted(pool.allocate(4)) == [12, 13, 14, 15]
    pool.release([3])
    pool.release([9])
    assert sorted(pool.allocate(2, after=15)) == [3, 9], "not adjacent, but there"
    assert counts(pool) == (0, 16, 0)
    assert pool.allocate(0) == []
    with pytest.raises(ValueError, match="1 pages are more than the 0 that are available"):
        pool.allocate(1)


def test_the_end_of_the_oldest_text_is_evicted_first() -> None:
    pool = PagePool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for page, digest in zip([*old, *new], (b"a", b"b", b"c", b"d"), strict=True):
        pool.publish(page, digest)
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.share([b"a", b"b"]) == [old[0]]
    assert pool.allocate(2) == new
    assert pool.share([b"c"]) == []
    assert counts(pool) == (0, 4, 0)
