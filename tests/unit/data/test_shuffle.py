"""Shuffled windows: a permutation, another in each epoch and window, resumable at every place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diffusionlm.data.shuffle import WindowShuffle

Drain = Callable[..., list[Any]]
ListReader = Callable[[list[Any]], Any]


@pytest.mark.parametrize("size", [0, 1, 4, 5, 12, 13, 40])
@pytest.mark.parametrize("window", [1, 4, 100])
def test_permutes_within_windows(list_reader: ListReader, drain: Drain, size: int, window: int) -> None:
    items = list(range(size))
    shuffle = WindowShuffle(list_reader(items), window, seed=0, stream=1)
    once = drain(shuffle)
    for start in range(0, size, window):
        assert sorted(once[start : start + window]) == items[start : start + window]
    for chunks in [(1,), (3,), (window,), (5, 1, 2)]:
        assert drain(shuffle, chunks) == once
    assert sorted(drain(shuffle, epoch=1)) == items


def test_order_differs_between_epochs_windows_streams_and_seeds(list_reader: ListReader, drain: Drain) -> None:
    def order(epoch: int = 0, seed: int = 0, stream: int = 1) -> list[int]:
        return drain(WindowShuffle(list_reader(list(range(32))), 16, seed, stream), epoch=epoch)

    assert order() == order()
    variants = [order(), order(epoch=1), order(seed=1), order(stream=2)]
    assert all(one != other for index, one in enumerate(variants) for other in variants[:index])
    assert [item - 16 for item in order()[16:]] != order()[:16]
    assert order()[:16] != list(range(16))


def test_resumes_at_every_place(list_reader: ListReader, drain: Drain) -> None:
    def make() -> WindowShuffle[int]:
        return WindowShuffle(list_reader(list(range(23))), 5, seed=3, stream=1)

    whole = drain(make(), epoch=2)
    for count in range(1, 24):
        head, position = make().read(2, None, count)
        assert head == whole[:count]
        assert head + drain(make(), (2,), epoch=2, position=position) == whole


def test_chained_shuffles_resume_at_every_place(list_reader: ListReader, drain: Drain) -> None:
    def make() -> WindowShuffle[int]:
        inner = WindowShuffle(list_reader(list(range(23))), 7, seed=3, stream=1)
        return WindowShuffle(inner, 3, seed=3, stream=2)

    whole = drain(make())
    assert sorted(whole) == list(range(23))
    for count in range(1, 24):
        head, position = make().read(0, None, count)
        assert head + drain(make(), (1, 4), position=position) == whole


def test_one_reader_serves_positions_out_of_turn(list_reader: ListReader, drain: Drain) -> None:
    shuffle = WindowShuffle(list_reader(list(range(23))), 5, seed=3, stream=1)
    epochs = [drain(shuffle, epoch=epoch) for epoch in range(2)]
    for epoch, count in [(1, 7), (0, 7), (1, 2), (0, 21), (0, 3)]:
        _, position = shuffle.read(epoch, None, count)
        assert drain(shuffle, (4,), epoch=epoch, position=position) == epochs[epoch][count:]
