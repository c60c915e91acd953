"""Mixtures: tokens by weight, each row of each component, resumable at every position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from diffusionlm.data.packing import Row
from diffusionlm.data.pipeline import MixedRowReader

Drain = Callable[..., list[Any]]


class LabeledRows:
    """Rows labeled (component, epoch, index); ``sizes`` are their numbers of tokens."""

    def __init__(self, part: int, sizes: list[int]) -> None:
        self.part, self.sizes = part, sizes

    def read(self, epoch: int, position: Any, limit: int) -> tuple[list[Row], Any]:
        start = position or 0
        rows = [self._row(epoch, place) for place in range(start, min(start + limit, len(self.sizes)))]
        return rows, start + limit if len(rows) == limit else None

    def _row(self, epoch: int, place: int) -> Row:
        document_ids_L = np.where(np.arange(16) < self.sizes[place], 0, -1).astype(np.int32)
        return Row(np.array([self.part, epoch, place], dtype=np.int32), document_ids_L, document_ids_L >= 0)


def labels(rows: list[Row]) -> list[tuple[int, int, int]]:
    return [tuple(row.tokens_L.tolist()) for row in rows]


def mix(sizes: list[list[int]], weights: list[float], repeat: bool = True) -> MixedRowReader:
    readers: list[Any] = [LabeledRows(component, counts) for component, counts in enumerate(sizes)]
    return MixedRowReader(readers, weights, [f"component {index}" for index in range(len(readers))], repeat)


def random_sizes() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 17, count).tolist() for count in (300, 40, 111)]


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [5.0, 1.0, 3.0], [0.1, 0.7, 0.2]])
def test_tokens_follow_the_weights_at_every_position(weights: list[float]) -> None:
    rows, _ = mix(random_sizes(), weights).read(0, None, 400)
    tokens = np.zeros((len(rows), 3))
    for place, row in enumerate(rows):
        tokens[place, row.tokens_L[0]] = (row.document_ids_L >= 0).sum()
    so_far = tokens.cumsum(axis=0)
    expected = so_far.sum(axis=1, keepdims=True) * np.array(weights) / sum(weights)
    assert np.abs(so_far - expected).max() <= 16 * 2


def test_an_epoch_has_every_row_of_every_component(drain: Drain) -> None:
    sizes = random_sizes()
    entries = labels(drain(mix(sizes, [1.0, 1.0, 1.0]), (7,)))
    for component, counts in enumerate(sizes):
        first_pass = [index for owner, epoch, index in entries if owner == component and epoch == 0]
        assert first_pass == list(range(len(counts)))
    passes = {part: {epoch for owner, epoch, _ in entries if owner == part} for part in range(3)}
    assert passes[0] == {0} and len(passes[1]) > 3, "short components start again, with another pass"
    later = {epoch for _, epoch, _ in labels(drain(mix(sizes, [1.0, 1.0, 1.0]), epoch=1))}
    assert not later & {epoch for _, epoch, _ in entries}, "epochs share no pass"


def test_without_repeat_each_row_comes_once(drain: Drain) -> None:
    sizes = [*random_sizes(), []]
    entries = labels(drain(mix(sizes, [1.0, 2.0, 3.0, 1.0], repeat=False), (5, 1)))
    assert sorted(entries) == [
        (component, 0, index) for component, counts in enumerate(sizes) for index in range(len(counts))
    ]


@pytest.mark.parametrize("repeat", [False, True])
def test_resuming_at_every_position(repeat: bool, check_resuming: Drain) -> None:
    sizes = [[3, 5, 8, 1, 1, 9], [16, 2], [4, 4, 4, 4]]

    def make() -> MixedRowReader:
        return mix(sizes, [2.0, 1.0, 1.5], repeat)

    for epoch in (0, 2):
        check_resuming(make, lambda a, b: labels(a) == labels(b), epoch)


def test_a_component_without_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"data\.mixture: component 1 has no documents"):
        mix([[1, 2], []], [1.0, 1.0]).read(0, None, 3)
