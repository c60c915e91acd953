"""``diffusionlm-sweep``: training runs of many configs, as a study of Optuna."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cli.arguments import positive_int
from cli.entry import build_parser, friendly_errors, path_argument, require_extra, usage_errors
from files.usage_error import UsageError

if TYPE_CHECKING:
    from cli.sweep.definition import Sweep

NAME = "diffusionlm-sweep"

EXAMPLE = f"""  {NAME} --config config/resources/train.toml --set training.max_steps=300 \\
      --set optimizer.learning_rate=3e-3,1e-2,3e-2 --set training.batch_size=8,16
  {NAME} --config config/resources/train.toml --set optimizer.learning_rate=log:1e-4..1e-1 --trials 20 --prune
  {NAME} --config train.toml --set 'optimizer.rest.betas=[0.9,0.95],[0.9,0.98]' --dry-run

The same command continues an interrupted sweep, also beside other processes of it; with more values or trials it
extends the sweep."""

SWEEPS = Path("runs/sweeps")


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> int:
    """Run a sweep. Returns 0, 1 if a run failed, 2 if the arguments are invalid, or 128 + the signal that ended it."""
    arguments = _parser().parse_args(argv)
    require_extra("sweep", "optuna")
    with usage_errors():
        sweep = _read_sweep(arguments)
        points = sweep.load_points()
        if arguments.dry_run:
            _print_dry_run(sweep, points.values())
            return 0
    return _run_sweep(sweep, points)


def _read_sweep(arguments: argparse.Namespace) -> Sweep:
    from optuna.distributions import CategoricalDistribution

    from cli.sweep.definition import Sampler, Sweep, read_settings

    settings = read_settings(arguments.settings)
    ranges = [setting.key for setting in settings if not isinstance(setting.distribution, CategoricalDistribution)]
    sampler: Sampler = arguments.sampler or ("tpe" if ranges else "grid")
    if sampler != "grid" and arguments.trials is None:
        raise UsageError(f"--trials is missing: how many runs --sampler {sampler} makes: --trials 20")
    if sampler == "grid" and ranges:
        raise UsageError(f"--set {ranges[0]}: a grid has no ranges; list values, or use --sampler tpe")
    if sampler == "grid" and arguments.trials is not None:
        raise UsageError("--trials: a grid runs all its points; use --sampler random or tpe")
    stem = "train" if arguments.config is None else arguments.config.stem
    return Sweep(
        config_path=arguments.config,
        settings=settings,
        directory=arguments.directory or SWEEPS / stem,
        sampler=sampler,
        num_trials=arguments.trials,
        prune=arguments.prune,
        jobs=arguments.jobs,
        storage=arguments.storage,
    )


def _run_sweep(sweep: Sweep, points: Mapping[str, Mapping[str, str]]) -> int:
    from cli.sweep.report import write_report
    from cli.sweep.runner import SweepRunner
    from cli.sweep.study import open_study
    from logger.pages.terminal import print_parts

    with open_study(sweep, points) as study:
        study.add()
        write_report(sweep, study.runs())
        signal = SweepRunner(study, lambda: write_report(sweep, study.runs())).run()
        print_parts(write_report(sweep, study.runs()))
        statuses = {run.status for run in study.runs(only_own=True)}
    if signal is not None:
        return 128 + signal
    return 1 if statuses & {"failed", "interrupted"} else 0


def _print_dry_run(sweep: Sweep, points: Iterable[Mapping[str, str]]) -> None:
    from cli.sweep.definition import format_values
    from logger.pages.terminal import print_parts

    lines = [format_values(values) for values in points]
    count = f"{len(lines)} runs" if sweep.num_trials is None else f"{sweep.num_trials} runs between these"
    print_parts([*lines, f"{count} in {sweep.directory}; nothing was started"])


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
        "--directory",
        metavar="DIR",
        type=path_argument,
        help="directory of the sweep (default: runs/sweeps/NAME, with the name of the config)",
    )
    parser.add_argument("--jobs", metavar="N", type=positive_int, default=1, help="runs at the same time (default: 1)")
    parser.add_argument(
        "--sampler",
        choices=("grid", "random", "tpe"),
        help="how runs get their values (default: grid, and tpe if there are ranges; the first quarter of its runs, "
        "4 to 10, is random)",
    )
    parser.add_argument("--trials", metavar="N", type=positive_int, help="runs in total, of --sampler random and tpe")
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
