"""``diffusionlm-make-data``: text to files of tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cli.arguments import friendly_errors, parse_command
from config.make_data import MakeDataConfig

NAME = "diffusionlm-make-data"

EXAMPLE = f"""  {NAME} --config config/resources/make_data.toml
  {NAME} --config config/resources/make_data.toml --set source.kind=files \\
      --set "source.paths=texts/*.jsonl" --set output.directory=data/texts"""


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load the config, tokenise, print what there is."""
    config, _ = parse_command(
        MakeDataConfig,
        name=NAME,
        description="Tokenise text once, for training at the speed of memory. The same command goes on where it was "
        "interrupted, and checks a directory that is complete.",
        example=EXAMPLE,
        argv=argv,
    )
    with friendly_errors(NAME):
        # Only now, so that --help and config errors do not wait for what it needs.
        from diffusionlm.data.make_data import make_data, report

        index = make_data(config, lambda text: print(text, file=sys.stderr, flush=True), sys.stderr)
        print(report(index, config.output.directory))


if __name__ == "__main__":
    main()
