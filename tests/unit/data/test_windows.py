"""Windows: what they become is read as if it were one stream, resumable at every place; shuffled, encoded, ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diffusionlm.data.reader import ItemsFuture, WindowedReader, shuffle_windows
from diffusionlm.data.tokenization import CHUNK_DOCUMENTS, InlineTextEncoder, tokenize_reader

Drain = Callable[..., list[Any]]
ListReader = Callable[[list[Any]], Any]


@pytest.mark.parametrize("size", [0, 1, 4, 5, 12, 13, 40])
@pytest.mark.parametrize("window", [1, 4, 100])
def test_permutes_within_windows(list_reader: ListReader, drain: Drain, size: int, window: int) -> None:
    items = list(range(size))
    shuffle = shuffle_windows(list_reader(items), window, seed=0, stream=1)
    once = drain(shuffle)
    for start in range(0, size, window):
        assert sorted(once[start : start + window]) == items[start : start + window]
    for chunks in [(1,), (3,), (window,), (5, 1, 2)]:
        assert drain(shuffle, chunks) == once
    assert sorted(drain(shuffle, epoch=1)) == items


def test_order_differs_between_epochs_windows_streams_and_seeds(list_reader: ListReader, drain: Drain) -> None:
    def order(epoch: int = 0, seed: int = 0, stream: int = 1, *key: int) -> list[int]:
        return drain(shuffle_windows(list_reader(list(range(32))), 16, seed, stream, *key), epoch=epoch)

    assert order() == order()
    variants = [order(), order(epoch=1), order(seed=1), order(stream=2), order(0, 0, 1, 0)]
    assert all(one != other for index, one in enumerate(variants) for other in variants[:index])
    assert [item - 16 for item in order()[16:]] != order()[:16]
    assert order()[:16] != list(range(16))


def test_resumes_at_every_place(list_reader: ListReader, drain: Drain) -> None:
    def make() -> WindowedReader[int, int]:
        return shuffle_windows(list_reader(list(range(23))), 5, seed=3, stream=1)

    whole = drain(make(), epoch=2)
    for count in range(1, 24):
        head, position = make().read(2, None, count)
        assert head == whole[:count]
        assert head + drain(make(), (2,), epoch=2, position=position) == whole


def test_chained_shuffles_resume_at_every_place(list_reader: ListReader, drain: Drain) -> None:
    def make() -> WindowedReader[int, int]:
        inner = shuffle_windows(list_reader(list(range(23))), 7, seed=3, stream=1)
        return shuffle_windows(inner, 3, seed=3, stream=2)

    whole = drain(make())
    assert sorted(whole) == list(range(23))
    for count in range(1, 24):
        head, position = make().read(0, None, count)
        assert head + drain(make(), (1, 4), position=position) == whole


def test_one_reader_serves_positions_out_of_turn(list_reader: ListReader, drain: Drain) -> None:
    shuffle = shuffle_windows(list_reader(list(range(23))), 5, seed=3, stream=1)
    epochs = [drain(shuffle, epoch=epoch) for epoch in range(2)]
    for epoch, count in [(1, 7), (0, 7), (1, 2), (0, 21), (0, 3)]:
        _, position = shuffle.read(epoch, None, count)
        assert drain(shuffle, (4,), epoch=epoch, position=position) == epochs[epoch][count:]


class Lazy:
    """Notes in which order windows are handed over and asked for."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __call__(self, epoch: int, number: int, items: list[int]) -> ItemsFuture[int]:
        self.told.append(f"begin {number}")

        def finish() -> list[int]:
            self.told.append(f"finish {number}")
            return [item for item in items for _ in range(item % 3)]  # windows become shorter, longer and empty

        return finish


@pytest.mark.parametrize("ahead", [0, 1, 2, 7])
@pytest.mark.parametrize("size", [0, 1, 3, 12, 23])
def test_windows_ahead_change_nothing(list_reader: ListReader, drain: Drain, ahead: int, size: int) -> None:
    items = list(range(size))
    expected = [item for item in items for _ in range(item % 3)]

    def make() -> WindowedReader[int, int]:
        return WindowedReader(list_reader(items), 3, Lazy(), ahead)

    for chunks in [(1,), (2, 5), (100,)]:
        assert drain(make(), chunks) == expected
    reader = make()
    for epoch in (0, 1):
        assert drain(reader, (2,), epoch=epoch) == expected, "one reader, epoch after epoch"
    for count in range(1, len(expected) + 1):
        head, position = make().read(0, None, count)
        assert head == expected[:count]
        if position is not None:
            assert drain(make(), (2,), position=position) == expected[count:]
            assert drain(reader, (2,), position=position) == expected[count:], "out of turn"


def test_windows_ahead_are_begun_before_the_first_is_asked_for(list_reader: ListReader, drain: Drain) -> None:
    lazy = Lazy()
    reader = WindowedReader(list_reader(list(range(12))), 3, lazy, 2)
    reader.read(0, None, 1)
    assert lazy.told == ["begin 0", "begin 1", "begin 2", "finish 0"]
    drain(reader)
    assert lazy.told.count("finish 1") == 1


def test_documents_are_encoded_chunk_by_chunk(list_reader: ListReader, drain: Drain) -> None:
    texts = [chr(97 + index % 26) * (index % 5) for index in range(CHUNK_DOCUMENTS * 2 + 3)]
    seen: list[str] = []

    def encode(text: str) -> list[int]:
        seen.append(text)
        return list(text.encode())

    def make() -> WindowedReader[str, Any]:
        return tokenize_reader(list_reader(texts), InlineTextEncoder(encode))

    whole = drain(make(), (1,))
    assert [bytes(tokens.tolist()).decode() for tokens in whole] == texts == seen
    assert all(tokens.dtype == "int32" for tokens in whole)
    for count in (1, CHUNK_DOCUMENTS - 1, CHUNK_DOCUMENTS, CHUNK_DOCUMENTS + 1, len(texts) - 1):
        head, position = make().read(0, None, count)
        tail = drain(make(), (7,), position=position)
        assert [tokens.tolist() for tokens in head + tail] == [tokens.tolist() for tokens in whole]
