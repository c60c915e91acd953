"""The files of a directory of tokens: their index, their checks, and the writer of a shard.

The directory holds for each split:

* ``train-00000.bin``, ...: the token ids of consecutive documents, little-endian unsigned integers of the index's
  dtype: ``np.fromfile("train-00000.bin", "<u2")``.
* ``train-00000.idx``, ...: the start of each document and the end of the last one, in tokens, little-endian 64-bit
  integers.

Documents have no end-of-text tokens. ``tokenizer/`` holds the tokenizer. ``index.json`` is written last: a directory
without it is incomplete, and ``progress.json`` says how far it is.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError, computed_field

from diffusionlm.data.reader import Split, Tokens
from files.atomic import sync_to_disk
from files.paths import hash_file

INDEX_FILE = "index.json"
PROGRESS_FILE = "progress.json"
TOKENIZER_DIRECTORY = "tokenizer"
OFFSET_DTYPE = "<i8"

ShardDtype = Literal["uint16", "uint32"]


class StrictModel(BaseModel):
    """Base of the JSON models: strict types, immutable."""

    # Unknown keys are ignored: computed totals are written for readers of the file and ignored here.
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


StrictModelT = TypeVar("StrictModelT", bound=StrictModel)


class ShardPart(StrictModel):
    """One file of a shard."""

    file: str
    bytes: NonNegativeInt
    sha256: str


class ShardEntry(StrictModel):
    """A shard: consecutive documents."""

    documents: PositiveInt
    tokens: NonNegativeInt
    text_bytes: NonNegativeInt
    parts: tuple[ShardPart, ...]


class SplitIndex(StrictModel):
    """The documents of a split, in order."""

    identity: str
    provenance: str
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


class ShardIndex(StrictModel):
    """The contents of ``index.json``."""

    version: Literal[1] = 1
    format: Literal["bin"] = "bin"
    dtype: ShardDtype
    """Dtype of the ids: uint16 if the vocabulary fits, else uint32."""
    vocab_size: PositiveInt
    eos_token_id: NonNegativeInt
    tokenizer_fingerprint: str
    config: dict[str, Any]
    """The resolved config without the directory and the number of workers, which do not change the data."""
    splits: dict[Split, SplitIndex]


def read_index(directory: Path, key: str) -> ShardIndex:
    """Read the index of a complete directory.

    Raises:
        ValueError: there is no index, or it is damaged or of another version or format.
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
        raise ValueError(f"{path} is damaged, or of another version: {field}: {first['msg']}; {remedy}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def check_files(directory: Path, split: SplitIndex, *, reads_contents: bool = False) -> None:
    """Check that every file exists and has the size in the index, and the checksum, if it ``reads_contents``.

    Raises:
        ValueError: a file is missing or damaged.
    """
    for part in (part for shard in split.shards for part in shard.parts):
        path = directory / part.file
        if not path.is_file():
            raise ValueError(f"{path} is missing, though {INDEX_FILE} names it; copy it again, or make the data again")
        actual_size = path.stat().st_size
        if actual_size != part.bytes:
            raise ValueError(
                f"{path} has {actual_size:,} bytes, not {part.bytes:,}; copy it again, or make the data again"
            )
        if reads_contents and hash_file(path) != part.sha256:
            raise ValueError(
                f"{path} is damaged: its checksum is not the one in {INDEX_FILE}; copy it again, or make it again"
            )


def select_dtype(vocab_size: int) -> ShardDtype:
    """Return the smaller dtype that holds all token ids."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def little_endian_dtype(dtype: ShardDtype) -> np.dtype[Any]:
    """Return the dtype of ids on disk, which is little-endian on every machine."""
    return np.dtype(dtype).newbyteorder("<")


def partial_path(path: Path) -> Path:
    """Return the path under which a file is written until it is complete."""
    return path.with_name(path.name + ".tmp")


class ShardWriter:
    """Writes one shard. The files do not depend on how the documents are grouped into calls.

    Args:
        target_tokens: the shard ends with the document that reaches this many.
    """

    def __init__(self, directory: Path, split: Split, index: int, dtype: ShardDtype, target_tokens: int) -> None:
        self._paths = [directory / f"{split}-{index:05}{suffix}" for suffix in (".bin", ".idx")]
        self._dtype, self._target_tokens = little_endian_dtype(dtype), target_tokens
        self._ids = partial_path(self._paths[0]).open("wb")
        self._lengths: list[int] = []
        self._num_tokens = self._text_bytes = 0

    @property
    def is_full(self) -> bool:
        return self._num_tokens >= self._target_tokens

    def add_documents(self, documents: list[Tokens], text_bytes: list[int]) -> int:
        """Write the first documents, up to the one that fills the shard, and return their number."""
        count = 0
        while count < len(documents) and not self.is_full:
            self._num_tokens += len(documents[count])
            count += 1
        self._lengths += map(len, documents[:count])
        self._text_bytes += sum(text_bytes[:count])
        self._ids.write(np.concatenate(documents[:count]).astype(self._dtype).data)
        return count

    def finish(self) -> ShardEntry:
        """Make the shard durable and return its entry in the index."""
        self._ids.close()
        np.cumsum([0, *self._lengths]).astype(OFFSET_DTYPE).tofile(partial_path(self._paths[1]))
        return ShardEntry(
            documents=len(self._lengths),
            tokens=self._num_tokens,
            text_bytes=self._text_bytes,
            parts=tuple(map(_commit_file, self._paths)),
        )

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # closing flushes, which fails again on a full disk
            self._ids.close()
        for path in self._paths:
            partial_path(path).unlink(missing_ok=True)


def _commit_file(path: Path) -> ShardPart:
    """Make a partial file durable under its name."""
    partial = partial_path(path)
    sync_to_disk(partial)
    part = ShardPart(file=path.name, bytes=partial.stat().st_size, sha256=hash_file(partial))
    os.replace(partial, path)
    sync_to_disk(path.parent)
    return part
