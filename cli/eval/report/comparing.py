"""Paired comparisons of variants, and the answers that decide them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from cli.eval.report.reading import ReportedTask, ReportedVariant
from diffusionlm.evaluation.grading.paired import compare_paired
from diffusionlm.evaluation.tasks.results import ItemResult, accuracy_by_item
from logger.pages import Cell, Column, Example, Examples, Number, Output, Table

MAX_VARIANTS_FOR_ALL_PAIRS = 5
"""Of more variants, each is compared with the first only, and by the main rule only."""

MAX_EXAMPLES = 10
"""Items that are shown of each group."""

MAX_ANSWERS = 4
"""Variants whose answers to an item are shown."""


def compare_pairs(task: ReportedTask) -> list[Table]:
    """Tabulate the paired differences by each rule; pairs without a common item are left out."""
    rows: list[list[Cell]] = []
    has_few = len(task.variants) <= MAX_VARIANTS_FOR_ALL_PAIRS
    for rule in task.rules if has_few else task.rules[:1]:
        for first, second in _pairs(task.variants):
            scores = [_scores(variant, rule) for variant in (first, second)]
            common = [key for key in scores[0] if key in scores[1]]
            if not common:
                continue
            first_N, second_N = (np.array([own[key] for key in common]) for own in scores)
            result = compare_paired(first_N, second_N)
            p_value = "< 0.0001" if result.p_value < 1e-4 else Number(result.p_value, ".2g")
            num_left_out = len(scores[0]) + len(scores[1]) - 2 * len(common)
            items = f"{result.num_items:,}" + (f" ({num_left_out:,} left out)" if num_left_out else "")
            difference = Number(result.difference, "+.1%", result.standard_error)
            pair = f"{second.label} - {first.label}"
            rows.append([pair, rule, difference, p_value, result.num_only_second, result.num_only_first, items])
    note = (
        "Difference of accuracies on the same items, ± one standard error; p: exact two-sided sign test on the items "
        f"that differ, not corrected for the number of comparisons ({len(rows)} here)."
    )
    names = ("difference", "p", "only B right", "only A right", "items in both")
    return [Table(["B - A", "rule", *(Column(name, ",") for name in names)], rows, note=note)] if rows else []


def _pairs(variants: Sequence[ReportedVariant]) -> Iterator[tuple[ReportedVariant, ReportedVariant]]:
    if len(variants) <= MAX_VARIANTS_FOR_ALL_PAIRS:
        return combinations(variants, 2)
    return ((variants[0], variant) for variant in variants[1:])


def _scores(variant: ReportedVariant, rule: str) -> dict[tuple[str, str], float]:
    """Accuracy by item and its right answer, of items that the rule grades."""
    items = [item for item in variant.items if rule in item.is_correct]
    golds = {item.id: item.gold for item in items}
    return {(name, golds[name]): accuracy for name, accuracy in accuracy_by_item(items, rule).items()}


def select_examples(task: ReportedTask) -> list[Examples]:
    """Select items that only one of two variants answers right, and those that all answer wrong."""
    variants = [variant for variant in task.variants if variant.items]
    if not variants or not task.rules:
        return []
    rule = task.rules[0]
    scores = {variant.label: _scores(variant, rule) for variant in variants}

    def build(keys: Sequence[tuple[str, str]], shown: Sequence[tuple[ReportedVariant, bool]], title: str) -> Examples:
        examples = [
            Example(
                f"right answer: {gold}",
                [_show_answer(variant, name, rule, is_right) for variant, is_right in shown],
                title=name,
            )
            for name, gold in keys[:MAX_EXAMPLES]
        ]
        note = f", {len(examples)} of them here" * (len(keys) > len(examples))
        count = f"{len(keys):,} item{'s' * (len(keys) != 1)}"
        return Examples(examples, f"{title}: {count}{note}", is_folded=True)

    groups = []
    for first, second in list(_pairs(variants))[:MAX_ANSWERS]:
        for better, worse in ((second, first), (first, second)):
            high, low = scores[better.label], scores[worse.label]
            flipped = sorted(
                (key for key in low if key in high and high[key] > low[key]), key=lambda key: low[key] - high[key]
            )
            groups.append(
                build(flipped, [(better, True), (worse, False)], f"{better.label} right, {worse.label} wrong")
            )
    wrong = [key for key in scores[variants[0].label] if all(own.get(key) == 0.0 for own in scores.values())]
    shown = [(variant, False) for variant in variants[:MAX_ANSWERS]]
    groups.append(build(wrong, shown, "Wrong" if len(variants) == 1 else "Wrong with every variant"))
    return [group for group in groups if group.examples]


def _show_answer(variant: ReportedVariant, name: str, rule: str, is_right: bool) -> Output:
    """Show the first of a variant's answers to an item that is right or wrong as asked for, else the first."""
    answers = [item for item in variant.items if item.id == name]
    answer = next((answer for answer in answers if answer.is_correct.get(rule) == is_right), answers[0])
    return Output(variant.label, answer.output, list(_describe_answer(answer)))


def _describe_answer(answer: ItemResult) -> Iterator[tuple[str, str]]:
    """Iterate over names and values: what each rule extracted and whether it is right, how the answer ended."""
    for rule, is_right in answer.is_correct.items():
        extracted: str | None = answer.extracted.get(rule, "")
        if answer.chosen and rule in answer.chosen:
            extracted = f"option {answer.chosen[rule]}"
        text = "nothing" if extracted is None else extracted[:80]
        yield rule, f"{'right' if is_right else 'wrong'}{': ' * bool(text)}{text}"
    if answer.option_log_likelihoods:
        yield "log-likelihoods", ", ".join(f"{value:.2f}" for value in answer.option_log_likelihoods)
    if answer.finish_reason is not None:
        ending = "stopped" if answer.finish_reason == "stop" else "cut by length"
        yield "ended", f"{ending}, {answer.num_tokens:,} tokens, {answer.num_forwards:,} forwards"
    if answer.detail:
        yield "detail", answer.detail[:300]
    if answer.error:
        yield "error", answer.error[:300]
