"""From the results of items to those of a variant, and the paired differences between variants. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    mean_by_item,
)


@dataclass(frozen=True)
class TaskSummary:
    """The results of one variant and task, and what they say together."""

    task: PreparedTask
    variant: str
    model: str
    results: list[ItemResult] = field(default_factory=list)

    @property
    def rules(self) -> tuple[str, ...]:
        """Rules by which answers are right or wrong, the main one first; none of a perplexity task."""
        return () if isinstance(self.task, PreparedText) else self.task.config.rules

    def means(self) -> dict[str, dict[str, float]]:
        """By metric: mean over each item's repeats, of the items that have the metric."""
        values: dict[str, list[tuple[str, float]]] = {rule: [] for rule in self.rules}
        for result in self.results:
            measured = {} if isinstance(self.task, PreparedText) else self.task.config.measure(result)
            for name, value in (dict.fromkeys(self.rules, 0.0) | dict(measured)).items():
                values.setdefault(name, []).append((result.id, value))
        names = [*self.rules, *sorted(values.keys() - set(self.rules))]
        return {name: mean_by_item(values[name]) for name in names}

    def build(self, protocol: Mapping[str, Any], fingerprints: Mapping[str, str]) -> VariantResult:
        """The result over all items.

        Args:
            protocol: settings of the task with this variant.
            fingerprints: of model, data and prompt.
        """
        results, means = self.results, self.means()
        metrics = {name: mean_with_error(list(values.values())) for name, values in means.items()}
        if not isinstance(self.task, PreparedText):
            metrics = self.task.config.summarize(metrics)
        num_repeats = max(Counter(result.id for result in results).values(), default=1)
        endings = Counter(result.finish_reason for result in results)
        counts = (
            endings["stop"],
            endings["length"],
            sum(result.is_empty for result in results),
            sum(result.is_invalid for result in results),
        )
        is_generated = isinstance(self.task.config, GenerationTask)
        return VariantResult(
            task=self.task.name,
            kind=self.task.config.kind,
            variant=self.variant,
            model=self.model,
            num_items=len({result.id for result in results}),
            num_repeats=num_repeats,
            metrics=metrics | {name: value for result in results for name, value in (result.metrics or {}).items()},
            number_metrics=getattr(self.task.config, "number_metrics", LIKELIHOOD_METRICS),
            pass_at_k={rule: _estimate_pass_at_k(means[rule], num_repeats) for rule in self.rules if num_repeats > 1},
            shares=OutcomeShares(*(count / len(results) for count in counts)) if is_generated else None,
            num_grading_errors=sum(result.error is not None for result in results),
            num_tokens=sum(result.num_tokens for result in results),
            num_forwards=sum(result.num_forwards for result in results),
            seconds=round(sum(result.seconds for result in results), 3),
            protocol=dict(protocol),
            fingerprints=dict(fingerprints),
        )


def _estimate_pass_at_k(means: Mapping[str, float], num_repeats: int) -> dict[int, MetricValue]:
    """For k = 1, powers of 2 and all repeats."""
    sizes = sorted({*(1 << power for power in range(num_repeats.bit_length())), num_repeats})
    counts = [round(mean * num_repeats) for mean in means.values()]
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
    for (first, means), (second, other_means) in combinations([(item, item.means()) for item in summaries], 2):
        for rule in first.rules if first.task.name == second.task.name else ():
            a, b = means[rule], other_means.get(rule, {})
            common = [name for name in a if name in b]
            if not common:
                continue
            paired = compare_paired(np.array([a[name] for name in common]), np.array([b[name] for name in common]))
            comparisons.append(
                VariantComparison(
                    task=first.task.name, rule=rule, first=first.variant, second=second.variant, **vars(paired)
                )
            )
    return tuple(comparisons)
