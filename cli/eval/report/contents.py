"""What the report says about each task: computed once, for the page and for Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cli.eval.report.comparing import ExampleGroup, compare_pairs, select_examples
from cli.eval.report.curve import TaskCurves, build_curves, flatten_settings
from cli.eval.report.reading import ReportedTask, ReportedVariant
from cli.eval.report.tables import ReportTable, tabulate_answers, tabulate_curves, tabulate_pairs, tabulate_results
from diffusionlm.evaluation.tasks.results import ItemResult
from files.terminal_text import escape_control_characters

MAX_TEXT = 1_500
"""Characters of an answer on the page; the files contain all of it."""


@dataclass(frozen=True)
class TaskContents:
    """The contents of the report about one task."""

    task: ReportedTask
    results: ReportTable
    answers: ReportTable
    pairs: ReportTable | None
    """None: there are no two variants with items in common."""
    curves: TaskCurves | None
    points: ReportTable | None
    """Each point of the curves as a row, with its settings."""
    examples: list[ExampleGroup]
    settings: list[tuple[str, dict[str, Any]]]
    """Label of each variant, and its protocol, model and fingerprints by dotted key."""


def build_contents(task: ReportedTask) -> TaskContents:
    """Compute the contents of a task."""
    pairs, curves = compare_pairs(task), build_curves(task)
    return TaskContents(
        task,
        tabulate_results(task),
        tabulate_answers(task),
        tabulate_pairs(pairs) if pairs else None,
        curves,
        None if curves is None else tabulate_curves(curves),
        select_examples(task),
        [(variant.label, _flatten_protocol(variant)) for variant in task.variants],
    )


def _flatten_protocol(variant: ReportedVariant) -> dict[str, Any]:
    result = variant.result
    fingerprints = {f"fingerprints.{name}": value for name, value in result.fingerprints.items()}
    return {"model": result.model, **flatten_settings(result.protocol), **fingerprints}


def describe_answer(answer: ItemResult) -> list[tuple[str, str]]:
    """Return names and values: what was extracted by each rule and whether it is right, how the answer ended."""
    facts = []
    for rule, is_right in answer.is_correct.items():
        if answer.chosen and rule in answer.chosen:
            found = f"option {answer.chosen[rule]}"
        elif rule in answer.extracted:
            value = answer.extracted[rule]
            found = "nothing" if value is None else cut_text(value, 80)
        else:
            found = ""
        facts.append((rule, f"{'right' if is_right else 'wrong'}{': ' * bool(found)}{found}"))
    if answer.option_log_likelihoods:
        facts.append(("log-likelihoods", ", ".join(f"{value:.2f}" for value in answer.option_log_likelihoods)))
    if answer.finish_reason is not None:
        ending = "stopped" if answer.finish_reason == "stop" else "cut by length"
        facts.append(("ended", f"{ending}, {answer.num_tokens:,} tokens, {answer.num_forwards:,} forwards"))
    facts += [
        (name, cut_text(text, 300)) for name, text in (("detail", answer.detail), ("error", answer.error)) if text
    ]
    return facts


def cut_text(text: str, length: int = MAX_TEXT) -> str:
    """Return at most so many characters with control characters as escapes, and say how many there are more."""
    rest = len(text) - length
    return escape_control_characters(text[:length]) + (f" ... ({rest:,} more characters)" if rest > 0 else "")
