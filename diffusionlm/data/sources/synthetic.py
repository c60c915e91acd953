"""Synthetic documents: short ASCII texts of exactly known entropy, and conversations whose answers can be checked.

With a byte-level tokenizer without merges a character is a token. Shapes: N documents, L characters.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from config.data import ChatTasks, MarkovChain, ShidokuGrids, SyntheticChats
from diffusionlm.data.chat.conversation import Conversation, Message
from diffusionlm.data.reader import ReaderPosition, SkipLog, Split
from diffusionlm.data.sources.validation_split import hash_record, hash_share
from diffusionlm.diffusion.rng import RngStream, keyed_rng

T = TypeVar("T")

DOCUMENTS_PER_BLOCK = 1_024
TASKS_PER_BLOCK = 256

MAX_ATTEMPTS = 10_000
"""Prompts that are sampled at most until one is in the split."""


class SampledSource(ABC, Generic[T]):
    """Documents that are sampled in blocks. Each is a function of (seed, split, epoch, its index in the epoch)."""

    block_size: ClassVar[int]
    """Documents that share one RNG key and are sampled together."""

    def __init__(self, config: Any, split: Split, key: str) -> None:
        self.config, self.split, self.key = config, split, key
        self.num_documents: int = config.documents_per_epoch if split == "train" else config.validation_documents
        self.skip_log = SkipLog()
        self._cached: tuple[tuple[int, int] | None, list[T]] = (None, [])

    @property
    @abstractmethod
    def identity(self) -> str: ...

    @property
    def provenance(self) -> str:
        return f"{self.num_documents:,} documents, made up"

    @abstractmethod
    def sample_block(self, epoch: int, block: int) -> list[T]:
        """Sample the documents of a block of an epoch."""

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[T], ReaderPosition]:
        start = position or 0
        stop = min(start + limit, self.num_documents)
        documents: list[T] = []
        for block in range(start // self.block_size, -(-stop // self.block_size)):
            first = block * self.block_size
            if self._cached[0] != (epoch, block):  # readers may read one by one
                self._cached = ((epoch, block), self.sample_block(epoch, block))
            documents += self._cached[1][max(start - first, 0) : stop - first]
        return documents, stop if len(documents) == limit else None


class SyntheticSource(SampledSource[str]):
    """Independent samples from a distribution over texts of one length and known entropy."""

    block_size = DOCUMENTS_PER_BLOCK

    @property
    @abstractmethod
    def entropy_nats(self) -> float | None:
        """Exact entropy of a text: the lowest possible mean loss. None: it is not known."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Characters, and so bytes, of a text."""

    @abstractmethod
    def sample(self, count: int, rng: np.random.Generator) -> list[str]:
        """Sample ``count`` independent texts."""

    @property
    def identity(self) -> str:
        options = self.config.model_dump_json(exclude={"documents_per_epoch", "validation_documents"})
        digest = hashlib.sha256(f"{options} {self.num_documents}".encode()).hexdigest()[:16]
        return f"{self.config.kind}/{self.split}/{digest}"

    def sample_block(self, epoch: int, block: int) -> list[str]:
        rng = keyed_rng(self.config.seed, RngStream.SYNTHETIC, int(self.split == "validation"), epoch, block)
        return self.sample(self.block_size, rng)


class MarkovSource(SyntheticSource):
    """A sticky Markov chain of L symbols from V: H = ln V + (L - 1) h, with the entropy h of one transition."""

    config: MarkovChain

    @property
    def entropy_nats(self) -> float:
        num_symbols, stay = len(self.config.symbols), self.config.stay
        transition = _entropy_term(stay) + (num_symbols - 1) * _entropy_term((1.0 - stay) / (num_symbols - 1))
        return math.log(num_symbols) + (self.config.length - 1) * transition

    @property
    def length(self) -> int:
        return self.config.length

    def sample(self, count: int, rng: np.random.Generator) -> list[str]:
        size, shape = len(self.config.symbols), (count, self.config.length)
        moves_NL = rng.integers(1, size, shape)
        moves_NL[rng.random(shape) < self.config.stay] = 0
        moves_NL[:, 0] = rng.integers(0, size, count)
        return _decode_symbols(self.config.symbols, np.cumsum(moves_NL, axis=1) % size)


class ShidokuSource(SyntheticSource):
    """The 288 grids of 4x4 Sudoku, or those of the split, equally likely: H = ln 288."""

    config: ShidokuGrids

    @property
    def entropy_nats(self) -> float | None:
        return None if self._noise else math.log(len(self.grids))

    @property
    def _noise(self) -> float:
        return self.config.noise if self.split == "train" else 0.0

    @functools.cached_property
    def grids(self) -> list[str]:
        fraction, is_validation = self.config.validation_fraction, self.split == "validation"
        is_held_out = {grid: hash_share(hash_record(grid)) < fraction for grid in shidoku_grids()}
        return [grid for grid in is_held_out if not fraction or is_held_out[grid] == is_validation]

    @property
    def length(self) -> int:
        return 16

    def sample(self, count: int, rng: np.random.Generator) -> list[str]:
        grids = [self.grids[index] for index in rng.integers(0, len(self.grids), count).tolist()]
        if not self._noise:
            return grids
        is_noise_NL = rng.random((count, self.length)) < self._noise
        digits_NL = rng.integers(1, 5, (count, self.length))
        codes_NL = np.array([list(grid) for grid in grids], dtype=np.int64)
        return _decode_symbols("01234", np.where(is_noise_NL, digits_NL, codes_NL))


