"""Documents that ``diffusionlm-make-data`` tokenised, memory-mapped, in any order.

The files are described in `diffusionlm.data.shard_index`.
"""

from __future__ import annotations

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
from diffusionlm.data.shard_index import (
    OFFSET_DTYPE,
    PARQUET_COLUMN,
    TOKENIZER_DIRECTORY,
    ShardEntry,
    ShardIndex,
    SplitIndex,
    check_sizes,
    read_index,
)
from diffusionlm.diffusion.rng import RngStream, keyed_rng

PATH_KEY = "data.source.path"


LOOK_AHEAD_DOCUMENTS = 1_024


LOOK_AHEAD_TOKENS = 1 << 20
"""`ShardReader` fetches about so many at once, whichever is less: one by one costs ten times as much."""


MOST_PARQUET_TOKENS = 1 << 30
"""Parquet is read into memory, 4 bytes a token, by each process that reads."""


TokenIdArray = NDArray[Any]


@dataclass(frozen=True)
class _ShardFile:
    """Documents that lie one behind the other."""

    ids: TokenIdArray
    offsets: Sequence[int]
    """Where each document starts in ``ids``, and the end of the last one."""


@dataclass(frozen=True)
class ShardDocuments:
    """The documents of one split, by their number."""

    identity: str
    """Changes when the tokens do."""
    provenance: str
    """What there is, and what it was made from, for people."""
    tokenizer_directory: Path
    tokenizer_fingerprint: str
    num_tokens: int
    """Of all documents, without end-of-text tokens."""
    num_documents: int
    vocab_size: int
    _path: Path
    _files: list[_ShardFile]
    _first_document_F: NDArray[np.int64]
    """Number of the first document of each file."""
    _num_separator_tokens: int
    """Tokens between two documents: the end-of-text tokens of ``dat``."""

    @classmethod
    def open(cls, config: Shards, split: Split) -> ShardDocuments:
        """The shards of a split; sizes are checked, contents are not (``diffusionlm-make-data`` does, given again).

        Raises:
            ValueError: the directory is missing, not complete or damaged, or too large to be read as Parquet; names
                the file, and says what to do.
        """
        index = read_index(config.path, PATH_KEY)
        split_index = index.splits.get(split)
        if split_index is None or not split_index.documents:
            raise ValueError(f"{PATH_KEY} = {config.path} has no {split} documents: make the data again")
        check_sizes(config.path, split_index)
        if not (config.path / TOKENIZER_DIRECTORY).is_dir():
            raise ValueError(f"{config.path / TOKENIZER_DIRECTORY} is missing: copy it again, or make the data again")
        files = _open_shard_files(config.path, index, split_index)
        most = config.max_documents if split == "train" else None
        firsts = np.cumsum([0, *(len(file.offsets) - 1 for file in files)])
        count = min(int(firsts[-1]), most or sys.maxsize)
        gap = int(index.format == "dat")
        cut = "" if count == split_index.documents else f"the first {count:,} of "
        on_disk = f"{split_index.bytes_on_disk / 2**20:,.1f} MiB of {index.format}"
        in_memory = f", {split_index.tokens * 4 / 2**20:,.1f} MiB in memory" if index.format == "parquet" else ""
        return cls(
            identity=_compute_identity(index, split_index, split, count),
            provenance=f"{cut}{split_index.documents:,} documents, {split_index.tokens:,} tokens, {on_disk} in "
            f"{config.path}{in_memory}, made from {split_index.provenance}",
            tokenizer_directory=config.path / TOKENIZER_DIRECTORY,
            tokenizer_fingerprint=index.tokenizer_fingerprint,
            num_tokens=_count_tokens(files, firsts, count, gap),
            num_documents=count,
            vocab_size=index.vocab_size,
            _path=config.path,
            _files=files,
            _first_document_F=firsts[:-1],
            _num_separator_tokens=gap,
        )

    def __len__(self) -> int:
        return self.num_documents

    def tokens(self, index: int) -> Tokens:
        """Ids of one document; for many, `documents` is faster."""
        return self.documents(np.array([index]))[0]

    def documents(self, indices: NDArray[np.int64]) -> list[Tokens]:
        """Ids of these documents. They share their memory: a document that is kept keeps all of them.

        Raises:
            ValueError: an id is outside of the vocabulary; names the directory.
        """
        if not indices.size:
            return []
        assert 0 <= int(indices.min()) <= int(indices.max()) < len(self), "documents are 0 to len - 1"
        file_of = np.searchsorted(self._first_document_F, indices, side="right") - 1
        within = indices - self._first_document_F[file_of]
        files, gap = self._files, self._num_separator_tokens
        pieces = []
        for number, document in zip(file_of.tolist(), within.tolist(), strict=True):
            file = files[number]
            pieces.append(file.ids[file.offsets[document] : file.offsets[document + 1] - gap])
        together: Tokens = np.concatenate(pieces, dtype=np.int32, casting="same_kind")
        # Without signs, so that an id of 2 ** 31 or more is large too.
        if together.size and int(together.view(np.uint32).max()) >= self.vocab_size:
            raise ValueError(
                f"{PATH_KEY} = {self._path} is damaged: it has the token id {int(together.view(np.uint32).max())}, and the "
                f"vocabulary has {self.vocab_size}; repeat the diffusionlm-make-data command to find the file"
            )
        ends = np.cumsum([len(piece) for piece in pieces]).tolist()
        return [together[start:end] for start, end in pairwise([0, *ends])]


