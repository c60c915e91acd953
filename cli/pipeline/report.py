"""The report of a pipeline: what its stages did, as a page of tables and loss curves with links to their own pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cli.pipeline.stages import Stage
from cli.pipeline.stamps import StageState, read_record, read_seconds
from config.dump import to_toml_values
from config.eval import EvalConfig
from config.finetune.pipeline import MARKDOWN, PAGE
from diffusionlm.evaluation.tasks.results import LIKELIHOOD_METRICS
from logger import format_duration
from logger.pages import Cell, Column, Link, Number, Page, Part, Table
from logger.pages.html import write_page
from logger.report.charts import main_charts
from logger.report.reading import read_run


@dataclass
class StageResult:
    """The results of a stage, as far as it has them."""

    stage: Stage
    seconds: float | None
    """None: it is not done."""
    tokens: int | None = None
    """Tokens that training has seen, or that were scored."""
    bound: Number | None = None
    """Nats per token on validation text."""
    tasks: list[dict[str, Any]] = field(default_factory=list)
    """`results` of results.json: of each task and variant."""

    def find_task(self, metric: str) -> dict[str, Any] | None:
        """The result of the first task that has a metric."""
        return next((task for task in self.tasks if metric in task["metrics"]), None)


def describe_states(states: Sequence[StageState]) -> list[Part]:
    """What each stage would do, for ``--dry-run``."""
    rows = [
        [state.stage.name, state.stage.settings.kind, state.stage.settings.input, state.action, state.reason]
        for state in states
    ]
    return [Table(["stage", "kind", "from", "action", "why"], rows), "nothing was started"]


def write_report(directory: Path, stages: Sequence[Stage]) -> list[Part]:
    """Write the report of the current results as HTML and Markdown, and return its tables.

    Raises:
        OSError: a file cannot be written.
    """
    results = [_read_result(stage) for stage in stages]
    done = sum(result.seconds is not None for result in results)
    tables: dict[str, Table] = {
        "Stages": _tabulate_stages(results),
        "Before and after": _compare_bounds(results),
        "Tasks": _tabulate_metrics(results),
    }
    sections: dict[str, list[Part]] = {name: [table] for name, table in tables.items() if table.rows}
    runs = [
        replace(read_run(result.stage.output_paths[0]), name=result.stage.name)
        for result in results
        if (result.stage.output_paths[0] / "metrics.jsonl").is_file()
    ]
    sections["Curves"] = [*main_charts(runs)] if runs else []
    title = f"Pipeline {directory.resolve().name}"
    write_page(Page(title, sections, states=[f"{done} of {len(results)} stages done"]), directory / PAGE)
    parts: list[Part] = [part for table in tables.values() if table.rows for part in (table, "")]
    return [*parts, *(str(directory / name) for name in (PAGE, MARKDOWN))]


def _read_result(stage: Stage) -> StageResult:
    """Read the results of a stage. A file that is missing or damaged has none."""
    result, output = StageResult(stage, read_seconds(stage)), stage.output_paths[0]
    values = read_record(output / "summary.json" if stage.is_training else output)
    result.tasks = values.get("results") or []
    result.tokens = values.get("tokens_seen", values.get("num_tokens"))
    text, evaluation = result.find_task("nats_per_token"), values.get("evaluation") or values
    if text is not None:
        metric = text["metrics"]["nats_per_token"]
        result.tokens, result.bound = text["num_tokens"], Number(metric["value"], error=metric["standard_error"])
    elif evaluation.get("nats_per_token") is not None:
        error = evaluation.get("standard_error", evaluation.get("nats_per_token_standard_error"))
        result.bound = Number(evaluation["nats_per_token"], error=error)
    return result


def _tabulate_stages(results: Sequence[StageResult]) -> Table:
    rows: list[list[Cell]] = []
    for result in results:
        stage, match = result.stage, result.find_task("exact_match")
        # Training runs and samples have pages of their own.
        pages = [name for name in ("run/report.html", "answers.html") if (stage.directory / name).is_file()]
        time = "not done" if result.seconds is None else format_duration(result.seconds)
        shares = [None, None] if match is None else [match["metrics"]["exact_match"]["value"], _stopped(match)]
        name = Link(stage.name, f"{stage.name}/{pages[0]}") if pages else stage.name
        row = [name, stage.settings.kind, stage.describe_input(), time, result.tokens, result.bound, *shares]
        rows.append(row)
    numbers = [Column("tokens", ",d"), Column("nats per token", ".3f"), Column("exact match", ".1%")]
    return Table(["stage", "kind", "from", Column("time"), *numbers, Column("stopped", ".1%")], rows)


def _stopped(task: dict[str, Any]) -> float | None:
    return task["shares"]["stopped"] if task["shares"] else None


def _compare_bounds(results: Sequence[StageResult]) -> Table:
    """Compare the bounds of several models on one text: what a stage improved or made worse.

    The change is relative to the first of the stages with equal data and method; a group of one stage is left out.
    """
    groups: dict[str, list[StageResult]] = {}
    for result in results:
        if isinstance(result.stage.config, EvalConfig) and result.bound is not None:
            values: dict[str, Any] = to_toml_values(result.stage.config)
            texts = [task for task in values.get("tasks", ()) if task["kind"] == "perplexity"][:1]
            key = json.dumps(texts or [values["data"], values["likelihood"]], sort_keys=True)
            groups.setdefault(key, []).append(result)
    rows: list[list[Cell]] = []
    for first, *others in groups.values():
        for result in (first, *others) if others else ():
            assert result.bound is not None and first.bound is not None
            change = None if result is first else result.bound.value / first.bound.value - 1.0
            rows.append([result.stage.name, result.stage.describe_input(), result.bound, change])
    return Table(["stage", "from", Column("nats per token", ".3f"), Column("change", "+.1%")], rows)


def _tabulate_metrics(results: Sequence[StageResult]) -> Table:
    rows: list[list[Cell]] = []
    for result in results:
        for task in result.tasks:
            for name, metric in task["metrics"].items():
                style = ".3f" if name in task.get("number_metrics", LIKELIHOOD_METRICS) else ".1%"
                value = Number(metric["value"], style, metric["standard_error"])
                row = [result.stage.name, task["task"], task["variant"], task["num_items"], name, value, _stopped(task)]
                rows.append(row)
    numbers = [Column("value"), Column("stopped", ".1%")]
    return Table(["stage", "task", "variant", Column("items", ",d"), "metric", *numbers], rows)
