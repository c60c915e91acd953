"""``diffusionlm-sweep``: a grid of training or inference runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cli.entry import build_parser, friendly_errors, print_error
from cli.sweep.grid import GridError
from cli.sweep.run import run_sweep

NAME = "diffusionlm-sweep"

EXAMPLE = f"""  {NAME} --config config/resources/train.toml --set training.max_steps=300 \\
      --set optimizer.learning_rate=3e-3,1e-2,3e-2 --set training.batch_size=8,16
  {NAME} --command infer --config config/resources/infer.toml --set generation.denoising_steps=1,2,4,8
  {NAME} --config train.toml --set 'optimizer.rest.betas=[0.9,0.95],[0.9,0.98]' --dry-run

The same command continues an interrupted sweep; with more values it extends the sweep."""


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> int:
    """Run a grid. Returns 0, 1 if a run failed, 2 if the arguments are invalid, or 128 + the signal that ended it."""
    arguments = _parser().parse_args(argv)
    if arguments.jobs < 1:
        print_error(NAME, f"--jobs {arguments.jobs} must be at least 1")
        return 2
    try:
        return run_sweep(
            arguments.command,
            arguments.config,
            arguments.settings,
            directory=arguments.directory,
            jobs=arguments.jobs,
            dry_run=arguments.dry_run,
        )
    except GridError as error:
        print_error(NAME, str(error))
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = build_parser(NAME, "Run a grid of configs, each in a process, and compare their results.", EXAMPLE)
    parser.add_argument("--config", metavar="FILE.toml", type=Path, help="the config that all runs share")
    parser.add_argument(
        "--set",
        dest="settings",
        metavar="SECTION.KEY=VALUE[,VALUE...]",
        action="append",
        default=[],
        help="one value for all runs, or several for an axis of the grid; quote values that contain commas",
    )
    parser.add_argument(
        "--command", choices=("train", "infer"), default="train", help="the command that runs (default: %(default)s)"
    )
    parser.add_argument(
        "--directory",
        metavar="DIR",
        type=Path,
        help="directory of the sweep (default: runs/sweeps/NAME, with the name of the config)",
    )
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="runs at the same time (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="validate and list all runs, but start none")
    return parser
