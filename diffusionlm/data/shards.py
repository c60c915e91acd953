"""Read the documents that ``diffusionlm-make-data`` tokenized: memory-mapped, in any order.

`diffusionlm.data.shard_files` describes the files.
"""

from __future__ import annotations

import errno
import hashlib
import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from config.data import Shards
from diffusionlm.data.reader import ReaderPosition, Split, Tokens
from diffusionlm.data.shard_files import (
    OFFSET_DTYPE,
    TOKENIZER_DIRECTORY,
    ShardEntry,
    ShardIndex,
    check_files,
    little_endian_dtype,
    read_index,
)
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from files.paths import portable_path

LOOK_AHEAD_DOCUMENTS = 1_024
LOOK_AHEAD_TOKENS = 1 << 20
"""`ShardReader` fetches about this much at once, the smaller of the two: one by one costs ten times as much."""

FEISTEL_ROUNDS = 16
"""4 are enough for large sets (Luby and Rackoff 1988); small sets mix more slowly. It must be even, so that both halves
end in their places."""

_MULTIPLIERS = tuple(map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))
"""Constants of the SplitMix64 finalizer (Steele, Lea and Flood 2014)."""


@dataclass(frozen=True)
class _ShardFile:
    token_ids: NDArray[Any]
    offsets: Sequence[int]
    """Start of each document in ``token_ids``, and the end of the last one."""


class ShardDocuments:
    """The documents of one split, by index. Sizes are checked; ``diffusionlm-make-data`` checks the contents.

    Raises:
        ValueError: the directory is missing, incomplete or damaged, or of another version.
    """

    def __init__(self, config: Shards, split: Split, key: str) -> None:
        directory = config.path
        self._setting = f"{key}.path = {directory}"
        index = read_index(directory, f"{key}.path")
        split_index = index.splits.get(split)
        if split_index is None or not split_index.documents:
            raise ValueError(f"{self._setting} has no {split} documents; make the data again")
        check_files(directory, split_index)
        self.tokenizer_directory = directory / TOKENIZER_DIRECTORY
        if not self.tokenizer_directory.is_dir():
            raise ValueError(f"{self.tokenizer_directory} is missing; copy it again, or make the data again")
        self._files = [_open_shard(directory, shard, index) for shard in split_index.shards]
        first_documents = np.cumsum([0, *(len(file.offsets) - 1 for file in self._files)])
        self._first_document_F: NDArray[np.int64] = first_documents[:-1]
        limit = config.max_documents if split == "train" else None
        self.num_documents = min(int(first_documents[-1]), limit or sys.maxsize)
        self.vocab_size, self.tokenizer_fingerprint = index.vocab_size, index.tokenizer_fingerprint
        self.num_tokens = _count_tokens(self._files, first_documents, self.num_documents)
        """Tokens of all documents, without end-of-text tokens."""
        checksums = " ".join(part.sha256 for shard in split_index.shards for part in shard.parts)
        digest = hashlib.sha256(f"{index.tokenizer_fingerprint} {self.num_documents} {checksums}".encode()).hexdigest()
        self.identity = f"shards/{split}/{digest[:16]}"
        prefix = "" if self.num_documents == split_index.documents else f"the first {self.num_documents:,} of "
        self.provenance = (
            f"{prefix}{split_index.documents:,} documents, {split_index.tokens:,} tokens, "
            f"{split_index.bytes_on_disk / 2**20:,.1f} MiB of bin in {portable_path(directory)}, made from "
            f"{split_index.provenance}"
        )

    def __len__(self) -> int:
        return self.num_documents

    def documents(self, indices: NDArray[np.int64]) -> list[Tokens]:
        """Return the token ids of these documents. They share one array, so keeping one keeps all in memory.

        Raises:
            ValueError: a token id is outside the vocabulary.
        """
        if not indices.size:
            return []
        assert 0 <= int(indices.min()) <= int(indices.max()) < len(self), "document indices are 0 to len - 1"
        file_of = np.searchsorted(self._first_document_F, indices, side="right") - 1
        index_in_file = indices - self._first_document_F[file_of]
        pieces = []
        for file_index, document in zip(file_of.tolist(), index_in_file.tolist(), strict=True):
            file = self._files[file_index]
            pieces.append(file.token_ids[file.offsets[document] : file.offsets[document + 1]])
        tokens: Tokens = np.concatenate(pieces, dtype=np.int32, casting="same_kind")
        # Viewed as unsigned, an id of 2 ** 31 or more is too large, not negative.
        if tokens.size and int(tokens.view(np.uint32).max()) >= self.vocab_size:
            raise ValueError(
                f"{self._setting} is damaged: it has the token id {int(tokens.view(np.uint32).max())}, and the "
                f"vocabulary has {self.vocab_size}; repeat the diffusionlm-make-data command to find the file"
            )
        ends = np.cumsum([len(piece) for piece in pieces]).tolist()
        return [tokens[start:end] for start, end in pairwise([0, *ends])]


