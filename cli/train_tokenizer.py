"""``diffusionlm-train-tokenizer``: train a byte-level BPE tokenizer on a source of text."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cli.arguments import parse_command
from cli.entry import friendly_errors, usage_errors
from cli.tables import make_table, print_parts
from config.data import PythonStdlib
from config.tokenizer import TrainTokenizerConfig

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cli.tokenizer_training import TokenizerResult

NAME = "diffusionlm-train-tokenizer"

EXAMPLE = f"""  {NAME} --config config/resources/train_tokenizer.toml
  {NAME} --config config/resources/train_tokenizer.toml --set source.kind=files \\
      --set "source.paths=texts/*.jsonl" --set tokenizer.vocab_size=16384 --set output.directory=runs/my-tokenizer"""


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments, train the tokenizer, print its statistics and the next command."""
    config, _ = parse_command(
        TrainTokenizerConfig,
        name=NAME,
        description="Train a byte-level BPE tokenizer, and measure it on held-out documents.",
        example=EXAMPLE,
        argv=argv,
    )
    # Imported here so that --help and config errors answer at once.
    from cli.tokenizer_training import check_output_directory, train_tokenizer

    with usage_errors(NAME):
        check_output_directory(config.output.directory)

    print_parts(format_result(train_tokenizer(config, sys.stderr)))


def format_result(result: TokenizerResult) -> list[RenderableType]:
    """Format as a table with the next command."""
    options, tokenizer = result.config.tokenizer, result.tokenizer
    size = f"{tokenizer.vocab_size:,} tokens: 256 bytes, {len(tokenizer.merges):,} merges"
    lines = [("tokenizer", f"{size}, {' '.join(tokenizer.special_tokens)}; pattern {options.pattern}")]
    num_missing = options.vocab_size - tokenizer.vocab_size
    if num_missing:
        lines.append(("", f"{num_missing:,} fewer than tokenizer.vocab_size: the text has no more pairs to merge"))
    lines.append(("trained on", str(result.training_text)))
    if result.skipped:
        lines.append(("skipped", ", ".join(f"{count:,} {reason}" for reason, count in result.skipped.items())))
    lines += [
        ("held out", _format_compression(result)),
        ("written to", str(result.config.output.directory)),
    ]
    return [make_table(lines), f"next: {_next_command(result.config)}"]


def _format_compression(result: TokenizerResult) -> str:
    if result.bytes_per_token is None:
        return "the source has no validation documents to measure it on"
    return f"{result.bytes_per_token:.3f} bytes per token, on {result.held_out} of the validation split"


def _next_command(config: TrainTokenizerConfig) -> str:
    directory = config.output.directory
    overrides = [f"run.directory={directory}-run", f'tokenizer={{path="{directory.as_posix()}"}}']
    arguments = [part for override in overrides for part in ("--set", override)]
    command = shlex.join(["uv", "run", "diffusionlm-train", "--config", "config/resources/train.toml", *arguments])
    uses_same_text = isinstance(config.source, PythonStdlib)
    return command if uses_same_text else f"{command}, with your text as [data.source]"


if __name__ == "__main__":
    main()
