"""The table of a sweep as text, Markdown and JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cli.sweep.grid import short_keys
from cli.sweep.plan import SweepPlan, SweepRun, objective
from cli.sweep.results import (
    INFER_COLUMNS,
    TRAIN_COLUMNS,
    Measurement,
    RunResult,
    format_measurement,
    read_result,
)
from cli.tables import make_table
from files.json_files import read_text
from files.toml_text import parse_toml
from logger import format_duration

_OTHER_ROWS = ("data.", "validation.")


@dataclass(frozen=True)
class SweepTableRow:
    """A run and its result."""

    run: SweepRun
    values: dict[str, str]
    """Values by key of an axis."""
    result: RunResult
    is_best: bool = False

    @property
    def status(self) -> str:
        """The status, of runs that are not complete with the last step."""
        step = self.result.step
        return self.run.status if self.result.is_final or step is None else f"{self.run.status} at step {step:,}"


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


def build_table(plan: SweepPlan, runs: Sequence[SweepRun]) -> SweepTable:
    """Build the table: training runs with the best first, inference runs in the order of the grid."""
    command = plan.sweep_command.name
    keys = tuple(dict.fromkeys(key for run in runs for key in run.values))
    number = objective(keys)
    rows = []
    for run in runs:
        result = read_result(command, plan.run_path(run.name))
        if run.value is not None and command == "train" and number not in result.numbers:  # a run of another machine
            result = replace(result, numbers={**result.numbers, number: Measurement(run.value)})
        rows.append(SweepTableRow(run, _values_of_keys(plan, run, keys), result))
    if command == "train":
        rows = _rank_rows(rows, number)
    return SweepTable(command, keys, tuple(rows), tuple(_notes(command, keys, rows)))


def _values_of_keys(plan: SweepPlan, run: SweepRun, keys: Sequence[str]) -> dict[str, str]:
    """Return the values of a run for these keys; those that it does not set come from its config."""
    missing = [key for key in keys if key not in run.values]
    try:
        config: Any = parse_toml(read_text(plan.config_path(run.name))) if missing else {}
    except ValueError:
        config = {}
    return {key: _format_override_value(config, key) if key in missing else run.values[key] for key in keys}


def _format_override_value(values: Mapping[str, Any], key: str) -> str:
    node: Any = values
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return "none" if node is None else node if isinstance(node, str) else json.dumps(node)


def _rank_rows(rows: Sequence[SweepTableRow], number: str) -> list[SweepTableRow]:
    """Sort finished runs by a measurement, then the other runs; runs without it are last."""

    def sort_key(row: SweepTableRow) -> tuple[bool, float]:
        measured = row.result.numbers.get(number)
        return row.run.status != "done", math.inf if measured is None else measured.value

    ranked = sorted(rows, key=sort_key)
    if ranked and ranked[0].run.status == "done" and number in ranked[0].result.numbers:
        return [replace(ranked[0], is_best=True), *ranked[1:]]
    return ranked


def _notes(command: str, keys: Sequence[str], rows: Sequence[SweepTableRow]) -> list[str]:
    notes, number = [], objective(keys)
    if command == "infer" and "model.path" in keys:
        notes.append("Different models: log-probabilities and token counts compare only with the same tokenizer.")
    if command == "train" and number == "bits_per_byte":
        notes.append("The runs have different tokenizers, so they are sorted by bits per byte.")
    if command == "train" and any(key.startswith(_OTHER_ROWS) for key in keys):
        notes.append("The runs differ in [data] or [validation]: bounds on different texts cannot be compared.")
    close = sum(_is_within_two_errors(row, rows[0], number) for row in rows[1:]) if rows and rows[0].is_best else 0
    if close:
        which = "1 other is" if close == 1 else f"{close} others are"
        notes.append(
            f"{which} within two standard errors of the best: the order may change with another seed "
            "(--set run.seed=0,1,2)."
        )
    if command == "train" and any(row.run.status != "done" and row.result.numbers.get("bound") for row in rows):
        notes.append("The numbers of unfinished and pruned runs are those of their last validation.")
    jobs = max((row.run.jobs for row in rows), default=1)
    if jobs > 1:
        notes.append(f"Up to {jobs} runs shared the machine: tokens/s and time include their contention.")
    return notes


def _is_within_two_errors(row: SweepTableRow, best: SweepTableRow, number: str) -> bool:
    measured, least = row.result.numbers.get(number), best.result.numbers[number]
    if measured is None or row.run.status != "done":
        return False
    return measured.value - least.value <= 2.0 * math.hypot(measured.error or 0.0, least.error or 0.0)


def format_cells(table: SweepTable, row: SweepTableRow) -> list[str]:
    """Format the cells of a row, in the order of the headings."""
    return [
        *(row.values[key] for key in table.keys),
        *(format_measurement(name, row.result.numbers.get(name)) for name in table.columns),
        format_duration(row.run.seconds) if row.run.seconds else "",
        f"{row.status}, best" if row.is_best else row.status,
    ]


def text_parts(table: SweepTable) -> list[Any]:
    """Build the table and its notes, for `cli.tables.print_parts`."""
    rows = [table.headings, *(format_cells(table, row) for row in table.rows)]
    cells = make_table(rows, right=range(len(table.headings) - 1), has_header=True)
    return [cells, *(f"\n{note}" for note in table.notes)]


def render_markdown(table: SweepTable, title: str) -> str:
    """Format the table as Markdown, for ``sweep.md``."""
    rows = [[*map(_escape_cell, format_cells(table, row))] for row in table.rows]
    for row, cells in zip(table.rows, rows, strict=True):
        cells[:] = [f"**{cell}**" if row.is_best and cell else cell for cell in cells]
    rules = [*["---:"] * (len(table.headings) - 1), "---"]
    lines = [" | ".join(["", *cells, ""]).strip() for cells in ([*map(_escape_cell, table.headings)], rules, *rows)]
    for row in table.rows:
        if row.run.error:
            log = [f"    {line}" for line in row.run.error]
            lines += ["", f"The log of {_escape_cell(row.run.name)} ends with:", "", *log]
    return "\n".join([f"# {_escape_cell(title)}", "", *lines, *(f"\n{note}" for note in table.notes)]) + "\n"


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
            "name": row.run.name,
            "values": row.values,
            **numbers,
            "seconds": round(row.run.seconds, 3),
            "status": row.run.status,
            "is_best": row.is_best,
            "step": row.result.step,
            "jobs": row.run.jobs,
            "error": list(row.run.error),
        }
        lines.append(json.dumps(record, ensure_ascii=False))
    return "".join(f"{line}\n" for line in lines)


def _escape_cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
