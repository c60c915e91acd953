"""Readers: ordered sequences that can be read from any position, so that a run resumes exactly.

Readers are stacked: documents -> shuffled documents -> tokens -> rows -> shuffled rows. The position of each is a small
JSON value that contains the position of the reader below it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from diffusionlm.diffusion.rng import RngStream, keyed_rng

S = TypeVar("S")
T = TypeVar("T")

Tokens = NDArray[np.int32]
"""Token ids of one document, [T], without end-of-text tokens."""

Split = Literal["train", "validation"]

REPAIRED_PREFIX = "mended: "
"""Prefix of the skip reasons of records that were repaired, not left out. Stored in index.json."""

DOCUMENTS_PER_READ = 64


@dataclass
class SkipLog:
    """Records that one stage left out or changed in the first epoch: numbers and first examples, by reason."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    """Place of the first record, and what is wrong with it."""
    total: int = 0
    """Records that the stage has read."""
    last: list[int] = field(default_factory=list)
    """Sort key of the last of them."""

    def is_new(self, epoch: int, sort_key: tuple[int, ...]) -> bool:
        """Return whether a record is to be counted: once, however often the first epoch is read."""
        if epoch or list(sort_key) <= self.last:
            return False
        self.last, self.total = list(sort_key), self.total + 1
        return True

    def add(self, reason: str, example: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.examples.setdefault(reason, example)

    @property
    def num_left_out(self) -> int:
        """Number of records that were left out, not repaired."""
        return sum(count for reason, count in self.counts.items() if not reason.startswith(REPAIRED_PREFIX))


ReaderPosition = Any
"""A JSON value that says where to continue reading; stored in checkpoints. None: the start of an epoch."""


class ResumableReader(Protocol[T]):
    """An ordered, repeatable sequence for each epoch, readable from any position."""

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[T], ReaderPosition]:
        """Return up to ``limit`` items from ``position`` on, and the position after them.

        If the epoch ends, fewer than ``limit`` items may be returned, and the position is None.
        """


def iterate(reader: ResumableReader[T], items_per_read: int) -> Iterator[T]:
    """Iterate over the items of the first epoch."""
    position: ReaderPosition = None
    while True:
        items, position = reader.read(0, position, items_per_read)
        yield from items
        if position is None:
            return


class DocumentSource(ResumableReader[Any], Protocol):
    """A reader of the documents of one split: texts, or conversations (`chat.conversation.Conversation`)."""

    @property
    def identity(self) -> str:
        """A string that changes when the documents change; stored in checkpoints."""

    @property
    def provenance(self) -> str:
        """Location and size of the documents, as text."""

    @property
    def skip_log(self) -> SkipLog:
        """Records left out or repaired so far."""


ItemsFuture = Callable[[], list[T]]
"""Waits for the transformed items of a window and returns them."""

WindowTransform = Callable[[int, int, list[S]], ItemsFuture[T]]
"""(epoch, index of the window, its items) -> the transformed items; deterministic."""


@dataclass
class WindowedReader(Generic[S, T]):
    """A reader that transforms another reader window by window.

    A position holds the start of the window and the number of its transformed items that were read; it stores no items.
    Resuming reads and transforms the window again.
    """

    upstream: ResumableReader[S]
    window_size: int
    """Upstream items per window."""
    transform: WindowTransform[S, T]
    prefetch_depth: int = 0
    """Number of windows that are passed to ``transform`` ahead of time. It changes no item."""

    def __post_init__(self) -> None:
        self._loaded_window: tuple[int, int] | None = None
        self._items: list[T] = []
        self._next_position: ReaderPosition = None
        # (epoch, index, transformed items, start of the next window in the upstream reader or None)
        self._prefetched: deque[tuple[int, int, ItemsFuture[T], ReaderPosition]] = deque()

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[T], ReaderPosition]:
        position = position or {"window": 0, "start": None, "used": 0}
        items: list[T] = []
        while True:
            self._load_window(epoch, position["window"], position["start"])
            new_items = self._items[position["used"] : position["used"] + limit - len(items)]
            items += new_items
            position = {**position, "used": position["used"] + len(new_items)}
            if len(items) == limit:
                return items, position
            if self._next_position is None:
                return items, None
            position = {"window": position["window"] + 1, "start": self._next_position, "used": 0}

    def _load_window(self, epoch: int, index: int, start: ReaderPosition) -> None:
        if self._loaded_window == (epoch, index):
            return
        self._items = []  # frees the old window before the new one is built
        prefetched = self._prefetched
        if not prefetched or prefetched[0][:2] != (epoch, index):
            prefetched.clear()
            self._submit_window(epoch, index, start)
        _, _, future, self._next_position = prefetched.popleft()
        last, next_position = (prefetched[-1][1], prefetched[-1][3]) if prefetched else (index, self._next_position)
        while len(prefetched) < self.prefetch_depth and next_position is not None:
            last, next_position = last + 1, self._submit_window(epoch, last + 1, next_position)
        self._items = future()
        self._loaded_window = (epoch, index)

    def _submit_window(self, epoch: int, index: int, start: ReaderPosition) -> ReaderPosition:
        items, next_position = self.upstream.read(epoch, start, self.window_size)
        self._prefetched.append((epoch, index, self.transform(epoch, index, items), next_position))
        return next_position


def shuffle_windows(
    upstream: ResumableReader[T], window_size: int, seed: int, stream: RngStream, *key: int
) -> WindowedReader[T, T]:
    """Permute the items within consecutive windows. The order is a function of (seed, stream, key, epoch, window)."""

    def permute(epoch: int, index: int, items: list[T]) -> ItemsFuture[T]:
        order = keyed_rng(seed, stream, *key, epoch, index).permutation(len(items))
        return lambda: [items[item] for item in order]

    return WindowedReader(upstream, window_size, permute)


def read_first_documents(source: DocumentSource, max_bytes: int) -> Iterator[str]:
    """Iterate over the first documents of a source, up to and including the one that reaches ``max_bytes`` of UTF-8.

    Of conversations, the contents of their messages.
    """
    num_bytes = 0
    for text in map(str, iterate(source, DOCUMENTS_PER_READ)):
        yield text
        num_bytes += len(text.encode("utf-8", "surrogatepass"))
        if num_bytes >= max_bytes:
            return
