"""The JSON files of a directory of tokens: ``index.json`` of a complete one, ``progress.json`` until then.

The directory holds for each split, by format:

* ``bin``: ``train-00000.bin``, ...: the token ids of consecutive documents, little-endian unsigned integers of the
  index's dtype. Beside each ``train-00000.idx``: the start of each document and the end of the last one, in tokens,
  little-endian 64-bit integers.
* ``parquet``: ``train-00000.parquet``, ...: one row per document; column ``input_ids``, a list of int32.
* ``dat``: ``train.dat``: ids as in ``bin``, each document followed by the end-of-text token:
  ``np.memmap("train.dat", dtype=..., mode="r")``.

Documents have no end-of-text tokens (except in ``dat``). ``tokenizer/`` holds the tokenizer. The index is written last:
a directory without it is incomplete.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError, computed_field

from config.make_data import ShardFormat
from diffusionlm.data.reader import ReaderPosition, Split

INDEX_FILE = "index.json"
PROGRESS_FILE = "progress.json"
TOKENIZER_DIRECTORY = "tokenizer"
FORMAT_VERSION: Literal[1] = 1

OFFSET_DTYPE = "<i8"
PARQUET_COLUMN = "input_ids"

ShardDtype = Literal["uint16", "uint32", "int32"]


class StrictModel(BaseModel):
    """Base of the JSON models: strict types, immutable."""

    # Unknown keys are ignored: computed totals are written for readers of the file and ignored here.
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


StrictModelT = TypeVar("StrictModelT", bound=StrictModel)


class FileRange(StrictModel):
    """The bytes of one shard in a file: all of it, or for ``dat`` a part."""

    file: str
    start: NonNegativeInt = 0
    """First byte."""
    bytes: NonNegativeInt
    """Number of bytes."""
    sha256: str


class ShardEntry(StrictModel):
    """A shard: consecutive documents."""

    documents: PositiveInt
    tokens: NonNegativeInt
    text_bytes: NonNegativeInt
    """UTF-8 bytes of the text."""
    parts: tuple[FileRange, ...]


class SplitIndex(StrictModel):
    """The documents of a split, in order."""

    identity: str
    """Identity of the source."""
    provenance: str
    """Provenance of the source."""
    skipped: dict[str, int] = {}
    """Records of the source left out or repaired, by reason."""
    shards: tuple[ShardEntry, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tokens(self) -> int:
        """Number of tokens, without end-of-text tokens."""
        return sum(shard.tokens for shard in self.shards)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def text_bytes(self) -> int:
        return sum(shard.text_bytes for shard in self.shards)

    @property
    def bytes_on_disk(self) -> int:
        return sum(part.bytes for shard in self.shards for part in shard.parts)

    @property
    def file_sizes(self) -> dict[str, int]:
        """File name -> bytes."""
        return {part.file: part.start + part.bytes for shard in self.shards for part in shard.parts}


class ShardIndex(StrictModel):
    """The contents of ``index.json``."""

    version: Literal[1] = FORMAT_VERSION
    format: ShardFormat
    dtype: ShardDtype
    """Dtype of the ids: int32 in Parquet, else uint16 if the vocabulary fits, else uint32."""
    vocab_size: PositiveInt
    eos_token_id: NonNegativeInt
    tokenizer_fingerprint: str
    config: dict[str, Any]
    """The resolved config without the directory and the number of workers, which do not change the data."""
    splits: dict[Split, SplitIndex]


class SplitProgress(StrictModel):
    """The finished part of a split."""

    index: SplitIndex
    """The finished shards, and the records skipped before ``position``."""
    position: ReaderPosition = None
    """Position at which to continue reading the source."""
    past: NonNegativeInt = 0
    """Number of documents after ``position`` that are in finished shards already."""
    done: bool = False


class MakeDataProgress(StrictModel):
    """``progress.json``, replaced after each shard."""

    version: Literal[1] = FORMAT_VERSION
    config: dict[str, Any]
    tokenizer_fingerprint: str | None = None
    """None: there is no tokenizer yet."""
    splits: dict[Split, SplitProgress]


def read_index(directory: Path, key: str) -> ShardIndex:
    """Read the index of a complete directory.

    Args:
        key: config key of the directory, for errors.

    Raises:
        ValueError: there is no index, or it is damaged or of another version.
    """
    path = directory / INDEX_FILE
    setting = f"{key} = {directory}"
    if not directory.is_dir():
        raise ValueError(f"{setting} is not a directory; make one with diffusionlm-make-data")
    if not path.is_file():
        if (directory / PROGRESS_FILE).is_file():
            raise ValueError(f"{setting} is incomplete; repeat the diffusionlm-make-data command, which continues it")
        raise ValueError(f"{setting} has no {INDEX_FILE}; name a directory that diffusionlm-make-data wrote")
    return read_json_model(ShardIndex, path, "make the data again, or with the version that wrote it")


def read_json_model(model_class: type[StrictModelT], path: Path, remedy: str) -> StrictModelT:
    """Read and validate a JSON file.

    Raises:
        ValueError: it cannot be read or is invalid; names the first problem, and ``remedy``.
    """
    try:
        return model_class.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path} is damaged: {field}: {first['msg']}; {remedy}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def check_sizes(directory: Path, split: SplitIndex) -> None:
    """Check that every file exists and has the size in the index.

    Raises:
        ValueError: a file is missing or has another size.
    """
    for name, size in split.file_sizes.items():
        path = directory / name
        if not path.is_file():
            raise ValueError(f"{path} is missing, though {INDEX_FILE} names it; copy it again, or make the data again")
        actual_size = path.stat().st_size
        if actual_size != size:
            raise ValueError(f"{path} has {actual_size:,} bytes, not {size:,}; copy it again, or make the data again")


def check_checksums(directory: Path, split: SplitIndex) -> None:
    """Compare every file with its checksum. This reads all files.

    Raises:
        ValueError: a file is missing or damaged.
    """
    check_sizes(directory, split)
    for part in (part for shard in split.shards for part in shard.parts):
        path = directory / part.file
        if compute_sha256(path, part.start, part.bytes) != part.sha256:
            raise ValueError(
                f"{path} is damaged: its checksum is not the one in {INDEX_FILE}; copy it again, or make it again"
            )


def compute_sha256(path: Path, start: int, size: int) -> str:
    """Hash ``size`` bytes of a file from ``start`` on."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        while size > 0 and (block := file.read(min(size, 1 << 22))):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()


def little_endian_dtype(dtype: ShardDtype) -> np.dtype[Any]:
    """Return the dtype of ids on disk, which is little-endian on every machine."""
    return np.dtype(dtype).newbyteorder("<")
