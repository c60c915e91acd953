"""Datasets of the Hugging Face Hub as a source of documents: unshuffled streams of the ``datasets`` library."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from config.data import HubDataset
from diffusionlm.data.chat.conversation import Record
from diffusionlm.data.reader import Split
from diffusionlm.data.sources.file_formats import parse_arrow_row
from diffusionlm.data.sources.local_files import DataFile, find_files, list_identifying_options, select_field
from diffusionlm.data.sources.record_source import (
    BadRecord,
    RecordSource,
    TextField,
    list_fields,
    select_split,
    validate_text,
)
from files.paths import portable_path

CACHE_MODULE = "datasets.packaged_modules.cache."
"""Module of the library's builder that serves its local cache."""


def open_hub(config: HubDataset, split: Split, key: str) -> RecordSource:
    """Open the documents of a split. Without `validation_split`, `choose_split` holds out validation text.

    `dataset` may also be a directory with a dataset. Streams are never shuffled: the library cannot resume a shuffled
    stream exactly.

    Raises:
        ValueError: no such dataset, configuration, revision, split or column, or the Hub cannot be reached.
    """
    is_validation, has_own_split = split == "validation", config.validation_split is not None
    split_name, max_documents = config.train_split_and_limit
    split_key = f"{key}.train_split"
    if is_validation:
        max_documents = None
        if config.validation_split is not None:
            split_name, split_key = config.validation_split, f"{key}.validation_split"
    builder = _load_builder(config, key)
    stream = _open_stream(config, builder, key, split_key, split_name)
    version, origin = _dataset_version(config, builder, key)
    validation_fraction = None if has_own_split else config.validation_fraction
    field, field_setting = select_field(config, key)
    if is_directory(config) and not isinstance(field, str):
        field = partial(field, folder=Path(config.dataset).expanduser())
    records = HubRecords(stream, config.dataset, field, f"{key}.dataset", field_setting)
    document_split = select_split(records, config, validation_fraction, is_validation, split_key)
    options = [validation_fraction, max_documents, config.on_bad_row, config.text_field]
    options = list_identifying_options(options, config, document_split)
    title = portable_path(config.dataset) if is_directory(config) else config.dataset
    limit = "" if max_documents is None else f", the first {max_documents:,} documents"
    if document_split.description:
        limit += f"; {document_split.description}"
    digest = hashlib.sha256(json.dumps(options).encode()).hexdigest()[:16]
    identity = f"hub/{config.dataset}/{builder.config.name}/{version}/{split_name}/{split}/{digest}"
    provenance = f"{title}, config {builder.config.name}, {origin}, split {split_name}{limit}"
    return RecordSource(records, key, config.on_bad_row, document_split, max_documents, identity, provenance)


def is_directory(config: HubDataset) -> bool:
    """Return whether the dataset is a directory of this machine, not one of the Hub."""
    return os.path.isdir(os.path.expanduser(config.dataset))


def _load_builder(config: HubDataset, key: str) -> Any:
    """Return the library's builder of the dataset."""
    import datasets

    name = os.path.expanduser(config.dataset)
    if not os.path.isdir(name) and name.startswith((".", "/")):
        raise ValueError(f"{key}.dataset = {config.dataset!r}: there is no such directory in {os.getcwd()}")
    try:
        return datasets.load_dataset_builder(name, config.config, revision=config.revision)
    except Exception as error:  # the Hub's client raises many types: not found, offline, gated, empty
        raise ValueError(f"{key}.dataset = {config.dataset!r} cannot be opened: {_error_text(error)}") from error


def _open_stream(config: HubDataset, builder: Any, key: str, split_key: str, split_name: str) -> Any:
    """Return the text column of a split, or all columns of conversations."""
    try:
        stream = builder.as_streaming_dataset(split=split_name)
        columns = stream.column_names
        if stream.features and config.chat is not None:
            stream = stream.decode(False)  # images stay files
    except Exception as error:  # no such split, or any error of its reader at the first file
        raise ValueError(
            f"{split_key} = {split_name!r} of {config.dataset} cannot be opened: {_error_text(error)}"
        ) from error
    if columns is None or config.chat is not None:  # None: unknown before the first row is read
        return stream
    if config.text_field not in columns:
        raise ValueError(
            f"{key}.text_field = {config.text_field!r} is no column of {config.dataset}; "
            f"its columns are {', '.join(map(repr, columns))}"
        )
    return stream.select_columns([config.text_field])


def _dataset_version(config: HubDataset, builder: Any, key: str) -> tuple[str, str]:
    """Return an identifier of the dataset's version, and its origin as text."""
    if is_directory(config):
        name = os.path.expanduser(config.dataset)
        files = [DataFile.open(path, f"{key}.dataset") for path in find_files((name,), f"{key}.dataset")]
        digest = hashlib.sha256("\n".join(file.identity for file in files).encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:16], f"{len(files):,} files in a directory"
    commit = str(builder.hash)
    if not type(builder).__module__.startswith(CACHE_MODULE):
        return commit, f"revision {commit}, streamed from the Hub"
    if config.revision is not None and not commit.startswith(config.revision):
        raise ValueError(
            f"{key}.revision = {config.revision!r}: the Hub cannot be reached, and the local cache has the "
            f"commit {commit}; name that one, leave revision out, or try again with a network"
        )
    return commit, f"revision {commit}, from the local cache (the Hub was not asked, or not reached)"


def _error_text(error: Exception) -> str:
    """Return the message of the library's error; some have none, such as the StopIteration for an empty file."""
    return str(error) or f"{error!r}; is one of its files missing or empty?"


@dataclass
class HubRecords:
    """A `RecordCursor` of a stream. The names of its position are part of checkpoints."""

    stream: Any
    dataset: str
    field: TextField
    key: str
    field_setting: str

    def __post_init__(self) -> None:
        self._start = self.stream.state_dict()
        self.seek(None)

    def seek(self, position: dict[str, Any] | None) -> None:
        position = position or {"state": self._start, "row": 0}
        self._state, self.row = position["state"], position["row"]

    def __iter__(self) -> Iterator[Record | BadRecord]:
        stream, field = self.stream, self.field
        stream.load_state_dict(self._state)
        rows = iter(stream)
        while True:
            try:
                row = next(rows, None)
            except Exception as error:  # its readers raise many types: network, Arrow, Unicode
                raise ValueError(
                    f"{self.key} = {self.dataset!r} cannot be read after row {self.row}: "
                    f"{_error_text(error)}; the library stops there: try again, or download the files and read them "
                    'with kind = "files", which can skip bad records'
                ) from error
            if row is None:
                return
            self.row += 1
            if not isinstance(field, str):
                yield parse_arrow_row(field, row)
            elif field in row:
                yield validate_text(row[field])
            else:
                yield BadRecord(f"no field {field!r}", f"its fields are {list_fields(row)}", is_field_error=True)

    def position(self) -> dict[str, Any]:
        return {"state": self.stream.state_dict(), "row": self.row}

    def sort_key(self) -> tuple[int, ...]:
        return (self.row,)

    def location(self) -> str:
        return f"{self.dataset}, row {self.row}"
