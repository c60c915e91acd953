"""``diffusionlm-train-tokenizer``: train a byte-level BPE tokenizer on a source of text."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from cli.arguments import parse_command
from cli.entry import friendly_errors, usage_errors
from config.dump import to_toml
from config.tokenizer import TrainTokenizerConfig
from files.paths import check_can_write
from files.usage_error import UsageError
from logger.pages import Table
from logger.pages.terminal import print_parts

if TYPE_CHECKING:
    from diffusionlm.data.reader import DocumentSource
    from logger.console import ProgressMeter
    from tokenizer import Tokenizer

NAME = "diffusionlm-train-tokenizer"

EXAMPLE = f"""  {NAME} --config config/resources/train_tokenizer.toml
  {NAME} --config config/resources/train_tokenizer.toml --set source.kind=files \\
      --set "source.paths=texts/*.jsonl" --set tokenizer.vocab_size=16384 --set output.directory=runs/my-tokenizer"""

MAX_HELD_OUT_BYTES = 4_000_000
"""Bytes of the first validation documents on which the tokenizer is measured."""


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments, train the tokenizer, print its statistics."""
    config, _ = parse_command(
        TrainTokenizerConfig,
        name=NAME,
        description="Train a byte-level BPE tokenizer, and measure it on held-out documents.",
        example=EXAMPLE,
        argv=argv,
    )
    directory = config.output.directory
    setting = f"output.directory = {directory}"
    if directory.is_dir() and any(directory.iterdir()):
        raise UsageError(f"{setting} is not empty: choose another directory, or remove what is in it")
    with usage_errors():
        check_can_write(directory, setting)
    print_parts([Table((), train_tokenizer(config))])


def train_tokenizer(config: TrainTokenizerConfig) -> list[tuple[str, str]]:
    """Train the tokenizer, measure it on validation documents, and write its directory. Returns the table of results.

    Raises:
        ValueError: there is no text, or the output directory cannot be written.
    """
    # Imported here so that --help and config errors answer at once.
    from diffusionlm.checkpoints.manifest import write_directory_atomically
    from diffusionlm.data.reader import read_first_documents
    from diffusionlm.data.sources import open_source
    from logger.console import ProgressMeter
    from tokenizer import save_tokenizer

    options, directory = config.tokenizer, config.output.directory
    source, held_out = open_source(config.source, "train", "source"), open_source(config.source, "validation", "source")
    volume, held_out_volume = Counter[str](), Counter[str]()
    with closing(ProgressMeter(sys.stderr)) as progress:
        tokenizer = _train_on_documents(config, source, volume, progress)
    held_out_texts = _count(read_first_documents(held_out, MAX_HELD_OUT_BYTES), held_out_volume)
    num_tokens = sum(len(tokenizer.encode(text)) for text in held_out_texts)

    def write(folder: Path) -> None:
        save_tokenizer(tokenizer, folder)
        (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")

    write_directory_atomically(directory, write)
    size = f"{tokenizer.vocab_size:,} tokens: 256 bytes, {len(tokenizer.merges):,} merges"
    lines = [("tokenizer", f"{size}, {' '.join(tokenizer.special_tokens)}; pattern {options.pattern}")]
    if num_missing := options.vocab_size - tokenizer.vocab_size:
        lines.append(("", f"{num_missing:,} fewer than tokenizer.vocab_size: the text has no more pairs to merge"))
    lines.append(("trained on", _format_volume(volume)))
    if skipped := source.skip_log.counts:
        lines.append(("skipped", ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())))
    compression = "the source has no validation documents to measure it on"
    if num_tokens:
        ratio = held_out_volume["bytes"] / num_tokens
        compression = f"{ratio:.3f} bytes per token, on {_format_volume(held_out_volume)} of the validation split"
    return [*lines, ("held out", compression), ("written to", str(directory))]


def _count(texts: Iterable[str], volume: Counter[str]) -> Iterator[str]:
    for text in texts:
        volume["documents"] += 1
        volume["bytes"] += len(text.encode("utf-8", "surrogatepass"))
        yield text


def _format_volume(volume: Counter[str]) -> str:
    return f"{volume['bytes']:,} bytes in {volume['documents']:,} documents"


def _train_on_documents(
    config: TrainTokenizerConfig, source: DocumentSource, volume: Counter[str], progress: ProgressMeter
) -> Tokenizer:
    from diffusionlm.data.reader import read_first_documents
    from profiling.cores import usable_cores
    from tokenizer import train_bpe

    options, workers = config.tokenizer, config.output.workers

    def read_texts() -> Iterator[str]:
        for text in _count(read_first_documents(source, options.max_training_bytes), volume):
            progress.begin("reading", "bytes")
            progress.set(volume["bytes"])
            yield text
        if not volume:
            raise ValueError(f"[source] has no training documents ({source.provenance}): add text")
        progress.begin("training", "merges", options.vocab_size - 256 - len(options.special_tokens))

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
