"""Made-up text whose distribution, and so whose entropy, is known exactly.

A law is a distribution over short ASCII texts; with a byte-level tokenizer without merges a character is a token.
`SyntheticSource` draws documents from a law, new ones in each epoch.

Shapes: N documents, L characters, D digits.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from config.data import CopiedSymbols, MarkovChain, NestedExpressions, ReversedAddition, ShidokuGrids, SyntheticText
from diffusionlm.data.reader import ReaderPosition, Split
from diffusionlm.diffusion.rng import RngStream, keyed_rng

DOCUMENTS_PER_BLOCK = 1_024
"""Documents that share one key of chance, and are drawn at once."""

DIGITS = "0123456789"
OPERATORS = ("+", "*")
"""Of nested expressions, equally likely."""
NESTING_PROBABILITY = 0.6
"""Probability that an expression that may be nested is."""

EMPTY_CELL = "."
"""A cell of a Shidoku puzzle that is to be found."""


class TextDistribution(Protocol):
    """A distribution over texts."""

    @property
    def entropy_nats(self) -> float:
        """Of one text."""

    @property
    def length_entropy_nats(self) -> float:
        """Of its length; 0 where all texts are equally long."""

    @property
    def max_length(self) -> int:
        """Characters of the longest text."""

    def sample(self, count: int, rng: np.random.Generator) -> list[str]:
        """Independent texts."""

    def log_probability(self, text: str) -> float:
        """In nats.

        Raises:
            ValueError: the text has probability 0; says why.
        """


@dataclass
class SyntheticSource:
    """Documents drawn from a law; each is a function of (seed, split, epoch, its place in the epoch)."""

    distribution: TextDistribution
    seed: int
    split: Split
    documents: int
    """Documents of an epoch."""
    identity: str
    skipped: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cached: tuple[tuple[int, int] | None, list[str]] = (None, [])

    @property
    def provenance(self) -> str:
        """How many documents an epoch has."""
        return f"{self.documents:,} documents, made up"

    @classmethod
    def open(cls, config: SyntheticText, split: Split) -> SyntheticSource:
        """The source of a config section."""
        documents = config.documents_per_epoch if split == "train" else config.validation_documents
        what = config.model_dump_json(exclude={"documents_per_epoch", "validation_documents"})
        digest = hashlib.sha256(f"{what} {documents}".encode()).hexdigest()[:16]
        return cls(build_distribution(config), config.seed, split, documents, f"{config.kind}/{split}/{digest}")

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[str], ReaderPosition]:
        """The documents from the ``position``-th on."""
        start = position or 0
        stop = min(start + limit, self.documents)
        documents: list[str] = []
        for block in range(start // DOCUMENTS_PER_BLOCK, -(-stop // DOCUMENTS_PER_BLOCK)):
            first = block * DOCUMENTS_PER_BLOCK
            documents += self._sample_block(epoch, block)[max(start - first, 0) : stop - first]
        return documents, stop if len(documents) == limit else None

    def _sample_block(self, epoch: int, block: int) -> list[str]:
        """All documents of a block; the last one read is kept, as readers often take one document at a time."""
        key, texts = self._cached
        if key != (epoch, block):
            rng = keyed_rng(self.seed, RngStream.SYNTHETIC, int(self.split == "validation"), epoch, block)
            texts = self.distribution.sample(DOCUMENTS_PER_BLOCK, rng)
            self._cached = ((epoch, block), texts)
        return texts

    @property
    def entropy_nats(self) -> float:
        """Exact entropy of one document in nats."""
        return self.distribution.entropy_nats

    @property
    def length_entropy_nats(self) -> float:
        """Exact entropy of a document's length in nats."""
        return self.distribution.length_entropy_nats

    @property
    def max_length(self) -> int:
        """Characters of the longest document."""
        return self.distribution.max_length

    def log_probability(self, text: str) -> float:
        """Exact log-probability of a document in nats.

        Raises:
            ValueError: the source never gives this text.
        """
        return self.distribution.log_probability(text)


