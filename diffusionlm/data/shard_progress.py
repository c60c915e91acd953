"""A directory of tokens that is being made: whose it is, how far it is, and what of it counts."""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt

from config.dump import format_value, to_toml_values
from config.make_data import MakeDataConfig
from diffusionlm.data.reader import DocumentSource, ReaderPosition, Split
from diffusionlm.data.shard_index import (
    FORMAT_VERSION,
    PROGRESS_FILE,
    TOKENIZER_DIRECTORY,
    SplitIndex,
    StrictModel,
    check_sizes,
    read_json_model,
)
from diffusionlm.data.shard_writers import temporary_path, write_text_atomic
from tokenizer import Tokenizer

LOCK_FILE = ".lock"
SHARD_FILE_PATTERN = re.compile(r"(train|validation)(-\d{5,}\.(bin|idx|parquet)|\.dat)(\.tmp)?")
"""Files of shards, complete or not."""


class SplitProgress(StrictModel):
    """What is done of a split."""

    index: SplitIndex
    """The shards that are complete; rows that were skipped before ``position``."""
    position: ReaderPosition = None
    """Where the source is read on."""
    past: NonNegativeInt = 0
    """Documents from there on that are in complete shards already."""
    done: bool = False


class MakeDataProgress(StrictModel):
    """``progress.json``: replaced after each shard."""

    version: Literal[1] = FORMAT_VERSION
    config: dict[str, Any]
    tokenizer_fingerprint: str | None = None
    """None: there is no tokenizer yet."""
    splits: dict[Split, SplitProgress]

    def save(self, directory: Path) -> None:
        """Replace the file."""
        write_text_atomic(directory / PROGRESS_FILE, self.model_dump_json(indent=1) + "\n")


@contextlib.contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """The directory, made if need be, for this process alone.

    Raises:
        ValueError: it is a file, cannot be made, or another process writes there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / LOCK_FILE).open("a")
    except OSError as error:
        raise ValueError(f"output.directory = {directory} cannot be written: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"output.directory = {directory} is in use by another process; wait for it or stop it"
            ) from error
        yield


@contextlib.contextmanager
def protect_write(directory: Path) -> Iterator[None]:
    """A block in which an OSError means that the directory could not be written, and that Ctrl-C does not cut short."""
    try:
        with _delay_interrupts():
            yield
    except OSError as error:
        free = shutil.disk_usage(directory).free / 2**20
        raise ValueError(
            f"output.directory = {directory} could not be written: {error.strerror or error} ({free:,.0f} MiB are free "
            "there). What was complete is kept: make room, and repeat the command"
        ) from error


@contextlib.contextmanager
def _delay_interrupts() -> Iterator[None]:
    """Ctrl-C counts at the end of the block: no file is left behind that nobody knows of."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is ever interrupted
        return
    waiting: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            signal.raise_signal(signal.SIGINT)


def content_config(config: MakeDataConfig) -> dict[str, Any]:
    """What of a config decides the contents: all but the directory and the number of workers."""
    values: dict[str, Any] = to_toml_values(config, "config")
    kept = {key: value for key, value in values["output"].items() if key not in ("directory", "workers")}
    return {**values, "output": kept}


def load_or_create_progress(
    config: MakeDataConfig, sources: Mapping[Split, DocumentSource], provided_tokenizer: Tokenizer | None
) -> MakeDataProgress:
    """What is done so far; what a killed process left half done is removed.

    Raises:
        ValueError: the directory holds something else, data that is made otherwise, or not what it should.
    """
    directory = config.output.directory
    path = directory / PROGRESS_FILE
    if not path.is_file():
        foreign = sorted({each.name for each in directory.iterdir()} - {LOCK_FILE, temporary_path(path).name})
        if foreign:
            raise ValueError(
                f"output.directory = {directory} is not empty and has no {PROGRESS_FILE} (it holds "
                f"{', '.join(foreign[:5])}); name another directory"
            )
        splits = {
            split: SplitProgress(index=SplitIndex(identity=source.identity, provenance=source.provenance))
            for split, source in sources.items()
        }
        progress = MakeDataProgress(config=content_config(config), splits=splits)
        progress.save(directory)
        return progress
    progress = read_json_model(MakeDataProgress, path, "remove the directory and begin again")
    identities = {split: state.index.identity for split, state in progress.splits.items()}
    check_same_inputs(config, sources, provided_tokenizer, progress.config, identities, progress.tokenizer_fingerprint)
    listed = {name for state in progress.splits.values() for name in state.index.sizes}
    for each in directory.iterdir():
        if SHARD_FILE_PATTERN.fullmatch(each.name) and not {each.name, each.name.removesuffix(".tmp")} & listed:
            each.unlink()
    if config.output.format != "dat":  # whose file is checked when it is written on
        for state in progress.splits.values():
            check_sizes(directory, state.index)
    if progress.tokenizer_fingerprint is None:
        shutil.rmtree(directory / TOKENIZER_DIRECTORY, ignore_errors=True)
    return progress


def check_same_inputs(
    config: MakeDataConfig,
    sources: Mapping[Split, DocumentSource],
    provided_tokenizer: Tokenizer | None,
    saved_config: dict[str, Any],
    saved_identities: Mapping[Split, str],
    saved_fingerprint: str | None,
) -> None:
    """See that what a directory holds was made from the same.

    Raises:
        ValueError: it was not; lists what differs.
    """
    before, now = _flatten_config(saved_config), _flatten_config(content_config(config))
    changes = [
        f"{key}: {_format_value(before, key)} -> {_format_value(now, key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    for split, source in sources.items():
        if saved_identities.get(split) != source.identity:
            changes.append(f"the {split} documents: {saved_identities.get(split)} -> {source.identity}")
    if provided_tokenizer is not None and saved_fingerprint not in (None, provided_tokenizer.fingerprint):
        changes.append(f"the tokenizer in {config.tokenizer.path}: its fingerprint is another one now")
    if changes:
        listed = "\n  ".join(changes)
        raise ValueError(
            f"output.directory = {config.output.directory} holds data that was made otherwise:\n  {listed}\n"
            "name another directory, or remove this one"
        )


def _flatten_config(value: Any, path: str = "") -> dict[str, Any]:
    """Every value that is no table, by its dotted path."""
    if not isinstance(value, dict):
        return {path: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= _flatten_config(item, f"{path}.{key}" if path else key)
    return found


def _format_value(leaves: dict[str, Any], key: str) -> str:
    return format_value(leaves[key], limit=200) if key in leaves else "(not set)"
