"""Evaluate a task with a loaded model: decode and grade its answers, or score its options or its text."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from config.evaluation.tasks import ClozeTask
from diffusionlm.evaluation.answer_decoding import AnswerRequest, decode_answers
from diffusionlm.evaluation.likelihood.greedy import greedy_matches
from diffusionlm.evaluation.likelihood.options import OptionsRequest, score_documents
from diffusionlm.evaluation.likelihood.scoring import ScoringRequest, score_continuations
from diffusionlm.evaluation.tasks.items import TaskItem, draw_seed
from diffusionlm.evaluation.tasks.preparation import PreparedGeneration, PreparedOptions, PreparedTask, PreparedText
from diffusionlm.evaluation.tasks.results import ItemResult, MetricValue
from diffusionlm.evaluation.tasks.verdicts import build_grader, grade
from diffusionlm.evaluation.text_likelihood import OnProgress, evaluate_likelihood
from diffusionlm.models.transformer import Transformer

ANSWERS_PER_GROUP = 512
"""Requests that are in memory at a time; at the end of each group the batch runs empty once."""
DOCUMENTS_PER_GROUP = 32
"""Documents whose options are scored before their results are written."""
TEXT_ID = "text"
"""Id of the only item of a perplexity task."""

AnswerKey = tuple[str, int]
"""Id of an item, and number of the repeat."""


def list_answers(task: PreparedTask) -> list[AnswerKey]:
    """The answers of a complete evaluation."""
    match task:
        case PreparedText():
            return [(TEXT_ID, 0)]
        case PreparedOptions():
            return [(item.id, 0) for item in task.items]
        case PreparedGeneration():
            return [(item.id, repeat) for item in task.items for repeat in range(task.config.repeats)]


def evaluate_task(
    model: Transformer,
    task: PreparedTask,
    variant: str = "",
    done: Collection[AnswerKey] = (),
    on_progress: OnProgress | None = None,
) -> Iterator[ItemResult]:
    """Iterate over the results of all answers that are not done yet, in the order in which they end.

    A result depends on its item, the repeat and the task's settings alone (up to rounding in the model).

    Args:
        on_progress: called by a perplexity task, which has one result only.

    Raises:
        ValueError: the model's probabilities are not finite.
    """
    pending = [answer for answer in list_answers(task) if answer not in done]
    if not pending:
        return
    match task:
        case PreparedText():
            yield _score_text(model, task, variant, on_progress)
        case PreparedOptions():
            yield from _score_items(model, task, variant, {item_id for item_id, _ in pending})
        case PreparedGeneration():
            yield from _answer_items(model, task, variant, pending)


def _answer_items(
    model: Transformer, task: PreparedGeneration, variant: str, pending: Sequence[AnswerKey]
) -> Iterator[ItemResult]:
    indices = {item.id: index for index, item in enumerate(task.items)}
    grader = build_grader(task.config)
    previous = time.perf_counter()
    for start in range(0, len(pending), ANSWERS_PER_GROUP):
        group = pending[start : start + ANSWERS_PER_GROUP]
        requests = [
            AnswerRequest(task.build_request(indices[item_id], repeat), task.config.stop) for item_id, repeat in group
        ]
        for number, answer in decode_answers(model, task.tokenizer, requests, task.config.batch_size):
            item_id, repeat = group[number]
            item = task.items[indices[item_id]]
            verdict = grade(task.config, grader, item, task.builder.answer_prefix(item) + answer.text)
            seconds, previous = time.perf_counter() - previous, time.perf_counter()
            yield ItemResult(
                task=task.name,
                variant=variant,
                id=item_id,
                repeat=repeat,
                prompt_sha256=task.prompts[indices[item_id]].sha256,
                gold=item.gold,
                output=answer.text,
                extracted=verdict.extracted,
                is_correct=verdict.is_correct,
                finish_reason=answer.finish_reason,
                num_tokens=len(answer.token_ids),
                num_forwards=answer.num_forwards,
                seconds=round(seconds, 4),
                error=verdict.error,
                detail=verdict.detail,
            )


def _score_items(
    model: Transformer, task: PreparedOptions, variant: str, pending: Collection[str]
) -> Iterator[ItemResult]:
    score_group = _score_words if isinstance(task.config, ClozeTask) else _score_options
    items = [item for item in task.items if item.id in pending]
    for start in range(0, len(items), DOCUMENTS_PER_GROUP):
        group = items[start : start + DOCUMENTS_PER_GROUP]
        started_at = time.perf_counter()
        results = list(score_group(model, task, group))
        seconds = round((time.perf_counter() - started_at) / len(group), 4)
        for result in results:
            yield replace(result, variant=variant, seconds=seconds)


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _identify(task: PreparedOptions, item: TaskItem) -> dict[str, Any]:
    """Fields of the result of an item that is scored once."""
    return {"task": task.name, "variant": "", "id": item.id, "repeat": 0, "gold": item.gold}


def _mask_key(task: PreparedOptions, item: TaskItem) -> int:
    """Key of an item's masks: the same for two models with the same likelihood.seed, another one for the item of the
    same number in another task."""
    return draw_seed(0, f"{task.name} {item.id}", 0)


def _measure_options(options: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """By rule: what the log-likelihoods of options are divided by."""
    return {
        "acc": (1.0,) * len(options),
        "acc_norm": tuple(float(len(option)) for option in options),
        "acc_bytes": tuple(float(len(option.encode())) for option in options),
    }


def _score_options(model: Transformer, task: PreparedOptions, items: Sequence[TaskItem]) -> Iterator[ItemResult]:
    requests, hashes = [], []
    for item in items:
        options = task.list_options(item)
        pairs, sha256 = task.encoder.encode_options(item, options)
        continuations = tuple(pair.continuation_ids for pair in pairs)
        divisors = tuple(_measure_options(options).values())
        requests.append(OptionsRequest(pairs[0].context_ids, continuations, _mask_key(task, item), divisors))
        hashes.append(sha256)
    scores = score_documents(model, requests, task.config.likelihood)
    for item, score, sha256 in zip(items, scores, hashes, strict=True):
        log_likelihoods = np.array(score.log_likelihoods)
        lengths = _measure_options(task.list_options(item))
        chosen = {rule: int((log_likelihoods / length).argmax()) for rule, length in lengths.items()}
        yield ItemResult(
            **_identify(task, item),
            prompt_sha256=sha256,
            is_correct={rule: index == item.gold_index for rule, index in chosen.items()},
            num_tokens=sum(score.num_tokens),
            num_forwards=score.num_forwards,
            option_log_likelihoods=score.log_likelihoods,
            option_standard_errors=tuple(map(_finite_or_none, score.standard_errors)),
            chosen=chosen,
        )


def _score_words(model: Transformer, task: PreparedOptions, items: Sequence[TaskItem]) -> Iterator[ItemResult]:
    requests, hashes = [], []
    for item in items:
        [pair], sha256 = task.encoder.encode_options(item, task.list_options(item))
        requests.append(ScoringRequest(pair.context_ids, pair.continuation_ids, _mask_key(task, item)))
        hashes.append(sha256)
    scores = score_continuations(model, requests, task.config.likelihood)
    matches = greedy_matches(model, requests, task.config.likelihood)
    for item, score, is_match, sha256 in zip(items, scores, matches, hashes, strict=True):
        yield ItemResult(
            **_identify(task, item),
            prompt_sha256=sha256,
            is_correct={"acc": is_match},
            num_tokens=score.num_tokens,
            num_forwards=score.num_forwards,
            option_log_likelihoods=(score.log_likelihood,),
            option_standard_errors=(_finite_or_none(score.standard_error),),
        )


def _score_text(model: Transformer, task: PreparedText, variant: str, on_progress: OnProgress | None) -> ItemResult:
    result = evaluate_likelihood(task.plan, on_progress, model)
    names = ("nats_per_token", "perplexity", "bits_per_byte")
    return ItemResult(
        task=task.name,
        variant=variant,
        id=TEXT_ID,
        repeat=0,
        prompt_sha256="",
        gold="",
        is_correct={},
        num_tokens=result.num_tokens,
        num_forwards=result.num_forwards or 0,
        seconds=result.seconds,
        metrics={
            name: MetricValue.from_floats(getattr(result, name), getattr(result, f"{name}_standard_error"))
            for name in names
        },
    )