def build_distribution(config: SyntheticText) -> TextDistribution:
    """The distribution that a config section describes."""
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
class MarkovDistribution:
    """A sticky chain of L symbols of V: H = ln V + (L - 1) h with the entropy h of one transition."""

    symbols: str
    length: int
    stay: float

    @property
    def entropy_nats(self) -> float:
        others = len(self.symbols) - 1
        transition = _entropy_term(self.stay) + others * _entropy_term((1.0 - self.stay) / others)
        return math.log(len(self.symbols)) + (self.length - 1) * transition

    @property
    def length_entropy_nats(self) -> float:
        return 0.0

    @property
    def max_length(self) -> int:
        return self.length

    def sample(self, count: int, rng: np.random.Generator) -> list[str]:
        """Independent chains."""
        size = len(self.symbols)
        moves_NL = rng.integers(1, size, (count, self.length))
        moves_NL[rng.random((count, self.length)) < self.stay] = 0
        moves_NL[:, 0] = rng.integers(0, size, count)
        return _decode_symbols(self.symbols, np.cumsum(moves_NL, axis=1) % size)

    def log_probability(self, text: str) -> float:
        """In nats; ValueError for a text that is no such chain."""
        _check_symbols(text, self.symbols, self.length)
        kept = sum(one == other for one, other in itertools.pairwise(text))
        moved = self.length - 1 - kept
        if (kept and self.stay == 0.0) or (moved and self.stay == 1.0):
            raise ValueError(f"{text!r} has a transition of probability 0: stay is {self.stay}")
        log = -math.log(len(self.symbols))
        log += kept * math.log(self.stay) if kept else 0.0
        return log + (moved * math.log((1.0 - self.stay) / (len(self.symbols) - 1)) if moved else 0.0)


@dataclass(frozen=True)
class CopyDistribution:
    """L random symbols of V, twice: H = L ln V."""

    symbols: str
    length: int

    @property
    def entropy_nats(self) -> float:
        return self.length * math.log(len(self.symbols))

    @property
    def length_entropy_nats(self) -> float:
        return 0.0

    @property
    def max_length(self) -> int:
        return 2 * self.length

    def sample(self, count: int, rng: np.random.Generator) -> list[str]:
        """Independent texts."""
        half_NL = rng.integers(0, len(self.symbols), (count, self.length))
        return _decode_symbols(self.symbols, np.concatenate([half_NL, half_NL], axis=1))

    def log_probability(self, text: str) -> float:
        """In nats; ValueError for a text whose halves differ."""
        _check_symbols(text, self.symbols, self.max_length)
        if text[: self.length] != text[self.length :]:
            raise ValueError(f"{text!r}: the second half is not a copy of the first")
        return -self.entropy_nats


@dataclass(frozen=True)
class AdditionDistribution:
    """a+b=c, least significant digits first, with random a and b of D digits: H = 2 D ln 10."""

    digits: int

    @property
    def entropy_nats(self) -> float:
        return 2 * self.digits * math.log(10)

    @property
    def length_entropy_nats(self) -> float:
        return 0.0

    @property
    def max_length(self) -> int:
        return 3 * self.digits + 3

    def sample(self, count: int, rng: np.random.Generator) -> list[str]:
        """Independent sums."""
        width = self.digits
        terms_N2D = rng.integers(0, 10, (count, 2, width))
        codes_NL = np.empty((count, self.max_length), dtype=np.int64)
        codes_NL[:, :width] = terms_N2D[:, 0]
        codes_NL[:, width] = 10
        codes_NL[:, width + 1 : 2 * width + 1] = terms_N2D[:, 1]
        codes_NL[:, 2 * width + 1] = 11
        carry_N = np.zeros(count, dtype=np.int64)
        for place in range(width):
            column_N = terms_N2D[:, :, place].sum(axis=1) + carry_N
            codes_NL[:, 2 * width + 2 + place] = column_N % 10
            carry_N = column_N // 10
        codes_NL[:, -1] = carry_N
        return _decode_symbols(DIGITS + "+=", codes_NL)

    def log_probability(self, text: str) -> float:
        """In nats; ValueError for a text that is no such sum, or a wrong one."""
        form = rf"([0-9]{{{self.digits}}})\+([0-9]{{{self.digits}}})=([0-9]{{{self.digits + 1}}})"
        match = re.fullmatch(form, text)
        if match is None:
            raise ValueError(f"{text!r} is not a sum of two numbers of {self.digits} digits, as 321+654=9750 is of 3")
        one, other, total = (int(number[::-1]) for number in match.groups())
        if one + other != total:
            raise ValueError(f"{text!r} is wrong: {one} + {other} is {one + other}, not {total}")
        return -self.entropy_nats


