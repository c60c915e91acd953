"""Assemble the page of a report: one self-contained file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from files.atomic import write_text_atomic
from logger.pages import Chart
from logger.pages.charts import draw_charts, style_classes
from logger.pages.page import fill_page
from logger.report import tables
from logger.report.plots import main_plots, other_metrics
from logger.report.reading import LoggedRun, read_runs
from logger.report.samples import render_samples

_KEYS_WITHOUT_EFFECT_ON_ROWS = {
    f"data.{key}" for key in ("workers", "prefetch_steps", "document_shuffle_window", "row_shuffle_window")
}
"""Keys of ``[data]`` that do not change which sequences are validated."""


def write_report(paths: Sequence[Path], output: Path) -> list[LoggedRun]:
    """Read the runs, write their page atomically and return the runs.

    Raises:
        ValueError: a path is not a run directory; names it.
        OSError: the page cannot be written.
    """
    runs = read_runs(paths)
    write_text_atomic(output, render_report(runs))
    return runs


def render_report(runs: Sequence[LoggedRun]) -> str:
    """Render the page of one run, or of several runs compared."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    charts: list[dict[str, Any]] = []
    other_charts, without_chart = other_metrics(runs)
    sections = {
        "Results": tables.results(runs),
        "Curves": draw_charts(_in_order(main_plots(runs), is_comparable(runs)), charts),
        "Samples": render_samples(runs),
        "Config": tables.config(runs),
        "Environment": tables.environment(runs),
        "Events": tables.events(runs),
        "Other metrics": draw_charts(other_charts, charts) + tables.last_values(runs, without_chart),
    }
    headline = tables.headline(runs[0]) if len(runs) == 1 else None
    heading = title if len(runs) == 1 else f"{len(runs)} runs compared"
    return fill_page((title, heading), sections, charts, notes(runs), _states(runs), headline)


def is_comparable(runs: Sequence[LoggedRun]) -> bool:
    """Return whether nats per token are comparable: the runs share one tokenizer, as far as they have one."""
    return len({run.tokenizer for run in runs if run.tokenizer is not None}) <= 1


def notes(runs: Sequence[LoggedRun]) -> list[str]:
    """Return warnings that precede the numbers."""
    messages: list[str] = []
    if not is_comparable(runs):
        messages.append(
            Markup(
                "<strong>These runs have different tokenizers.</strong> Nats per token are not comparable between "
                "them, nor is the top-1 accuracy: compare <em>bits per byte</em>."
            )
        )
    validated = {tuple(str(run.config.get(key)) for key in _validation_keys(runs)) for run in runs if run.config}
    if len(validated) > 1:
        messages.append("These runs have different data or validation settings: their validation texts may differ.")
    for run in runs:
        name = Markup("<strong><bdi>{}</bdi></strong>: ").format(run.name) if len(runs) > 1 else Markup("")
        messages += [name + note for note in run.notes]
        if run.state == "going":
            messages.append(name + "The run is still going; the page shows what it has written so far.")
        elif run.state == "failed":
            messages.append(name + run.events_of("failed")[-1].text)
        elif run.state == "ended":
            before = "its final evaluation" if run.last_step == run.max_steps else "its last step"
            messages.append(name + f"The run ended before {before} without an error message.")
    return messages


def _validation_keys(runs: Sequence[LoggedRun]) -> list[str]:
    """Return the config keys that decide which sequences are validated."""
    keys = {key for run in runs for key in run.config if key.startswith("data.")} - _KEYS_WITHOUT_EFFECT_ON_ROWS
    return sorted(keys | {"validation.rows", "validation.final_rows", "model.max_position_embeddings"})


def _in_order(plots: list[Chart], comparable: bool) -> list[Chart]:
    """Sort bits per byte first and mark nats as not comparable, if tokenizers differ."""
    if comparable:
        return plots
    for plot in plots:
        if plot.unit.startswith("nats") or plot.title == "Top-1 accuracy":
            plot.note = f"Not comparable: different tokenizers. {plot.note}".strip()
    return sorted(plots, key=lambda plot: plot.unit != "bits per byte")


def _states(runs: Sequence[LoggedRun]) -> list[str]:
    """Render the state and the color of each run."""
    items: list[str] = []
    for index, run in enumerate(runs):
        name = Markup('<i class="{}"></i><bdi>{}</bdi> ').format(style_classes(index), run.name)
        state = Markup('<span class="state {}">{}</span> ').format(run.state, tables.STATES[run.state])
        steps = f"{run.last_step:,}" + (f" of {run.max_steps:,}" if run.max_steps else "") + " steps"
        items.append((name if len(runs) > 1 else Markup("")) + state + steps)
    return items
