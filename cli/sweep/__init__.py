"""``diffusionlm-sweep``: a grid of training or inference runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cli.arguments import friendly_errors
from cli.sweep.grid import GridError
from cli.sweep.run import run_sweep

NAME = "diffusionlm-sweep"

EXAMPLE = f"""  {NAME} --config config/resources/train.toml --set training.max_steps=300 \\
      --set optimizer.learning_rate=3e-3,1e-2,3e-2 --set training.batch_size=8,16
  {NAME} --command infer --config config/resources/infer.toml --set generation.denoising_steps=1,2,4,8
  {NAME} --config train.toml --set 'optimizer.rest.betas=[0.9,0.95],[0.9,0.98]' --dry-run

The same command goes on with a sweep that was interrupted; with more values it extends it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, then run the grid. Returns 0, 1 where a run failed, 2 where nothing was started, or 128 + signal."""
    arguments = _parser().parse_args(argv)
    if arguments.jobs < 1:
        print(f"{NAME}: error: --jobs {arguments.jobs} must be at least 1", file=sys.stderr)
        return 2
    with friendly_errors(NAME):
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
            print(f"{NAME}: error: {error}", file=sys.stderr)
            return 2
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=NAME,
        description="Run a grid of configs, one process after the other, and lay their results side by side.",
        epilog=f"example:\n{EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE.toml", type=Path, help="the config that all runs share")
    parser.add_argument(
        "--set",
        dest="settings",
        metavar="SECTION.KEY=VALUE[,VALUE...]",
        action="append",
        default=[],
        help="one value for all runs, or several: an axis of the grid; values with commas stand in quotes or brackets",
    )
    parser.add_argument(
        "--command", choices=("train", "infer"), default="train", help="what is run (default: %(default)s)"
    )
    parser.add_argument(
        "--directory", metavar="DIR", type=Path, help="of the sweep (default: runs/sweeps/, and the config's name)"
    )
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="runs beside each other (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="validate all runs, show them, and start nothing")
    return parser