@dataclass(frozen=True)
class ShidokuDistribution:
    """The 288 grids of 4x4 Sudoku, equally likely: H = ln 288."""

    @property
    def entropy_nats(self) -> float:
        return math.log(len(shidoku_grids()))

    @property
    def length_entropy_nats(self) -> float:
        return 0.0

    @property
    def max_length(self) -> int:
        return 16

    def sample(self, count: int, rng: np.random.Generator) -> list[str]:
        """Independent grids."""
        grids = shidoku_grids()
        return [grids[index] for index in rng.integers(0, len(grids), count).tolist()]

    def log_probability(self, text: str) -> float:
        """In nats; ValueError for a text that is no grid."""
        _check_grid(text)
        return -self.entropy_nats


@functools.cache
def shidoku_grids() -> tuple[str, ...]:
    """All 4x4 grids with the digits 1 to 4 once in each row, column and 2x2 box, row by row, sorted."""
    rows = ["".join(row) for row in itertools.permutations("1234")]
    grids = [""]
    for _ in range(4):
        grids = [grid + row for grid in grids for row in rows if _can_append_row(grid, row)]
    return tuple(grids)


def _can_append_row(grid: str, row: str) -> bool:
    """Whether a row may follow the rows of a grid."""
    columns = all(digit not in grid[column::4] for column, digit in enumerate(row))
    # An odd number of rows: the last of them and this one make two boxes.
    boxes = len(grid) % 8 == 0 or not set(grid[-4:-2]) & set(row[:2])
    return columns and boxes


def is_shidoku(text: str) -> bool:
    """Whether a text is one of the 288 grids."""
    return text in shidoku_grids()


def puzzle(grid: str, givens: int, rng: np.random.Generator) -> str:
    """The grid with ``givens`` random cells kept and ``.`` in the others; it may have several solutions.

    Raises:
        ValueError: not a grid, or not 0 to 16 givens.
    """
    _check_grid(grid)
    if not 0 <= givens <= 16:
        raise ValueError(f"givens = {givens}: a grid has 0 to 16 of them")
    kept = set(rng.permutation(16)[:givens].tolist())
    return "".join(digit if cell in kept else EMPTY_CELL for cell, digit in enumerate(grid))


def find_solutions(puzzle: str) -> list[str]:
    """The grids that agree with a puzzle of 16 cells, each 1 to 4 or ``.``, sorted.

    Raises:
        ValueError: the text is no puzzle.
    """
    if re.fullmatch(r"[1-4.]{16}", puzzle) is None:
        raise ValueError(
            f"{puzzle!r} is not a 4x4 puzzle: 16 cells row by row, each 1 to 4, or {EMPTY_CELL} if unknown"
        )
    matches = re.compile(puzzle).fullmatch
    return [grid for grid in shidoku_grids() if matches(grid)]


def _check_grid(text: str) -> None:
    if not is_shidoku(text):
        raise ValueError(f"{text!r} is not a 4x4 Sudoku grid: 16 digits 1 to 4, once in each row, column and 2x2 box")


