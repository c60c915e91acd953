"""The report of runs: results, curves, samples, config and events."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from logger.console import format_duration
from logger.pages import Cell, Column, Number, Page, Part, Table, format_cell, tabulate_settings
from logger.pages.html import write_page
from logger.report.charts import main_charts, other_charts
from logger.report.reading import LoggedRun, read_runs
from logger.report.samples import collect_samples

MAX_EVENTS = 200
"""Events listed for each run; all are in metrics.jsonl."""

VALIDATION_RESULTS = (
    ("nats per token", "nats_per_token", "standard_error"),
    ("bits per byte", "bits_per_byte", "bits_per_byte_standard_error"),
)
"""Unit, and keys of the value and its standard error in summary.json; metrics are called the same, after ``val_``."""

KEYS_WITHOUT_EFFECT_ON_TEXTS = {
    f"data.{key}" for key in ("workers", "prefetch_steps", "document_shuffle_window", "row_shuffle_window")
}
"""Keys of ``[data]`` that do not change which texts are validated."""


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
            "Events": _list_events(runs),
            "Other metrics": [*other_charts(runs)],
        },
        _notes(runs),
        [_prefix(run, runs) + f"{run.state}, {_describe_steps(run)} steps" for run in runs],
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
    keys = {key for run in runs for key in run.config if key.startswith("data.")} - KEYS_WITHOUT_EFFECT_ON_TEXTS
    keys |= {"validation.rows", "validation.final_rows", "model.max_position_embeddings"}
    validated = {tuple(str(run.config.get(key)) for key in keys) for run in runs if run.config}
    if len(validated) > 1:
        messages.append("These runs have different data or validation settings: their validation texts may differ.")
    for run in runs:
        failure = [event.text for event in run.events_of("failed")[-1:]] if run.state == "failed" else []
        messages += [_prefix(run, runs) + note for note in (*run.notes, *failure)]
    return messages


def tabulate_results(runs: Sequence[LoggedRun]) -> Table:
    """Tabulate all results, with a column for each run."""
    rows = [[name, *cells] for name, cells in _result_rows(runs) if any(cell is not None for cell in cells)]
    return Table(["", *(Column(run.name) for run in runs)] if len(runs) > 1 else (), rows)


def _result_rows(runs: Sequence[LoggedRun]) -> Iterator[tuple[str, list[Cell]]]:
    def results(*keys: str | int, style: str = ".3f") -> list[Cell]:
        """Numbers of the summaries, by their path."""
        return [_number(run.result(*keys), style) for run in runs]

    def items(*keys: str | int) -> range:
        """Indices of the longest list at a path."""
        lists = [run.value(*keys) for run in runs]
        return range(max(len(value) if isinstance(value, list) else 0 for value in lists))

    def first(*keys: str | int) -> float:
        return next((value for run in runs if (value := run.result(*keys)) is not None), math.nan)

    for unit, *keys in VALIDATION_RESULTS:
        yield f"Validation, {unit}", [_validation_result(run, *keys) for run in runs]
    yield "Kind of bound", [_kind(run) if run.summary else None for run in runs]
    for index in items("other_block_lengths"):
        yield "Also trained for, nats per token", [_other_bound(run, index) for run in runs]
    yield "Next token, exact, nats per token", results("evaluation", "next_token_nats_per_token")
    yield "EOS padding after answers, nats per token", results("evaluation", "eos_padding_nats_per_token")
    if any(run.result("source_entropy") is not None for run in runs):
        yield "Validation, nats per document", [_nats_per_document(run) for run in runs]
        yield "Entropy of the source, nats per document", results("source_entropy")
    yield "Unigram entropy, nats per token", results("evaluation", "unigram_entropy")
    ngrams = [run.value("ngrams") for run in runs]
    for name in dict.fromkeys(name for entropies in ngrams if isinstance(entropies, dict) for name in entropies):
        yield f"{name}, nats per token", results("ngrams", name)
    for index in items("evaluation", "fills"):
        fill = ("evaluation", "fills", index)
        for rank in (1, 5):
            yield (
                f"Top-{rank} accuracy, {first(*fill, 'fraction'):.0%} masked",
                results(*fill, f"top{rank}_accuracy", style=".1%"),
            )
        yield (
            f"Majority baseline, {first(*fill, 'fraction'):.0%} masked",
            results(*fill, "majority_baseline", style=".1%"),
        )
    has_masks = any(run.result("evaluation", "block_length") != 1 for run in runs)
    for index in items("evaluation", "by_masked_fraction") if has_masks else ():
        row = ("evaluation", "by_masked_fraction", index)
        yield f"Loss, {first(*row, 0):.0%} to {first(*row, 1):.0%} masked", results(*row, 2)
    yield "Training loss, averaged", [_number(run.last("loss_smooth")) for run in runs]
    yield "Parameters", results("parameters", style=",.0f")
    yield "Tokens seen", [_number(run.result("tokens_seen") or run.last("tokens_seen"), ",.0f") for run in runs]
    yield "Steps", [_describe_steps(run) for run in runs]
    yield "Skipped steps", [_number(run.last("skipped_steps") or None, ",.0f") for run in runs]
    yield "Time of training steps", [None if (s := _seconds(run)) is None else format_duration(s) for run in runs]
    if any((run.result("padding_share") or 0.0) >= 0.0005 for run in runs):
        yield "Padding of the training rows", results("padding_share", style=".1%")


def _number(value: float | None, style: str = ".3f") -> Cell:
    return None if value is None else Number(value, style)


def _other_bound(run: LoggedRun, index: int) -> Cell:
    keys = ("nats_per_token", "standard_error", "block_length")
    value, error, blocks = (run.result("other_block_lengths", index, key) for key in keys)
    pattern = "bidirectional" if blocks is None else f"blocks of {blocks:.0f}"
    return None if value is None else f"{format_cell(Number(value, '.3f', error))}, {pattern}"


def _validation_result(run: LoggedRun, key: str, error_key: str) -> Cell:
    """Return the final value with its error, or the run's last value and its step."""
    value, error = run.result("evaluation", key), run.result("evaluation", error_key)
    if value is not None:
        number = Number(value, ".3f", error)
        has_one_row = run.result("evaluation", "num_rows") == 1
        return f"{format_cell(number)} (one row: no standard error)" if has_one_row else number
    last = run.numbers[f"val_{key}"].last if f"val_{key}" in run.numbers else None
    if last is None:
        return None
    return f"{format_cell(Number(last[1], '.3f', run.last(f'val_{error_key}')))} at step {last[0]:,.0f}"


