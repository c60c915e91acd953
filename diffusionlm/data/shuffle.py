"""An order that is a function of (seed, epoch, place): shuffled within windows, resumable without their contents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from diffusionlm.data.sources import Position, Reader
from diffusionlm.diffusion.chance import Stream, generator

T = TypeVar("T")


@dataclass
class WindowShuffle(Generic[T]):
    """A reader whose items are permuted within consecutive windows.

    A position holds where the window starts and how much of it was read; resuming reads the window again. So a
    checkpoint holds no items, and nothing is lost or repeated.
    """

    upstream: Reader[T]
    window: int
    seed: int
    stream: Stream
    """Whose chance: two shuffles of a run do not share theirs."""

    def __post_init__(self) -> None:
        self._loaded: tuple[int, int] | None = None
        self._items: list[T] = []
        self._next_start: Position = None

    def read(self, epoch: int, position: Position, limit: int) -> tuple[list[T], Position]:
        """Up to ``limit`` items in shuffled order, and the position behind them."""
        place = position or {"window": 0, "start": None, "used": 0}
        items: list[T] = []
        while True:
            self._load(epoch, place["window"], place["start"])
            taken = self._items[place["used"] : place["used"] + limit - len(items)]
            items += taken
            place = {**place, "used": place["used"] + len(taken)}
            if len(items) == limit:
                return items, place
            if self._next_start is None:
                return items, None
            place = {"window": place["window"] + 1, "start": self._next_start, "used": 0}

    def _load(self, epoch: int, window: int, start: Position) -> None:
        if self._loaded == (epoch, window):
            return
        self._items = []  # the old window goes before the new one comes
        items, self._next_start = self.upstream.read(epoch, start, self.window)
        order = generator(self.seed, self.stream, epoch, window).permutation(len(items))
        self._items = [items[index] for index in order]
        self._loaded = (epoch, window)
