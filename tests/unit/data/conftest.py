"""Simple readers, a simple tokenizer, and reading from every position."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from typing import Any

import pytest

Drain = Callable[..., list[Any]]


class ListReader:
    """A reader of a list; each epoch has the same items."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def read(self, epoch: int, position: Any, limit: int) -> tuple[list[Any], Any]:
        start = position or 0
        chunk = self.items[start : start + limit]
        return chunk, start + limit if len(chunk) == limit else None


class ByteTokenizer:
    """Tokens are UTF-8 bytes, and 256 is end-of-text."""

    eos_token_id: int | None = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


@pytest.fixture
def list_reader() -> Callable[[list[Any]], ListReader]:
    return ListReader


@pytest.fixture
def byte_tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture
def drain() -> Drain:
    """``drain(reader, chunks, epoch=0, position=None)``: the rest of an epoch, read in chunks of these sizes.

    Positions go through JSON, as in a checkpoint, and the protocol of `ResumableReader.read` is checked.
    """

    def read_all(reader: Any, chunks: tuple[int, ...] = (1000,), epoch: int = 0, position: Any = None) -> list[Any]:
        items: list[Any] = []
        num_reads = 0
        while True:
            limit = chunks[num_reads % len(chunks)]
            chunk, position = reader.read(epoch, position, limit)
            assert len(chunk) <= limit
            items += chunk
            if len(chunk) < limit:
                assert position is None, "an epoch that has ended has no position"
            if position is None:
                return items
            position = json.loads(json.dumps(position))
            num_reads += 1

    return read_all


@pytest.fixture
def check_resuming(drain: Drain) -> Drain:
    """``check_resuming(make_reader, equal=operator.eq, epoch=0, step=1)``: read an epoch from its start and, with new
    readers, from its other positions (each ``step``-th); returns its items."""

    def check(
        make_reader: Callable[[], Any], equal: Callable[[Any, Any], bool] = operator.eq, epoch: int = 0, step: int = 1
    ) -> list[Any]:
        items = drain(make_reader(), epoch=epoch)
        for count in range(1, len(items) + 1, step):
            head, position = make_reader().read(epoch, None, count)
            position = json.loads(json.dumps(position))
            tail = [] if position is None else drain(make_reader(), (2, 1), epoch, position)
            assert equal(head + tail, items), count
        return items

    return check
