"""The table of a sweep: for a terminal, for a page of text, and for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from cli.sweep.grid import short_keys
from cli.sweep.record import SweepDirectory
from cli.sweep.results import INFER_COLUMNS, TRAIN_COLUMNS, Measurement, RunResult, read_result
from logger import format_duration

_COMPARED_BY_BYTES = ("tokenizer.", "model.init_from")
_OTHER_ROWS = ("data.", "validation.")


@dataclass(frozen=True)
class SweepTableRow:
    """A run of a sweep, and what came of it."""

    name: str
    values: dict[str, str]
    """Of each axis."""
    status: str
    seconds: float
    error: tuple[str, ...]
    jobs: int
    result: RunResult
    is_best: bool = False


@dataclass(frozen=True)
class SweepTable:
    """The runs in the order in which they are shown."""

    command: str
    keys: tuple[str, ...]
    """Dotted keys of the axes."""
    rows: tuple[SweepTableRow, ...]
    notes: tuple[str, ...]
    """What has to be known to read the numbers."""

    @property
    def columns(self) -> dict[str, str]:
        """Numbers and their headings."""
        return TRAIN_COLUMNS if self.command == "train" else INFER_COLUMNS

    @property
    def headings(self) -> list[str]:
        """Of keys, numbers, time and status."""
        short = short_keys(self.keys)
        return [*(short[key] for key in self.keys), *self.columns.values(), "time", "status"]


def build_table(sweep: SweepDirectory) -> SweepTable:
    """All runs of the sweep, the best first; of inference runs, in the order of the grid."""
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
    """Finished runs by their number, then the others by theirs, then those without one."""

    def place(row: SweepTableRow) -> tuple[bool, float]:
        measured = row.result.numbers.get(number)
        return not row.result.is_final, math.inf if measured is None else measured.value

    ranked = sorted(rows, key=place)
    if ranked and ranked[0].result.is_final and number in ranked[0].result.numbers:
        best = ranked[0]
        marked = SweepTableRow(**{**vars(best), "is_best": True})
        return [marked, *ranked[1:]]
    return ranked


def _training_notes(keys: Sequence[str], rows: Sequence[SweepTableRow], by_bytes: bool) -> list[str]:
    notes = []
    number = "bits_per_byte" if by_bytes else "bound"
    if by_bytes:
        notes.append("The runs differ in their tokens, so they are sorted by bits per byte.")
    if any(key.startswith(_OTHER_ROWS) for key in keys):
        notes.append("The runs differ in [data] or [validation]: bounds on other rows do not compare.")
    if rows and rows[0].is_best:
        best = rows[0].result.numbers[number]
        near = sum(_is_within_two_errors(row.result, best, number) for row in rows[1:])
        if near:
            which = "1 other is" if near == 1 else f"{near} others are"
            notes.append(
                f"{which} within two standard errors of the best: another seed may order them otherwise "
                "(--set run.seed=0,1,2)."
            )
    if any(not row.result.is_final and row.result.numbers.get("bound") for row in rows):
        notes.append("Numbers of runs that are not done are those of their last validation.")
    return [*notes, *_speed_notes(rows)]


def _model_notes(keys: Sequence[str]) -> list[str]:
    if "model.path" not in keys:
        return []
    return ["The runs differ in their model: log-probabilities and tokens compare where the tokenizer is the same."]


def _speed_notes(rows: Sequence[SweepTableRow]) -> list[str]:
    jobs = max((row.jobs for row in rows), default=1)
    return [f"Up to {jobs} runs shared the machine: tokens/s and time are those of a shared one."] if jobs > 1 else []


def _is_within_two_errors(result: RunResult, best: Measurement, number: str) -> bool:
    measured = result.numbers.get(number)
    if measured is None or not result.is_final:
        return False
    return measured.value - best.value <= 2.0 * math.hypot(measured.error or 0.0, best.error or 0.0)


def format_measurement(name: str, measured: Measurement | None) -> str:
    """A number with its error, with as many digits as people read."""
    if measured is None:
        return ""
    if name in ("tokens_per_second", "forwards"):
        return f"{measured.value:,.0f}"
    digits = 2 if name == "tokens_per_forward" else 4
    error = "" if measured.error is None else f" +- {measured.error:.{digits}f}"
    return f"{measured.value:.{digits}f}{error}"


def format_cells(table: SweepTable, row: SweepTableRow) -> list[str]:
    """A row's texts, under the headings."""
    return [
        *(row.values[key] for key in table.keys),
        *(format_measurement(name, row.result.numbers.get(name)) for name in table.columns),
        format_duration(row.seconds) if row.seconds else "",
        f"{row.status}, best" if row.is_best else row.status,
    ]


def render_text(table: SweepTable) -> str:
    """For a terminal: columns with a width of their own, numbers to the right."""
    grid = [table.headings, *(format_cells(table, row) for row in table.rows)]
    widths = [max(len(line[column]) for line in grid) for column in range(len(grid[0]))]
    lines = []
    for line in grid:
        aligned = [
            cell.ljust(width) if column == len(widths) - 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(aligned).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, *(f"\n{note}" for note in table.notes)])


def render_markdown(table: SweepTable, title: str) -> str:
    """``sweep.md``."""
    last = len(table.headings) - 1
    lines = [f"# {_escape_cell(title)}", "", "| " + " | ".join(map(_escape_cell, table.headings)) + " |"]
    lines.append("|" + "|".join(" --- " if column == last else " ---: " for column in range(last + 1)) + "|")
    for row in table.rows:
        marked = [
            f"**{_escape_cell(cell)}**" if row.is_best and cell else _escape_cell(cell)
            for cell in format_cells(table, row)
        ]
        lines.append("| " + " | ".join(marked) + " |")
    failed = [row for row in table.rows if row.error]
    for row in failed:
        lines += ["", f"{_escape_cell(row.name)} ended with:", "", *(f"    {line}" for line in row.error)]
    return "\n".join([*lines, *(f"\n{note}" for note in table.notes)]) + "\n"


def render_json_lines(table: SweepTable) -> str:
    """``sweep.jsonl``: a run a line, in the order of the table."""
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
