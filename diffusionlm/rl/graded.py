"""Answers that are graded by rewards: for reinforcement learning, and as an evaluation of held-out items."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from config.base import NonEmptyStr, TupleOf, check_distinct
from diffusionlm.evaluation.tasks.item_task import GenerationTask, ItemTask, PromptConfig, TaskItem, find_field
from diffusionlm.evaluation.tasks.results import Verdict
from diffusionlm.rl.reward_process import RewardError
from diffusionlm.rl.rewards import CodeReward, ExactMatchReward, GradedAnswer, PythonReward, RewardConfig
from files.usage_error import prefix_errors

TOTAL = "reward"
"""Metric: the weighted sum."""
_ROUNDING = 1e-9


class GradedTask(GenerationTask, ItemTask):
    """Records whose answers are graded by `[[tasks.rewards]]`, each with a `kind`: `reward`, their weighted sum, and
    with several of them the score of each. Fields: `question` or `prompt`, or those that `prompt.template` names;
    `answer`, if the rewards need it."""

    kind: Literal["graded"] = "graded"
    prompt: PromptConfig = PromptConfig()
    answer_field: NonEmptyStr | None = None
    """Field of the right answer. None: answer, if an item has it."""
    infill: bool = False
    """The prompt is a text in which answers fill the spans [MASK:n], n tokens each; the answer is what fills them."""
    rewards: Annotated[TupleOf[RewardConfig], Field(min_length=1)] = (ExactMatchReward(),)
    """Rewards whose scores, each times its weight, are summed."""
    stop: TupleOf[NonEmptyStr] = ()
    """The answer ends before the first of these texts, wherever they lie in tokens."""
    question_template: ClassVar[str] = "{question}"

    @model_validator(mode="after")
    def _check_rewards(self) -> Self:
        check_distinct({"the names of rewards and of their sum": [*self._names, TOTAL]})
        if self.infill and (self.prompt.format != "text" or self.prompt.shots or self.prompt.answer_prefix):
            raise ValueError(
                "infill = true needs a text whose masked spans are those of the question alone: remove prompt.shots, "
                'prompt.answer_prefix and prompt.format = "chat"'
            )
        return self

    @property
    def _names(self) -> list[str]:
        return [reward.name or reward.kind for reward in self.rewards]

    @property
    def _are_shares(self) -> dict[str, bool]:
        """By metric: values are in [0, 1]."""
        each = [reward.is_share for reward in self.rewards]
        weights = [reward.weight for reward in self.rewards]
        is_total_share = all(each) and min(weights) >= 0.0 and sum(weights) <= 1.0 + _ROUNDING
        own = dict(zip(self._names, each, strict=True)) if len(self.rewards) > 1 else {}
        return {TOTAL: is_total_share, **own}

    @property
    def rules(self) -> tuple[str, ...]:
        return tuple(name for name, is_share in self._are_shares.items() if is_share)

    @property
    def number_metrics(self) -> tuple[str, ...]:
        return tuple(name for name, is_share in self._are_shares.items() if not is_share)

    @property
    def runs_code(self) -> bool:
        return any(isinstance(reward, CodeReward) and reward.run_code for reward in self.rewards)

    @property
    def reads_steps(self) -> bool:
        """A reward reads the text after each step."""
        return any(isinstance(reward, PythonReward) and reward.reads_steps for reward in self.rewards)

    @property
    def input_files(self) -> tuple[Path, ...]:
        return (*super().input_files, *(reward.path for reward in self.rewards if isinstance(reward, PythonReward)))

    @property
    def fills_masks(self) -> bool:
        return self.infill

    def parse_item(self, record: Mapping[str, Any]) -> TaskItem:
        has_answer = self.answer_field is not None or record.get("answer") is not None
        value = find_field(record, "answer_field", self.answer_field, ("answer",)) if has_answer else ""
        gold = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        question = record.get("question", record.get("prompt"))
        return TaskItem(gold, {"answer": gold} | ({} if question is None else {"question": question}))

    def check_item(self, item: TaskItem) -> None:
        answer = _build_answer(item, "")
        for index, reward in enumerate(self.rewards):
            with prefix_errors(f"rewards.{index} ({reward.kind})"):
                reward.check(answer)

    def grade(self, item: TaskItem, text: str) -> Verdict:
        return self.grade_steps(item, text, (text,))[0]

    def grade_steps(self, item: TaskItem, text: str, steps: Sequence[str]) -> tuple[Verdict, tuple[float, ...] | None]:
        """Grade an answer. Among rewards of steps, one that is a single number counts at the last step.

        Raises:
            RewardError: a reward has no score; names the item and the reward.
        """
        answer = _build_answer(item, text, steps)
        scores: dict[str, float] = {}
        step_rewards, has_steps = [0.0] * len(steps), False
        for name, reward in zip(self._names, self.rewards, strict=True):
            try:
                score = reward.score(answer)
            except ValueError as error:
                raise RewardError(f"item {item.id!r}: reward {name!r}: {error}") from error
            has_steps |= not isinstance(score, float)
            own = [0.0] * (len(steps) - 1) + [score] if isinstance(score, float) else score
            scores[name] = sum(own)
            step_rewards = [total + reward.weight * value for total, value in zip(step_rewards, own, strict=True)]
        total = sum(reward.weight * score for reward, score in zip(self.rewards, scores.values(), strict=True))
        verdict = Verdict({TOTAL: total} | (scores if len(scores) > 1 else {}))
        return verdict, tuple(step_rewards) if has_steps else None


def _build_answer(item: TaskItem, text: str, steps: Sequence[str] = ()) -> GradedAnswer:
    return GradedAnswer(text, str(item.fields.get("question", "")), item.gold, item.fields, steps)
