"""Train a tokenizer on the documents of a source, measure it on held-out ones, and write its directory."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TextIO

from config.data import TextSource
from config.dump import to_toml
from config.tokenizer import TrainTokenizerConfig
from diffusionlm.checkpoints.manifest import write_directory_atomically
from diffusionlm.data.chat.texts import ConversationTexts
from diffusionlm.data.reader import DocumentSource, Split, read_first_documents
from diffusionlm.data.sources import open_source
from files.output_paths import check_can_write
from logger.progress import ProgressMeter
from profiling.cores import usable_cores
from tokenizer import Tokenizer, save_tokenizer, train_bpe

CONFIG_FILE = "config.toml"

MAX_HELD_OUT_BYTES = 4_000_000
"""Bytes of the first validation documents on which the tokenizer is measured."""


@dataclass
class TextVolume:
    """Number of documents and of their bytes."""

    documents: int = 0
    text_bytes: int = 0

    def add(self, text: str) -> None:
        """Count one more document."""
        self.documents += 1
        self.text_bytes += len(text.encode("utf-8", "surrogatepass"))

    def __str__(self) -> str:
        return f"{self.text_bytes:,} bytes in {self.documents:,} documents"


@dataclass(frozen=True)
class TokenizerResult:
    """The trained tokenizer and its statistics."""

    config: TrainTokenizerConfig
    tokenizer: Tokenizer
    training_text: TextVolume
    skipped: dict[str, int]
    """Number of skipped training documents by reason."""
    held_out: TextVolume
    held_out_tokens: int
    """Tokens of the held-out documents, without end-of-text tokens."""

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes per token of the held-out documents; None if there are none."""
        return self.held_out.text_bytes / self.held_out_tokens if self.held_out_tokens else None


def train_tokenizer(config: TrainTokenizerConfig, stream: TextIO) -> TokenizerResult:
    """Train the tokenizer, measure it on validation documents, and write its directory. Progress goes to ``stream``.

    Raises:
        ValueError: there is no text, or the output directory cannot be written.
    """
    source, held_out = _open_text(config.source, "train"), _open_text(config.source, "validation")
    training_text, measured = TextVolume(), TextVolume()
    tokenizer = _train_on_documents(config, source, training_text, stream)
    tokens = 0
    for text in read_first_documents(held_out, MAX_HELD_OUT_BYTES):
        measured.add(text)
        tokens += len(tokenizer.encode(text))

    def write(folder: Path) -> None:
        save_tokenizer(tokenizer, folder)
        (folder / CONFIG_FILE).write_text(to_toml(config), encoding="utf-8")

    write_directory_atomically(config.output.directory, write)
    return TokenizerResult(config, tokenizer, training_text, dict(source.skipped), measured, tokens)


def _open_text(config: TextSource, split: Split) -> DocumentSource:
    """Open a split; of conversations, their contents."""
    source = open_source(config, split, "source")
    return source if getattr(config, "chat", None) is None else ConversationTexts(source)


def check_output_directory(directory: Path) -> None:
    """Check that writing overwrites nothing, before any work is done.

    Raises:
        ValueError: the path is a file or a directory that is not empty, or it cannot be written.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"output.directory = {directory} is a file: choose another directory")
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    remedy = "choose another directory (--set output.directory=...)"
    if {"special_tokens.json", "tokenizer.json"} & set(names):
        raise ValueError(
            f"output.directory = {directory} already holds a tokenizer: {remedy}, or remove this one first (rm -r "
            f"{shlex.quote(str(directory))})"
        )
    if names:
        listing = ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
        raise ValueError(f"output.directory = {directory} is not empty ({listing}): {remedy}")
    check_can_write(directory, f"output.directory = {directory}")


def _train_on_documents(
    config: TrainTokenizerConfig, source: DocumentSource, volume: TextVolume, stream: TextIO
) -> Tokenizer:
    options = config.tokenizer
    workers = config.output.workers
    num_merges = options.vocab_size - 256 - len(options.special_tokens)
    texts = read_first_documents(source, options.max_training_bytes)
    first = next(texts, None)
    if first is None:
        raise ValueError(f"[source] has no training documents ({source.provenance}): add text")
    with closing(ProgressMeter(stream)) as progress:

        def read_texts() -> Iterator[str]:
            progress.begin("reading", "bytes")
            for text in chain([first], texts):
                volume.add(text)
                progress.set(volume.text_bytes)
                yield text
            progress.begin("training", "merges", num_merges)

        return train_bpe(
            read_texts(),
            vocab_size=options.vocab_size,
            special_tokens=options.special_tokens,
            pattern=options.pattern,
            mask_token=options.mask_token,
            eos_token=options.eos_token,
            num_workers=max(1, usable_cores() if workers is None else workers),
            on_progress=lambda done, _: progress.set(done),
        )
