"""A task for a model: its items and prompts, checked against the model before that is loaded. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from config.data import LocalFiles
from config.eval import EvalConfig
from config.evaluation.likelihood import AnswerLikelihoodConfig
from config.evaluation.tasks import (
    AnyTask,
    ClozeTask,
    ExactMatchTask,
    GenerationTask,
    Gsm8kTask,
    HumanEvalTask,
    ItemTask,
    MultipleChoiceTask,
    PerplexityTask,
)
from config.generation import GenerationConfig
from config.infer import InferModelConfig
from config.model import ModelConfig
from diffusionlm.checkpoints.model_files import ModelDescription
from diffusionlm.data.chat.templates import resolve_chat_template
from diffusionlm.evaluation.pair_encoding import EncodedPair, PairEncoder
from diffusionlm.evaluation.plan import EvaluationPlan, plan_evaluation
from diffusionlm.evaluation.tasks.items import TaskItem, draw_seed, read_task_items
from diffusionlm.evaluation.tasks.prompts import EncodedItem, PromptBuilder, PromptEncoder
from diffusionlm.evaluation.tasks.verdicts import build_candidate
from diffusionlm.inference.request_builder import RequestBuilder, prepare_request
from diffusionlm.inference.requests import PreparedRequest, RequestOptions
from diffusionlm.inference.settings import DecodingSettings
from tokenizer import CHAT_TEMPLATES, ChatTemplate, Tokenizer


@dataclass(frozen=True)
class PreparedGeneration:
    """A generation task whose prompts fit a model."""

    name: str
    config: GenerationTask
    tokenizer: Tokenizer
    settings: DecodingSettings
    builder: PromptBuilder
    items: Sequence[TaskItem]
    prompts: Sequence[EncodedItem]
    """One for each item."""
    template: ChatTemplate | None

    def build_request(self, index: int, repeat: int) -> PreparedRequest:
        """The request of an answer to an item."""
        item, prompt = self.items[index], self.prompts[index]
        return _build_request(self.settings, item, prompt, draw_seed(self.config.seed, item.id, repeat))


@dataclass(frozen=True)
class PreparedOptions:
    """A likelihood task whose prompts fit a model."""

    name: str
    config: MultipleChoiceTask | ClozeTask
    builder: PromptBuilder
    encoder: PromptEncoder
    items: Sequence[TaskItem]
    template: ChatTemplate | None

    def list_options(self, item: TaskItem) -> tuple[str, ...]:
        """What is scored after the prompt of an item."""
        return list_options(self.config, item)


@dataclass(frozen=True)
class PreparedText:
    """A perplexity task whose text is opened."""

    name: str
    config: PerplexityTask
    plan: EvaluationPlan


PreparedTask = PreparedGeneration | PreparedOptions | PreparedText


@dataclass
class TaskReader:
    """Prepares tasks; those that have the same items share them."""

    _items: dict[str, list[TaskItem]] = field(default_factory=dict)

    def prepare(self, task: AnyTask, model: ModelDescription, model_config: InferModelConfig) -> PreparedTask:
        """Read the items of a task, and check that their prompts fit a model.

        Raises:
            ValueError: the data or the settings are wrong, or a prompt does not fit the model; names the task.
        """
        name = task.name or task.kind
        try:
            match task:
                case PerplexityTask():
                    return _prepare_text(name, task, model_config)
                case MultipleChoiceTask() | ClozeTask():
                    return prepare_options(name, task, self._read_items(task), model.tokenizer, model.config)
                case Gsm8kTask() | HumanEvalTask() | ExactMatchTask():
                    return prepare_generation(name, task, self._read_items(task), model.tokenizer, model.config)
        except ValueError as error:
            raise ValueError(f"task {name!r}: {error}") from None

    def _read_items(self, task: ItemTask) -> list[TaskItem]:
        ignored = {"name", "prompt", "generation", "likelihood", "repeats", "batch_size", "stop", "run_code"}
        key = task.model_dump_json(exclude=ignored)
        if key not in self._items:
            self._items[key] = read_task_items(task)
        return self._items[key]


def check_code_permission(task: ItemTask) -> None:
    """Check that code of a model may be executed, if grading a task executes it.

    Raises:
        ValueError: it may not; says what the permission means.
    """
    if isinstance(task, HumanEvalTask) and not task.run_code:
        raise ValueError(
            "run_code = false, and grading executes programs that the model has written, with the rights of your user: "
            "limits of time, memory and system calls contain accidents, not a determined program. Set run_code = true "
            "(--run-code) to allow it, best in a container without network"
        )


def prepare_generation(
    name: str, task: GenerationTask, items: Sequence[TaskItem], tokenizer: Tokenizer, model: ModelConfig
) -> PreparedGeneration:
    """Encode the prompts of a generation task.

    Raises:
        ValueError: code would be executed without ``run_code``, an item's code is not valid, repeats would be equal,
            there is no chat template, the settings do not fit the model, or a prompt does not fit its context.
    """
    check_code_permission(task)
    if isinstance(task, HumanEvalTask):
        _check_code(task, items)
    template = _find_template(task, tokenizer)
    requests = RequestBuilder.from_config(tokenizer, model, resolve_length(task), template)
    settings = requests.settings
    if task.repeats > 1 and not settings.is_random:
        raise ValueError(
            f"repeats = {task.repeats} would give equal answers, because decoding is deterministic: set "
            "generation.temperature above 0 and generation.top_k other than 1, or repeats = 1"
        )
    builder = PromptBuilder(task)
    encoder = PromptEncoder(builder, PairEncoder.from_model(tokenizer, model), template, requests)
    prompts = []
    for item in items:
        prompt = _encode(encoder, item)
        _build_request(settings, item, prompt, 0)
        prompts.append(prompt)
    return PreparedGeneration(name, task, tokenizer, settings, builder, items, prompts, template)


def prepare_options(
    name: str,
    task: MultipleChoiceTask | ClozeTask,
    items: Sequence[TaskItem],
    tokenizer: Tokenizer,
    model: ModelConfig,
) -> PreparedOptions:
    """Check the prompts of a likelihood task; they are encoded again when they are scored.

    Raises:
        ValueError: there is no chat template, the model has no mask token, or a prompt does not fit its context.
    """
    config = task.likelihood
    block_length = None if config.bidirectional else config.block_length or model.block_length
    if block_length != 1 or model.logit_alignment != "shifted":
        _ = model.required_mask_token_id
    builder, template = PromptBuilder(task), _find_template(task, tokenizer)
    encoder = PromptEncoder(builder, PairEncoder.from_model(tokenizer, model), template)
    if config.end_of_text != "none" and model.eos_token_id is None:
        raise ValueError(
            f'likelihood.end_of_text = "{config.end_of_text}" needs a token, and the model\'s config.json names no '
            'eos_token_id: set it to "none"'
        )
    for item in items:
        try:
            pairs, _ = encoder.encode_options(item, list_options(task, item))
            for index, pair in enumerate(pairs):
                _check_option(pair, f"option {index}", config, model)
        except ValueError as error:
            raise ValueError(f"item {item.id!r}: {error}") from None
    return PreparedOptions(name, task, builder, encoder, items, template)


def _check_option(pair: EncodedPair, name: str, config: AnswerLikelihoodConfig, model: ModelConfig) -> None:
    """Check what scoring would reject once the model is loaded.

    Raises:
        ValueError: the option has no tokens or a mask token, or it is too long with its prompt.
    """
    if not pair.continuation_ids:
        raise ValueError(f"{name} has no tokens, and so no likelihood: correct the file or prompt.delimiter")
    if model.mask_token_id is not None and model.mask_token_id in pair.continuation_ids:
        raise ValueError(f"{name} has the mask token {model.mask_token_id}, whose probability is zero: remove it")
    length = len(pair.context_ids) + len(pair.continuation_ids) + (config.end_of_text != "none")
    if length > model.max_position_embeddings:
        raise ValueError(
            f"{length} tokens of prompt and {name} are more than the model's context, max_position_embeddings = "
            f"{model.max_position_embeddings}: lower prompt.shots or shorten the template"
        )


def list_options(task: MultipleChoiceTask | ClozeTask, item: TaskItem) -> tuple[str, ...]:
    """What is scored after the prompt of an item: the options, their letters, or the answer alone."""
    if isinstance(task, ClozeTask):
        return (item.gold,)
    if task.score == "letters":
        return tuple(chr(ord("A") + index) for index in range(len(item.options)))
    return item.options


def resolve_length(task: GenerationTask) -> GenerationConfig:
    """The generation section of a task with the number of new tokens that is the task's default."""
    if task.generation.max_new_tokens is None and task.generation.total_length is None:
        return task.generation.model_copy(update={"max_new_tokens": task.default_new_tokens})
    return task.generation


