"""The report of runs: results, curves, samples, config and events."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from logger.pages import Page, tabulate_settings
from logger.pages.html import write_page
from logger.report.charts import main_charts, other_metrics
from logger.report.reading import LoggedRun, read_runs
from logger.report.results import (
    describe_steps,
    list_events,
    tabulate_environment,
    tabulate_last_values,
    tabulate_results,
)
from logger.report.samples import collect_samples

STATES = {
    "complete": "complete",
    "going": "still going",
    "stopped": "stopped by a signal",
    "failed": "failed",
    "ended": "ended early",
}

KEYS_WITHOUT_EFFECT_ON_ROWS = {
    f"data.{key}" for key in ("workers", "prefetch_steps", "document_shuffle_window", "row_shuffle_window")
}
"""Keys of ``[data]`` that do not change which sequences are validated."""


def write_report(paths: Sequence[Path], output: Path) -> list[LoggedRun]:
    """Read the runs, write their page as HTML and Markdown, and return the runs.

    Raises:
        ValueError: a path is not a run directory; names it.
        OSError: the page cannot be written.
    """
    runs = read_runs(paths)
    write_page(build_page(runs), output)
    return runs


def build_page(runs: Sequence[LoggedRun]) -> Page:
    """Build the page of one run, or of several runs compared."""
    other_charts, without_chart = other_metrics(runs)
    configs = [
        (run.name, {key: value for key, value in run.config.items() if key != "run.directory"})
        for run in runs
        if run.config
    ]
    names = f"{len(runs)} runs: " if len(runs) > 1 else ""
    return Page(
        names + ", ".join(run.name for run in runs),
        {
            "Results": [tabulate_results(runs)],
            "Curves": [*main_charts(runs)],
            "Samples": collect_samples(runs),
            "Config": tabulate_settings(configs, "configs of these runs"),
            "Environment": [tabulate_environment(runs)],
            "Events": list_events(runs),
            "Other metrics": [*other_charts, *tabulate_last_values(runs, without_chart)],
        },
        _notes(runs),
        [_prefix(run, runs) + f"{STATES[run.state]}, {describe_steps(run)} steps" for run in runs],
    )


def _prefix(run: LoggedRun, runs: Sequence[LoggedRun]) -> str:
    return f"{run.name}: " if len(runs) > 1 else ""


def _notes(runs: Sequence[LoggedRun]) -> list[str]:
    """Return warnings that precede the numbers."""
    messages: list[str] = []
    if len({run.tokenizer for run in runs if run.tokenizer is not None}) > 1:
        messages.append(
            "These runs have different tokenizers. Nats per token are not comparable between them, nor is the top-1 "
            "accuracy: compare bits per byte."
        )
    validated = {tuple(str(run.config.get(key)) for key in _validation_keys(runs)) for run in runs if run.config}
    if len(validated) > 1:
        messages.append("These runs have different data or validation settings: their validation texts may differ.")
    for run in runs:
        own = list(run.notes)
        if run.state == "going":
            own.append("The run is still going; the page shows what it has written so far.")
        elif run.state == "failed":
            own.append(run.events_of("failed")[-1].text)
        elif run.state == "ended":
            before = "its final evaluation" if run.last_step == run.max_steps else "its last step"
            own.append(f"The run ended before {before} without an error message.")
        messages += [_prefix(run, runs) + note for note in own]
    return messages


def _validation_keys(runs: Sequence[LoggedRun]) -> list[str]:
    """Return the config keys that decide which sequences are validated."""
    keys = {key for run in runs for key in run.config if key.startswith("data.")} - KEYS_WITHOUT_EFFECT_ON_ROWS
    return sorted(keys | {"validation.rows", "validation.final_rows", "model.max_position_embeddings"})
