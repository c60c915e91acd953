"""What all kinds of tasks share: options of items and prompts, the item, the verdict. Without torch and numpy.

A kind is one class in a module of its own: its options, whose docstrings are the help, its default templates, how it
reads an item from a record, and how it judges an answer. `config.evaluation.tasks` has a row for each kind.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from config.base import ConfigPath, NonEmptyStr, NonNegativeInt, PositiveInt, Section, TupleOf, check_distinct
from config.evaluation.likelihood import AnswerLikelihoodConfig
from config.evaluation.presets import apply_preset, describe_kind, get_preset, list_deviations
from config.generation import GenerationConfig
from diffusionlm.evaluation.tasks.results import LIKELIHOOD_METRICS, ItemResult, MetricValue, Verdict


@dataclass(frozen=True)
class TaskItem:
    """One question with its right answer."""

    gold: str
    """The right answer; of options the text of the right one."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What a template may name: the fields of the record, and those of the kind of task."""
    options: tuple[str, ...] = ()
    gold_index: int = 0
    messages: tuple[Mapping[str, Any], ...] = ()
    """The prompt, if it is a conversation and not made from a template."""
    tools: tuple[Any, ...] | None = None
    images: tuple[Mapping[str, Any], ...] = ()
    """Content parts of the record's ``image`` or ``images``, for a question that is made from a template."""
    group: str = ""
    """Items of a group have metrics of their own."""
    id: str = ""


class PromptConfig(Section):
    """``prompt``: the text or the chat that a model reads before its answer."""

    template: NonEmptyStr | None = None
    """Text in which {name} stands for the field `name` of the item, and {{ and }} for braces. Besides its own fields an
    item has those of its kind: question, answer, choices, letters and options (each option on a line, with its letter).
    None: the task's default."""
    answer_template: str | None = None
    """The answer of an example, in the same form. None: the task's default."""
    delimiter: str | None = None
    """Between a text prompt and the answer of an example, or an option, or answer_prefix. It belongs to the answer: the
    prompt ends without it. None: the task's default, a space or, for humaneval, nothing."""
    format: Literal["text", "chat"] = "text"
    """text: the template alone. chat: a user message that holds it, in the model's chat template."""
    system: str | None = None
    """System message of the chat. None: the chat template's default, if it has one."""
    chat_template: Literal["chatml", "qwen3", "llama3", "llada"] | None = None
    """Chat template. None: the model's own."""
    answer_prefix: str = ""
    """Text that the answer begins with, in the form of `template`. The model continues it; it counts as a part of the
    answer when the answer is graded."""
    shots: NonNegativeInt = 0
    """Number of solved examples before the question."""
    shots_data: ConfigPath | None = None
    """File of the examples, in the format of the task's data: its first items are used. An item that is asked itself is
    left out, and the next one is used."""
    shots_as: Literal["turns", "text"] = "turns"
    """With format = "chat". turns: each example is a user message and an answer. text: one user message holds all
    examples and the question."""
    separator: str = "\n\n"
    """Between examples of a text."""

    @model_validator(mode="after")
    def _check_keys_agree(self) -> Self:
        if self.shots and self.shots_data is None:
            raise ValueError(
                f"shots = {self.shots} needs shots_data, the file of the examples: add it, or remove shots"
            )
        if self.shots_data is not None and not self.shots:
            raise ValueError("shots_data has no effect without shots: set the number of examples, or remove it")
        for key in ("system", "chat_template"):
            if self.format == "text" and getattr(self, key) is not None:
                raise ValueError(f'{key} has no effect with format = "text": set format = "chat", or remove it')
        return self


class ScoredTask:
    """What all kinds have: metrics."""

    @property
    def rules(self) -> tuple[str, ...]:
        """Metrics in [0, 1] that every verdict has, the main one first."""
        return ()

    @property
    def number_metrics(self) -> tuple[str, ...]:
        """Names of metrics that are no shares in [0, 1], and not shown in percent."""
        return LIKELIHOOD_METRICS

    @property
    def runs_code(self) -> bool:
        """Whether grading executes programs that the model has written."""
        return False

    def measure(self, result: ItemResult) -> Mapping[str, float]:
        """Values of an answer whose means over items are metrics."""
        return result.is_correct

    def summarize(self, means: dict[str, MetricValue]) -> dict[str, MetricValue]:
        """The metrics of a task, from the means of `measure`."""
        return means


