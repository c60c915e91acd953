"""A task for a model: its items and prompts, checked against the model before that is loaded. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from config.eval import EvalConfig
from config.evaluation.likelihood import AnswerLikelihoodConfig
from config.evaluation.tasks import AnyItemTask, AnyTask
from config.infer import InferModelConfig
from config.model import ModelConfig
from diffusionlm.checkpoints.adapter_config import read_adapter_config
from diffusionlm.checkpoints.model_files import ModelDescription, check_weight_files, read_model_description
from diffusionlm.data.chat.templates import resolve_chat_template
from diffusionlm.evaluation.grading.code_execution import probe_isolation
from diffusionlm.evaluation.pair_encoding import EncodedPair, PairEncoder
from diffusionlm.evaluation.tasks.exact_match import ExactMatchTask
from diffusionlm.evaluation.tasks.humaneval import HumanEvalTask
from diffusionlm.evaluation.tasks.item_task import GenerationTask, LikelihoodTask, TaskItem
from diffusionlm.evaluation.tasks.items import draw_seed, read_task_items
from diffusionlm.evaluation.tasks.perplexity import PerplexityTask
from diffusionlm.evaluation.tasks.prompts import EncodedItem, PromptBuilder, PromptEncoder
from diffusionlm.evaluation.text_likelihood import OpenedText, open_text
from diffusionlm.inference.request_builder import RequestBuilder, prepare_request
from diffusionlm.inference.requests import PreparedRequest, RequestOptions
from diffusionlm.inference.settings import DecodingSettings
from tokenizer import CHAT_TEMPLATES, ChatTemplate, Tokenizer


@dataclass(frozen=True)
class PreparedItems:
    """A task whose prompts fit a model."""

    name: str
    config: AnyItemTask
    tokenizer: Tokenizer
    items: Sequence[TaskItem]
    builder: PromptBuilder
    template: ChatTemplate | None
    encoder: PromptEncoder
    decoding: DecodingSettings | None = None
    """None: nothing is generated."""
    prompts: Sequence[EncodedItem] = ()
    """One for each item, if answers are generated; else prompts are encoded again when their options are scored."""

    @property
    def settings(self) -> DecodingSettings:
        """How answers are decoded."""
        assert self.decoding is not None, "a likelihood task decodes nothing"
        return self.decoding

    def build_request(self, index: int, repeat: int) -> PreparedRequest:
        """The request of an answer to an item."""
        item = self.items[index]
        return _build_request(self.settings, item, self.prompts[index], draw_seed(self.config.seed, item.id, repeat))


@dataclass(frozen=True)
class PreparedText:
    """A perplexity task whose text is opened."""

    name: str
    config: PerplexityTask
    text: OpenedText


PreparedTask = PreparedItems | PreparedText


@dataclass(frozen=True)
class Variant:
    """A model with settings, and its tasks."""

    name: str
    model: InferModelConfig
    tasks: tuple[AnyTask, ...]
    """With the settings of the variant."""
    prepared: tuple[PreparedTask, ...] = ()
    """The tasks for its model, after `prepare_variants`."""
    directory: Path = Path()
    """Of the model, resolved."""


def prepare_variants(variants: Sequence[Variant]) -> list[Variant]:
    """Check the tasks of variants against their models, before a model is loaded.

    Raises:
        ValueError: something does not fit; names the variant, the task or the file.
    """
    if any(isinstance(task, HumanEvalTask) and task.run_code for variant in variants for task in variant.tasks):
        try:
            probe_isolation()
        except RuntimeError as error:
            raise ValueError(f"run_code = true: {error}") from None
    reader, prepared = TaskReader(), []
    for variant in variants:
        assert variant.model.path is not None, "checked when variants were combined"
        try:
            model = read_model_description(variant.model.path)
            tasks = tuple(reader.prepare(task, model, variant.model) for task in variant.tasks)
            check_weight_files(variant.model.path)
            if variant.model.adapter is not None:
                read_adapter_config(variant.model.adapter)
        except ValueError as error:
            if len(variants) == 1:
                raise
            raise ValueError(f"variant {variant.name!r}: {error}") from None
        prepared.append(replace(variant, prepared=tasks, directory=model.directory))
    return prepared


@dataclass
class TaskReader:
    """Prepares tasks; those that have the same items share them."""

    _items: dict[str, list[TaskItem]] = field(default_factory=dict)

    def prepare(self, task: AnyTask, model: ModelDescription, model_config: InferModelConfig) -> PreparedTask:
        """Read the items of a task, and check that their prompts fit a model.

        Raises:
            ValueError: the data or the settings are wrong, or a prompt does not fit the model; names the task.
        """
        try:
            if isinstance(task, PerplexityTask):
                return _prepare_text(task, model_config)
            return prepare_items(task, self._read_items(task), model.tokenizer, model.config)
        except ValueError as error:
            raise ValueError(f"task {task.name or task.kind!r}: {error}") from None

    def _read_items(self, task: AnyItemTask) -> list[TaskItem]:
        ignored = {"name", "prompt", "generation", "likelihood", "repeats", "batch_size", "stop", "run_code"}
        key = task.model_dump_json(exclude=ignored)
        if key not in self._items:
            self._items[key] = read_task_items(task)
        return self._items[key]


def check_code_permission(task: AnyTask) -> None:
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


def prepare_items(
    task: AnyItemTask, items: Sequence[TaskItem], tokenizer: Tokenizer, model: ModelConfig
) -> PreparedItems:
    """Check the items and prompts of a task against a model, and encode the prompts of answers.

    Raises:
        ValueError: code would be executed without ``run_code``, an item cannot be graded, repeats would be equal, there
            is no chat template, the settings do not fit the model, or a prompt does not fit its context; names the
            item.
    """
    check_code_permission(task)
    builder, template = PromptBuilder(task), _find_template(task, tokenizer)
    requests = _build_requests(task, tokenizer, model, template) if isinstance(task, GenerationTask) else None
    settings = None if requests is None else requests.settings
    encoder = PromptEncoder(builder, PairEncoder.from_model(tokenizer, model), template, requests)
    if isinstance(task, LikelihoodTask):
        _check_likelihood(task.likelihood, model)
    prompts = []
    for item in items:
        try:
            if isinstance(task, GenerationTask):
                assert settings is not None
                task.check_item(item)
                prompts.append(encoder.encode(item))
                _build_request(settings, item, prompts[-1], 0)
            else:
                pairs, _ = encoder.encode_options(item, task.list_options(item))
                for index, pair in enumerate(pairs):
                    _check_option(pair, f"option {index}", task.likelihood, model)
        except ValueError as error:
            raise ValueError(f"{task.data or 'source'}: item {item.id!r}: {error}") from None
    name = task.name or task.kind
    return PreparedItems(name, task, tokenizer, items, builder, template, encoder, settings, prompts)


def _build_requests(
    task: GenerationTask, tokenizer: Tokenizer, model: ModelConfig, template: ChatTemplate | None
) -> RequestBuilder:
    """Resolve how answers are decoded.

    Raises:
        ValueError: the settings do not fit the model, or repeats would be equal.
    """
    requests = RequestBuilder.from_config(tokenizer, model, task.resolve_length(), template)
    if task.repeats > 1 and not requests.settings.is_random:
        raise ValueError(
            f"repeats = {task.repeats} would give equal answers, because decoding is deterministic: set "
            "generation.temperature above 0 and generation.top_k other than 1, or repeats = 1"
        )
    return requests


def _check_likelihood(config: AnswerLikelihoodConfig, model: ModelConfig) -> None:
    """Check that a model can score options.

    Raises:
        ValueError: it has no mask token, or not the end-of-text token that the settings need.
    """
    block_length = None if config.bidirectional else config.block_length or model.block_length
    if block_length != 1 or model.logit_alignment != "shifted":
        _ = model.required_mask_token_id
    if config.end_of_text != "none" and model.eos_token_id is None:
        raise ValueError(
            f'likelihood.end_of_text = "{config.end_of_text}" needs a token, and the model\'s config.json names no '
            'eos_token_id: set it to "none"'
        )


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


def _prepare_text(task: PerplexityTask, model: InferModelConfig) -> PreparedText:
    config = EvalConfig(model=model, data=task.text_config, likelihood=task.likelihood)
    # Opened again below, because an opened text counts the documents that it skips.
    rows, _ = open_text(config).reader.read(0, None, 1)
    if not rows:
        raise ValueError(
            "there is no text in data or text.source: name other files or another split, and the field of the text as "
            "text.source.text_field"
        )
    return PreparedText(task.name or task.kind, task, open_text(config))


def _find_template(task: AnyItemTask, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of a task's chats; None: its prompts are texts.

    Raises:
        ValueError: there is none.
    """
    if isinstance(task, ExactMatchTask):
        return resolve_chat_template(task.chat_rows, tokenizer, "chat" if task.source is None else "source.chat")
    config = task.prompt
    if config.format == "text":
        return None
    if config.chat_template is not None:
        return CHAT_TEMPLATES[config.chat_template]
    if tokenizer.chat_template is None:
        raise ValueError(
            f'prompt.format = "chat", and the model has no chat template: set prompt.chat_template to one of '
            f"{', '.join(CHAT_TEMPLATES)}"
        )
    return tokenizer.chat_template


def _build_request(settings: DecodingSettings, item: TaskItem, prompt: EncodedItem, seed: int) -> PreparedRequest:
    options = RequestOptions(segment_starts=prompt.segment_starts)
    return prepare_request(settings, prompt.token_ids.tolist(), seed, options, f"item {item.id!r}")
