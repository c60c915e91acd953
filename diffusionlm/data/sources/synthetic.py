"""Synthetic text of exactly known entropy: documents sampled from a distribution over short ASCII texts.

With a byte-level tokenizer without merges a character is a token. Shapes: N documents, L characters, D digits.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from config.data import CopiedSymbols, MarkovChain, NestedExpressions, ReversedAddition, ShidokuGrids, SyntheticText
from diffusionlm.data.reader import ReaderPosition, Split
from diffusionlm.diffusion.rng import RngStream, keyed_rng

DOCUMENTS_PER_BLOCK = 1_024
"""Documents that share one RNG key and are sampled together."""

DIGITS = "0123456789"
OPERATORS = ("+", "*")
"""Operators of nested expressions, equally likely."""
NESTING_PROBABILITY = 0.6
"""Probability that an expression is nested, where the depth permits it."""

"""A cell of a Shidoku puzzle without a given digit."""


class TextDistribution(ABC):
    @property
    @abstractmethod
    def entropy_nats(self) -> float:
        """Exact entropy of one text, its length included: the lowest possible mean loss."""

    @property
    def length_entropy_nats(self) -> float:
        """Exact entropy of the length of a text; 0 if all have the same length.

        A model that sees the number of positions knows the length: its lowest loss is ``entropy_nats`` less this.
        """
        return 0.0

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Characters, and so bytes, of the longest text."""

    @abstractmethod
    def sample(self, count: int, rng: np.random.Generator) -> list[str]:
        """Sample ``count`` independent texts."""


