"""``diffusionlm-train-tokenizer``: learn a byte-level BPE tokenizer from a source of text."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cli.arguments import friendly_errors, parse_command
from config.tokenizer import TrainTokenizerConfig

NAME = "diffusionlm-train-tokenizer"

EXAMPLE = f"""  {NAME} --config config/resources/train_tokenizer.toml
  {NAME} --config config/resources/train_tokenizer.toml --set source.kind=files \\
      --set "source.paths=texts/*.jsonl" --set tokenizer.vocab_size=16384 --set output.directory=runs/my-tokenizer"""


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load the config, learn, print what there is."""
    config, _ = parse_command(
        TrainTokenizerConfig,
        name=NAME,
        description="Learn a byte-level BPE tokenizer, and measure it on documents that it was not learnt from.",
        example=EXAMPLE,
        argv=argv,
    )
    with friendly_errors(NAME):
        # Only now, so that --help and config errors do not wait for what it needs.
        from cli.tokenizer_training import train_tokenizer

        print(train_tokenizer(config, sys.stderr).to_text())


if __name__ == "__main__":
    main()
