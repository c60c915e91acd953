"""``diffusionlm-sweep``: training or inference runs of many configs, as a study of Optuna."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from cli.entry import build_parser, friendly_errors, path_argument, print_error
from cli.sweep.commands import SWEEP_COMMANDS
from cli.sweep.grid import GridError, PointLoader, read_settings
from cli.sweep.plan import SWEEPS, SweepPlan
from cli.sweep.run import run_sweep

NAME = "diffusionlm-sweep"

EXAMPLE = f"""  {NAME} --config config/resources/train.toml --set training.max_steps=300 \\
      --set optimizer.learning_rate=3e-3,1e-2,3e-2 --set training.batch_size=8,16
  {NAME} --config config/resources/train.toml --set optimizer.learning_rate=log:1e-4..1e-1 --trials 20 --prune
  {NAME} --command infer --config config/resources/infer.toml --set generation.denoising_steps=1,2,4,8
  {NAME} --config train.toml --set 'optimizer.rest.betas=[0.9,0.95],[0.9,0.98]' --dry-run

The same command continues an interrupted sweep, also beside other processes of it; with more values or trials it
extends the sweep."""


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> int:
    """Run a sweep. Returns 0, 1 if a run failed, 2 if the arguments are invalid, or 128 + the signal that ended it."""
    arguments = _parser().parse_args(argv)
    try:
        return run_sweep(_build_plan(arguments), arguments.dry_run)
    except GridError as error:
        print_error(NAME, str(error))
        return 2


def _build_plan(arguments: argparse.Namespace) -> SweepPlan:
    for name in ("jobs", "trials"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise GridError(f"--{name} {getattr(arguments, name)} must be at least 1")
    sweep_command = SWEEP_COMMANDS[arguments.command]
    settings = read_settings(arguments.settings, sweep_command)
    has_ranges = any(setting.range is not None for setting in settings)
    stem = arguments.command if arguments.config is None else arguments.config.stem
    return SweepPlan(
        load_point=PointLoader(sweep_command, arguments.config, settings),
        directory=arguments.directory or SWEEPS / stem,
        sampler=arguments.sampler or ("tpe" if has_ranges else "grid"),
        num_trials=arguments.trials,
        prune=arguments.prune,
        jobs=arguments.jobs,
        storage=arguments.storage,
    )


def _parser() -> argparse.ArgumentParser:
    parser = build_parser(NAME, "Run many configs, each in a process, and compare their results.", EXAMPLE)
    parser.add_argument("--config", metavar="FILE.toml", type=path_argument, help="the config that all runs share")
    parser.add_argument(
        "--set",
        dest="settings",
        metavar="SECTION.KEY=VALUE[,VALUE...]",
        action="append",
        default=[],
        help="one value for all runs, or an axis of the sweep: several values (quote those that contain commas), or a "
        "range: 0.0..0.3, log:1e-4..1e-1, or of integers 64..256:32",
    )
    parser.add_argument(
        "--command", choices=("train", "infer"), default="train", help="the command that runs (default: %(default)s)"
    )
    parser.add_argument(
        "--directory",
        metavar="DIR",
        type=path_argument,
        help="directory of the sweep (default: runs/sweeps/NAME, with the name of the config)",
    )
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="runs at the same time (default: 1)")
    parser.add_argument(
        "--sampler",
        choices=("grid", "random", "tpe"),
        help="how runs get their values (default: grid, and tpe if there are ranges; the first quarter of its runs, "
        "4 to 10, is random)",
    )
    parser.add_argument("--trials", metavar="N", type=int, help="runs in total, of --sampler random and tpe")
    parser.add_argument(
        "--prune",
        action="store_true",
        help="stop runs whose validation bound is not in the best third (successive halving)",
    )
    parser.add_argument(
        "--storage",
        metavar="URL",
        default="",
        help="database of the study, which several machines share (default: sqlite:///DIR/study.db)",
    )
    parser.add_argument("--dry-run", action="store_true", help="validate and list all runs, but start none")
    return parser
