"""Select the validation text of a source that has no validation files or split of its own.

Of many documents, a hash of their text selects those for validation. Few documents, such as one large text, are divided
themselves: their ends are for validation. Conversations are never divided. Copies of a document are divided alike, so
that no text is in both splits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from diffusionlm.data.chat.conversation import Conversation, Record

MIN_EXPECTED_DOCUMENTS = 5
"""The hash selects documents if each split can expect this many; with fewer, shares vary too much by chance."""

MAX_READ_DOCUMENTS = 10_000
"""Documents that are read at most to choose between hash and ends: a tiny validation fraction would need all."""

MIN_END_CHARACTERS = 4_096
"""Shortest end of a document that is held out, unless all documents together are small."""

PART_CHARACTERS = 1 << 16
"""Approximate length of the parts into which the text of an `EndSplit` is cut, so that a large text is tokenized and
shuffled in parts."""

SEPARATORS = ("\n\n", "\n", " ")
"""Texts are cut after a paragraph if possible, else after a line or a word."""


@dataclass(frozen=True)
class WholeSource:
    """All documents of the source are in the split."""

    description: ClassVar[str] = ""

    def select(self, record: Record) -> list[Record]:
        return [record]


@dataclass(frozen=True)
class HashSplit:
    """Documents whose hash is below a limit are for validation."""

    limit: float
    """As a share of all hashes: the validation fraction, or that which divides the documents exactly."""
    is_validation: bool
    description: str = ""
    """Size of a validation split that divides the documents exactly."""

    def select(self, record: Record) -> list[Record]:
        is_selected = hash_share(hash_record(record)) < self.limit
        return [record] if is_selected == self.is_validation else []


@dataclass(frozen=True)
class EndSplit:
    """The ends of documents are for validation, the rest is for training. Both are cut into parts."""

    end_lengths: dict[bytes, int]
    """SHA-256 of a text -> maximum length of its validation text, in characters. Other texts are for training."""
    is_validation: bool
    description: str
    """Size of the validation text."""

    def select(self, record: Record) -> list[str]:
        text = str(record)
        length = self.end_lengths.get(hashlib.sha256(text.encode()).digest(), 0)
        start = find_boundary(text, len(text) - length, length // 4)
        return cut_into_parts(text[start:] if self.is_validation else text[:start])


DocumentSplit = WholeSource | HashSplit | EndSplit
"""Assigns documents to the training or the validation split; `description` is the size of a validation split that was
chosen by size. ``select(record)`` returns the parts of it that are
in the split, in order."""


def choose_split(records: Iterable[Record], validation_fraction: float, is_validation: bool, key: str) -> DocumentSplit:
    """Select whole documents by hash if there are enough of them, else divide the documents.

    There are enough if both splits can expect `MIN_EXPECTED_DOCUMENTS` different ones and have at least one.

    Args:
        records: all documents; read up to the one that decides. Conversations are not divided: those with the smallest
            hashes are for validation.

    Raises:
        ValueError: the text is too short to be divided, or there is a single document that must not be cut.
    """
    min_documents = MIN_EXPECTED_DOCUMENTS / min(validation_fraction, 1.0 - validation_fraction)
    sizes: dict[bytes, tuple[int, int]] = {}
    num_validation = 0
    is_chat = False
    for count, record in enumerate(records, 1):
        digest = hash_record(record)
        is_chat = isinstance(record, Conversation)
        if digest not in sizes:
            sizes[digest] = (1, 1) if isinstance(record, Conversation) else (len(record), len(record.encode()))
            num_validation += hash_share(digest) < validation_fraction
        is_enough = len(sizes) >= min_documents and 0 < num_validation < len(sizes)
        if is_enough or count == MAX_READ_DOCUMENTS:
            return HashSplit(validation_fraction, is_validation)
    if not sizes:  # the reader of the documents has the reason
        return HashSplit(validation_fraction, is_validation)
    if is_chat:
        return _select_smallest_hashes(sizes, validation_fraction, is_validation, key)
    return _divide_documents(sizes, validation_fraction, is_validation, key)


def _select_smallest_hashes(
    digests: Iterable[bytes], validation_fraction: float, is_validation: bool, key: str
) -> HashSplit:
    """Hold out the share of the documents: at least two of four or more, so that a bound has a standard error, at least
    one of fewer, and not all."""
    ordered = sorted(digests)
    if len(ordered) == 1:
        raise ValueError(
            f"{key}: there is only one conversation, and validation needs another one: add conversations, or name "
            "validation_paths"
        )
    count = min(len(ordered) - 1, max(2 if len(ordered) >= 4 else 1, round(validation_fraction * len(ordered))))
    description = f"{count:,} of its {len(ordered):,} conversations are for validation"
    return HashSplit(hash_share(ordered[count]), is_validation, description)


def _divide_documents(
    sizes: dict[bytes, tuple[int, int]], validation_fraction: float, is_validation: bool, key: str
) -> EndSplit:
    """Hold out the end of each document. The share of a short document is added to that of the next one.

    Args:
        sizes: SHA-256 of each document -> its characters and bytes.
    """
    num_characters, num_bytes = (sum(column) for column in zip(*sizes.values(), strict=True))
    min_length = min(MIN_END_CHARACTERS, validation_fraction * num_characters / 4)
    end_lengths: dict[bytes, int] = {}
    due = 0.0
    for digest, (size, _) in sizes.items():
        due += validation_fraction * size
        if due >= min_length:
            end_lengths[digest] = min(size, max(1, int(due)))
            due -= end_lengths[digest]
    if sum(end_lengths.values()) == num_characters:
        raise ValueError(
            f"{key}: the text is too short to hold out validation_fraction = {validation_fraction} of it (size in "
            f"bytes: {num_bytes:,}); add text"
        )
    end_bytes = sum(sizes[digest][1] * length / sizes[digest][0] for digest, length in end_lengths.items())
    ends = f"the ends of {len(end_lengths):,} of its {len(sizes):,} documents"
    description = f"{ends} ({round(end_bytes):,} of {num_bytes:,} bytes) are validation text"
    return EndSplit(end_lengths, is_validation, description)


def cut_into_parts(text: str) -> list[str]:
    """Cut a text into parts of about `PART_CHARACTERS`, after paragraphs if possible."""
    parts: list[str] = []
    start = 0
    while start < len(text):
        slack = PART_CHARACTERS // 4
        is_last = len(text) - start <= PART_CHARACTERS + slack
        end = len(text) if is_last else find_boundary(text, start + PART_CHARACTERS, slack)
        parts.append(text[start:end])
        start = end
    return parts


def find_boundary(text: str, target: int, slack: int) -> int:
    """Return the first end of a paragraph from ``target`` to ``target + slack``; if there is none, of a line, then of a
    word, then ``target``."""
    if target == 0:
        return 0
    for separator in SEPARATORS:
        index = text.find(separator, max(0, target - len(separator)), target + slack)
        if index >= 0:
            return index + len(separator)
    return target


def hash_record(record: Record) -> bytes:
    """Hash a text with SHA-256, or a conversation as JSON, whatever the order of its keys was."""
    return hashlib.sha256((record if isinstance(record, str) else record.to_json()).encode()).digest()


def hash_share(digest: bytes) -> float:
    """Return the hash as a number from 0 to 1."""
    return int.from_bytes(digest[:8], "big") / 2**64
