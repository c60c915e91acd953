"""The folder of a run of tasks: results are appended as they come, and an interrupted run is continued. No torch.

A result is one line of ``items/VARIANT.jsonl``, flushed at once. A last line without a line break was torn when the
process ended, and is dropped. ``fingerprint.json`` holds what decides results; a run with other values is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from config.dump import list_differences
from diffusionlm.evaluation.tasks.results import (
    FINGERPRINT_FILE,
    ITEMS_FOLDER,
    ItemResult,
    format_item_line,
    parse_item_line,
)
from files.atomic import write_text_atomic
from files.json_files import read_json_object

MAX_SHOWN_DIFFERENCES = 8
_BLOCK_BYTES = 1 << 16


class RunFolder:
    """Reads and writes a folder.

    Args:
        fingerprint: variant -> task -> what decides its results.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, Mapping[str, Any]]) -> None:
        """Create the folder, or continue the run in it.

        Raises:
            ValueError: it holds another run; names what differs.
            OSError: it cannot be written.
        """
        self.path = path
        file = path / FINGERPRINT_FILE
        if file.is_file():
            check_fingerprint(path, read_json_object(file), fingerprint)
        elif path.is_dir() and any(path.iterdir()):
            raise ValueError(f"{path} is not empty, and holds no evaluation: name another folder as output")
        (path / ITEMS_FOLDER).mkdir(parents=True, exist_ok=True)
        write_text_atomic(file, json.dumps(fingerprint, indent=1, ensure_ascii=False) + "\n")

    def items_path(self, variant: str) -> Path:
        """File of a variant's results."""
        return self.path / ITEMS_FOLDER / f"{to_file_name(variant)}.jsonl"

    def open_writer(self, variant: str) -> ItemWriter:
        """Open the file of a variant's results for appending, without a torn last line."""
        return ItemWriter(self.items_path(variant))

    def read_items(self, variant: str) -> Iterator[ItemResult]:
        """Iterate over the results of a variant, without a torn last line.

        Raises:
            ValueError: a line is no result.
        """
        path = self.items_path(variant)
        if not path.is_file():
            return
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield parse_item_line(line.decode("utf-8", "replace"), f"{path}: line {number}")


class ItemWriter:
    """Appends results to a file, each flushed at once."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("ab+")
        self._file.truncate(_end_of_lines(self._file))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write everything to disk."""
        os.fsync(self._file.fileno())
        self._file.close()

    def write(self, result: ItemResult) -> None:
        """Append a line with a result, and flush it."""
        self._file.write(format_item_line(result).encode() + b"\n")
        self._file.flush()


def _end_of_lines(file: BinaryIO) -> int:
    """Offset after the last line break."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        index = file.read(end - start).rfind(b"\n")
        if index >= 0:
            return start + index + 1
        end = start
    return 0


def to_file_name(variant: str) -> str:
    """A file name for a variant: its own, if that is plain, else a shortened one with a hash."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.=,+-]{0,99}", variant):
        return variant
    digest = hashlib.sha256(variant.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_.=,+-]+', '-', variant).strip('-.')[:80]}-{digest}"


def check_fingerprint(path: Path, old: Mapping[str, Any], new: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that a run continues an earlier one; it may have more variants and tasks.

    Raises:
        ValueError: a variant or task is missing, or differs.
    """
    missing = [name for name in old if name not in new]
    differences = [f"variant {name!r} is missing" for name in missing]
    for name in old:
        if name in missing:
            continue
        for task, values in old[name].items():
            if task not in new[name]:
                differences.append(f"task {task!r} is missing")
            else:
                lines = list_differences(values, dict(new[name][task]))
                differences += [f"{name}, {task}: {line}" for line in lines]
    if differences:
        shown = differences[:MAX_SHOWN_DIFFERENCES]
        more = [f"and {len(differences) - len(shown)} more"] if len(differences) > len(shown) else []
        raise ValueError(
            f"{path} holds the results of another evaluation: {'; '.join([*shown, *more])}. Name another folder as "
            "output, or remove this one"
        )
