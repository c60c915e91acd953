"""The table of a sweep as text, Markdown and JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cli.sweep.grid import short_keys
from cli.sweep.record import SweepDirectory
from cli.sweep.results import INFER_COLUMNS, TRAIN_COLUMNS, Measurement, RunResult, read_result
from cli.tables import align_columns, column_widths
from logger import format_duration

_COMPARED_BY_BYTES = ("tokenizer.", "model.init_from")
_OTHER_ROWS = ("data.", "validation.")


@dataclass(frozen=True)
class SweepTableRow:
    """A run and its result."""

    name: str
    values: dict[str, str]
    """Values by key of an axis."""
    status: str
    seconds: float
    error: tuple[str, ...]
    jobs: int
    result: RunResult
    is_best: bool = False


@dataclass(frozen=True)
class SweepTable:
    """The runs in display order."""

    command: str
    keys: tuple[str, ...]
    """Dotted keys of the axes."""
    rows: tuple[SweepTableRow, ...]
    notes: tuple[str, ...]
    """Sentences that explain the numbers."""

    @property
    def columns(self) -> dict[str, str]:
        """Names of measurements -> headings."""
        return TRAIN_COLUMNS if self.command == "train" else INFER_COLUMNS

    @property
    def headings(self) -> list[str]:
        short = short_keys(self.keys)
        return [*(short[key] for key in self.keys), *self.columns.values(), "time", "status"]


def build_table(sweep: SweepDirectory) -> SweepTable:
    """Build the table: training runs with the best first, inference runs in the order of the grid."""
    command = sweep.sweep_command.name
    keys = tuple(dict.fromkeys(key for run in sweep.runs.values() for key in run.values))
    rows = []
    for run in sweep.runs.values():
        result = read_result(command, sweep.run_path(run.name))
        values = sweep.values_of_keys(run.name, keys)
        status = _status(run.status, result)
        rows.append(SweepTableRow(run.name, values, status, run.seconds, tuple(run.error), run.jobs, result))
    if command != "train":
        return SweepTable(command, keys, tuple(rows), (*_model_notes(keys), *_speed_notes(rows)))
    by_bytes = any(key.startswith(_COMPARED_BY_BYTES) for key in keys)
    ranked = _rank_rows(rows, "bits_per_byte" if by_bytes else "bound")
    return SweepTable(command, keys, tuple(ranked), tuple(_training_notes(keys, ranked, by_bytes)))


def _status(status: str, result: RunResult) -> str:
    if result.is_final or result.step is None or status == "done":
        return status
    return f"{status} at step {result.step:,}"


def _rank_rows(rows: Sequence[SweepTableRow], number: str) -> list[SweepTableRow]:
    """Sort finished runs by a measurement, then the other runs; runs without it are last."""

    def sort_key(row: SweepTableRow) -> tuple[bool, float]:
        measured = row.result.numbers.get(number)
        return not row.result.is_final, math.inf if measured is None else measured.value

    ranked = sorted(rows, key=sort_key)
    if ranked and ranked[0].result.is_final and number in ranked[0].result.numbers:
        return [replace(ranked[0], is_best=True), *ranked[1:]]
    return ranked


def _training_notes(keys: Sequence[str], rows: Sequence[SweepTableRow], by_bytes: bool) -> list[str]:
    notes = []
    number = "bits_per_byte" if by_bytes else "bound"
    if by_bytes:
        notes.append("The runs have different tokenizers, so they are sorted by bits per byte.")
    if any(key.startswith(_OTHER_ROWS) for key in keys):
        notes.append("The runs differ in [data] or [validation]: bounds on different texts cannot be compared.")
    if rows and rows[0].is_best:
        best = rows[0].result.numbers[number]
        close = sum(_is_within_two_errors(row.result, best, number) for row in rows[1:])
        if close:
            which = "1 other is" if close == 1 else f"{close} others are"
            notes.append(
                f"{which} within two standard errors of the best: the order may change with another seed "
                "(--set run.seed=0,1,2)."
            )
    if any(not row.result.is_final and row.result.numbers.get("bound") for row in rows):
        notes.append("The numbers of unfinished runs are those of their last validation.")
    return [*notes, *_speed_notes(rows)]


def _model_notes(keys: Sequence[str]) -> list[str]:
    if "model.path" not in keys:
        return []
    return [
        "The runs use different models: log-probabilities and token counts are comparable only with the same tokenizer."
    ]


def _speed_notes(rows: Sequence[SweepTableRow]) -> list[str]:
    jobs = max((row.jobs for row in rows), default=1)
    return [f"Up to {jobs} runs shared the machine: tokens/s and time include their contention."] if jobs > 1 else []


def _is_within_two_errors(result: RunResult, best: Measurement, number: str) -> bool:
    measured = result.numbers.get(number)
    if measured is None or not result.is_final:
        return False
    return measured.value - best.value <= 2.0 * math.hypot(measured.error or 0.0, best.error or 0.0)


def format_measurement(name: str, measured: Measurement | None) -> str:
    """Format a number and its standard error with a suitable number of digits."""
    if measured is None:
        return ""
    if name in ("tokens_per_second", "forwards"):
        return f"{measured.value:,.0f}"
    digits = 2 if name == "tokens_per_forward" else 4
    error = "" if measured.error is None else f" +- {measured.error:.{digits}f}"
    return f"{measured.value:.{digits}f}{error}"


def format_cells(table: SweepTable, row: SweepTableRow) -> list[str]:
    """Format the cells of a row, in the order of the headings."""
    return [
        *(row.values[key] for key in table.keys),
        *(format_measurement(name, row.result.numbers.get(name)) for name in table.columns),
        format_duration(row.seconds) if row.seconds else "",
        f"{row.status}, best" if row.is_best else row.status,
    ]


def render_text(table: SweepTable) -> str:
    """Format the table for a terminal."""
    rows = [table.headings, *(format_cells(table, row) for row in table.rows)]
    lines = align_columns(rows, right=range(len(table.headings) - 1))
    lines.insert(1, "  ".join("-" * width for width in column_widths(rows)))
    return "\n".join([*lines, *(f"\n{note}" for note in table.notes)])


def render_markdown(table: SweepTable, title: str) -> str:
    """Format the table as Markdown, for ``sweep.md``."""
    last = len(table.headings) - 1
    lines = [f"# {_escape_cell(title)}", "", "| " + " | ".join(map(_escape_cell, table.headings)) + " |"]
    lines.append("|" + "|".join(" --- " if column == last else " ---: " for column in range(last + 1)) + "|")
    for row in table.rows:
        cells = [
            f"**{_escape_cell(cell)}**" if row.is_best and cell else _escape_cell(cell)
            for cell in format_cells(table, row)
        ]
        lines.append("| " + " | ".join(cells) + " |")
    failed = [row for row in table.rows if row.error]
    for row in failed:
        lines += ["", f"The log of {_escape_cell(row.name)} ends with:", "", *(f"    {line}" for line in row.error)]
    return "\n".join([*lines, *(f"\n{note}" for note in table.notes)]) + "\n"


def render_json_lines(table: SweepTable) -> str:
    """Format one JSON object per run, in the order of the table, for ``sweep.jsonl``."""
    lines = []
    for row in table.rows:
        numbers = {}
        for name in table.columns:
            measured = row.result.numbers.get(name)
            numbers[name] = None if measured is None else measured.value
            if name in ("bound", "bits_per_byte"):
                numbers[f"{name}_standard_error"] = None if measured is None else measured.error
        record = {
            "name": row.name,
            "values": row.values,
            **numbers,
            "seconds": round(row.seconds, 3),
            "status": row.status,
            "is_best": row.is_best,
            "step": row.result.step,
            "jobs": row.jobs,
            "error": list(row.error),
        }
        lines.append(json.dumps(record, ensure_ascii=False))
    return "".join(f"{line}\n" for line in lines)


def _escape_cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
