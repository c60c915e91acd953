"""From the results of items to those of a variant, and the paired differences between variants. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from config.evaluation.tasks import ClozeTask
from diffusionlm.evaluation.grading.paired import compare_paired
from diffusionlm.evaluation.grading.pass_at_k import pass_at_k
from diffusionlm.evaluation.statistics import ratio_with_standard_error
from diffusionlm.evaluation.tasks.preparation import PreparedGeneration, PreparedOptions, PreparedTask
from diffusionlm.evaluation.tasks.results import (
    ItemResult,
    MetricValue,
    OutcomeShares,
    VariantComparison,
    VariantResult,
)
from diffusionlm.evaluation.tasks.verdicts import list_rules

OPTION_RULES = ("acc", "acc_norm", "acc_bytes")


class TaskSummary:
    """Counts over the results of one variant and task; results themselves are not kept."""

    def __init__(self, task: PreparedTask, variant: str, model: str) -> None:
        self.task, self.variant, self._model = task, variant, model
        self.num_correct: dict[str, dict[str, int]] = {}
        """Item -> rule -> repeats that are right."""
        self._num_repeats: dict[str, int] = {}
        self._log_likelihoods: list[float] = []
        self._text_metrics: dict[str, MetricValue] = {}
        self._counts = dict.fromkeys(
            ("answers", "stop", "length", "empty", "invalid", "errors", "tokens", "forwards"), 0
        )
        self._seconds = 0.0

    @property
    def rules(self) -> tuple[str, ...]:
        """Rules by which answers are right or wrong, the main one first; none of a perplexity task."""
        match self.task:
            case PreparedGeneration():
                return list_rules(self.task.config)
            case PreparedOptions():
                return OPTION_RULES[:1] if isinstance(self.task.config, ClozeTask) else OPTION_RULES
        return ()

    def add(self, result: ItemResult) -> None:
        """Add a result to the counts of its variant and task."""
        counts = self._counts
        correct = self.num_correct.setdefault(result.id, dict.fromkeys(self.rules, 0))
        for rule in self.rules:
            correct[rule] += result.is_correct.get(rule, False)
        self._num_repeats[result.id] = self._num_repeats.get(result.id, 0) + 1
        counts["answers"] += 1
        if result.finish_reason is not None:
            counts[result.finish_reason] += 1
        counts["empty"] += result.is_empty
        counts["invalid"] += result.is_invalid
        counts["errors"] += result.error is not None
        counts["tokens"] += result.num_tokens
        counts["forwards"] += result.num_forwards
        self._seconds += result.seconds
        self._text_metrics |= result.metrics or {}
        config = self.task.config
        # Guided scores are not normalized, so there is no perplexity of them.
        if isinstance(config, ClozeTask) and config.likelihood.cfg_scale == 0.0 and result.option_log_likelihoods:
            self._log_likelihoods += result.option_log_likelihoods

    def accuracies(self, rule: str) -> dict[str, float]:
        """Share of each item's repeats that are right."""
        return {name: correct[rule] / self._num_repeats[name] for name, correct in self.num_correct.items()}

    def build(self, protocol: Mapping[str, Any], fingerprints: Mapping[str, str]) -> VariantResult:
        """The result over all items.

        Args:
            protocol: settings of the task with this variant.
            fingerprints: of model, data and prompt.
        """
        counts, num_answers = self._counts, self._counts["answers"]
        metrics = {rule: mean_with_error(list(self.accuracies(rule).values())) for rule in self.rules}
        if self._log_likelihoods:
            metrics["perplexity"] = _perplexity(self._log_likelihoods)
        num_repeats = max(self._num_repeats.values(), default=1)
        is_generated = isinstance(self.task, PreparedGeneration)
        shares = OutcomeShares(
            stopped=counts["stop"] / num_answers,
            length=counts["length"] / num_answers,
            empty=counts["empty"] / num_answers,
            invalid=counts["invalid"] / num_answers,
        )
        return VariantResult(
            task=self.task.name,
            kind=self.task.config.kind,
            variant=self.variant,
            model=self._model,
            num_items=len(self.num_correct),
            num_repeats=num_repeats,
            metrics={**metrics, **self._text_metrics},
            pass_at_k={rule: self._pass_at_k(rule, num_repeats) for rule in self.rules} if num_repeats > 1 else {},
            shares=shares if is_generated else None,
            num_grading_errors=counts["errors"],
            num_tokens=counts["tokens"],
            num_forwards=counts["forwards"],
            seconds=round(self._seconds, 3),
            protocol=dict(protocol),
            fingerprints=dict(fingerprints),
        )

    def _pass_at_k(self, rule: str, num_repeats: int) -> dict[int, MetricValue]:
        """For k = 1, powers of 2 and all repeats."""
        sizes = sorted({*(1 << power for power in range(num_repeats.bit_length())), num_repeats})
        return {
            size: mean_with_error([pass_at_k(num_repeats, item[rule], size) for item in self.num_correct.values()])
            for size in sizes
        }


def mean_with_error(values: Sequence[float]) -> MetricValue:
    """The mean over items, with its standard error."""
    value, error = ratio_with_standard_error(np.array(values), np.ones(len(values), dtype=np.int64))
    return MetricValue.from_floats(value, error)


def compare_variants(summaries: Iterable[TaskSummary]) -> tuple[VariantComparison, ...]:
    """Paired differences of each pair of variants of a task, by each rule, on the items that both have answered."""
    comparisons = []
    for first, second in combinations(summaries, 2):
        if first.task.name != second.task.name:
            continue
        for rule in first.rules:
            if rule not in second.rules:
                continue
            a, b = first.accuracies(rule), second.accuracies(rule)
            common = [name for name in a if name in b]
            if not common:
                continue
            paired = compare_paired(np.array([b[name] for name in common]), np.array([a[name] for name in common]))
            error = paired.standard_error
            comparison = VariantComparison(
                task=first.task.name,
                rule=rule,
                first=first.variant,
                second=second.variant,
                num_items=paired.num_items,
                difference=paired.difference,
                standard_error=error if math.isfinite(error) else None,
                p_value=paired.p_value,
                num_only_first=paired.num_b_better,
                num_only_second=paired.num_a_better,
            )
            comparisons.append(comparison)
    return tuple(comparisons)


def _perplexity(log_likelihoods: Sequence[float]) -> MetricValue:
    """exp of the mean negative log-likelihood of a word."""
    mean = mean_with_error([-value for value in log_likelihoods])
    if mean.value > 700.0:
        return MetricValue(math.inf)
    perplexity = math.exp(mean.value)
    return MetricValue(perplexity, None if mean.standard_error is None else perplexity * mean.standard_error)