@dataclass
class ShardReader:
    """A reader of all documents, in an order that is a function of (seed, key, epoch); a position is an integer.

    The order takes no memory, and reading may start anywhere in it.
    """

    documents: ShardDocuments
    seed: int
    is_shuffled: bool
    """False: the order of the shards, in each epoch."""
    key: tuple[int, ...] = ()
    """RNG key of the order, beside the epoch, so that two readers of a run have different orders."""

    def __post_init__(self) -> None:
        mean_tokens = max(1, self.documents.num_tokens // len(self.documents))
        self._fetch_size = min(LOOK_AHEAD_DOCUMENTS, max(1, LOOK_AHEAD_TOKENS // mean_tokens))
        self._cached: tuple[int, int, list[Tokens]] = (0, 0, [])
        self._order: tuple[int, KeyedPermutation] | None = None

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[Tokens], ReaderPosition]:
        start: int = position or 0
        stop = min(start + limit, len(self.documents))
        cached_epoch, first, cached = self._cached
        if cached_epoch != epoch or start < first or stop > first + len(cached):
            first, cached = start, self._fetch(epoch, start, max(limit, self._fetch_size))
            self._cached = (epoch, first, cached)
        documents = cached[start - first : stop - first]
        return documents, stop if len(documents) == limit else None

    def _fetch(self, epoch: int, start: int, count: int) -> list[Tokens]:
        indices = np.arange(start, min(start + count, len(self.documents)))
        if not self.is_shuffled:
            return self.documents.documents(indices)
        if self._order is None or self._order[0] != epoch:
            permutation = KeyedPermutation(len(self.documents), self.seed, RngStream.DOCUMENT_ORDER, *self.key, epoch)
            self._order = (epoch, permutation)
        return self.documents.documents(self._order[1](indices))


class KeyedPermutation:
    """A permutation of 0 to n - 1, n >= 1, that is a function of (n, seed, stream, key) and takes no memory.

    A Feistel network over pairs (left, right) with left < a, right < b and a * b barely larger than n. Results outside
    of n go through it again (cycle walking; Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
    """

    def __init__(self, n: int, seed: int, stream: RngStream, *key: int) -> None:
        self.n = n
        first_size = math.isqrt(n - 1) + 1
        self._sizes = (np.uint64(first_size), np.uint64(-(-n // first_size)))
        # Raw output of the bit generator is the same in every version of NumPy.
        self._keys = keyed_rng(seed, stream, *key).bit_generator.random_raw(FEISTEL_ROUNDS)

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map indices, all within 0 to n - 1, to their images; the shape is kept."""
        assert indices.size == 0 or 0 <= int(indices.min()) <= int(indices.max()) < self.n, "indices are 0 to n - 1"
        images = self._permute_pairs(indices.astype(np.uint64))
        while (is_outside := images >= self.n).any():
            images[is_outside] = self._permute_pairs(images[is_outside])
        return images.astype(np.int64)

    def _permute_pairs(self, indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Permute all pairs, each encoded as left + a * right."""
        first, second = self._sizes
        left, right = indices % first, indices // first
        for key in self._keys:
            shifted = left + _hash_below(first, right, key)
            # Modulo a: if shifted < a, the difference wraps around and is the larger one.
            left, right = right, np.minimum(shifted, shifted - first)
            first, second = second, first
        return left + first * right


def _hash_below(size: np.uint64, values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Hash values to 0 to size - 1; size <= 2 ** 31."""
    bits = (values + key) * _MULTIPLIERS[0]
    bits = (bits ^ (bits >> np.uint64(30))) * _MULTIPLIERS[1]
    bits = (bits ^ (bits >> np.uint64(27))) * _MULTIPLIERS[2]
    return ((bits >> np.uint64(32)) * size) >> np.uint64(32)


def _open_shard(directory: Path, shard: ShardEntry, index: ShardIndex) -> _ShardFile:
    ids_path, offsets_path = (directory / part.file for part in shard.parts)
    offsets = _memory_map(offsets_path, np.dtype(OFFSET_DTYPE))
    is_valid = len(offsets) == shard.documents + 1 and offsets[0] == 0 and offsets[-1] == shard.tokens
    if not is_valid or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(
            f"{offsets_path} is damaged: it does not split {shard.tokens:,} tokens into {shard.documents:,} documents; "
            "copy it again, or make the data again"
        )
    # As Python integers, access is several times faster than to an array's elements.
    return _ShardFile(_memory_map(ids_path, little_endian_dtype(index.dtype)), memoryview(offsets))  # type: ignore[arg-type]


def _memory_map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    # Python before 3.13 keeps the file open, and there may be thousands.
    options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:  # documents without tokens; an empty file cannot be mapped
                return np.empty(0, dtype)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **options), dtype)
    except OSError as error:
        hint = "; raise the limit of open files (ulimit -n)" if error.errno == errno.EMFILE else ""
        raise ValueError(f"{path} cannot be read: {error.strerror}{hint}") from error


def _count_tokens(files: list[_ShardFile], first_documents: NDArray[np.int64], num_documents: int) -> int:
    total = 0
    for file, first in zip(files, first_documents.tolist(), strict=False):
        total += file.offsets[min(len(file.offsets) - 1, max(0, num_documents - first))]
    return total
