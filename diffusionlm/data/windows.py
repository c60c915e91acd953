"""Readers over readers: what is done with one window of items after the other, resumable without their contents."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from diffusionlm.data.reader import Position, Reader
from diffusionlm.diffusion.rng import Stream, generator

S = TypeVar("S")
T = TypeVar("T")

Pending = Callable[[], list[T]]
"""What a window becomes, when it is asked for: elsewhere it may be worked on until then."""

Transform = Callable[[int, int, list[S]], Pending[T]]
"""(epoch, number of the window, its items) -> what they become."""


@dataclass
class _Window(Generic[T]):
    epoch: int
    number: int
    pending: Pending[T]
    behind: Position
    """Where the next one starts; None: there is none."""


@dataclass
class Windows(Generic[S, T]):
    """A reader whose items are those of another one, transformed window by window.

    A position holds where the window starts and how much of what it became was read; resuming reads and transforms the
    window again. So a checkpoint holds no items, and nothing is lost or repeated.
    """

    upstream: Reader[S]
    size: int
    """Items of a window."""
    transform: Transform[S, T]
    """Must give the same for the same window."""
    ahead: int = 0
    """Windows that are handed to ``transform`` before they are read, so that others can work on them."""

    def __post_init__(self) -> None:
        self._loaded: tuple[int, int] | None = None
        self._items: list[T] = []
        self._behind: Position = None
        self._coming: deque[_Window[T]] = deque()

    def read(self, epoch: int, position: Position, limit: int) -> tuple[list[T], Position]:
        """Up to ``limit`` items, and the position behind them."""
        place = position or {"window": 0, "start": None, "used": 0}
        items: list[T] = []
        while True:
            self._load(epoch, place["window"], place["start"])
            taken = self._items[place["used"] : place["used"] + limit - len(items)]
            items += taken
            place = {**place, "used": place["used"] + len(taken)}
            if len(items) == limit:
                return items, place
            if self._behind is None:
                return items, None
            place = {"window": place["window"] + 1, "start": self._behind, "used": 0}

    def _load(self, epoch: int, number: int, start: Position) -> None:
        if self._loaded == (epoch, number):
            return
        self._items = []  # the old window goes before the new one comes
        coming = self._coming
        if not coming or (coming[0].epoch, coming[0].number) != (epoch, number):
            coming.clear()
            self._begin(epoch, number, start)
        window = coming.popleft()
        last = window
        while len(coming) < self.ahead:
            last = coming[-1] if coming else last
            if last.behind is None:
                break
            self._begin(epoch, last.number + 1, last.behind)
        self._items, self._behind = window.pending(), window.behind
        self._loaded = (epoch, number)

    def _begin(self, epoch: int, number: int, start: Position) -> None:
        items, behind = self.upstream.read(epoch, start, self.size)
        self._coming.append(_Window(epoch, number, self.transform(epoch, number, items), behind))


def shuffled(upstream: Reader[T], window: int, seed: int, stream: Stream, *key: int) -> Windows[T, T]:
    """The items, permuted within consecutive windows: an order that is a function of (seed, epoch, place).

    Args:
        stream, key: whose chance: two shuffles of a run do not share theirs.
    """

    def permute(epoch: int, number: int, items: list[T]) -> Pending[T]:
        order = generator(seed, stream, *key, epoch, number).permutation(len(items))
        return lambda: [items[index] for index in order]

    return Windows(upstream, window, permute)
