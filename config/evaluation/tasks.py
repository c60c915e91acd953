"""``[[tasks]]`` of ``diffusionlm-eval``: items of a data file, how a model is asked, and how its answers are graded."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from config.base import ConfigPath, NonEmptyStr, NonNegativeInt, PositiveInt, Section, StrTuple, TupleOf, check_distinct
from config.evaluation.likelihood import AnswerLikelihoodConfig
from config.evaluation.presets import apply_preset, describe_kind, get_preset, list_deviations
from config.evaluation.text import EvalDataConfig, LikelihoodConfig, NelboConfig
from config.finetune.chat import ChatRowsConfig
from config.generation import GenerationConfig

ExtractionRule = Literal["strict", "flexible", "boxed"]
COMPLETION_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""Beginnings of code that follows a function, as in lm-evaluation-harness 0.4."""


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


class TaskOptions(Section):
    """Options of tasks with items."""

    name: NonEmptyStr | None = None
    """Name in tables and files. None: the kind."""
    data: ConfigPath
    """File of the items: JSON lines, JSON or Parquet, also compressed."""
    limit: PositiveInt | None = None
    """Number of items, a random subset that depends on `seed` alone, in the order of the file. None: all."""
    item_ids: StrTuple = ()
    """Only these items. Empty: all."""
    id_field: NonEmptyStr | None = None
    """Field of the items' ids. None: task_id, id, ind or index, the first that an item has; else the number of the
    record, from 0."""
    preset: NonEmptyStr | None = None
    """Published protocol, such as llada-instruct/gsm8k, whose values are the defaults of the task
    (`config.evaluation.presets`). Results list what differs from it."""
    seed: NonNegativeInt = 0
    """Seed of the subset and of answers: an answer's randomness depends on it, the item's id and the number of the
    repeat. Masks of likelihoods have likelihood.seed."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("preset"), str):
            return values
        name, kind = values["preset"], cls.model_fields["kind"].default
        if get_preset(name).kind != kind:
            raise ValueError(f'preset = "{name}" is no protocol for kind = "{kind}": {describe_kind(name)}')
        return apply_preset(name, values)

    @property
    def deviations(self) -> list[str]:
        """What differs from the preset."""
        return [] if self.preset is None else list_deviations(self.preset, self.model_dump(exclude_unset=True))

    @model_validator(mode="after")
    def _check_ids(self) -> Self:
        check_distinct({"item_ids": self.item_ids})
        return self


class Gsm8kTask(TaskOptions):
    """Math word problems: the model writes a solution, and its last number is compared with the right one."""

    kind: Literal["gsm8k"] = "gsm8k"
    prompt: PromptConfig = PromptConfig()
    question_field: NonEmptyStr = "question"
    answer_field: NonEmptyStr = "answer"
    """Its text after #### is the right number; without ####, the whole text has to be one."""
    extraction: Annotated[TupleOf[ExtractionRule], Field(min_length=1)] = ("strict", "flexible")
    """Rules that find the number in an answer; accuracy is reported by each. strict: after ####. flexible: the last
    number. boxed: in the last \\boxed{}."""
    generation: GenerationConfig = GenerationConfig()
    """How answers are decoded. If neither max_new_tokens nor total_length is set: 256 new tokens."""
    stop: TupleOf[NonEmptyStr] = ("Question:",)
    """The answer ends before the first of these texts, wherever they lie in tokens."""
    repeats: PositiveInt = 1
    """Answers to each item, each with randomness of its own."""
    batch_size: PositiveInt = 16
    """Answers that are decoded at a time; results do not depend on it."""
    default_new_tokens: ClassVar[int] = 256


