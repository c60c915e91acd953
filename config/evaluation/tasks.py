"""``[[tasks]]`` of ``diffusionlm-eval``: a row for each kind, which is a class in a module of its own; and
``[evaluation]`` of training, which has tasks as well."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from config.base import NonEmptyStr, NonNegativeInt, Section, TupleOf, check_distinct
from diffusionlm.evaluation.tasks.cloze import ClozeTask
from diffusionlm.evaluation.tasks.exact_match import ExactMatchTask
from diffusionlm.evaluation.tasks.gsm8k import Gsm8kTask
from diffusionlm.evaluation.tasks.humaneval import HumanEvalTask
from diffusionlm.evaluation.tasks.multiple_choice import MultipleChoiceTask
from diffusionlm.evaluation.tasks.perplexity import PerplexityTask
from diffusionlm.rl.graded import GradedTask

GeneratedTask = Gsm8kTask | HumanEvalTask | ExactMatchTask | GradedTask
"""Kinds whose answers a model writes: prompts and rewards of reinforcement learning."""
AnyItemTask = GeneratedTask | MultipleChoiceTask | ClozeTask
AnyTask = AnyItemTask | PerplexityTask
TaskConfig = Annotated[AnyTask, Field(discriminator="kind")]


class TrainingEvaluationConfig(Section):
    """``[evaluation]``: tasks, as those of ``diffusionlm-eval``, on which the weights that would be saved are
    evaluated."""

    tasks: TupleOf[Annotated[AnyItemTask, Field(discriminator="kind")]] = ()
    """`[[evaluation.tasks]]`, each with a `kind`. Set `limit`: the run waits for the answers."""
    every_steps: NonNegativeInt = 0
    """Steps between evaluations; 0: only after the last step."""
    best: NonEmptyStr | None = None
    """Task and rule, such as gsm8k/flexible: the link `best` points to the checkpoint with the highest accuracy by it,
    among steps that were evaluated and saved. None: to that with the lowest validation bound."""

    @model_validator(mode="after")
    def _check_tasks(self) -> Self:
        for key in ("every_steps", "best"):
            if getattr(self, key) and not self.tasks:
                raise ValueError(f"{key} has no effect without tasks: add [[evaluation.tasks]], or remove it")
        names = [task.name or task.kind for task in self.tasks]
        check_distinct({"the names of tasks": names})
        rules = [f"{name}/{rule}" for name, task in zip(names, self.tasks, strict=True) for rule in task.rules]
        if self.best is not None and self.best not in rules:
            raise ValueError(f'best = "{self.best}" is no rule of a task: choose one of {", ".join(rules)}')
        return self