@functools.cache
def shidoku_grids() -> tuple[str, ...]:
    """Return all 4x4 grids with the digits 1 to 4 once in each row, column and 2x2 box: 16 digits each, sorted."""
    rows = ["".join(row) for row in itertools.permutations("1234")]
    grids = [""]
    for _ in range(4):
        grids = [grid + row for grid in grids for row in rows if _can_append_row(grid, row)]
    return tuple(grids)


def _can_append_row(grid: str, row: str) -> bool:
    columns_differ = all(digit not in grid[column::4] for column, digit in enumerate(row))
    # After an odd number of rows, the last one and this one complete two boxes.
    boxes_differ = len(grid) % 8 == 0 or not set(grid[-4:-2]) & set(row[:2])
    return columns_differ and boxes_differ


def _entropy_term(probability: float) -> float:
    """Return -p ln p, in nats."""
    return -probability * math.log(probability) if probability else 0.0


def _decode_symbols(alphabet: str, codes_NL: NDArray[np.int64]) -> list[str]:
    """Map indices into an ASCII alphabet to texts."""
    text = np.frombuffer(alphabet.encode("ascii"), dtype=np.uint8)[codes_NL].tobytes().decode("ascii")
    length = codes_NL.shape[1]
    return [text[start : start + length] for start in range(0, len(text), length)]


@dataclass(frozen=True)
class SyntheticChat:
    """A question and its answer."""

    key: str
    """What decides about the split."""
    build_question: Callable[[], str | list[Message]]
    """Content of the user's message."""
    answer: str


def make_task(config: ChatTasks, task: str, rng: np.random.Generator) -> tuple[str, str]:
    """Sample a prompt of a task, and compute its answer."""
    if task == "add":
        first, second = (int(rng.integers(10**config.digits)) for _ in range(2))
        return f"add: {first}+{second}", str(first + second)
    length = int(rng.integers(1, config.max_length + 1))
    word = "".join(config.symbols[index] for index in rng.integers(len(config.symbols), size=length))
    match task:
        case "copy":
            return f"copy: {word}", word
        case "reverse":
            return f"reverse: {word}", word[::-1]
        case "sort":
            return f"sort: {word}", "".join(sorted(word))
        case _:
            symbol = config.symbols[int(rng.integers(len(config.symbols)))]
            return f"count {symbol}: {word}", str(word.count(symbol))


class SyntheticChatSource(SampledSource[Conversation]):
    """Conversations of one question. A hash of the prompt decides whether it is for validation, so no prompt is in both
    splits."""

    block_size = TASKS_PER_BLOCK

    @abstractmethod
    def sample_chat(self, task: str, rng: np.random.Generator) -> SyntheticChat:
        """Sample a question of a task."""

    @property
    def identity(self) -> str:
        values = self.config.model_dump(mode="json", by_alias=True, exclude={"chat": {"tags"}})
        shared = {name: values.pop(name) for name in SyntheticChats.model_fields}
        options = json.dumps(values | shared, separators=(",", ":"), ensure_ascii=False)
        digest = hashlib.sha256(options.encode()).hexdigest()[:16]
        return f"{self.config.kind}/{self.split}/{digest}"

    def sample_block(self, epoch: int, block: int) -> list[Conversation]:
        """Sample the conversations of a block."""
        rng = keyed_rng(self.config.seed, RngStream.CHAT_TASKS, int(self.split == "validation"), epoch, block)
        return [self._sample(rng) for _ in range(self.block_size)]

    def _sample(self, rng: np.random.Generator) -> Conversation:
        config = self.config
        for _ in range(MAX_ATTEMPTS):
            task = config.tasks[int(rng.integers(len(config.tasks)))]
            chat = self.sample_chat(task, rng)
            is_held_out = hash_share(hash_record(chat.key)) < config.validation_fraction
            if is_held_out == (self.split == "validation"):
                messages = (
                    {"role": "user", "content": chat.build_question()},
                    {"role": "assistant", "content": chat.answer},
                )
                return Conversation(messages, task=task)
        raise ValueError(
            f"{self.key}: the tasks have too few prompts to hold out some for validation: raise max_length or digits, "
            "or name more symbols"
        )


class ChatTaskSource(SyntheticChatSource):
    """Questions about words and numbers."""

    config: ChatTasks

    def sample_chat(self, task: str, rng: np.random.Generator) -> SyntheticChat:
        prompt, answer = make_task(self.config, task, rng)
        return SyntheticChat(prompt, lambda: prompt, answer)
