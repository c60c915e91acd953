"""From the results of items to those of a variant, and the paired differences between variants. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from diffusionlm.evaluation.grading.paired import compare_paired
from diffusionlm.evaluation.statistics import ratio_with_standard_error
from diffusionlm.evaluation.tasks.item_task import GenerationTask
from diffusionlm.evaluation.tasks.preparation import PreparedTask, PreparedText
from diffusionlm.evaluation.tasks.results import (
    LIKELIHOOD_METRICS,
    ItemResult,
    MetricValue,
    OutcomeShares,
    VariantComparison,
    VariantResult,
)


class TaskSummary:
    """Sums over the results of one variant and task; results themselves are not kept."""

    def __init__(self, task: PreparedTask, variant: str, model: str) -> None:
        self.task, self.variant, self._model = task, variant, model
        self._sums: dict[str, dict[str, float]] = {}
        """Item -> metric -> sum over its repeats."""
        self._num_repeats: dict[str, int] = {}
        self._text_metrics: dict[str, MetricValue] = {}
        self._counts = dict.fromkeys(
            ("answers", "stop", "length", "empty", "invalid", "errors", "tokens", "forwards"), 0
        )
        self._seconds = 0.0

    @property
    def rules(self) -> tuple[str, ...]:
        """Rules by which answers are right or wrong, the main one first; none of a perplexity task."""
        return () if isinstance(self.task, PreparedText) else self.task.config.rules

    def add(self, result: ItemResult) -> None:
        """Add a result to the sums of its variant and task."""
        counts, sums = self._counts, self._sums.setdefault(result.id, {})
        values = {} if isinstance(self.task, PreparedText) else self.task.config.measure(result)
        for name, value in (dict.fromkeys(self.rules, 0.0) | dict(values)).items():
            sums[name] = sums.get(name, 0.0) + value
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

    def means(self, metric: str) -> dict[str, float]:
        """Mean over each item's repeats, of the items that have the metric."""
        return {name: sums[metric] / self._num_repeats[name] for name, sums in self._sums.items() if metric in sums}

    def build(self, protocol: Mapping[str, Any], fingerprints: Mapping[str, str]) -> VariantResult:
        """The result over all items.

        Args:
            protocol: settings of the task with this variant.
            fingerprints: of model, data and prompt.
        """
        counts, num_answers = self._counts, self._counts["answers"]
        names = dict.fromkeys([*self.rules, *sorted({name for sums in self._sums.values() for name in sums})])
        metrics = {name: mean_with_error(list(self.means(name).values())) for name in names}
        if not isinstance(self.task, PreparedText):
            metrics = self.task.config.summarize(metrics)
        num_repeats = max(self._num_repeats.values(), default=1)
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
            num_items=len(self._sums),
            num_repeats=num_repeats,
            metrics={**metrics, **self._text_metrics},
            number_metrics=getattr(self.task.config, "number_metrics", LIKELIHOOD_METRICS),
            pass_at_k={rule: self._pass_at_k(rule, num_repeats) for rule in self.rules} if num_repeats > 1 else {},
            shares=shares if isinstance(self.task.config, GenerationTask) else None,
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
        counts = [round(sums[rule]) for sums in self._sums.values()]
        return {size: mean_with_error([pass_at_k(num_repeats, count, size) for count in counts]) for size in sizes}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate ``1 - C(n - c, k) / C(n, k)`` that one of k samples of an item is right (Chen et al.
    2021, equation 1).

    Args:
        n: samples of the item.
        c: right samples among them.
        k: samples that are drawn without replacement.

    Raises:
        ValueError: not ``0 <= c <= n`` or not ``1 <= k <= n``.
    """
    if not 0 <= c <= n:
        raise ValueError(f"c = {c} right samples of n = {n}: expected 0 to n")
    if not 1 <= k <= n:
        raise ValueError(f"k = {k} with n = {n} samples: expected 1 to n; draw more samples or lower k")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


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
            a, b = first.means(rule), second.means(rule)
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
