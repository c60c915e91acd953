"""Documents: where they come from. A source is read in order from any position, so that a run resumes exactly."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from diffusionlm.diffusion.rng import RngStream, keyed_rng

T = TypeVar("T")


Tokens = NDArray[np.int32]
"""Ids of one document, as its text gives them: without end-of-text tokens around it."""


Split = Literal["train", "validation"]


REPAIRED_PREFIX = "mended: "
"""What the reasons of rows begin with that were mended, and not left out."""


ReaderPosition = Any
"""A JSON value that says where to read on: made by a reader, kept in checkpoints, given back to it. None: the start."""


class ResumableReader(Protocol[T]):
    """An ordered, repeatable sequence for each epoch, readable from any position."""

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[T], ReaderPosition]:
        """Up to ``limit`` items from ``position`` on, and the position behind them.

        Fewer than ``limit`` items: the epoch has ended, and the position is None.
        """


class DocumentSource(ResumableReader[str], Protocol):
    """Documents of one split, with an identity."""

    @property
    def identity(self) -> str:
        """Changes when the documents do; kept in checkpoints."""

    @property
    def provenance(self) -> str:
        """Where the documents are and how many or how large, for people."""

    @property
    def skipped(self) -> dict[str, int]:
        """Documents left out so far, counted by reason."""


@runtime_checkable
class KnownEntropy(Protocol):
    """A source of independent documents whose distribution is known: ask with ``isinstance(source, KnownEntropy)``."""

    @property
    def entropy_nats(self) -> float:
        """Exact entropy of one document in nats, its length included: no model's mean loss can be lower."""

    @property
    def length_entropy_nats(self) -> float:
        """Exact entropy of a document's length in nats, 0 where all are equally long.

        A model that sees how many positions a document has is told its length: its floor is ``entropy_nats`` less this.
        """

    @property
    def max_length(self) -> int:
        """Characters, which are bytes, of the longest document."""

    def log_probability(self, text: str) -> float:
        """Exact log-probability of a document in nats.

        Raises:
            ValueError: the source never gives this text; says why.
        """


S = TypeVar("S")


ItemsFuture = Callable[[], list[T]]
"""What a window becomes, when it is asked for: elsewhere it may be worked on until then."""


WindowTransform = Callable[[int, int, list[S]], ItemsFuture[T]]
"""(epoch, number of the window, its items) -> what they become."""


@dataclass
class _PrefetchedWindow(Generic[T]):
    epoch: int
    number: int
    future: ItemsFuture[T]
    next_position: ReaderPosition
    """Where the next one starts; None: there is none."""


@dataclass
class WindowedReader(Generic[S, T]):
    """A reader whose items are those of another one, transformed window by window.

    A position holds where the window starts and how much of what it became was read; resuming reads and transforms the
    window again. So a checkpoint holds no items, and nothing is lost or repeated.
    """

    upstream: ResumableReader[S]
    size: int
    """Items of a window."""
    transform: WindowTransform[S, T]
    """Must give the same for the same window."""
    prefetch_depth: int = 0
    """Windows that are handed to ``transform`` before they are read, so that others can work on them."""

    def __post_init__(self) -> None:
        self._loaded_window: tuple[int, int] | None = None
        self._items: list[T] = []
        self._next_position: ReaderPosition = None
        self._prefetched: deque[_PrefetchedWindow[T]] = deque()

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[T], ReaderPosition]:
        """Up to ``limit`` items, and the position behind them."""
        place = position or {"window": 0, "start": None, "used": 0}
        items: list[T] = []
        while True:
            self._load_window(epoch, place["window"], place["start"])
            taken = self._items[place["used"] : place["used"] + limit - len(items)]
            items += taken
            place = {**place, "used": place["used"] + len(taken)}
            if len(items) == limit:
                return items, place
            if self._next_position is None:
                return items, None
            place = {"window": place["window"] + 1, "start": self._next_position, "used": 0}

    def _load_window(self, epoch: int, number: int, start: ReaderPosition) -> None:
        if self._loaded_window == (epoch, number):
            return
        self._items = []  # the old window goes before the new one comes
        coming = self._prefetched
        if not coming or (coming[0].epoch, coming[0].number) != (epoch, number):
            coming.clear()
            self._submit_window(epoch, number, start)
        window = coming.popleft()
        last = window
        while len(coming) < self.prefetch_depth:
            last = coming[-1] if coming else last
            if last.next_position is None:
                break
            self._submit_window(epoch, last.number + 1, last.next_position)
        self._items, self._next_position = window.future(), window.next_position
        self._loaded_window = (epoch, number)

    def _submit_window(self, epoch: int, number: int, start: ReaderPosition) -> None:
        items, next_position = self.upstream.read(epoch, start, self.size)
        self._prefetched.append(_PrefetchedWindow(epoch, number, self.transform(epoch, number, items), next_position))


def shuffle_windows(
    upstream: ResumableReader[T], window: int, seed: int, stream: RngStream, *key: int
) -> WindowedReader[T, T]:
    """The items, permuted within consecutive windows: an order that is a function of (seed, epoch, place).

    Args:
        stream, key: whose chance: two shuffles of a run do not share theirs.
    """

    def permute(epoch: int, number: int, items: list[T]) -> ItemsFuture[T]:
        order = keyed_rng(seed, stream, *key, epoch, number).permutation(len(items))
        return lambda: [items[index] for index in order]

    return WindowedReader(upstream, window, permute)


DOCUMENTS_AT_ONCE = 64


def first_documents(source: ResumableReader[str], max_bytes: int) -> Iterator[str]:
    """Documents of the first epoch in order, up to and with the one that brings them to ``max_bytes`` of UTF-8.

    Raises:
        ValueError: (while it is read) the source cannot read on.
    """
    left, position = max_bytes, None
    while left > 0:
        documents, position = source.read(0, position, DOCUMENTS_AT_ONCE)
        for text in documents:
            yield text
            left -= len(text.encode("utf-8", "surrogatepass"))
            if left <= 0:
                return
        if position is None:
            return
