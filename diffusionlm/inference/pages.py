"""Who owns which page of a `PagedCache`, and which pages a later request may share.

A page is free, owned by one or more requests, or cached: kept for its content until its room is needed. The number of
pages of the three kinds is always that of all pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray


class PagePool:
    """Allocates pages, and finds those that hold the beginning of a text."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self.num_owned = 0
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._is_reserved = np.zeros(num_pages, dtype=np.bool_)
        """Free pages behind an owner's last one. Others get them last: adjacent pages are read without a copy."""
        self._num_owners = np.zeros(num_pages, dtype=np.int64)
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Pages without an owner that are kept for their content, the least recently used first."""

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give."""
        return self.num_free + self.num_cached

    def allocate(self, count: int, after: int | None = None, num_later: int = 0) -> list[int]:
        """Give pages to an owner: adjacent ones, if there are.

        Args:
            after: last page that the owner has; the next ones are preferred.
            num_later: pages that the owner will ask for later. A place with as many free pages behind it is preferred.

        Raises:
            ValueError: there are fewer.
        """
        if count > self.num_available:
            raise ValueError(f"{count} pages are more than the {self.num_available} that are available")
        while self.num_free < count:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
            self._is_free[page] = True
            self.num_free += 1
        pages = self._find_pages(count, after, num_later)
        self._is_free[pages] = self._is_reserved[pages] = False
        self._num_owners[pages] = 1
        self.num_free -= count
        self.num_owned += count
        return pages

    def _find_pages(self, count: int, after: int | None, num_later: int) -> list[int]:
        if after is not None and self._is_free[after + 1 : after + 1 + count].sum() == count:
            return list(range(after + 1, after + 1 + count))
        unreserved = np.flatnonzero(self._is_free & ~self._is_reserved)
        if num_later and (run := _find_run(unreserved, count + num_later)) is not None:
            self._is_reserved[run[count:]] = True
            return run[:count]
        free = np.flatnonzero(self._is_free)
        run = _find_run(unreserved, count) or _find_run(free, count)
        return [int(page) for page in free[:count]] if run is None else run

    def share(self, digests: Sequence[bytes]) -> list[int]:
        """Give an owner the pages that hold the longest known beginning of a text.

        Args:
            digests: of its pages, from the first one on (`page_digests`).
        """
        pages: list[int] = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            self.num_owned += not self._num_owners[page]
            self._num_owners[page] += 1
            self._cached.pop(page, None)
            pages.append(page)
        return pages

    def publish(self, page: int, digest: bytes) -> None:
        """Let later requests share an owned page, whose content does not change anymore."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest], self._digest_of[page] = page, digest

    def release(self, pages: Sequence[int]) -> None:
        """Take pages from an owner; the last one comes last."""
        if pages:
            end = pages[-1] + 1
            later = np.flatnonzero(~self._is_reserved[end:])
            self._is_reserved[end : end + int(later[0]) if len(later) else None] = False
        for page in reversed(pages):  # the end of a text is evicted before its beginning
            assert self._num_owners[page] > 0, "a page without an owner is released"
            self._num_owners[page] -= 1
            if self._num_owners[page]:
                continue
            self.num_owned -= 1
            if page in self._digest_of:
                self._cached[page] = None
            else:
                self._is_free[page] = True
                self.num_free += 1

    def _forget(self, page: int) -> None:
        del self._page_of[self._digest_of.pop(page)]


def _find_run(pages: NDArray[np.int64], count: int) -> list[int] | None:
    """The first ``count`` adjacent ones of ascending pages; None: there are none."""
    if not 0 < count <= len(pages):
        return None
    # A run begins where the count-th page from here is count - 1 pages away.
    starts = np.flatnonzero(pages[count - 1 :] - pages[: len(pages) - count + 1] == count - 1)
    return [int(page) for page in pages[starts[0] : starts[0] + count]] if len(starts) else None


def page_digests(contents: Iterable[NDArray[np.int64]], salt: bytes) -> list[bytes]:
    """Digest of each page of a text and of everything before it, by SHA-256: equal digests mean equal keys and values.

    Args:
        contents: for each page in order what its keys and values depend on besides the pages before.
        salt: what all of them depend on; for pages behind others the digest of the page before.
    """
    digests, digest = [], salt
    for content in contents:
        digest = sha256(digest + content.tobytes()).digest()
        digests.append(digest)
    return digests
