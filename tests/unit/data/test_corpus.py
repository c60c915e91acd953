"""The first documents of a source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diffusionlm.data.reader import read_first_documents


@pytest.mark.parametrize(("max_bytes", "number"), [(1, 1), (3, 1), (4, 2), (9, 3), (10, 4), (600, 200), (10**9, 200)])
def test_up_to_and_with_the_one_that_is_enough(
    max_bytes: int, number: int, list_reader: Callable[[list[Any]], Any]
) -> None:
    texts = [f"é{index % 10}" for index in range(200)]  # three bytes each
    assert list(read_first_documents(list_reader(texts), max_bytes)) == texts[:number]


def test_empty_sources_and_texts(list_reader: Callable[[list[Any]], Any]) -> None:
    assert list(read_first_documents(list_reader([]), 10)) == []
    assert list(read_first_documents(list_reader(["", "a", "", "bc", "d"]), 3)) == ["", "a", "", "bc"]
    assert list(read_first_documents(list_reader(["\ud800", "b"]), 4)) == ["\ud800", "b"]


def test_no_more_is_read_than_needed(list_reader: Callable[[list[Any]], Any]) -> None:
    reader = list_reader(["ab"] * 1000)
    read = reader.read
    asked: list[int] = []
    reader.read = lambda epoch, position, limit: asked.append(limit) or read(epoch, position, limit)
    assert len(list(read_first_documents(reader, 20))) == 10
    assert len(asked) == 1