def _nats_per_document(run: LoggedRun) -> Cell:
    """The bound of a validation row, which is one document where the entropy of the source is known."""
    value, error, num_tokens, num_rows = (
        run.result("evaluation", key) for key in ("nats_per_token", "standard_error", "num_tokens", "num_rows")
    )
    if value is None or not num_tokens or not num_rows:
        return None
    scale = num_tokens / num_rows
    return Number(value * scale, ".3f", None if error is None else error * scale)


def _kind(run: LoggedRun) -> str:
    blocks = run.result("evaluation", "block_length")
    if blocks is None:
        return "bound"
    return "loss, token by token" if blocks == 1 else f"bound, blocks of {blocks:.0f}"


def _describe_steps(run: LoggedRun) -> str:
    """Return the steps that are done, of how many."""
    return f"{run.last_step:,}" + (f" of {run.max_steps:,}" if run.max_steps else "")


def _seconds(run: LoggedRun) -> float | None:
    if run.result("seconds") is not None:
        return run.result("seconds")
    tokens, speed = run.last("tokens_seen"), run.last("tokens_per_second")
    return tokens / speed if tokens is not None and speed else None


def _list_events(runs: Sequence[LoggedRun]) -> list[Part]:
    """Tabulate the events of each run, the newest first."""
    parts: list[Part] = []
    for run in runs:
        events = [event for event in run.events if event.kind != "sample"]
        newest = events[::-1][:MAX_EVENTS]
        rows: list[list[Cell]] = [[event.step, event.kind, event.text] for event in newest]
        num_omitted = len(events) - len(newest)
        note = f"{num_omitted:,} earlier ones are in metrics.jsonl." if num_omitted else ""
        title = run.name if len(runs) > 1 else ""
        if rows:
            parts.append(Table([Column("Step", ","), "Kind", "Event"], rows, title, note))
    return parts
