"""Tasks on a model in memory, such as one that is trained: ranks share the answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from config.evaluation.in_training import TrainingEvaluationConfig
from config.model import ModelConfig
from ddp.process_group import SINGLE_PROCESS, World
from diffusionlm.evaluation.tasks.evaluation import evaluate_task, list_answers
from diffusionlm.evaluation.tasks.items import read_task_items
from diffusionlm.evaluation.tasks.preparation import PreparedItems, prepare_items
from diffusionlm.evaluation.tasks.results import ItemResult, VariantResult
from diffusionlm.evaluation.tasks.summary import TaskSummary
from diffusionlm.models.transformer import Transformer
from tokenizer import Tokenizer


@dataclass(frozen=True)
class TaskOutcome:
    """The answers of a model to a task, in the order of the items."""

    result: VariantResult
    items: tuple[ItemResult, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """Values to log: accuracies in [0, 1] with their standard errors, and the share of stopped answers."""
        name, values = self.result.task, self.result.metrics
        logged = {f"tasks/{name}/{rule}": metric.value for rule, metric in values.items()}
        for rule, metric in values.items():
            if metric.standard_error is not None:
                logged[f"tasks_standard_error/{name}/{rule}"] = metric.standard_error
        return logged if self.result.shares is None else {**logged, f"tasks_stopped/{name}": self.result.shares.stopped}

    def describe(self) -> str:
        """One line for a log."""
        parts = []
        for rule, metric in self.result.metrics.items():
            error = "" if metric.standard_error is None else f" +- {metric.standard_error:.1%}"
            value = f"{metric.value:.1%}{error}" if rule not in self.result.number_metrics else f"{metric.value:.2f}"
            parts.append(f"{rule} {value}")
        return f"{self.result.task}: {', '.join(parts)} of {self.result.num_items:,} items"


@dataclass(frozen=True)
class LiveEvaluation:
    """Tasks whose prompts fit the model."""

    tasks: tuple[PreparedItems, ...]
    world: World = SINGLE_PROCESS
    is_collective: bool = False
    """The model's forwards are collective, so every rank computes all answers; otherwise each computes its share."""

    @classmethod
    def open(
        cls,
        config: TrainingEvaluationConfig,
        tokenizer: Tokenizer,
        model: ModelConfig,
        world: World = SINGLE_PROCESS,
        *,
        is_collective: bool = False,
    ) -> LiveEvaluation:
        """Read the items and encode their prompts.

        Raises:
            ValueError: the data or the settings of a task are wrong, a prompt does not fit the model, or ``best`` names
                no rule of its task; names the key.
        """
        tasks = []
        for index, task in enumerate(config.tasks):
            try:
                tasks.append(prepare_items(task, read_task_items(task), tokenizer, model))
            except ValueError as error:
                raise ValueError(f"evaluation.tasks.{index}: {error}") from None
        if config.best is not None:
            _check_best(config.best, tasks)
        return cls(tuple(tasks), world, is_collective)

    def evaluate(self, model: Transformer) -> list[TaskOutcome]:
        """Answer all items. All ranks call this, and get the same results, which do not depend on their number, up to
        rounding.

        Raises:
            ValueError: the model's probabilities are not finite; on every rank.
        """
        outcomes = []
        for task in self.tasks:
            items = self._collect(task, model)
            outcomes.append(TaskOutcome(TaskSummary(task, "", "", list(items)).build({}, {}), items))
        return outcomes

    def _collect(self, task: PreparedItems, model: Transformer) -> tuple[ItemResult, ...]:
        answers = list_answers(task)
        own = answers if self.is_collective else answers[self.world.rank :: self.world.size]
        others = set(answers).difference(own)
        compute: Callable[[], list[ItemResult]] = lambda: list(evaluate_task(model, task, done=others))  # noqa: E731
        parts = [compute()] if self.is_collective else self.world.run_on_all(compute)
        results = {(item.id, item.repeat): item for part in parts for item in part}
        return tuple(results[answer] for answer in answers)


def _check_best(best: str, tasks: list[PreparedItems]) -> None:
    name, _, rule = best.rpartition("/")
    rules = next(task for task in tasks if task.name == name).config.rules
    if rule not in rules:
        raise ValueError(f'evaluation.best = "{best}": the rules of {name} are {", ".join(rules)}')
