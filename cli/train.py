"""``diffusionlm-train``: train a model as a TOML config says."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from config.command import friendly_errors, parse_command
from config.train import RENAMED, TrainConfig

NAME = "diffusionlm-train"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, load the config, train. Returns the exit code: 128 + signal where one ended the run."""
    config, arguments = parse_command(
        TrainConfig,
        name=NAME,
        description="Train a masked diffusion language model.",
        example=f"{NAME} --config config/resources/train.toml --set training.max_steps=200",
        renamed=RENAMED,
        extra=_add_arguments,
        argv=argv,
    )
    if arguments.dry_run:
        from profiling.plan import render_plan

        print(render_plan(config))
        return 0
    with friendly_errors(NAME):
        from diffusionlm.training.loop import train

        result = train(config)
        return 0 if result.stopped_by is None else 128 + result.stopped_by
    return 1


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="show parameters, tokens, memory and FLOPs, and exit")


if __name__ == "__main__":
    sys.exit(main())