def _prepare_text(name: str, task: PerplexityTask, model: InferModelConfig) -> PreparedText:
    text = task.text
    if task.data is not None:
        text = text.model_copy(update={"source": LocalFiles(paths=(str(task.data),)), "split": "all"})
    config = EvalConfig(model=model, data=text, likelihood=task.likelihood)
    # A plan of its own, because a plan counts the documents that it skips.
    rows, _ = plan_evaluation(config).reader.read(0, None, 1)
    if not rows:
        raise ValueError(
            "there is no text in data or text.source: name other files or another split, and the field of the text as "
            "text.source.text_field"
        )
    return PreparedText(name, task, plan_evaluation(config))


def _check_code(task: HumanEvalTask, items: Sequence[TaskItem]) -> None:
    """Check that the prompts and tests of all items are code.

    Raises:
        ValueError: those of an item are not.
    """
    for item in items:
        try:
            build_candidate(task, item, "")
        except ValueError as error:
            raise ValueError(f"{task.data}: item {item.id!r}: {error}") from None


def _find_template(task: ItemTask, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of a task's chats; None: its prompts are texts.

    Raises:
        ValueError: there is none.
    """
    if isinstance(task, ExactMatchTask):
        return resolve_chat_template(task.chat, tokenizer, "chat")
    if task.prompt.format == "text":
        return None
    if task.prompt.chat_template is not None:
        return CHAT_TEMPLATES[task.prompt.chat_template]
    if tokenizer.chat_template is None:
        raise ValueError(
            f'prompt.format = "chat", and the model has no chat template: set prompt.chat_template to one of '
            f"{', '.join(CHAT_TEMPLATES)}"
        )
    return tokenizer.chat_template


def _encode(encoder: PromptEncoder, item: TaskItem) -> EncodedItem:
    try:
        return encoder.encode(item)
    except ValueError as error:
        raise ValueError(f"item {item.id!r}: {error}") from None


def _build_request(settings: DecodingSettings, item: TaskItem, prompt: EncodedItem, seed: int) -> PreparedRequest:
    options = RequestOptions(segment_starts=prompt.segment_starts)
    return prepare_request(settings, prompt.token_ids.tolist(), seed, options, f"item {item.id!r}")
