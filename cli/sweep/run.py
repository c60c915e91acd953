"""Run a sweep: validate its points, make the runs and write the results."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from cli.sweep.grid import GridError, GridPoint, format_values
from cli.sweep.page import render_page
from cli.sweep.plan import SweepPlan, SweepRun
from cli.sweep.table import SweepTable, build_table, render_json_lines, render_markdown, text_parts
from cli.tables import make_table, print_parts
from cli.train import check_model
from config.base import Section
from config.train import TrainConfig
from files.atomic import write_text_atomic
from profiling.estimate import estimate_run

PAGE, MARKDOWN, JSON_LINES = "sweep.html", "sweep.md", "sweep.jsonl"


def run_sweep(plan: SweepPlan, dry_run: bool) -> int:
    """Validate all points, make the runs that are not done, and write the table and the page.

    Args:
        plan: of the sweep.
        dry_run: print the points without starting them or writing files.

    Returns:
        0, 1 if a run failed or was interrupted, or 128 + the signal that ended the sweep.

    Raises:
        GridError: a point is invalid, or the directory is in use or contains another sweep; nothing was started.
        OSError: the directory cannot be written.
    """
    points = plan.load_point.load_all()
    plan.check(points)
    has_begun = plan.has_begun()
    if dry_run and not has_begun:
        _print_dry_run(plan, points, ())
        return 0
    try:
        # Imported here so that --help and errors of configs do not wait for it.
        from cli.sweep.runner import SweepRunner
        from cli.sweep.study import importances, open_study, read_runs
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "optuna":
            raise
        raise GridError(
            "Optuna is not installed: add it with uv sync --extra sweep, or run uv run --extra sweep diffusionlm-sweep"
        ) from None
    if dry_run:
        _print_dry_run(plan, points, read_runs(plan))
        return 0
    configs = [point.config for point in points if isinstance(point.config, TrainConfig)]
    first_validation = min((config.validation.every_steps for config in configs), default=0)
    with open_study(plan, max(1, first_validation)) as study:
        wanted = study.add(points)

        def write() -> SweepTable:
            runs = study.runs()
            return write_results(plan, runs, importances(runs))

        write()
        is_grid = plan.num_trials is None
        done = [
            run for run in study.runs() if run.status in ("done", "pruned") and (run.digest in wanted or not is_grid)
        ]
        signal = SweepRunner(study, sys.stderr, write).run(wanted, plan.num_trials or len(wanted), len(done))
        table = write()
        runs = [run for run in study.runs() if run.digest in wanted or not is_grid]
    print_parts([*text_parts(table), "", *(str(plan.directory / name) for name in (PAGE, MARKDOWN, JSON_LINES))])
    if signal is not None:
        return 128 + signal
    return 1 if any(run.status in ("failed", "interrupted") for run in runs) else 0


def write_results(plan: SweepPlan, runs: Sequence[SweepRun], importances: Mapping[str, float]) -> SweepTable:
    """Write the table and the page of the current results."""
    table = build_table(plan, runs)
    title = f"Sweep {plan.directory.resolve().name}"
    write_text_atomic(plan.directory / MARKDOWN, render_markdown(table, title))
    write_text_atomic(plan.directory / JSON_LINES, render_json_lines(table))
    write_text_atomic(plan.directory / PAGE, render_page(table, title, plan, importances))
    return table


def _print_dry_run(plan: SweepPlan, points: Sequence[GridPoint], runs: Sequence[SweepRun]) -> None:
    existing = {run.digest: run for run in runs}
    is_training = plan.sweep_command.name == "train"
    rows = [["values", "status", *(["parameters", "tokens", "memory"] if is_training else [])]]
    for point in points:
        run = existing.get(point.digest)
        status = "new" if run is None else run.status
        rows.append([format_values(point.values), status, *_format_plan(point.config)])
    count = f"{len(points)} runs" if plan.num_trials is None else f"{plan.num_trials} runs between these"
    print_parts([make_table(rows, has_header=True), f"{count} in {plan.directory}; nothing was started"])


def _format_plan(config: Section) -> list[str]:
    """Estimate parameters, tokens and memory of a training run."""
    if not isinstance(config, TrainConfig):
        return []
    try:
        plan: Any = estimate_run(check_model(config)[0])
    except (ValueError, OSError) as error:
        return ["refused", "", str(error)]
    tokens = "by the data" if plan.tokens is None else f"{plan.tokens:,}"
    return [f"{plan.parameters:,}", tokens, f"{plan.bytes_total / 2**20:,.0f} MiB"]
