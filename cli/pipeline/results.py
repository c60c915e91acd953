"""Read what the stages of a pipeline have written, for its report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cli.eval.report.reading import LIKELIHOOD_METRICS
from cli.pipeline.plan import ANSWERS, RESULT, RUN, StagePlan
from cli.pipeline.state import read_seconds
from config.dump import to_toml_values
from config.eval import EvalConfig
from files.json_files import read_json_object, read_text
from logger import format_duration

HEADER = ("stage", "kind", "from", "time", "tokens", "nats per token", "exact match", "stopped")
BOUND_HEADER = ("stage", "from", "nats per token", "change")
METRIC_HEADER = ("stage", "task", "variant", "items", "metric", "value", "stopped")
MAX_SAMPLES = 8
"""Samples of a stage in the report; its files have all."""


@dataclass(frozen=True)
class Sample:
    """A prompt and an answer."""

    prompt: str
    answer: str


@dataclass
class StageResult:
    """The results of a stage, as far as it has them."""

    plan: StagePlan
    seconds: float | None = None
    """None: it is not done."""
    tokens: int | None = None
    """Tokens that training has seen, or that were scored."""
    bound: tuple[float, float] | None = None
    """Nats per token on validation text, and its standard error."""
    tasks: list[dict[str, Any]] = field(default_factory=list)
    """`results` of results.json: of each task and variant."""
    samples: list[Sample] = field(default_factory=list)

    @property
    def cells(self) -> list[str]:
        """The row of the stage, with the columns of `HEADER`."""
        stage, match = self.plan.stage, self.find_task("exact_match")
        return [
            stage.name,
            stage.kind,
            _describe_input(self.plan),
            "not done" if self.seconds is None else format_duration(self.seconds),
            "" if self.tokens is None else f"{self.tokens:,}",
            "" if self.bound is None else f"{self.bound[0]:.3f} +- {self.bound[1]:.3f}",
            "" if match is None else _format_share(match["metrics"]["exact_match"]["value"]),
            "" if match is None else _format_share(match["shares"]["stopped"]),
        ]

    def find_task(self, metric: str) -> dict[str, Any] | None:
        """The result of the first task that has a metric."""
        return next((task for task in self.tasks if metric in task["metrics"]), None)


def _describe_input(plan: StagePlan) -> str:
    stage = plan.stage
    return f"{stage.input or ''}{'' if stage.checkpoint == 'last' else f' ({stage.checkpoint})'}"


def _format_share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def read_results(plans: Sequence[StagePlan]) -> list[StageResult]:
    """Read the results of all stages. A file that is missing or damaged has none."""
    return [_read_result(plan) for plan in plans]


def _read_result(plan: StagePlan) -> StageResult:
    result = StageResult(plan, read_seconds(plan))
    if plan.is_training:
        summary = _read_json(plan, f"{RUN}/summary.json")
        evaluation = summary.get("evaluation") or {}
        result.tokens = summary.get("tokens_seen")
        if "nats_per_token" in evaluation:
            result.bound = (evaluation["nats_per_token"], evaluation["standard_error"])
    elif plan.stage.kind == "evaluate":
        values = _read_json(plan, RESULT)
        result.tokens = values.get("num_tokens")
        if values.get("nats_per_token") is not None:
            result.bound = (values["nats_per_token"], values.get("nats_per_token_standard_error") or 0.0)
        result.tasks = values.get("results") or []
        text = result.find_task("nats_per_token")
        if text is not None:
            metric = text["metrics"]["nats_per_token"]
            result.tokens, result.bound = text["num_tokens"], (metric["value"], metric["standard_error"] or 0.0)
    elif plan.stage.kind == "sample":
        result.samples = _read_answers(plan)
    return result


def _read_json(plan: StagePlan, name: str) -> dict[str, Any]:
    try:
        return read_json_object(plan.directory / name)
    except ValueError:
        return {}


def _read_answers(plan: StagePlan) -> list[Sample]:
    try:
        lines = read_text(plan.directory / ANSWERS).splitlines()[:MAX_SAMPLES]
        return [Sample(text["prompt"], text["output"]) for text in (json.loads(line)["text"] for line in lines)]
    except (ValueError, KeyError, TypeError):
        return []


def list_bound_rows(results: Sequence[StageResult]) -> list[list[str]]:
    """Rows that compare the bounds of several models on one text: what a stage improved or made worse.

    Returns:
        Rows with the columns of `BOUND_HEADER`. The change is relative to the first of the stages with equal data and
        method; a group of one stage is left out.
    """
    groups: dict[str, list[StageResult]] = {}
    for result in results:
        if isinstance(result.plan.config, EvalConfig) and result.bound is not None:
            values: dict[str, Any] = to_toml_values(result.plan.config, result.plan.name)
            texts = [task for task in values.get("tasks", ()) if task["kind"] == "perplexity"][:1]
            key = json.dumps(texts or [values["data"], values["likelihood"]], sort_keys=True)
            groups.setdefault(key, []).append(result)
    rows = []
    for group in groups.values():
        for result in group if len(group) > 1 else ():
            assert result.bound is not None and group[0].bound is not None
            change = result.bound[0] / group[0].bound[0] - 1.0
            row = [result.plan.name, _describe_input(result.plan), result.cells[5]]
            rows.append([*row, "" if result is group[0] else f"{change:+.1%}"])
    return rows


def list_metric_rows(results: Sequence[StageResult]) -> list[list[str]]:
    """Rows of the metrics of tasks, with the columns of `METRIC_HEADER`."""
    rows = []
    for result in results:
        for task in result.tasks:
            for name, metric in task["metrics"].items():
                pattern = ".3f" if name in LIKELIHOOD_METRICS else ".1%"
                error = metric["standard_error"]
                value = f"{metric['value']:{pattern}}" + ("" if error is None else f" +- {error:{pattern}}")
                stopped = _format_share(task["shares"]["stopped"]) if task["shares"] else ""
                cells = [result.plan.name, task["task"], task["variant"], f"{task['num_items']:,}", name, value]
                rows.append([*cells, stopped])
    return rows
