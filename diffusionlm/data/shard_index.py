"""``index.json`` of a directory of tokens: what is in it, made from what.

The directory has, for each split, as the format says:

* ``bin``: ``train-00000.bin`` and so on, the ids of all documents one behind the other, little-endian unsigned
  integers of the index's dtype; beside each ``train-00000.idx``, little-endian 64-bit integers: where each document
  starts, in tokens from the start of the file, and where the last one ends.
* ``parquet``: ``train-00000.parquet`` and so on, a row for each document, the column ``input_ids`` a list of int32.
* ``dat``: ``train.dat``, ids as in ``bin``, each document followed by the end-of-text token:
  ``np.memmap("train.dat", dtype=..., mode="r")``.

Documents are as the text gives them, without end-of-text tokens around them (but for ``dat``). ``tokenizer/`` has the
tokenizer. The index is written last: a directory without it is not complete.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError, computed_field

from diffusionlm.data.reader import Split

INDEX_FILE = "index.json"


PROGRESS_FILE = "progress.json"
"""In place of the index while the directory is being made."""


TOKENIZER_DIRECTORY = "tokenizer"


FORMAT_VERSION: Literal[1] = 1


OFFSET_DTYPE = "<i8"
"""Dtype of ``.idx`` files."""


PARQUET_COLUMN = "input_ids"
"""Of Parquet files."""


ShardFormat = Literal["bin", "parquet", "dat"]


ShardDtype = Literal["uint16", "uint32", "int32"]


class StrictModel(BaseModel):
    """What the JSON files are made of: strict, and immutable."""

    # Unknown keys are passed over: totals are written for people, and not read.
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


StrictModelT = TypeVar("StrictModelT", bound=StrictModel)


class FileRange(StrictModel):
    """A file, or for ``dat`` the part of one that a shard takes."""

    file: str
    start: NonNegativeInt = 0
    """Byte at which the part begins."""
    bytes: NonNegativeInt
    sha256: str


class ShardEntry(StrictModel):
    """Consecutive documents."""

    documents: PositiveInt
    tokens: NonNegativeInt
    text_bytes: NonNegativeInt
    """UTF-8 bytes of the text."""
    parts: tuple[FileRange, ...]


class SplitIndex(StrictModel):
    """The documents of a split, in their order."""

    identity: str
    """Of the source."""
    provenance: str
    """Of the source, for people."""
    skipped: dict[str, int] = {}
    """Rows of the source that were left out, counted by reason."""
    shards: tuple[ShardEntry, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def documents(self) -> int:
        """Of all shards."""
        return sum(shard.documents for shard in self.shards)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tokens(self) -> int:
        """Of all shards, without end-of-text tokens."""
        return sum(shard.tokens for shard in self.shards)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the text of all shards."""
        return sum(shard.text_bytes for shard in self.shards)

    @property
    def bytes_on_disk(self) -> int:
        """Of all files."""
        return sum(part.bytes for shard in self.shards for part in shard.parts)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file, by name."""
        return {part.file: part.start + part.bytes for shard in self.shards for part in shard.parts}


class ShardIndex(StrictModel):
    """The whole file."""

    version: Literal[1] = FORMAT_VERSION
    format: ShardFormat
    dtype: ShardDtype
    """Of the ids: uint16 where the vocabulary fits, else uint32; int32 in Parquet."""
    vocab_size: PositiveInt
    eos_token_id: NonNegativeInt
    tokenizer_fingerprint: str
    config: dict[str, Any]
    """The resolved config; without the directory and the number of workers, which change nothing."""
    splits: dict[Split, SplitIndex]


def read_index(directory: Path, key: str) -> ShardIndex:
    """The index of a complete directory, which the config's ``key`` names.

    Raises:
        ValueError: there is none, or it is damaged, or from another version; says what to do.
    """
    path = directory / INDEX_FILE
    named = f"{key} = {directory}"
    if not directory.is_dir():
        raise ValueError(f"{named} is not a directory; diffusionlm-make-data makes one")
    if not path.is_file():
        if (directory / PROGRESS_FILE).is_file():
            raise ValueError(f"{named} is not complete: repeat the diffusionlm-make-data command, which then goes on")
        raise ValueError(f"{named} has no {INDEX_FILE}: name a directory that diffusionlm-make-data wrote")
    return read_json_model(ShardIndex, path, "make the data again, or with the version that wrote it")


def read_json_model(model_class: type[StrictModelT], path: Path, remedy: str) -> StrictModelT:
    """A JSON file of this kind.

    Raises:
        ValueError: it cannot be read or is something else; names the first fault.
    """
    try:
        return model_class.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path} is damaged: {place}: {first['msg']}; {remedy}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def check_sizes(directory: Path, split: SplitIndex) -> None:
    """See that every file is there and as long as the index says.

    Raises:
        ValueError: one is not; names it.
    """
    for name, size in split.sizes.items():
        path = directory / name
        if not path.is_file():
            raise ValueError(f"{path} is missing, though {INDEX_FILE} names it: copy it again, or make the data again")
        found = path.stat().st_size
        if found != size:
            raise ValueError(f"{path} has {found:,} bytes, not {size:,}: copy it again, or make the data again")


def check_checksums(directory: Path, split: SplitIndex) -> None:
    """Compare every file with its checksum; this reads all of them.

    Raises:
        ValueError: one is damaged; names it.
    """
    check_sizes(directory, split)
    for part in (part for shard in split.shards for part in shard.parts):
        path = directory / part.file
        if compute_sha256(path, part.start, part.bytes) != part.sha256:
            raise ValueError(f"{path} is damaged: its checksum is not the index's; copy it again, or make it again")


def compute_sha256(path: Path, start: int, size: int) -> str:
    """Checksum of a part of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        while size > 0 and (block := file.read(min(size, 1 << 22))):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()
