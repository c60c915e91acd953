"""Documents: where they come from. A source is read in order from any position, so that a run resumes exactly."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, assert_never, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from config.data import HubDataset, LocalFiles, PythonStdlib, Synthetic, TextSource

T = TypeVar("T")

Tokens = NDArray[np.int32]
"""Ids of one document, as its text gives them: without end-of-text tokens around it."""

Split = Literal["train", "validation"]

REPAIRED_PREFIX = "mended: "
"""What the reasons of rows begin with that were mended, and not left out."""

ReaderPosition = Any
"""A JSON value that says where to read on: made by a reader, kept in checkpoints, given back to it. None: the start."""


class ResumableReader(Protocol[T]):
    """An ordered, repeatable sequence for each epoch, readable from any position."""

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[T], ReaderPosition]:
        """Up to ``limit`` items from ``position`` on, and the position behind them.

        Fewer than ``limit`` items: the epoch has ended, and the position is None.
        """


class DocumentSource(ResumableReader[str], Protocol):
    """Documents of one split, with an identity."""

    @property
    def identity(self) -> str:
        """Changes when the documents do; kept in checkpoints."""

    @property
    def provenance(self) -> str:
        """Where the documents are and how many or how large, for people."""

    @property
    def skipped(self) -> dict[str, int]:
        """Documents left out so far, counted by reason."""


@runtime_checkable
class KnownEntropy(Protocol):
    """A source of independent documents whose distribution is known: ask with ``isinstance(source, KnownEntropy)``."""

    @property
    def entropy_nats(self) -> float:
        """Exact entropy of one document in nats, its length included: no model's mean loss can be lower."""

    @property
    def length_entropy_nats(self) -> float:
        """Exact entropy of a document's length in nats, 0 where all are equally long.

        A model that sees how many positions a document has is told its length: its floor is ``entropy_nats`` less this.
        """

    @property
    def max_length(self) -> int:
        """Characters, which are bytes, of the longest document."""

    def log_probability(self, text: str) -> float:
        """Exact log-probability of a document in nats.

        Raises:
            ValueError: the source never gives this text; says why.
        """


def open_source(config: TextSource, split: Split) -> DocumentSource:
    """The documents of a config section.

    Raises:
        ValueError: nothing to read; names the path or dataset.
    """
    match config:
        case PythonStdlib():
            return StdlibSource.open(config, split)
        case LocalFiles():
            from diffusionlm.data.local_files import open_local_files

            return open_local_files(config, split)
        case HubDataset():
            from diffusionlm.data.hub import open_hub

            return open_hub(config, split)
        case Synthetic():
            from diffusionlm.data.synthetic import SyntheticSource

            return SyntheticSource.open(config, split)
        case _:
            assert_never(config)


EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "encodings", "pydoc_data", "test", "tests", "idle_test"}
)
"""Not the library's own text, tables, and tests."""


@dataclass
class StdlibSource:
    """Python files of the standard library, in sorted order; a file is a document."""

    root: Path
    paths: list[Path]
    identity: str
    provenance: str
    skipped: dict[str, int]

    @classmethod
    def open(cls, config: PythonStdlib, split: Split) -> StdlibSource:
        """The files of one split; which it is depends on the file's path inside the library alone."""
        root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(
            path
            for path in root.rglob("*.py")
            if EXCLUDED_FOLDERS.isdisjoint(path.relative_to(root).parts[:-1]) and path.stat().st_size > 0
        )
        chosen, skipped, digest, size = list[Path](), dict[str, int](), hashlib.sha256(), 0
        for path in files:
            name = path.relative_to(root).as_posix()
            if _is_one_in(name, config.validation_share) != (split == "validation"):
                continue
            content = path.read_bytes()
            try:
                content.decode("utf-8")
            except UnicodeDecodeError:
                skipped["not UTF-8"] = skipped.get("not UTF-8", 0) + 1
                continue
            chosen.append(path)
            size += len(content)
            digest.update(name.encode() + hashlib.sha256(content).digest())
        if not chosen:
            raise ValueError(f"data.source python-stdlib: no Python files for {split} in {root}")
        identity = f"python-stdlib/{split}/{digest.hexdigest()[:16]}"
        return cls(root, chosen, identity, f"{len(chosen)} files, {size:,} bytes, in {root}", skipped)

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[str], ReaderPosition]:
        """The files from the ``position``-th on."""
        start = position or 0
        documents = [path.read_text(encoding="utf-8") for path in self.paths[start : start + limit]]
        return documents, start + limit if len(documents) == limit else None


def _is_one_in(name: str, share: int) -> bool:
    """True for one name in ``share``, by its hash."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % share == 0