@dataclass
class SyntheticSource:
    """Documents sampled from a distribution. Each is a function of (seed, split, epoch, its index in the epoch)."""

    distribution: TextDistribution
    seed: int
    split: Split
    num_documents: int
    """Documents per epoch."""
    identity: str
    skipped: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cached: tuple[tuple[int, int] | None, list[str]] = (None, [])

    @property
    def provenance(self) -> str:
        return f"{self.num_documents:,} documents, made up"

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[str], ReaderPosition]:
        start = position or 0
        stop = min(start + limit, self.num_documents)
        documents: list[str] = []
        for block in range(start // DOCUMENTS_PER_BLOCK, -(-stop // DOCUMENTS_PER_BLOCK)):
            first = block * DOCUMENTS_PER_BLOCK
            documents += self._sample_block(epoch, block)[max(start - first, 0) : stop - first]
        return documents, stop if len(documents) == limit else None

    def _sample_block(self, epoch: int, block: int) -> list[str]:
        """Return the documents of a block; the last block is cached, because readers may read one by one."""
        key, texts = self._cached
        if key != (epoch, block):
            rng = keyed_rng(self.seed, RngStream.SYNTHETIC, int(self.split == "validation"), epoch, block)
            texts = self.distribution.sample(DOCUMENTS_PER_BLOCK, rng)
            self._cached = ((epoch, block), texts)
        return texts


def open_synthetic(config: SyntheticText, split: Split) -> SyntheticSource:
    num_documents = config.documents_per_epoch if split == "train" else config.validation_documents
    options = config.model_dump_json(exclude={"documents_per_epoch", "validation_documents"})
    digest = hashlib.sha256(f"{options} {num_documents}".encode()).hexdigest()[:16]
    identity = f"{config.kind}/{split}/{digest}"
    return SyntheticSource(build_distribution(config), config.seed, split, num_documents, identity)


def build_distribution(config: SyntheticText) -> TextDistribution:
    match config:
        case MarkovChain():
            return MarkovDistribution(config.symbols, config.length, config.stay)
        case ShidokuGrids():
            return ShidokuDistribution()
        case CopiedSymbols():
            return CopyDistribution(config.symbols, config.length)
        case ReversedAddition():
            return AdditionDistribution(config.digits)
        case NestedExpressions():
            return GrammarDistribution(config.depth)
        case _:
            assert_never(config)


@dataclass(frozen=True)
class MarkovDistribution(TextDistribution):
    """A sticky Markov chain of L symbols from V: H = ln V + (L - 1) h, with the entropy h of one transition."""

    symbols: str
    length: int
    stay: float

    @property
    def entropy_nats(self) -> float:
        num_other_symbols = len(self.symbols) - 1
        transition = _entropy_term(self.stay) + num_other_symbols * _entropy_term((1.0 - self.stay) / num_other_symbols)
        return math.log(len(self.symbols)) + (self.length - 1) * transition

    @property
    def max_length(self) -> int:
        return self.length

    def sample(self, count: int, rng: np.random.Generator) -> list[str]:
        size = len(self.symbols)
        moves_NL = rng.integers(1, size, (count, self.length))
        moves_NL[rng.random((count, self.length)) < self.stay] = 0
        moves_NL[:, 0] = rng.integers(0, size, count)
        return _decode_symbols(self.symbols, np.cumsum(moves_NL, axis=1) % size)


@dataclass(frozen=True)
class CopyDistribution(TextDistribution):
    """L random symbols from V, followed by a copy of them: H = L ln V."""

    symbols: str
    length: int

    @property
    def entropy_nats(self) -> float:
        return self.length * math.log(len(self.symbols))

    @property
    def max_length(self) -> int:
        return 2 * self.length

    def sample(self, count: int, rng: np.random.Generator) -> list[str]:
        half_NL = rng.integers(0, len(self.symbols), (count, self.length))
        return _decode_symbols(self.symbols, np.concatenate([half_NL, half_NL], axis=1))


@dataclass(frozen=True)
class AdditionDistribution(TextDistribution):
    """a+b=c, least significant digits first, with random a and b of D digits: H = 2 D ln 10."""

    digits: int

    @property
    def entropy_nats(self) -> float:
        return 2 * self.digits * math.log(10)

    @property
    def max_length(self) -> int:
        return 3 * self.digits + 3

    def sample(self, count: int, rng: np.random.Generator) -> list[str]:
        width = self.digits
        terms_N2D = rng.integers(0, 10, (count, 2, width))
        codes_NL = np.empty((count, self.max_length), dtype=np.int64)
        codes_NL[:, :width] = terms_N2D[:, 0]
        codes_NL[:, width] = 10
        codes_NL[:, width + 1 : 2 * width + 1] = terms_N2D[:, 1]
        codes_NL[:, 2 * width + 1] = 11
        carry_N = np.zeros(count, dtype=np.int64)
        for digit in range(width):
            column_N = terms_N2D[:, :, digit].sum(axis=1) + carry_N
            codes_NL[:, 2 * width + 2 + digit] = column_N % 10
            carry_N = column_N // 10
        codes_NL[:, -1] = carry_N
        return _decode_symbols(DIGITS + "+=", codes_NL)


@dataclass(frozen=True)
class ShidokuDistribution(TextDistribution):
    """The 288 grids of 4x4 Sudoku, equally likely: H = ln 288."""

    @property
    def entropy_nats(self) -> float:
        return math.log(len(shidoku_grids()))

    @property
    def max_length(self) -> int:
        return 16

    def sample(self, count: int, rng: np.random.Generator) -> list[str]:
        grids = shidoku_grids()
        return [grids[index] for index in rng.integers(0, len(grids), count).tolist()]


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


@dataclass(frozen=True)
class GrammarDistribution(TextDistribution):
    """Nested expressions of an unambiguous probabilistic context-free grammar of bounded depth.

    E(0) is a digit; E(d) is a digit or, with probability ``NESTING_PROBABILITY``, ``(E(d-1) operator E(d-1))``. Each
    text has one derivation, so the entropy of a text is that of its derivation, a sum over the depth. No text is a
    prefix of another one, so an end-of-text token adds no entropy.
    """

    depth: int

    @property
    def entropy_nats(self) -> float:
        leaf = entropy = math.log(len(DIGITS))
        choice = _entropy_term(NESTING_PROBABILITY) + _entropy_term(1.0 - NESTING_PROBABILITY)
        for _ in range(self.depth):
            entropy = (
                choice
                + (1.0 - NESTING_PROBABILITY) * leaf
                + NESTING_PROBABILITY * (math.log(len(OPERATORS)) + 2.0 * entropy)
            )
        return entropy

    @property
    def length_entropy_nats(self) -> float:
        return float(sum(map(_entropy_term, self.length_probabilities().tolist())))

    @property
    def max_length(self) -> int:
        return (4 << self.depth) - 3

    def length_probabilities(self) -> NDArray[np.float64]:
        """Return the probability of each length from 0 to ``max_length``."""
        probabilities = np.array([0.0, 1.0])
        for _ in range(self.depth):
            # A nested expression has two expressions, an operator and two parentheses.
            nested = NESTING_PROBABILITY * np.convolve(probabilities, probabilities)
            probabilities = np.concatenate([np.zeros(3), nested])
            probabilities[1] += 1.0 - NESTING_PROBABILITY
        return probabilities

    def sample(self, count: int, rng: np.random.Generator) -> list[str]:
        uniforms = _uniform_stream(rng)
        return [_sample_expression(self.depth, uniforms) for _ in range(count)]


def _sample_expression(depth: int, uniforms: Iterator[float]) -> str:
    if depth and next(uniforms) < NESTING_PROBABILITY:
        left = _sample_expression(depth - 1, uniforms)
        operator = OPERATORS[int(next(uniforms) * len(OPERATORS))]
        return f"({left}{operator}{_sample_expression(depth - 1, uniforms)})"
    return DIGITS[int(next(uniforms) * len(DIGITS))]


def _uniform_stream(rng: np.random.Generator) -> Iterator[float]:
    """Yield numbers in [0, 1), sampled in blocks."""
    while True:
        yield from rng.random(DOCUMENTS_PER_BLOCK).tolist()


def _entropy_term(probability: float) -> float:
    """Return -p ln p, in nats."""
    return -probability * math.log(probability) if probability else 0.0


def _decode_symbols(alphabet: str, codes_NL: NDArray[np.int64]) -> list[str]:
    """Map indices into an ASCII alphabet to texts."""
    text = np.frombuffer(alphabet.encode("ascii"), dtype=np.uint8)[codes_NL].tobytes().decode("ascii")
    length = codes_NL.shape[1]
    return [text[start : start + length] for start in range(0, len(text), length)]
