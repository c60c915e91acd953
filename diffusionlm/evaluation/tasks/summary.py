"""From the results of items to those of a variant. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from diffusionlm.evaluation.statistics import ratio_with_standard_error
from diffusionlm.evaluation.tasks.item_task import GenerationTask
from diffusionlm.evaluation.tasks.preparation import PreparedTask
from diffusionlm.evaluation.tasks.results import ItemResult, MetricValue, OutcomeShares, VariantResult, mean_by_item


def summarize_task(task: PreparedTask, results: Sequence[ItemResult]) -> VariantResult:
    """The result over all items; of which variant they are, the caller adds."""
    config = task.config
    values: dict[str, list[tuple[str, float]]] = {rule: [] for rule in config.rules}
    for result in results:
        for name, value in (dict.fromkeys(config.rules, 0.0) | dict(config.measure(result))).items():
            values.setdefault(name, []).append((result.id, value))
    means = {name: list(mean_by_item(values[name]).values()) for name in [*config.rules, *sorted(values)]}
    metrics = config.summarize({name: mean_with_error(own) for name, own in means.items()})
    num_repeats = max(Counter(result.id for result in results).values(), default=1)
    shares = None
    if isinstance(config, GenerationTask):
        endings = Counter(result.finish_reason for result in results)
        num_empty, num_invalid = (sum(item.is_empty for item in results), sum(item.is_invalid for item in results))
        counts = (endings["stop"], endings["length"], num_empty, num_invalid)
        shares = OutcomeShares(*(count / len(results) for count in counts))
    return VariantResult(
        task=task.name,
        kind=config.kind,
        num_items=len({result.id for result in results}),
        num_repeats=num_repeats,
        metrics=metrics | {name: value for result in results for name, value in (result.metrics or {}).items()},
        number_metrics=config.number_metrics,
        pass_at_k={rule: _estimate_pass_at_k(means[rule], num_repeats) for rule in config.rules if num_repeats > 1},
        shares=shares,
        num_grading_errors=sum(result.error is not None for result in results),
        num_tokens=sum(result.num_tokens for result in results),
        num_forwards=sum(result.num_forwards for result in results),
        seconds=round(sum(result.seconds for result in results), 3),
    )


def _estimate_pass_at_k(means: Sequence[float], num_repeats: int) -> dict[int, MetricValue]:
    """For k = 1, powers of 2 and all repeats."""
    sizes = sorted({*(1 << power for power in range(num_repeats.bit_length())), num_repeats})
    counts = [round(mean * num_repeats) for mean in means]
    return {size: mean_with_error([pass_at_k(num_repeats, count, size) for count in counts]) for size in sizes}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate ``1 - C(n - c, k) / C(n, k)`` that one of k samples of an item is right (Chen et al.
    2021, equation 1).

    Args:
        n: samples of the item.
        c: right samples among them.
        k: samples that are drawn without replacement.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean_with_error(values: Sequence[float]) -> MetricValue:
    """The mean over items, with its standard error."""
    value, error = ratio_with_standard_error(np.array(values), np.ones(len(values), dtype=np.int64))
    return MetricValue.from_floats(value, error)