@dataclass
class ShardReader:
    """All documents of each epoch, in an order that is a function of (seed, epoch); a position is a number.

    The order takes no memory, and reading may begin anywhere in it.
    """

    documents: ShardDocuments
    seed: int
    is_shuffled: bool
    """Else in the order of the shards, each epoch alike."""
    key: tuple[int, ...] = ()
    """Of the order, beside the epoch: two readers of one run do not share theirs."""

    def __post_init__(self) -> None:
        mean = max(1, self.documents.num_tokens // len(self.documents))
        self._fetch_size = min(LOOK_AHEAD_DOCUMENTS, max(1, LOOK_AHEAD_TOKENS // mean))
        self._cached: tuple[int, int, list[Tokens]] = (0, 0, [])
        self._order: tuple[int, KeyedPermutation] | None = None

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[Tokens], ReaderPosition]:
        """Up to ``limit`` documents, and the position behind them."""
        start: int = position or 0
        stop = min(start + limit, len(self.documents))
        held_epoch, first, held = self._cached
        if held_epoch != epoch or start < first or stop > first + len(held):
            first, held = start, self._fetch(epoch, start, max(limit, self._fetch_size))
            self._cached = (epoch, first, held)
        documents = held[start - first : stop - first]
        return documents, stop if len(documents) == limit else None

    def _fetch(self, epoch: int, start: int, count: int) -> list[Tokens]:
        places = np.arange(start, min(start + count, len(self.documents)))
        if not self.is_shuffled:
            return self.documents.documents(places)
        if self._order is None or self._order[0] != epoch:
            self._order = (
                epoch,
                KeyedPermutation(len(self.documents), self.seed, RngStream.DOCUMENT_ORDER, *self.key, epoch),
            )
        return self.documents.documents(self._order[1](places))


def _compute_identity(index: ShardIndex, split_index: SplitIndex, split: Split, count: int) -> str:
    sums = " ".join(part.sha256 for shard in split_index.shards for part in shard.parts)
    digest = hashlib.sha256(f"{index.tokenizer_fingerprint} {count} {sums}".encode()).hexdigest()
    return f"shards/{split}/{digest[:16]}"


def _open_shard_files(directory: Path, index: ShardIndex, split_index: SplitIndex) -> list[_ShardFile]:
    match index.format:
        case "bin":
            return [_open_bin(directory, shard, index.dtype) for shard in split_index.shards]
        case "dat":
            return [_open_dat(directory / name, index, split_index) for name in split_index.sizes]
        case "parquet":
            if split_index.tokens > MOST_PARQUET_TOKENS:
                raise ValueError(
                    f"{PATH_KEY} = {directory} is Parquet, whose {split_index.tokens:,} tokens would take "
                    f"{split_index.tokens * 4 / 2**30:.1f} GiB in memory; at most {MOST_PARQUET_TOKENS * 4 / 2**30:.0f} "
                    'are read: make the data with output.format = "bin", which is for training'
                )
            names = [directory / name for name in split_index.sizes]
            return [_read_parquet(*each) for each in zip(names, split_index.shards, strict=True)]


def _open_bin(directory: Path, shard: ShardEntry, dtype: str) -> _ShardFile:
    ids, path = (directory / part.file for part in shard.parts)
    offsets = _memory_map(path, OFFSET_DTYPE)
    whole = len(offsets) == shard.documents + 1 and offsets[0] == 0 and offsets[-1] == shard.tokens
    if not whole or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(
            f"{path} is damaged: it does not cut {shard.tokens:,} tokens into {shard.documents:,} documents; copy it "
            "again, or make the data again"
        )
    return _ShardFile(_memory_map(ids, _little_endian(dtype)), _as_int_sequence(offsets))


def _open_dat(path: Path, index: ShardIndex, split_index: SplitIndex) -> _ShardFile:
    """The file is read once, to find where documents end; that takes 8 bytes of memory for each."""
    ids = _memory_map(path, _little_endian(index.dtype))
    block = 1 << 24
    ends = [np.flatnonzero(ids[at : at + block] == index.eos_token_id) + at for at in range(0, len(ids), block)]
    offsets = np.concatenate([[0], *(each + 1 for each in ends)])
    if len(offsets) != split_index.documents + 1 or offsets[-1] != len(ids):
        raise ValueError(
            f"{path} is damaged: {len(offsets) - 1:,} documents end in it, not {split_index.documents:,}, or it goes on "
            "behind the last one; copy it again, or make the data again"
        )
    return _ShardFile(ids, _as_int_sequence(offsets))


def _as_int_sequence(offsets: NDArray[np.int64]) -> Sequence[int]:
    """The same as Python's integers, several times faster to get at than those of an array."""
    return memoryview(offsets)  # type: ignore[arg-type]


def _little_endian(dtype: str) -> str:
    return np.dtype(dtype).newbyteorder("<").str


def _memory_map(path: Path, dtype: str) -> TokenIdArray:
    """A file as an array that is read when it is used."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:  # documents without tokens; an empty file cannot be mapped
                return np.empty(0, dtype)
            return np.frombuffer(_map(file.fileno()), dtype)
    except OSError as error:
        many = "; raise the limit of open files (ulimit -n), or make the data with a larger output.shard_tokens"
        raise ValueError(f"{path} cannot be read: {error.strerror}{many if error.errno == 24 else ''}") from error


def _map(descriptor: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):  # else the map holds the file open, and there may be thousands of them
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ, trackfd=False)
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)


def _read_parquet(path: Path, shard: ShardEntry) -> _ShardFile:
    """The file in memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    ids, offsets = np.empty(shard.tokens, np.int32), np.zeros(shard.documents + 1, np.int64)
    document = token = 0
    try:
        for batch in pq.ParquetFile(path, page_checksum_verification=True).iter_batches(columns=[PARQUET_COLUMN]):
            lists = batch.column(0)
            values, lengths = lists.flatten().to_numpy(), lists.value_lengths().to_numpy()
            ids[token : token + len(values)] = values
            offsets[document + 1 : document + 1 + len(lengths)] = lengths
            document, token = document + len(lengths), token + len(values)
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: more rows or ids than there should be
        raise ValueError(f"{path} is damaged ({error}): copy it again, or make the data again") from error
    np.cumsum(offsets, out=offsets)
    if (document, token, offsets[-1]) != (shard.documents, shard.tokens, shard.tokens):
        raise ValueError(
            f"{path} is damaged: it has {document:,} documents of {token:,} tokens, not {shard.documents:,} of "
            f"{shard.tokens:,}; copy it again, or make the data again"
        )
    return _ShardFile(ids, _as_int_sequence(offsets))


def _count_tokens(files: list[_ShardFile], firsts: NDArray[np.int64], count: int, gap: int) -> int:
    """Tokens of the first ``count`` documents."""
    taken = [min(len(file.offsets) - 1, max(0, count - int(first))) for file, first in zip(files, firsts, strict=False)]
    return sum(file.offsets[number] - gap * number for file, number in zip(files, taken, strict=True))


ROUNDS = 16
"""Four suffice for large sets (Luby and Rackoff 1988); a handful of items mixes more slowly. Even, so
that both halves end where they began."""


_MULTIPLIERS = tuple(map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))
"""Of the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""


class KeyedPermutation:
    """A permutation of 0 to n - 1 that is a function of (n, seed, stream, key) alone and takes no memory.

    A Feistel network over pairs (left, right) with left < a, right < b and a * b barely larger than n; what falls
    outside of n goes through it again until it is inside (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains").

    Raises:
        ValueError: n is not between 1 and 2 ** 62.
    """

    def __init__(self, n: int, seed: int, stream: RngStream, *key: int) -> None:
        if not 1 <= n <= 1 << 62:
            raise ValueError(f"a permutation of {n} places: there must be 1 to 2 ** 62")
        self.n = n
        left = math.isqrt(n - 1) + 1
        self._sizes = (np.uint64(left), np.uint64(-(-n // left)))
        # Raw output of the bit generator is the same in every version of NumPy.
        self._keys = keyed_rng(seed, stream, *key).bit_generator.random_raw(ROUNDS)

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The item at each of these places, all within 0 to n - 1; the shape is kept."""
        assert places.size == 0 or 0 <= int(places.min()) <= int(places.max()) < self.n, "places are 0 to n - 1"
        items = self._permute_pairs(places.astype(np.uint64))
        while (outside := items >= self.n).any():
            items[outside] = self._permute_pairs(items[outside])
        return items.astype(np.int64)

    def _permute_pairs(self, places: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """A permutation of all pairs, each as left + a * right."""
        first, second = self._sizes
        left, right = places % first, places // first
        for key in self._keys:
            moved = left + _hash_below(first, right, key)
            # Modulo a: where nothing is to be taken off, the difference wraps around and is the larger one.
            left, right = right, np.minimum(moved, moved - first)
            first, second = second, first
        return left + first * right


def _hash_below(size: np.uint64, values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Numbers from 0 to size - 1, as if random; size <= 2 ** 31."""
    bits = (values + key) * _MULTIPLIERS[0]
    bits = (bits ^ (bits >> np.uint64(30))) * _MULTIPLIERS[1]
    bits = (bits ^ (bits >> np.uint64(27))) * _MULTIPLIERS[2]
    return ((bits >> np.uint64(32)) * size) >> np.uint64(32)
