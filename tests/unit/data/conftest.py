"""Readers and a tokenizer that are simple enough to see through."""

from __future__ import annotations

import json
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
        some = self.items[start : start + limit]
        return some, start + limit if len(some) == limit else None


class ByteTokenizer:
    """UTF-8 bytes, and 256 for end-of-text."""

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
    """``drain(reader, chunks, epoch=0, position=None)``: what is left of an epoch, read in these sizes in turn.

    Each position goes through JSON, as in a checkpoint, and the protocol of `Reader.read` is checked on the way.
    """

    def read_all(reader: Any, chunks: tuple[int, ...] = (1000,), epoch: int = 0, position: Any = None) -> list[Any]:
        items: list[Any] = []
        turn = 0
        while True:
            limit = chunks[turn % len(chunks)]
            some, position = reader.read(epoch, position, limit)
            assert len(some) <= limit
            items += some
            if len(some) < limit:
                assert position is None, "an epoch that has ended has no position"
            if position is None:
                return items
            position = json.loads(json.dumps(position))
            turn += 1

    return read_all
