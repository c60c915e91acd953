"""Assemble the page of a report: one self-contained file, laid out by the template ``report.html``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from files.atomic import write_text_atomic
from logger.pages.charts import Chart, draw_charts, style_classes
from logger.report import tables
from logger.report.plots import main_plots, other_metrics
from logger.report.reading import LoggedRun, read_runs
from logger.report.samples import render_samples
from logger.report.template import fill_template, script_json

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
    heading = title if len(runs) == 1 else f"{len(runs)} runs compared"
    return fill_page((title, heading), sections, charts, notes(runs), _states(runs), _headline(runs))


def fill_page(
    titles: tuple[str, str],
    sections: Mapping[str, str],
    charts: Sequence[dict[str, Any]],
    notes: Sequence[str],
    states: str,
    headline: str = "",
) -> str:
    """Fill the template of reports.

    Args:
        titles: of the window and of the page, as text.
        sections: HTML by heading; empty ones are left out.
        charts: the values of all charts, for the script.
        notes: HTML of warnings.
        states: HTML of list items below the heading.
        headline: HTML of the main numbers.
    """
    nonempty = {name: html for name, html in sections.items() if html}
    parts = {
        "title": escape(titles[0]),
        "heading": escape(titles[1]),
        "states": states,
        "notes": "".join(f"<p>{note}</p>" for note in notes),
        "headline": headline,
        "links": "".join(f'<a href="#{_anchor(name)}">{name}</a>' for name in nonempty),
        "sections": "".join(
            f'<section id="{_anchor(name)}"><h2>{name}</h2>{html}</section>' for name, html in nonempty.items()
        ),
        "data": script_json(charts),
    }
    return fill_template("logger.report", "report.html", parts)


def is_comparable(runs: Sequence[LoggedRun]) -> bool:
    """Return whether nats per token are comparable: the runs share one tokenizer, as far as they have one."""
    return len({run.tokenizer for run in runs if run.tokenizer is not None}) <= 1


def notes(runs: Sequence[LoggedRun]) -> list[str]:
    """Return warnings that precede the numbers, as HTML."""
    messages = []
    if not is_comparable(runs):
        messages.append(
            "<strong>These runs have different tokenizers.</strong> Nats per token are not comparable between them, "
            "nor is the top-1 accuracy: compare <em>bits per byte</em>."
        )
    validated = {tuple(str(run.config.get(key)) for key in _validation_keys(runs)) for run in runs if run.config}
    if len(validated) > 1:
        messages.append("These runs have different data or validation settings: their validation texts may differ.")
    for run in runs:
        name = f"<strong>{escape(run.name)}</strong>: " if len(runs) > 1 else ""
        messages += [name + escape(note) for note in run.notes]
        if run.state == "going":
            messages.append(f"{name}The run is still going; the page shows what it has written so far.")
        elif run.state == "failed":
            messages.append(name + escape(run.events_of("failed")[-1].text))
        elif run.state == "ended":
            before = "its final evaluation" if run.last_step == run.max_steps else "its last step"
            messages.append(f"{name}The run ended before {before} without an error message.")
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


def _states(runs: Sequence[LoggedRun]) -> str:
    """Render the state and the color of each run."""
    items = []
    for index, run in enumerate(runs):
        swatch = f'<i class="{style_classes(index)}"></i>' if len(runs) > 1 else ""
        name = f"{escape(run.name)} " if len(runs) > 1 else ""
        steps = f"{run.last_step:,}" + (f" of {run.max_steps:,}" if run.max_steps else "") + " steps"
        items.append(
            f'<li>{swatch}{name}<span class="state {run.state}">{tables.STATES[run.state]}</span> {steps}</li>'
        )
    return "".join(items)


def _headline(runs: Sequence[LoggedRun]) -> str:
    if len(runs) > 1:
        return ""
    entries = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(below)}</dd></div>"
        for name, value, below in tables.headline(runs[0])
    )
    return f'<dl class="headline">{entries}</dl>' if entries else ""


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")
