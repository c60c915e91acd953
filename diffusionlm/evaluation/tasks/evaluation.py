"""Evaluate a task with a loaded model: decode and grade its answers, or score its options or its text; and summarize.

`LiveEvaluation` evaluates tasks on a model that is trained: ranks share the answers.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from config.evaluation.tasks import TrainingEvaluationConfig
from config.model import ModelConfig
from ddp.process_group import SINGLE_PROCESS, World
from diffusionlm.evaluation.answer_decoding import decode_answers
from diffusionlm.evaluation.likelihood.scoring import OptionsRequest, score_documents
from diffusionlm.evaluation.sampler_likelihood import greedy_matches
from diffusionlm.evaluation.tasks.item_task import GenerationTask, LikelihoodTask, TaskItem
from diffusionlm.evaluation.tasks.items import draw_seed, read_task_items
from diffusionlm.evaluation.tasks.preparation import PreparedItems, PreparedTask, PreparedText, prepare_items
from diffusionlm.evaluation.tasks.results import (
    LIKELIHOOD_METRICS,
    ItemResult,
    MetricValue,
    OutcomeShares,
    VariantResult,
    Verdict,
    mean_by_item,
)
from diffusionlm.evaluation.text_likelihood import OnProgress, evaluate_likelihood, ignore_progress
from diffusionlm.models.transformer import Transformer
from diffusionlm.vision.processor import ImageProcessor
from files.usage_error import prefix_errors
from tokenizer import Tokenizer

ANSWERS_PER_GROUP = 512
"""Requests that are in memory at a time; at the end of each group the batch runs empty once."""
DOCUMENTS_PER_GROUP = 32
"""Documents whose options are scored before their results are written."""

AnswerKey = tuple[str, int]


def list_answers(task: PreparedTask) -> list[AnswerKey]:
    """The answers of a complete evaluation."""
    repeats = task.config.repeats if isinstance(task.config, GenerationTask) else 1
    return [(item.id, repeat) for item in task.items for repeat in range(repeats)]


def evaluate_task(
    model: Transformer,
    task: PreparedTask,
    done: Collection[AnswerKey] = (),
    on_progress: OnProgress = ignore_progress,
) -> Iterator[ItemResult]:
    """Iterate over the results of all answers that are not done yet, in the order in which they end.

    A result depends on its item, the repeat and the task's settings alone (up to rounding in the model).

    Args:
        on_progress: called by a perplexity task, which has one result only.
    """
    pending = [answer for answer in list_answers(task) if answer not in done]
    if isinstance(task, PreparedText):
        return (_score_text(model, task, on_progress) for _ in pending)
    if isinstance(task.config, GenerationTask):
        return _answer_items(model, task, task.config, pending)
    return _score_items(model, task, task.config, {item_id for item_id, _ in pending})


def _answer_items(
    model: Transformer, task: PreparedItems, config: GenerationTask, pending: Sequence[AnswerKey]
) -> Iterator[ItemResult]:
    items = {item.id: item for item in task.items}
    previous = time.perf_counter()
    for start in range(0, len(pending), ANSWERS_PER_GROUP):
        group = [(items[item_id], repeat) for item_id, repeat in pending[start : start + ANSWERS_PER_GROUP]]
        requests = [(task.build_request(item, repeat), config.stop) for item, repeat in group]
        for number, answer in decode_answers(model, task.requests.tokenizer, requests, config.batch_size):
            item, repeat = group[number]
            verdict = grade(task, item, task.answer_prefix(item) + answer.text)
            seconds, previous = time.perf_counter() - previous, time.perf_counter()
            yield _build_result(
                task,
                item,
                verdict,
                repeat=repeat,
                output=answer.text,
                finish_reason=answer.finish_reason,
                num_tokens=len(answer.token_ids),
                num_forwards=answer.num_forwards,
                seconds=round(seconds, 4),
            )


def _build_result(task: PreparedItems, item: TaskItem, verdict: Verdict, **values: Any) -> ItemResult:
    prompt = task.hash_prompt(item)
    return ItemResult(task=task.name, id=item.id, gold=item.gold, prompt_sha256=prompt, **vars(verdict), **values)


def grade(task: PreparedItems, item: TaskItem, text: str) -> Verdict:
    """Grade an answer. If grading fails, the answer is wrong by every rule, and the verdict has the error."""
    assert isinstance(task.config, GenerationTask)
    try:
        return task.config.grade(item, text)
    except Exception as error:
        return Verdict(dict.fromkeys(task.config.rules, 0.0), error=f"{type(error).__name__}: {error}")


def _score_items(
    model: Transformer, task: PreparedItems, config: LikelihoodTask, pending: Collection[str]
) -> Iterator[ItemResult]:
    items = [item for item in task.items if item.id in pending]
    for start in range(0, len(items), DOCUMENTS_PER_GROUP):
        group = items[start : start + DOCUMENTS_PER_GROUP]
        started_at = time.perf_counter()
        requests = [_build_options(task, config, item) for item in group]
        scores = score_documents(model, requests, config.likelihood)
        matches = greedy_matches(model, requests, config.likelihood) if config.needs_greedy else [False] * len(group)
        seconds = round((time.perf_counter() - started_at) / len(group), 4)
        for item, score, is_match in zip(group, scores, matches, strict=True):
            errors = tuple(error if math.isfinite(error) else None for error in score.standard_errors)
            yield _build_result(
                task,
                item,
                config.judge(item, score.log_likelihoods, is_match),
                repeat=0,
                num_tokens=sum(score.num_tokens),
                num_forwards=score.num_forwards,
                option_log_likelihoods=score.log_likelihoods,
                option_standard_errors=errors,
                seconds=seconds,
            )


def _build_options(task: PreparedItems, config: LikelihoodTask, item: TaskItem) -> OptionsRequest:
    options = config.list_options(item)
    context, continuations = task.encode_options(item, options)
    # Two models with the same likelihood.seed have the same masks; items of the same number in other tasks do not.
    key = draw_seed(0, f"{task.name} {item.id}", 0)
    divisors = tuple(config.list_divisors(options).values())
    return OptionsRequest(context.token_ids, continuations, key, divisors=divisors, context_options=context.options)


def _score_text(model: Transformer, task: PreparedText, on_progress: OnProgress) -> ItemResult:
    result = evaluate_likelihood(task.text, model, on_progress)
    return ItemResult(
        task=task.name,
        id=task.items[0].id,
        repeat=0,
        prompt_sha256="",
        gold="",
        is_correct={},
        num_tokens=result.num_tokens,
        num_forwards=result.num_forwards or 0,
        seconds=result.seconds,
        metrics={
            name: MetricValue.from_floats(getattr(result, name), getattr(result, f"{name}_standard_error"))
            for name in LIKELIHOOD_METRICS
        },
    )


# ----------------------------------------------------------------------------------------------------------------------
# From the results of items to that of a variant


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
    if any(result.finish_reason is not None for result in results):
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
        pass_at_k={
            rule: _estimate_pass_at_k(means[rule], num_repeats)
            for rule in config.rules
            if num_repeats > 1 and all(value in (0.0, 1.0) for _, value in values[rule])  # not for shares of an answer
        },
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
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return MetricValue.from_floats(statistics.fmean(values), error)


# ----------------------------------------------------------------------------------------------------------------------
# Tasks during training


class LiveEvaluation:
    """Tasks on which a model is evaluated while it is trained."""

    def __init__(
        self,
        config: TrainingEvaluationConfig,
        tokenizer: Tokenizer,
        model: ModelConfig,
        world: World = SINGLE_PROCESS,
        *,
        is_collective: bool = False,
        processor: ImageProcessor | None = None,
    ) -> None:
        """Read the items and encode their prompts.

        Args:
            processor: of images in items; None: the model reads none.
            is_collective: the model's forwards are collective, so every rank computes all answers; otherwise each
                computes its share.

        Raises:
            ValueError: the data or the settings of a task are wrong, or a prompt does not fit the model; names the key.
        """
        self.world, self.is_collective = world, is_collective
        self.tasks: list[PreparedItems] = []
        for index, task in enumerate(config.tasks):
            with prefix_errors(f"evaluation.tasks.{index}"):
                self.tasks.append(prepare_items(task, read_task_items(task), tokenizer, model, processor))

    def evaluate(self, model: Transformer) -> list[tuple[VariantResult, tuple[ItemResult, ...]]]:
        """Answer all items; return the result of each task, and its answers in the order of the items. All ranks call
        this, and get the same results, which do not depend on their number, up to rounding.
        """
        outcomes = []
        for task in self.tasks:
            items = self._collect(task, model)
            outcomes.append((summarize_task(task, items), items))
        return outcomes

    def _collect(self, task: PreparedItems, model: Transformer) -> tuple[ItemResult, ...]:
        answers = list_answers(task)
        own = answers if self.is_collective else answers[self.world.data_rank :: self.world.data_size]
        others = set(answers).difference(own)
        compute: Callable[[], list[ItemResult]] = lambda: list(evaluate_task(model, task, done=others))  # noqa: E731
        parts = [compute()] if self.is_collective else self.world.run_on_all(compute)
        results = {(item.id, item.repeat): item for part in parts for item in part}
        return tuple(results[answer] for answer in answers)