@dataclass(frozen=True)
class GrammarDistribution:
    """Nested expressions of an unambiguous probabilistic context-free grammar of bounded depth.

    E(0) is a digit; E(d) is a digit or, with probability `NESTING`, ``(E(d-1) operator E(d-1))``. Each text has one
    derivation, so the entropy of the texts is that of the derivations, which adds up over the depth. No text is the
    beginning of another one, so an end-of-text token adds nothing.
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
        return float(sum(_entropy_term(share) for share in self.length_probabilities().tolist()))

    @property
    def max_length(self) -> int:
        return (4 << self.depth) - 3

    def length_probabilities(self) -> NDArray[np.float64]:
        """Probability of each length, from 0 to ``max_length``."""
        shares = np.array([0.0, 1.0])
        for _ in range(self.depth):
            # Two expressions, an operator and two parentheses.
            shares = np.concatenate([np.zeros(3), NESTING_PROBABILITY * np.convolve(shares, shares)])
            shares[1] += 1.0 - NESTING_PROBABILITY
        return shares

    def sample(self, count: int, rng: np.random.Generator) -> list[str]:
        """Independent expressions."""
        uniforms = _uniform_stream(rng)
        return [_sample_expression(self.depth, uniforms) for _ in range(count)]

    def log_probability(self, text: str) -> float:
        """In nats; ValueError for a text outside of the grammar."""
        log, end = self._parse(text, 0, self.depth)
        if end < len(text):
            raise self._error(text, end)
        return log

    def _parse(self, text: str, start: int, depth: int) -> tuple[float, int]:
        """Log-probability of the expression that starts here, and where it ends."""
        first = text[start : start + 1]
        if first and first in DIGITS:
            return -math.log(len(DIGITS)) + (math.log(1.0 - NESTING_PROBABILITY) if depth else 0.0), start + 1
        if first != "(" or depth == 0:
            raise self._error(text, start)
        left, middle = self._parse(text, start + 1, depth - 1)
        if text[middle : middle + 1] not in OPERATORS:
            raise self._error(text, middle)
        right, end = self._parse(text, middle + 1, depth - 1)
        if text[end : end + 1] != ")":
            raise self._error(text, end)
        return math.log(NESTING_PROBABILITY) - math.log(len(OPERATORS)) + left + right, end + 1

    def _error(self, text: str, place: int) -> ValueError:
        found = repr(text[place]) if place < len(text) else "the end"
        return ValueError(
            f"{text!r} is not an expression of at most {self.depth} nested parentheses: "
            f"unexpected {found} at character {place}"
        )


def _sample_expression(depth: int, uniforms: Iterator[float]) -> str:
    if depth and next(uniforms) < NESTING_PROBABILITY:
        left = _sample_expression(depth - 1, uniforms)
        operator = OPERATORS[int(next(uniforms) * len(OPERATORS))]
        return f"({left}{operator}{_sample_expression(depth - 1, uniforms)})"
    return DIGITS[int(next(uniforms) * len(DIGITS))]


def _uniform_stream(rng: np.random.Generator) -> Iterator[float]:
    """Numbers in [0, 1), drawn many at a time."""
    while True:
        yield from rng.random(DOCUMENTS_PER_BLOCK).tolist()


def _entropy_term(probability: float) -> float:
    """-p ln p, in nats."""
    return -probability * math.log(probability) if probability else 0.0


def _decode_symbols(alphabet: str, codes_NL: NDArray[np.int64]) -> list[str]:
    """Texts of places in an ASCII alphabet."""
    text = np.frombuffer(alphabet.encode("ascii"), dtype=np.uint8)[codes_NL].tobytes().decode("ascii")
    length = codes_NL.shape[1]
    return [text[start : start + length] for start in range(0, len(text), length)]


def _check_symbols(text: str, symbols: str, length: int) -> None:
    odd = next((char for char in text if char not in symbols), None)
    if odd is not None:
        raise ValueError(f"{text!r} holds {odd!r}, which is none of the symbols {symbols!r}")
    if len(text) != length:
        raise ValueError(f"{text!r} has {len(text)} symbols, not {length}")
