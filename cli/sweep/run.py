"""Run a sweep: validate the grid, start the runs and write the results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cli.sweep.commands import SWEEP_COMMANDS
from cli.sweep.grid import GridPoint, format_values, load_points, read_settings
from cli.sweep.page import render_page
from cli.sweep.record import SweepDirectory, lock_sweep, read_record
from cli.sweep.runner import SweepRunner
from cli.sweep.table import build_table, render_json_lines, render_markdown, render_text
from cli.tables import align_columns
from config.base import Section
from config.train import TrainConfig
from files.atomic import write_text_atomic
from profiling.estimate import estimate_run

SWEEPS = Path("runs/sweeps")
PAGE, MARKDOWN, JSON_LINES = "sweep.html", "sweep.md", "sweep.jsonl"


def run_sweep(
    command: str,
    config: Path | None,
    settings: Sequence[str],
    *,
    directory: Path | None = None,
    jobs: int = 1,
    dry_run: bool = False,
) -> int:
    """Validate all points, run those that are not done, and write the table and the page.

    Args:
        command: "train" or "infer".
        config: config file that all runs share; None: the defaults.
        settings: ``section.key=value`` or ``section.key=value,value``.
        directory: directory of the sweep; None: named after the config.
        jobs: number of concurrent runs.
        dry_run: print the runs without starting them or writing files.

    Returns:
        0, 1 if a run is not done, or 128 + the signal that ended the sweep.

    Raises:
        GridError: a point is invalid, or the directory is in use or contains another sweep; nothing was started.
        OSError: the directory cannot be written.
    """
    sweep_command = SWEEP_COMMANDS[command]
    grid_settings = read_settings(settings, sweep_command)
    path = directory or SWEEPS / (config.stem if config is not None else command)
    sweep = read_record(path, sweep_command)
    points = load_points(
        sweep_command, config, grid_settings, sweep.runs_path, sweep.reload_points(config, grid_settings)
    )
    if dry_run:
        print(_render_dry_run(sweep, points))
        return 0
    with lock_sweep(path):
        # Read again, because another sweep may have written the record before the lock was taken.
        sweep = read_record(path, sweep_command)
        sweep.add(points)
        write_results(sweep)
        signal = SweepRunner(sweep, points, jobs, sys.stderr, lambda: write_results(sweep)).run()
        write_results(sweep)
    print(render_text(build_table(sweep)))
    print(f"\n{path / PAGE}\n{path / MARKDOWN}\n{path / JSON_LINES}", flush=True)
    if signal is not None:
        return 128 + signal
    return 0 if all(sweep.runs[point.name].status == "done" for point in points) else 1


def write_results(sweep: SweepDirectory) -> None:
    """Write the table and the page of the current results."""
    table = build_table(sweep)
    title = f"Sweep {sweep.path.resolve().name}"
    write_text_atomic(sweep.path / MARKDOWN, render_markdown(table, title))
    write_text_atomic(sweep.path / JSON_LINES, render_json_lines(table))
    write_text_atomic(sweep.path / PAGE, render_page(table, title, sweep.path))


def _render_dry_run(sweep: SweepDirectory, points: Sequence[GridPoint]) -> str:
    rows = [
        [
            "run",
            "values",
            "status",
            *(["parameters", "tokens", "memory"] if sweep.sweep_command.name == "train" else []),
        ]
    ]
    for point in points:
        status = sweep.runs[point.name].status if point.name in sweep.runs else "new"
        rows.append([point.name, format_values(point.values), status, *_format_plan(point.config)])
    return "\n".join([*align_columns(rows), f"{len(points)} runs in {sweep.path}; nothing was started"])


def _format_plan(config: Section) -> list[str]:
    """Estimate parameters, tokens and memory of a training run."""
    if not isinstance(config, TrainConfig):
        return []
    plan: Any = estimate_run(config)
    tokens = "by the data" if plan.tokens is None else f"{plan.tokens:,}"
    return [f"{plan.parameters:,}", tokens, f"{plan.bytes_total / 2**20:,.0f} MiB"]
