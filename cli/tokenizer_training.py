"""One call of ``diffusionlm-train-tokenizer``: a tokenizer learnt from the documents of a source."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TextIO

from config.data import PythonStdlib
from config.dump import to_toml
from config.tokenizer import TrainTokenizerConfig
from diffusionlm.checkpoints.manifest import write_directory_atomically
from diffusionlm.data.reader import DocumentSource, read_first_documents
from diffusionlm.data.sources import open_source
from logger.progress import ProgressMeter
from profiling.cores import usable_cores
from tokenizer import Tokenizer, save_tokenizer, train_bpe

CONFIG_FILE = "config.toml"

MAX_HELD_OUT_BYTES = 4_000_000
"""The tokenizer is measured on the first validation documents, up to this many bytes of them."""


@dataclass
class TextVolume:
    """Documents and their bytes."""

    documents: int = 0
    text_bytes: int = 0

    def add(self, text: str) -> None:
        """One document more."""
        self.documents += 1
        self.text_bytes += len(text.encode("utf-8", "surrogatepass"))

    def __str__(self) -> str:
        return f"{self.text_bytes:,} bytes in {self.documents:,} documents"


@dataclass(frozen=True)
class TokenizerResult:
    """What ``diffusionlm-train-tokenizer`` says."""

    config: TrainTokenizerConfig
    tokenizer: Tokenizer
    training_text: TextVolume
    skipped: dict[str, int]
    """Training documents left out, counted by reason."""
    held_out: TextVolume
    held_out_tokens: int
    """Without end-of-text tokens."""

    @property
    def bytes_per_token(self) -> float | None:
        """Of the held-out documents; None where there are none."""
        return self.held_out.text_bytes / self.held_out_tokens if self.held_out_tokens else None

    def to_text(self) -> str:
        """A table for people, with the next command."""
        wanted, tokenizer, directory = self.config.tokenizer, self.tokenizer, self.config.output.directory
        size = f"{tokenizer.vocab_size:,} tokens: 256 bytes, {len(tokenizer.merges):,} merges"
        missing = wanted.vocab_size - tokenizer.vocab_size
        lines = [("tokenizer", f"{size}, {' '.join(tokenizer.special_tokens)}; pattern {wanted.pattern}")]
        if missing:
            lines.append(("", f"{missing:,} fewer than asked for: the text has no more pairs to merge"))
        lines.append(("learnt from", str(self.training_text)))
        if self.skipped:
            lines.append(("skipped", ", ".join(f"{count:,} {reason}" for reason, count in self.skipped.items())))
        lines += [
            ("held out", self._format_compression()),
            ("written to", str(directory)),
            ("next", self._next_command()),
        ]
        return "\n".join(f"{name:<12}  {value}" for name, value in lines)

    def _format_compression(self) -> str:
        if self.bytes_per_token is None:
            return "the source has no validation documents to measure it on"
        return f"{self.bytes_per_token:.3f} bytes per token, on {self.held_out} of the validation split"

    def _next_command(self) -> str:
        directory = self.config.output.directory
        overrides = [f"run.directory={directory}-run", f'tokenizer={{path="{directory.as_posix()}"}}']
        arguments = [part for override in overrides for part in ("--set", override)]
        command = shlex.join(["uv", "run", "diffusionlm-train", "--config", "config/resources/train.toml", *arguments])
        same = isinstance(self.config.source, PythonStdlib)
        return command if same else f"{command}, with your text as [data.source]"


def train_tokenizer(config: TrainTokenizerConfig, stream: TextIO) -> TokenizerResult:
    """Learn the tokenizer, measure it on validation documents, and write its directory; progress goes to ``stream``.

    Raises:
        ValueError: nothing to read, or a directory that holds something or cannot be written; names the key.
    """
    check_output(config.output.directory)
    source = open_source(config.source, "train", "source")
    held_out = open_source(config.source, "validation", "source")
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


def check_output(directory: Path) -> None:
    """Refuse what would be lost, before any work is done.

    Raises:
        ValueError: there is a file, or a directory that is not empty.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"output.directory = {directory} is a file; name another directory")
    inside = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    another = "name another directory (--set output.directory=...)"
    if {"special_tokens.json", "tokenizer.json"} & set(inside):
        remedy = f"{another}, or remove this one first (rm -r {shlex.quote(str(directory))})"
        raise ValueError(
            f"output.directory = {directory} holds a tokenizer already, which is not overwritten; {remedy}"
        )
    if inside:
        shown = ", ".join([*inside[:3], *(["..."] if len(inside) > 3 else [])])
        raise ValueError(f"output.directory = {directory} holds something else ({shown}); {another}")


def _train_on_documents(
    config: TrainTokenizerConfig, source: DocumentSource, amount: TextVolume, stream: TextIO
) -> Tokenizer:
    wanted = config.tokenizer
    workers = config.output.workers
    num_merges = wanted.vocab_size - 256 - len(wanted.special_tokens)
    texts = read_first_documents(source, wanted.max_training_bytes)
    first = next(texts, None)
    if first is None:
        raise ValueError(f"[source] has no training documents ({source.provenance}); give it text to learn from")
    with closing(ProgressMeter(stream)) as progress:

        def counted() -> Iterator[str]:
            progress.begin("reading", "bytes")
            for text in chain([first], texts):
                amount.add(text)
                progress.set(amount.text_bytes)
                yield text
            progress.begin("learning", "merges", num_merges)

        return train_bpe(
            counted(),
            vocab_size=wanted.vocab_size,
            special_tokens=wanted.special_tokens,
            pattern=wanted.pattern,
            mask_token=wanted.mask_token,
            eos_token=wanted.eos_token,
            num_workers=max(1, usable_cores() if workers is None else workers),
            on_progress=lambda done, _: progress.set(done),
        )
