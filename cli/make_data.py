"""``diffusionlm-make-data``: tokenize text into a directory of shards."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from cli.arguments import parse_command
from cli.entry import friendly_errors, usage_errors
from config.make_data import MakeDataConfig
from files.paths import check_can_write
from logger.pages import Cell, Column, Part, Table
from logger.pages.terminal import print_parts

if TYPE_CHECKING:
    from diffusionlm.data.shard_files import ShardIndex

NAME = "diffusionlm-make-data"

EXAMPLE = f"""  {NAME} --config config/resources/make_data.toml
  {NAME} --config config/resources/make_data.toml --set source.kind=files \\
      --set "source.paths=texts/*.jsonl" --set output.directory=data/texts"""


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> None:
    config, _ = parse_command(
        MakeDataConfig,
        name=NAME,
        description="Tokenize text once, for training at the speed of memory. Repeat the command to continue after an "
        "interruption, or to check a complete directory.",
        example=EXAMPLE,
        argv=argv,
    )
    with usage_errors():
        check_can_write(config.output.directory, f"output.directory = {config.output.directory}")
    # Imported here so that --help and config errors do not wait.
    from diffusionlm.data.make_data import make_data
    from logger.console import ProgressMeter

    with closing(ProgressMeter(sys.stderr)) as meter:

        def show_progress(split: str, num_documents: int, num_tokens: int, text_bytes: int) -> None:
            if split != meter.name:
                meter.begin(split, "bytes")
            meter.set_postfix(f"{num_documents:,} documents, {num_tokens:,} tokens")
            meter.set(text_bytes)

        index = make_data(config, meter.log, show_progress)
    print_parts(format_summary(index, config.output.directory))


def format_summary(index: ShardIndex, directory: Path) -> list[Part]:
    """Format a table of the splits."""
    from diffusionlm.data.make_data import format_skip_counts
    from diffusionlm.data.shard_files import INDEX_FILE

    names = ("documents", "tokens", "bytes of text", "bytes/token", "files", "MiB")
    rows: list[list[Cell]] = []
    skipped = []
    for name, split in sorted(index.splits.items()):
        ratio = f"{split.text_bytes / split.tokens:.2f}" if split.tokens else "-"
        counts = (f"{count:,}" for count in (split.documents, split.tokens, split.text_bytes))
        rows.append([name, *counts, ratio, str(2 * len(split.shards)), f"{split.bytes_on_disk / 2**20:,.1f}"])
        skipped.append(f"left out or mended, {name}: {format_skip_counts(split.skipped)}")
    return [
        Table(["", *map(Column, names)], rows),
        *skipped,
        f"written to {directory}: {index.dtype}, {index.vocab_size:,} ids; {INDEX_FILE} lists the files",
    ]
