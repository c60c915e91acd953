"""Texts whose last word is to be predicted: right if greedy decoding yields it; and the perplexity of a word."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from config.base import NonEmptyStr
from diffusionlm.evaluation.tasks.item_task import (
    ItemTask,
    LikelihoodTask,
    TaskItem,
    find_text,
)
from diffusionlm.evaluation.tasks.results import ItemResult, MetricValue, Verdict

NATS = "nats"


class ClozeTask(LikelihoodTask, ItemTask):
    """Texts whose last word is to be predicted: `acc`, greedy decoding yields it; perplexity of a word. Fields: `text`,
    whose last word is the answer, or `answer_field`."""

    kind: Literal["cloze"] = "cloze"
    text_field: NonEmptyStr = "text"
    """The whole text; its last word is the answer, unless there is answer_field."""
    answer_field: NonEmptyStr | None = None
    """The answer; text_field then ends before it."""
    question_template: ClassVar[str] = "{context}"
    needs_greedy: ClassVar[bool] = True

    @property
    def rules(self) -> tuple[str, ...]:
        return ("acc",)

    def parse_item(self, record: Mapping[str, Any]) -> TaskItem:
        text = find_text(record, "text_field", self.text_field)
        if self.answer_field is not None:
            context, answer = text.rstrip(), find_text(record, "answer_field", self.answer_field).strip()
        else:
            context, _, answer = text.rstrip().rpartition(" ")
            if not context.strip() or not answer:
                raise ValueError(f"its text {text!r} has no context before the last word")
        return TaskItem(answer, {"context": context, "question": context, "answer": answer})

    def list_options(self, item: TaskItem) -> tuple[str, ...]:
        return (item.gold,)

    def judge(self, item: TaskItem, log_likelihoods: Sequence[float], is_greedy: bool) -> Verdict:
        return Verdict({"acc": float(is_greedy)})

    def measure(self, result: ItemResult) -> Mapping[str, float]:
        # Guided scores are not normalized, so there is no perplexity of them.
        if self.likelihood.cfg_scale > 0.0 or not result.option_log_likelihoods:
            return result.is_correct
        return {**result.is_correct, NATS: -result.option_log_likelihoods[0]}

    def summarize(self, means: dict[str, MetricValue]) -> dict[str, MetricValue]:
        nats = means.pop(NATS, None)
        return means if nats is None else {**means, "perplexity": _perplexity(nats)}


def _perplexity(nats: MetricValue) -> MetricValue:
    """exp of the mean negative log-likelihood of a word."""
    if nats.value > 700.0:
        return MetricValue(math.inf)
    perplexity = math.exp(nats.value)
    return MetricValue(perplexity, None if nats.standard_error is None else perplexity * nats.standard_error)
