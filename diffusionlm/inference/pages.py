"""Who owns which page of a `PagedCache`, and which pages a later request may share.

A page is free, owned by one or more requests, or cached: kept for its content until its room is needed. `PagePool`
knows pages, `PageManager` the texts of requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from diffusionlm.inference.model_runner import count_final_tokens, count_unchanging_tokens, schedule_step
from diffusionlm.inference.requests import ActiveRequest


class PagePool:
    """Allocates pages, and finds those that hold the beginning of a text."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._num_owners = np.zeros(num_pages, dtype=np.int64)
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Pages without an owner that are kept for their content, the least recently used first."""

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_owned(self) -> int:
        return self.num_pages - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give."""
        return self.num_free + self.num_cached

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Give pages to an owner: adjacent ones, if there are, which are read without a copy.

        Args:
            after: last page that the owner has; the next ones are preferred.

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
        pages = self._find_pages(count, after)
        self._is_free[pages] = False
        self._num_owners[pages] = 1
        self.num_free -= count
        return pages

    def _find_pages(self, count: int, after: int | None) -> list[int]:
        if after is not None and self._is_free[after + 1 : after + 1 + count].sum() == count:
            return list(range(after + 1, after + 1 + count))
        free = np.flatnonzero(self._is_free)
        longest = max(np.split(free, np.flatnonzero(np.diff(free) > 1) + 1), key=len)
        if len(longest) < max(count, 1):
            return [int(page) for page in free[:count]]
        # In the middle, so that this text and the one before it can grow.
        start = (len(longest) - count) // 2 if longest[0] else 0
        return [int(page) for page in longest[start : start + count]]

    def share(self, digests: Sequence[bytes]) -> list[int]:
        """Give an owner the pages that hold the longest known beginning of a text.

        Args:
            digests: of its pages, from the first one on.
        """
        pages: list[int] = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
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
        for page in reversed(pages):  # the end of a text is evicted before its beginning
            assert self._num_owners[page] > 0, "a page without an owner is released"
            self._num_owners[page] -= 1
            if self._num_owners[page]:
                continue
            if page in self._digest_of:
                self._cached[page] = None
            else:
                self._is_free[page] = True
                self.num_free += 1

    def _forget(self, page: int) -> None:
        del self._page_of[self._digest_of.pop(page)]


class PageManager:
    """Gives requests pages for their texts, and shares those of texts that begin alike."""

    def __init__(self, num_pages: int, page_size: int, *, has_prefix_cache: bool) -> None:
        self.pool = PagePool(num_pages)
        self._page_size, self.has_prefix_cache = page_size, has_prefix_cache

    def check_size(self, request: ActiveRequest) -> None:
        """Check that a request can fit into the cache.

        Raises:
            ValueError: it cannot.
        """
        num_pages = self._num_pages(request, len(request.tokens_L))
        if num_pages > self.pool.num_pages:
            raise ValueError(
                f"{len(request.tokens_L)} tokens need {num_pages} pages of {self._page_size} positions, and the "
                f"cache has {self.pool.num_pages}: shorten the text, or give the cache more memory"
            )

    def allocate_prompt_pages(self, request: ActiveRequest, others: Sequence[ActiveRequest]) -> bool:
        """Give a waiting request the pages of its first forward; False if there are not enough.

        Args:
            others: requests that are decoded. They may need one page more at once, and would take these back.
        """
        if self.can_share(request):
            self._share(request)
        length = schedule_step(request).num_visible if request.uses_blocks else len(request.tokens_L)
        reserved = sum(min(other.num_texts, self._missing(other, len(other.tokens_L))) for other in others)
        if self._missing(request, length) + reserved <= self.pool.num_available:
            return self.allocate(request, length)
        self.release(request)
        return False

    def allocate(self, request: ActiveRequest, length: int) -> bool:
        """Give a request pages for all positions below ``length``; False if there are not enough."""
        if self._missing(request, length) > self.pool.num_available:
            return False
        request.pages = request.pages or [[] for _ in range(request.num_texts)]
        num_pages = -(-length // self._page_size)
        for pages in request.pages:
            if num_pages > len(pages):
                pages += self.pool.allocate(num_pages - len(pages), pages[-1] if pages else None)
        return True

    def release(self, request: ActiveRequest) -> None:
        """Take all pages from a request."""
        for pages in request.pages:
            self.pool.release(pages)
        request.pages, request.page_digests = [], []
        request.cached_length, request.needs_prefill = 0, True

    def publish(self, request: ActiveRequest) -> None:
        """Add the pages of a request that have become final to the prefix cache."""
        if not self.can_share(request):
            return
        digests = self._digest(request, count_unchanging_tokens(request))
        for index, digest in enumerate(digests, start=len(request.page_digests)):
            self.pool.publish(request.pages[0][index], digest)
            request.page_digests.append(digest)

    def can_share(self, request: ActiveRequest) -> bool:
        """Whether keys and values of a page depend on the text up to the end of its last block alone."""
        return self.has_prefix_cache and request.uses_blocks and not request.has_guidance

    def _num_pages(self, request: ActiveRequest, length: int) -> int:
        """Pages of all texts of a request up to a length."""
        return -(-length // self._page_size) * request.num_texts if request.uses_cache else 0

    def _missing(self, request: ActiveRequest, length: int) -> int:
        """Pages that a request lacks for its positions below ``length``."""
        return max(0, self._num_pages(request, length) - sum(map(len, request.pages)))

    def _share(self, request: ActiveRequest) -> None:
        """Begin a waiting request with the pages of the prefix cache."""
        digests = self._digest(request, count_final_tokens(request))
        pages = self.pool.share(digests)
        if pages:
            request.pages, request.page_digests = [pages], digests[: len(pages)]
            request.cached_length = len(pages) * self._page_size

    def _digest(self, request: ActiveRequest, num_tokens: int) -> list[bytes]:
        """Digests of the whole pages of a request's first ``num_tokens`` positions, each with everything before it,
        behind those that it has. Equal ones mean equal keys and values.

        Keys and values of a page depend on the tokens and images up to the end of its last block, which may be in the
        next page, and on where blocks begin, as the turns of a chat move them.
        """
        size, num_known = self._page_size, len(request.page_digests)
        ends = np.arange((num_known + 1) * size, num_tokens + 1, size)
        block_length = request.settings.block_causal_length
        if not len(ends) or block_length is None:
            return []
        block_starts_L = request.segments.block_starts(np.arange(len(request.tokens_L)), block_length)
        block_ends = np.searchsorted(block_starts_L, block_starts_L[ends - 1], side="right")
        contents_2L = np.stack([request.tokens_L, block_starts_L])
        digests, digest = [], request.page_digests[-1] if num_known else request.cache_salt
        for end, block_end in zip(ends, block_ends, strict=True):
            images = [item for item in request.options.images if item.start < block_end and item.end > end - size]
            image_keys = repr([(item.start, item.image.digest) for item in images]).encode() if images else b""
            digest = sha256(digest + contents_2L[:, end - size : block_end].tobytes() + image_keys).digest()
            digests.append(digest)
        return digests
