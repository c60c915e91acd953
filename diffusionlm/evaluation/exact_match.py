"""Exact match: the share of prompts that a model answers with the reference, and whether it stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from diffusionlm.data.chat.reference_answers import ReferenceAnswer
from diffusionlm.evaluation.exact_match_plan import ExactMatchPlan
from diffusionlm.evaluation.statistics import ratio_with_standard_error
from diffusionlm.inference.generate import Generation, decode
from diffusionlm.models.transformer import Transformer
from tokenizer import Tokenizer


@dataclass(frozen=True)
class AnswerSample:
    """An answer, as text."""

    task: str
    prompt: str
    reference: str
    answer: str
    is_exact: bool
    is_stopped: bool


@dataclass(frozen=True)
class MatchCounts:
    """Results over a group of prompts."""

    num_prompts: int
    exact_match: float
    """Share of the answers that equal the reference, apart from whitespace around them."""
    standard_error: float
    """Of ``exact_match``, over prompts; infinite for a single one."""
    stop_rate: float
    """Share of the answers that end with a stop token within the canvas."""
    mean_length_difference: float
    """Mean number of tokens of the answer minus those of the reference."""


@dataclass(frozen=True)
class ExactMatchReport(MatchCounts):
    """The result over all prompts."""

    by_task: dict[str, MatchCounts]
    samples: tuple[AnswerSample, ...]
    """Wrong answers first; they are at most half, if there are as many right ones."""
    max_new_tokens: int | None
    num_forwards: int
    """Forwards of single prompts, summed."""


@dataclass(frozen=True)
class _Answer:
    sample: AnswerSample
    length_difference: int
    num_forwards: int


def evaluate_exact_match(
    model: Transformer, plan: ExactMatchPlan, on_progress: Callable[[int, int], None] | None = None
) -> ExactMatchReport:
    """Decode an answer to each prompt and compare it with the reference.

    Args:
        on_progress: called with the number of answers, and of prompts.

    Raises:
        ValueError: the model's probabilities are not finite.
    """
    answers: list[_Answer] = []
    for start in range(0, len(plan.requests), plan.config.batch_size):
        part = slice(start, start + plan.config.batch_size)
        results = decode(model, plan.requests[part])
        references = plan.references[part]
        answers += [_compare(plan.tokenizer, item, result) for item, result in zip(references, results, strict=True)]
        if on_progress is not None:
            on_progress(len(answers), len(plan.requests))
    return _build_report(answers, plan)


def _compare(tokenizer: Tokenizer, reference: ReferenceAnswer, result: Generation) -> _Answer:
    text, expected = tokenizer.decode(result.token_ids).strip(), reference.answer.strip()
    prompt = str(reference.messages[-1].get("content", "")) if reference.messages else ""
    is_stopped = result.finish_reason == "stop"
    sample = AnswerSample(reference.task, prompt, expected, text, text == expected, is_stopped)
    return _Answer(sample, len(result.token_ids) - len(tokenizer.encode(expected)), result.num_forwards)


def _build_report(answers: Sequence[_Answer], plan: ExactMatchPlan) -> ExactMatchReport:
    num_samples = plan.config.samples
    tasks = dict.fromkeys(answer.sample.task for answer in answers)
    by_task = {task: _count([item for item in answers if item.sample.task == task]) for task in sorted(tasks) if task}
    samples = [answer.sample for answer in answers]
    wrong, right = ([sample for sample in samples if sample.is_exact == is_exact] for is_exact in (False, True))
    num_wrong = max(num_samples // 2, num_samples - len(right))
    samples = [*wrong[:num_wrong], *right][:num_samples]
    return ExactMatchReport(
        **vars(_count(answers)),
        by_task=by_task,
        samples=tuple(samples),
        max_new_tokens=plan.settings.config.max_new_tokens,
        num_forwards=sum(answer.num_forwards for answer in answers),
    )


def _count(answers: Sequence[_Answer]) -> MatchCounts:
    is_exact_N = np.array([float(answer.sample.is_exact) for answer in answers])
    exact_match, error = ratio_with_standard_error(is_exact_N, np.ones(len(answers), dtype=np.int64))
    return MatchCounts(
        num_prompts=len(answers),
        exact_match=exact_match,
        standard_error=error,
        stop_rate=sum(answer.sample.is_stopped for answer in answers) / len(answers),
        mean_length_difference=sum(answer.length_difference for answer in answers) / len(answers),
    )
