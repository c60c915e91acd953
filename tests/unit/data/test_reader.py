"""Readers: windows are read as one stream from every position; shuffled, tokenized, prefetched; first documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diffusionlm.data.reader import ItemsFuture, WindowedReader, read_first_documents, shuffle_windows
from diffusionlm.diffusion.rng import RngStream

Drain = Callable[..., list[Any]]
ListReader = Callable[[list[Any]], Any]


@pytest.mark.parametrize("size", [0, 1, 4, 5, 12, 13, 40])
@pytest.mark.parametrize("window", [1, 4, 100])
def test_permutes_within_windows(list_reader: ListReader, drain: Drain, size: int, window: int) -> None:
    items = list(range(size))
    shuffle = shuffle_windows(list_reader(items), window, seed=0, stream=RngStream.DOCUMENT_ORDER)
    once = drain(shuffle)
    for start in range(0, size, window):
        assert sorted(once[start : start + window]) == items[start : start + window]
    for chunks in [(1,), (3,), (window,), (5, 1, 2)]:
        assert drain(shuffle, chunks) == once
    assert sorted(drain(shuffle, epoch=1)) == items


def test_order_differs_between_epochs_windows_streams_and_seeds(list_reader: ListReader, drain: Drain) -> None:
    def order(epoch: int = 0, seed: int = 0, stream: RngStream = RngStream.DOCUMENT_ORDER, *key: int) -> list[int]:
        return drain(shuffle_windows(list_reader(list(range(32))), 16, seed, stream, *key), epoch=epoch)

    assert order() == order()
    variants = [order(), order(epoch=1), order(seed=1), order(stream=RngStream.SEQUENCE_ORDER)]
    variants += [order(0, 0, RngStream.DOCUMENT_ORDER, 0)]
    assert len(set(map(tuple, variants))) == len(variants)
    assert [item - 16 for item in order()[16:]] != order()[:16]
    assert order()[:16] != list(range(16))


class RecordingTransform:
    """Records the order of submitted and awaited windows."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, epoch: int, index: int, items: list[int]) -> ItemsFuture[int]:
        self.calls.append(f"submit {index}")

        def finish() -> list[int]:
            self.calls.append(f"await {index}")
            return [item for item in items for _ in range(item % 3)]  # the results are shorter, longer or empty

        return finish


@pytest.mark.parametrize("prefetch_depth", [0, 1, 2, 7])
@pytest.mark.parametrize("size", [0, 1, 3, 12, 23])
def test_prefetching_changes_nothing(list_reader: ListReader, drain: Drain, prefetch_depth: int, size: int) -> None:
    items = list(range(size))
    expected = [item for item in items for _ in range(item % 3)]

    def make() -> WindowedReader[int, int]:
        return WindowedReader(list_reader(items), 3, RecordingTransform(), prefetch_depth)

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


def test_prefetched_windows_are_submitted_before_the_first_is_awaited(list_reader: ListReader, drain: Drain) -> None:
    transform = RecordingTransform()
    reader = WindowedReader(list_reader(list(range(12))), 3, transform, 2)
    reader.read(0, None, 1)
    assert transform.calls == ["submit 0", "submit 1", "submit 2", "await 0"]
    drain(reader)
    assert transform.calls.count("await 1") == 1


@pytest.mark.parametrize(("max_bytes", "count"), [(1, 1), (3, 1), (4, 2), (9, 3), (10, 4), (600, 200), (10**9, 200)])
def test_first_documents_reach_the_limit(max_bytes: int, count: int, list_reader: ListReader) -> None:
    texts = [f"é{index % 10}" for index in range(200)]  # three bytes each
    assert list(read_first_documents(list_reader(texts), max_bytes)) == texts[:count]