class ItemTask(Section, ScoredTask):
    """Options of tasks with items."""

    name: NonEmptyStr | None = None
    """Name in tables and files. None: the kind."""
    data: ConfigPath | None = None
    """File of the items: JSON lines, JSON or Parquet, also compressed."""
    limit: PositiveInt | None = None
    """Number of items, a random subset that depends on `seed` alone, in the order of the file. None: all."""
    item_ids: TupleOf[str] = ()
    """Only these items. Empty: all."""
    id_field: NonEmptyStr | None = None
    """Field of the items' ids. None: task_id, id, ind or index, the first that an item has; else the number of the
    record, from 0."""
    preset: NonEmptyStr | None = None
    """Published protocol, such as llada-instruct/gsm8k, whose values are the defaults of the task
    (`config/resources/evaluation/presets.toml`). Results list what differs from it."""
    seed: NonNegativeInt = 0
    """Seed of the subset and of answers: an answer's randomness depends on it, the item's id and the number of the
    repeat. Masks of likelihoods have likelihood.seed."""

    question_template: ClassVar[str] = "Question: {question}\nAnswer:"
    answer_template: ClassVar[str] = "{answer}"
    delimiter: ClassVar[str] = " "
    """Defaults of the prompt: those of lm-evaluation-harness 0.4."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("preset"), str):
            return values
        name, kind = values["preset"], cls.model_fields["kind"].default
        if get_preset(name).kind != kind:
            raise ValueError(f'preset = "{name}" is no protocol for kind = "{kind}": {describe_kind(name)}')
        return apply_preset(name, values)

    @model_validator(mode="after")
    def _check_items(self) -> Self:
        if self.data is None and getattr(self, "source", None) is None:
            raise ValueError("data is missing: name the file of the items")
        check_distinct({"item_ids": self.item_ids})
        return self

    @property
    def deviations(self) -> list[str]:
        """What differs from the preset."""
        return [] if self.preset is None else list_deviations(self.preset, self.model_dump(exclude_unset=True))

    @property
    def prompt_config(self) -> PromptConfig:
        """The section ``prompt``; the defaults if the kind has none."""
        config: PromptConfig = getattr(self, "prompt", PromptConfig())
        return config

    @abstractmethod
    def parse_item(self, record: Mapping[str, Any]) -> TaskItem:
        """Read an item from a record of the file.

        Raises:
            ValueError: a field is missing or malformed.
        """

    @property
    def input_files(self) -> tuple[Path, ...]:
        """Files that results depend on: items, examples."""
        return tuple(path for path in (self.data, self.prompt_config.shots_data) if path is not None)

    def read_source(self) -> list[TaskItem]:
        """Read the items of a kind without a file."""
        raise NotImplementedError


class GenerationTask(Section):
    """A kind whose answers a model writes."""

    generation: GenerationConfig = GenerationConfig()
    """How answers are decoded. If neither max_new_tokens nor total_length is set: 256 new tokens of gsm8k, 512 of
    humaneval, 64 of exact_match."""
    repeats: PositiveInt = 1
    """Answers to each item, each with randomness of its own; pass@k is reported for k up to it."""
    batch_size: PositiveInt = 16
    """Answers that are decoded at a time; results do not depend on it."""
    default_new_tokens: ClassVar[int] = 256
    if TYPE_CHECKING:  # each kind declares this with its own default and help
        stop: tuple[str, ...]

    @property
    def fills_masks(self) -> bool:
        """Whether answers fill the spans ``[MASK:n]`` of the prompt."""
        return False

    def resolve_length(self) -> GenerationConfig:
        """The generation section with the number of new tokens that is the task's default."""
        if self.generation.max_new_tokens is None and self.generation.total_length is None:
            return self.generation.model_copy(update={"max_new_tokens": self.default_new_tokens})
        return self.generation

    def check_item(self, item: TaskItem) -> None:
        """Check what grading an answer to an item needs.

        Raises:
            ValueError: it is missing.
        """

    @abstractmethod
    def grade(self, item: TaskItem, text: str) -> Verdict:
        """Grade an answer, which has its prefix, if the prompt ends with one. Exceptions become verdicts."""

    def grade_steps(self, item: TaskItem, text: str, steps: Sequence[str]) -> tuple[Verdict, tuple[float, ...] | None]:
        """Grade an answer of which the text after each decoding step is known, at least one.

        Returns:
            The verdict, and what each step adds to its first metric; None: steps have no rewards of their own.
        """
        return self.grade(item, text), None


class LikelihoodTask(Section):
    """A kind whose options are scored after the prompt."""

    prompt: PromptConfig = PromptConfig()
    likelihood: AnswerLikelihoodConfig = AnswerLikelihoodConfig()
    """How log-likelihoods are computed."""
    needs_greedy: ClassVar[bool] = False
    """`judge` is told whether greedy decoding yields the option; there is only one."""

    @abstractmethod
    def list_options(self, item: TaskItem) -> tuple[str, ...]:
        """What is scored after the prompt."""

    def list_divisors(self, options: Sequence[str]) -> dict[str, tuple[float, ...]]:
        """By metric: what log-likelihoods are divided by before options are compared."""
        return {}

    @abstractmethod
    def judge(self, item: TaskItem, log_likelihoods: Sequence[float], is_greedy: bool) -> Verdict:
        """Judge the log-likelihoods of the options."""


def list_fields(record: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, record)) or "none"


def find_field(record: Mapping[str, Any], key: str, name: str | None, candidates: tuple[str, ...] = ()) -> Any:
    """The value of the field that ``key`` of the task names, else of the first candidate that the record has.

    Raises:
        ValueError: there is no such field, or it is null.
    """
    names = candidates if name is None else (name,)
    value = next((record[field_name] for field_name in names if record.get(field_name) is not None), None)
    if value is None:
        raise ValueError(
            f"has no {' or '.join(names)} ({key}); its fields are {list_fields(record)}: correct the file, or name the "
            f"field as {key}"
        )
    return value


def find_text(record: Mapping[str, Any], key: str, name: str | None, candidates: tuple[str, ...] = ()) -> str:
    """The text of `find_field`.

    Raises:
        ValueError: there is none, or it is blank.
    """
    value = find_field(record, key, name, candidates)
    if not isinstance(value, str) or not value.strip():
        problem = "is empty" if isinstance(value, str) else f"is {value!r}, not a text"
        raise ValueError(f"the field of {key} {problem}: correct the file, or name another field")
    return value