class HumanEvalTask(TaskOptions):
    """Python functions: the model completes them, and their tests are executed."""

    kind: Literal["humaneval"] = "humaneval"
    prompt: PromptConfig = PromptConfig()
    run_code: bool = False
    """Execute what the model has written, in processes of their own with limited time, memory, files and system calls,
    without network. A determined program is not contained: use a container."""
    prompt_field: NonEmptyStr = "prompt"
    test_field: NonEmptyStr = "test"
    entry_point_field: NonEmptyStr = "entry_point"
    answer: Literal["completion", "code_block"] = "completion"
    """completion: the prompt and the answer together are the program. code_block: the prompt and the first fenced block
    of the answer (or all of it, without one) are, whether the block is the rest of the function or defines it again: it
    may use the prompt's imports and helper functions."""
    timeout_seconds: Annotated[float, Field(gt=0.0, le=600.0)] = 5.0
    """Time of each program."""
    generation: GenerationConfig = GenerationConfig()
    """How answers are decoded. If neither max_new_tokens nor total_length is set: 512 new tokens."""
    stop: TupleOf[NonEmptyStr] = Field(
        default_factory=lambda values: () if values.get("answer") == "code_block" else COMPLETION_STOPS
    )
    """The answer ends before the first of these texts, wherever they lie in tokens. If it is not set: with answer =
    "completion" those before which a function ends; with "code_block" none, for they also lie within a program."""
    repeats: PositiveInt = 1
    """Answers to each item, each with randomness of its own; pass@k is reported for k up to it."""
    batch_size: PositiveInt = 16
    """Answers that are decoded at a time; results do not depend on it."""
    default_new_tokens: ClassVar[int] = 512


class MultipleChoiceTask(TaskOptions):
    """Questions with options: the most probable option is chosen."""

    kind: Literal["multiple_choice"] = "multiple_choice"
    prompt: PromptConfig = PromptConfig()
    question_field: NonEmptyStr | None = None
    """None: question, ctx, goal, sentence or prompt, the first that an item has."""
    choices_field: NonEmptyStr | None = None
    """A list of texts, or an object of lists text and label (ARC). None: choices, endings, options,
    or the two fields sol1 and sol2 (PIQA)."""
    gold_field: NonEmptyStr | None = None
    """The right option: its index from 0, its letter or label, or its text. None: gold, answerKey, label or answer."""
    score: Literal["texts", "letters"] = "texts"
    """What is scored after the prompt. texts: the options themselves. letters: A, B, C, ..., with a template that lists
    the options."""
    likelihood: AnswerLikelihoodConfig = AnswerLikelihoodConfig()
    """How log-likelihoods are computed."""


class ClozeTask(TaskOptions):
    """Texts whose last word is to be predicted: right if greedy decoding yields it."""

    kind: Literal["cloze"] = "cloze"
    prompt: PromptConfig = PromptConfig()
    text_field: NonEmptyStr = "text"
    """The whole text; its last word is the answer, unless there is answer_field."""
    answer_field: NonEmptyStr | None = None
    """The answer; text_field then ends before it."""
    likelihood: AnswerLikelihoodConfig = AnswerLikelihoodConfig()
    """How log-likelihoods are computed."""


class ExactMatchTask(TaskOptions):
    """Conversations: the last answer of each is the reference, which the model's answer has to equal apart from
    whitespace around it."""

    kind: Literal["exact_match"] = "exact_match"
    chat: ChatRowsConfig = ChatRowsConfig()
    """How a record becomes a conversation, and the chat template; without one, the model's own."""
    generation: GenerationConfig = GenerationConfig()
    """How answers are decoded. If neither max_new_tokens nor total_length is set: 64 new tokens."""
    stop: TupleOf[NonEmptyStr] = ()
    """The answer ends before the first of these texts, wherever they lie in tokens."""
    repeats: PositiveInt = 1
    """Answers to each item, each with randomness of its own."""
    batch_size: PositiveInt = 16
    """Answers that are decoded at a time; results do not depend on it."""
    default_new_tokens: ClassVar[int] = 64


class PerplexityTask(Section):
    """The likelihood of a text: nats per token, perplexity and bits per byte."""

    kind: Literal["perplexity"] = "perplexity"
    name: NonEmptyStr | None = None
    """Name in tables and files. None: the kind."""
    data: ConfigPath | None = None
    """File, directory or glob of the text, all of which is read. None: text.source says what is read."""
    text: EvalDataConfig = EvalDataConfig()
    """How the text is cut into rows."""
    likelihood: LikelihoodConfig = NelboConfig()
    """How the rows are scored."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.data is None) == (self.text.source is None):
            problem = "names no text" if self.data is None else "names the text in data and in text.source"
            raise ValueError(f"{problem}: set one of data and text.source")
        return self


GenerationTask = Gsm8kTask | HumanEvalTask | ExactMatchTask
LikelihoodTask = MultipleChoiceTask | ClozeTask
ItemTask = GenerationTask | LikelihoodTask
AnyTask = Gsm8kTask | HumanEvalTask | MultipleChoiceTask | ClozeTask | ExactMatchTask | PerplexityTask
TaskConfig = Annotated[AnyTask, Field(discriminator="kind")]
