"""Paired comparisons of variants, and the answers that decide them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from cli.eval.report.reading import ReportedTask, ReportedVariant
from diffusionlm.evaluation.grading.paired import PairedDifference, compare_paired
from diffusionlm.evaluation.tasks.results import ItemResult, accuracy_by_item

MAX_VARIANTS_FOR_ALL_PAIRS = 5
"""Of more variants, each is compared with the first only, and by the main rule only."""


@dataclass(frozen=True)
class VariantPair:
    """Two variants compared by one rule, on the items that both have."""

    rule: str
    first: str
    second: str
    difference: PairedDifference
    """Accuracy of the second variant minus that of the first."""
    num_left_out: int
    """Items that only one of them has, or that have another right answer in the other."""


def compare_pairs(task: ReportedTask) -> list[VariantPair]:
    """Compare the variants of a task by each rule that both have; pairs without a common item are left out."""
    pairs = []
    has_few = len(task.variants) <= MAX_VARIANTS_FOR_ALL_PAIRS
    for rule in task.rules if has_few else task.rules[:1]:
        for first, second in _pairs(task.variants):
            scores_by_id = [_scores(variant, rule) for variant in (first, second)]
            common = [key for key in scores_by_id[0] if key in scores_by_id[1]]
            if not common:
                continue
            first_N, second_N = (np.array([scores[key] for key in common]) for scores in scores_by_id)
            num_left_out = len(scores_by_id[0]) + len(scores_by_id[1]) - 2 * len(common)
            difference = compare_paired(second_N, first_N)
            pairs.append(VariantPair(rule, first.label, second.label, difference, num_left_out))
    return pairs


def _pairs(variants: Sequence[ReportedVariant]) -> Iterator[tuple[ReportedVariant, ReportedVariant]]:
    if len(variants) <= MAX_VARIANTS_FOR_ALL_PAIRS:
        return combinations(variants, 2)
    return ((variants[0], variant) for variant in variants[1:])


def _scores(variant: ReportedVariant, rule: str) -> dict[tuple[str, str], float]:
    """Accuracy by item and its right answer, of items that the rule grades."""
    items = [item for item in variant.items if rule in item.is_correct]
    golds = {item.id: item.gold for item in items}
    return {(name, golds[name]): accuracy for name, accuracy in accuracy_by_item(items, rule).items()}


@dataclass(frozen=True)
class ExampleItem:
    """An item with the first answer of some variants to it."""

    id: str
    gold: str
    answers: tuple[tuple[str, ItemResult], ...]
    """Label of the variant, and its answer."""


@dataclass(frozen=True)
class ExampleGroup:
    """Items that have something in common."""

    title: str
    total: int
    """Number of such items; only some are shown."""
    items: tuple[ExampleItem, ...]


MAX_EXAMPLES = 10
"""Items that are shown of each group."""
MAX_ANSWERS = 4
"""Variants whose answers to an item are shown."""


def select_examples(task: ReportedTask) -> list[ExampleGroup]:
    """Select items that all variants answer wrong, and those that only one of two answers right."""
    variants = [variant for variant in task.variants if variant.items]
    if not variants or not task.rules:
        return []
    rule = task.rules[0]
    scores = {variant.label: _scores(variant, rule) for variant in variants}
    common = [key for key in scores[variants[0].label] if all(key in own for own in scores.values())]
    answers = {variant.label: _answers_by_item(variant) for variant in variants}

    def build(keys: list[tuple[str, str]], shown: Sequence[tuple[ReportedVariant, bool]], title: str) -> ExampleGroup:
        items = []
        for name, gold in keys[:MAX_EXAMPLES]:
            chosen = (
                (variant.label, _choose_answer(answers[variant.label][name], rule, is_right))
                for variant, is_right in shown
            )
            items.append(ExampleItem(name, gold, tuple(chosen)))
        return ExampleGroup(title, len(keys), tuple(items))

    groups = []
    for first, second in list(_pairs(variants))[:MAX_ANSWERS]:
        one, other = scores[first.label], scores[second.label]
        for better, worse, high, low in ((second, first, other, one), (first, second, one, other)):
            flipped = [key for key in one if key in other and high[key] > low[key]]
            flipped.sort(key=lambda key: low[key] - high[key])
            groups.append(
                build(flipped, [(better, True), (worse, False)], f"{better.label} right, {worse.label} wrong")
            )
    wrong = [key for key in common if not any(own[key] for own in scores.values())]
    shown = [(variant, False) for variant in variants[:MAX_ANSWERS]]
    groups.append(build(wrong, shown, "Wrong" if len(variants) == 1 else "Wrong with every variant"))
    return [group for group in groups if group.items]


def _answers_by_item(variant: ReportedVariant) -> dict[str, list[ItemResult]]:
    answers: dict[str, list[ItemResult]] = {}
    for item in variant.items:
        answers.setdefault(item.id, []).append(item)
    return answers


def _choose_answer(answers: Sequence[ItemResult], rule: str, is_right: bool) -> ItemResult:
    """Return the first repeat that is right or wrong as asked for, else the first."""
    return next((answer for answer in answers if answer.is_correct.get(rule) == is_right), answers[0])
