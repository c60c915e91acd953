"""A sweep from its command to its results."""

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
    """Validate all points, run those that are not done, and write table and page.

    Args:
        command: "train" or "infer".
        config: what all runs share; None: defaults.
        settings: ``section.key=value`` or ``section.key=value,value``.
        directory: of the sweep; None: by the config's name.
        jobs: runs beside each other.
        dry_run: show the runs, and change nothing.

    Returns:
        0, 1 where a run is not done, or 128 + the signal that ended the sweep.

    Raises:
        GridError: a point is not valid, or the directory holds another sweep; nothing was started.
        ValueError: the directory is in use.
        OSError: it cannot be written.
    """
    sweep_command = SWEEP_COMMANDS[command]
    read = read_settings(settings, sweep_command)
    path = directory or SWEEPS / (config.stem if config is not None else command)
    sweep = read_record(path, sweep_command)
    points = load_points(sweep_command, config, read, sweep.runs_path, sweep.reload_points(config, read))
    if dry_run:
        print(_render_dry_run(sweep, points))
        return 0
    with lock_sweep(path):
        # Once more, since another sweep may have written it before the directory was this one's.
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
    """Table and page of what there is."""
    table = build_table(sweep)
    title = f"Sweep {sweep.path.resolve().name}"
    write_text_atomic(sweep.path / MARKDOWN, render_markdown(table, title))
    write_text_atomic(sweep.path / JSON_LINES, render_json_lines(table))
    write_text_atomic(sweep.path / PAGE, render_page(table, title, sweep.path))


def _render_dry_run(sweep: SweepDirectory, points: Sequence[GridPoint]) -> str:
    lines = [
        ["run", "values", "is", *(["parameters", "tokens", "memory"] if sweep.sweep_command.name == "train" else [])]
    ]
    for point in points:
        status = sweep.runs[point.name].status if point.name in sweep.runs else "new"
        lines.append([point.name, format_values(point.values), status, *_format_plan(point.config)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*shown, f"{len(points)} runs in {sweep.path}; nothing was started"])


def _format_plan(config: Section) -> list[str]:
    """Parameters, tokens and memory of a training run, on paper."""
    if not isinstance(config, TrainConfig):
        return []
    plan: Any = estimate_run(config)
    tokens = "by the data" if plan.tokens is None else f"{plan.tokens:,}"
    return [f"{plan.parameters:,}", tokens, f"{plan.bytes_total / 2**20:,.0f} MiB"]
