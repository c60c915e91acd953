"""``diffusionlm-analyze``: two model directories side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cli.arguments import FlagShorthand, ValueShorthand, friendly_errors, parse_command
from config.convert import AnalyzeConfig

NAME = "diffusionlm-analyze"

EXAMPLE = f"""  {NAME} runs/quickstart
  {NAME} Qwen3-0.6B runs/adapted --json
  {NAME} a b --set values=false --set max_rows=0"""


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load the config, compare, print."""
    config, _ = parse_command(
        AnalyzeConfig,
        name=NAME,
        description="Names, shapes and values of two model directories: what maps to what, and how much they differ.",
        example=EXAMPLE,
        config_required=False,
        add_arguments=_add_shorthands,
        argv=argv,
    )
    if config.a is None:
        print(f"{NAME}: error: no model given: name one or two model directories", file=sys.stderr)
        raise SystemExit(2)
    with friendly_errors(NAME):
        # Only now, so that --help and config errors do not wait for torch.
        from diffusionlm.checkpoints.analyze import analyze, format_analysis, format_directory

        if config.b is None:
            print(format_directory(config.a, config.max_rows))
            return
        result = analyze(config.a, config.b, values=config.values)
        print(result.to_json() if config.format == "json" else format_analysis(result, config.max_rows))


def _add_shorthands(parser: argparse.ArgumentParser) -> None:
    """Arguments that stand for overrides, so that --print-config shows what they do."""
    for name, what in (("a", "model, checkpoint or run directory"), ("b", "the other one")):
        parser.add_argument(
            name,
            metavar=name.upper(),
            nargs="?",
            action=ValueShorthand,
            const=name,
            default=argparse.SUPPRESS,
            help=what,
        )
    parser.add_argument("--json", action=FlagShorthand, nargs=0, const='format="json"', help="one JSON object")


if __name__ == "__main__":
    main()
