"""Datasets of the Hugging Face Hub as a source of documents: unshuffled streams of the ``datasets`` library."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from config.data import HubDataset
from diffusionlm.data.local_files import FileFingerprint, find_files
from diffusionlm.data.reader import Split
from diffusionlm.data.record_source import BadRecord, RecordSource, validate_text

CACHE_MODULE = "datasets.packaged_modules.cache."
"""Where the library's builder lives that serves its local cache."""


def open_hub(config: HubDataset, split: Split) -> RecordSource:
    """The documents of a split; a hash of its text decides where a document belongs if there is no split for it.

    A directory with a dataset is read in place of one of the Hub. Streams are never shuffled: the library cannot resume
    a shuffled one exactly.

    Raises:
        ValueError: no such dataset, configuration, revision, split or column, or the Hub cannot be reached.
    """
    validation, separate = split == "validation", config.validation_split is not None
    train_name, max_documents = config.train_split_and_limit
    name = config.validation_split if validation and config.validation_split is not None else train_name
    builder = _load_builder(config)
    key = "validation_split" if validation and separate else "train_split"
    stream = _open_stream(config, builder, key, name)
    version, served = _dataset_version(config, builder)
    validation_fraction = None if separate else config.validation_fraction
    max_documents = None if validation else max_documents
    how = [validation_fraction, max_documents, config.on_bad_row, config.text_field]
    digest = hashlib.sha256(json.dumps(how).encode()).hexdigest()[:16]
    limit = "" if max_documents is None else f", the first {max_documents:,} documents"
    return RecordSource(
        HubRecords(stream, stream.state_dict(), config.dataset, config.text_field),
        identity=f"hub/{config.dataset}/{builder.config.name}/{version}/{name}/{split}/{digest}",
        provenance=f"{config.dataset}, config {builder.config.name}, {served}, split {name}{limit}",
        on_bad_row=config.on_bad_row,
        max_documents=max_documents,
        validation_fraction=validation_fraction,
        is_validation=validation,
    )


def _load_builder(config: HubDataset) -> Any:
    """What the library knows of the dataset."""
    import datasets

    name = os.path.expanduser(config.dataset)
    if not os.path.isdir(name) and name.startswith((".", "/")):
        raise ValueError(f"data.source.dataset = {config.dataset!r}: there is no such directory in {os.getcwd()}")
    try:
        return datasets.load_dataset_builder(name, config.config, revision=config.revision)
    except Exception as error:  # whatever the Hub's client raises: not found, offline, gated, nothing in it
        if isinstance(error, ConnectionError) and datasets.config.HF_HUB_OFFLINE:
            call = ", ".join(repr(part) for part in (config.dataset, config.config) if part is not None)
            raise ValueError(
                f"data.source.dataset = {config.dataset!r} is not in the local cache, "
                f"{datasets.config.HF_DATASETS_CACHE}, and HF_HUB_OFFLINE forbids to ask the Hub; unset it, or fill "
                f'the cache where there is a network: python -c "import datasets; datasets.load_dataset({call})"'
            ) from error
        options = ", ".join(
            f"{key} = {value!r}" for key in ("config", "revision") if (value := getattr(config, key)) is not None
        )
        raise ValueError(
            f"data.source.dataset = {config.dataset!r}{options and f' with {options}'} cannot be opened: {_error_text(error)}"
        ) from error


def _open_stream(config: HubDataset, builder: Any, key: str, split: str) -> Any:
    """The text column of a split."""
    try:
        stream = builder.as_streaming_dataset(split=split)
        columns = stream.column_names
    except Exception as error:  # no such split, or whatever its reader raises at the first file
        raise ValueError(
            f"data.source.{key} = {split!r} of {config.dataset} cannot be opened: {_error_text(error)}"
        ) from error
    if columns is None:  # known with the first row
        return stream
    if config.text_field not in columns:
        raise ValueError(
            f"data.source.text_field = {config.text_field!r} is no column of {config.dataset}; "
            f"its columns are {', '.join(map(repr, columns))}"
        )
    return stream.select_columns([config.text_field])


def _dataset_version(config: HubDataset, builder: Any) -> tuple[str, str]:
    """What tells this version of the dataset from others, and where it comes from.

    Raises:
        ValueError: the cache has another revision than the one that is asked for.
    """
    name = os.path.expanduser(config.dataset)
    if os.path.isdir(name):
        files = [FileFingerprint.of(path, "data.source.dataset") for path in find_files((name,), "data.source.dataset")]
        digest = hashlib.sha256("\n".join(file.identity for file in files).encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:16], f"{len(files):,} files in a directory"
    commit = str(builder.hash)
    if not type(builder).__module__.startswith(CACHE_MODULE):
        return commit, f"revision {commit}, streamed from the Hub"
    if config.revision is not None and not commit.startswith(config.revision):
        raise ValueError(
            f"data.source.revision = {config.revision!r}: the Hub cannot be reached, and the local cache has the "
            f"commit {commit}; name that one, leave revision out, or try again with a network"
        )
    return commit, f"revision {commit}, from the local cache (the Hub was not asked, or not reached)"


def _error_text(error: Exception) -> str:
    """An error of the library; some have no text, such as the StopIteration for an empty file."""
    return str(error) or f"{error!r}; is one of its files missing or empty?"


@dataclass(frozen=True)
class HubRecords:
    """The rows of a stream."""

    stream: Any
    start: dict[str, Any]
    """State of the stream before its first row."""
    dataset: str
    text_field: str

    def cursor(self, place: dict[str, Any] | None) -> HubCursor:
        """Reads on from a state of the stream."""
        return HubCursor(self, **(place or {"state": self.start, "row": 0}))

    def key(self, *, is_field_error: bool) -> str:
        """The config's key of the field, or of the dataset."""
        return f"data.source.text_field = {self.text_field!r}" if is_field_error else "data.source.dataset"


@dataclass
class HubCursor:
    """A place in the stream, which has only one at a time."""

    records: HubRecords
    state: dict[str, Any]
    row: int

    def __iter__(self) -> Iterator[str | BadRecord]:
        stream, field = self.records.stream, self.records.text_field
        stream.load_state_dict(self.state)
        rows = iter(stream)
        while True:
            try:
                row = next(rows, None)
            except Exception as error:  # whatever its reader raises: network, Arrow, Unicode
                raise ValueError(
                    f"data.source.dataset = {self.records.dataset!r} cannot be read on behind row {self.row}: "
                    f"{_error_text(error)}; the library gives no row from there on: try again, or download the files and "
                    'read them with kind = "files", which can skip bad rows'
                ) from error
            if row is None:
                return
            self.row += 1
            if field in row:
                yield validate_text(row[field])
            else:
                yield BadRecord(
                    f"no field {field!r}", f"its fields are {', '.join(map(repr, row))}", is_field_error=True
                )

    def place(self) -> dict[str, Any]:
        return {"state": self.records.stream.state_dict(), "row": self.row}

    def sort_key(self) -> tuple[int, ...]:
        return (self.row,)

    def location(self) -> str:
        return f"{self.records.dataset}, row {self.row}"
