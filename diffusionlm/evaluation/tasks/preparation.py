"""A task for a model: its items, and their prompts, as texts or chats, from a template with the fields of an item after
solved examples; checked against the model before that is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from string import Formatter
from typing import Any

from config.eval import EvalConfig
from config.evaluation.tasks import AnyItemTask, AnyTask
from config.infer import InferModelConfig
from config.model import ModelConfig
from diffusionlm.checkpoints.model_files import ModelDescription
from diffusionlm.data.chat.conversation import describe_images
from diffusionlm.data.chat.templates import resolve_chat_template
from diffusionlm.evaluation.grading.code_execution import probe_isolation
from diffusionlm.evaluation.likelihood.answers import AnswerBuilder
from diffusionlm.evaluation.pair_encoding import PairEncoder
from diffusionlm.evaluation.tasks.exact_match import ExactMatchTask
from diffusionlm.evaluation.tasks.item_task import GenerationTask, LikelihoodTask, TaskItem
from diffusionlm.evaluation.tasks.items import draw_seed, read_items_of_file, read_task_items
from diffusionlm.evaluation.tasks.perplexity import PerplexityTask
from diffusionlm.evaluation.text_likelihood import OpenedText, describe_model
from diffusionlm.inference.healing import HealedText, split_infill
from diffusionlm.inference.images import expand_images
from diffusionlm.inference.request_builder import RequestBuilder
from diffusionlm.inference.requests import PreparedRequest
from diffusionlm.vision.messages import place_images, split_images
from diffusionlm.vision.processor import ImageProcessor, RawImage, load_processor
from files.usage_error import prefix_errors
from tokenizer import CHAT_TEMPLATES, ChatTemplate, Tokenizer, render_chat


def fill_template(template: str, fields: Mapping[str, Any], key: str) -> str:
    """Replace each ``{name}`` by a field, and ``{{`` and ``}}`` by braces.

    Raises:
        ValueError: the template is malformed, or there is no such field; names ``key``.
    """
    parts = []
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{key} = {template!r}: {error}; write {{{{ and }}}} for braces") from None
    for literal, name, specification, conversion in pieces:
        parts.append(literal)
        if name is None:
            continue
        if name not in fields or specification or conversion:
            raise ValueError(
                f"{key}: {{{name}}} is no field of the item; its fields are {', '.join(map(repr, fields))}. Write "
                "{{ and }} for braces"
            )
        value = fields[name]
        parts.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
    return "".join(parts)


class PreparedItems:
    """The items of a task, and their prompts for a model: texts, or chats if there is a template of these."""

    def __init__(
        self,
        task: AnyItemTask,
        items: Sequence[TaskItem],
        tokenizer: Tokenizer,
        model: ModelConfig,
        processor: ImageProcessor | None = None,
    ) -> None:
        """Find the chat template, and read the examples."""
        self.name, self.config, self.items = task.name or task.kind, task, items
        self.chat_template = _find_chat_template(task, tokenizer)
        self.prompt = task.prompt_config
        defaults = (task.question_template, task.answer_template, task.delimiter)
        values = (self.prompt.template, self.prompt.answer_template, self.prompt.delimiter)
        self.template, self.answer_template, self.delimiter = (
            default if value is None else value for value, default in zip(values, defaults, strict=True)
        )
        path = self.prompt.shots_data
        self._examples = [] if path is None else list(read_items_of_file(task, path))
        self._tokenizer, self._model, self._processor = tokenizer, model, processor
        self._encoder = PairEncoder(tokenizer, model)

    @cached_property
    def requests(self) -> RequestBuilder:
        """How answers are decoded."""
        assert isinstance(self.config, GenerationTask), "a likelihood task decodes nothing"
        config = self.config.resolve_length()
        return RequestBuilder.from_config(
            self._tokenizer, self._model, config, self.chat_template, processor=self._processor
        )

    def text(self, item: TaskItem) -> str:
        """The prompt as a text, with examples and the beginning of the answer."""
        text = self._join_examples(item)
        prefix = self.answer_prefix(item)
        return f"{text}{self.delimiter}{prefix}" if prefix else text

    def messages(self, item: TaskItem) -> list[dict[str, Any]]:
        """The prompt as a chat, without the beginning of the answer."""
        if item.messages:
            return [dict(message) for message in item.messages]
        system = [] if self.prompt.system is None else [{"role": "system", "content": self.prompt.system}]
        if self.prompt.shots_as == "text":
            return [*system, _build_message(self._join_examples(item), *self.select_shots(item), item)]
        turns = []
        for shot in self.select_shots(item):
            turns.append(_build_message(self._question(shot), shot))
            turns.append({"role": "assistant", "content": self._answer(shot)})
        return [*system, *turns, _build_message(self._question(item), item)]

    def answer_prefix(self, item: TaskItem) -> str:
        """The text that the answer begins with."""
        return fill_template(self.prompt.answer_prefix, item.fields, "prompt.answer_prefix")

    def select_shots(self, item: TaskItem) -> list[TaskItem]:
        """The examples of an item: the first ones that are neither the item nor a copy of it.

        Raises:
            ValueError: there are fewer than ``prompt.shots``.
        """
        own, shots = _question_and_gold(item), self.prompt.shots
        selected = list(islice((example for example in self._examples if _question_and_gold(example) != own), shots))
        if len(selected) < shots:
            raise ValueError(
                f"prompt.shots_data = {self.prompt.shots_data} has {len(selected)} examples besides the item and its "
                f"copies, and prompt.shots = {shots}: lower shots, or name a file with more"
            )
        return selected

    def build_request(self, item: TaskItem, repeat: int) -> PreparedRequest:
        """Build the request of an answer to an item."""
        assert isinstance(self.config, GenerationTask)
        if self.config.fills_masks:
            prompt = self.requests.encode_spans(split_infill(self.text(item)))
        elif self.chat_template is None:
            prompt = HealedText(self._encoder.encode(self.text(item)))
        else:
            prompt = self.requests.encode_chat(self.messages(item), item.tools, self.answer_prefix(item))
        return self.requests.prepare(prompt, draw_seed(self.config.seed, item.id, repeat), f"item {item.id!r}")

    def encode_options(self, item: TaskItem, options: Sequence[str]) -> tuple[HealedText, tuple[tuple[int, ...], ...]]:
        """Encode a prompt, with its images, and its possible continuations."""
        files: list[RawImage] = []
        if self.chat_template is None:
            text, delimiter = self.text(item), self.delimiter
        else:
            messages, files = split_images(self.messages(item))
            chat = render_chat(self.chat_template, messages, add_generation_prompt=True)
            text, delimiter = chat + self.answer_prefix(item), ""
        pairs = [self._encoder.encode_pair(text, f"{delimiter}{option}") for option in options]
        context = HealedText(pairs[0].context_ids)
        if files:
            context = expand_images(context, files, self._processor, self._model)
        return context, tuple(pair.continuation_ids for pair in pairs)

    def hash_prompt(self, item: TaskItem) -> str:
        """SHA-256 of the prompt: of the text, or of the chat and the beginning of the answer as JSON."""
        if self.chat_template is None:
            text = self.text(item)
        else:
            text = json.dumps(
                [describe_images(self.messages(item)), item.tools, self.answer_prefix(item)], ensure_ascii=False
            )
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()

    def _join_examples(self, item: TaskItem) -> str:
        shots = [f"{self._question(shot)}{self.delimiter}{self._answer(shot)}" for shot in self.select_shots(item)]
        return self.prompt.separator.join([*shots, self._question(item)])

    def _question(self, item: TaskItem) -> str:
        return fill_template(self.template, item.fields, "prompt.template")

    def _answer(self, item: TaskItem) -> str:
        return fill_template(self.answer_template, item.fields, "prompt.answer_template")


def _build_message(text: str, *items: TaskItem) -> dict[str, Any]:
    """A user message with the images of items: where the text has ``<image>``, else before it."""
    message: dict[str, Any] = {"role": "user", "content": text}
    parts = [part for item in items for part in item.images]
    if not parts:
        return message
    [placed], images = place_images([message], [part["image"] for part in parts]), iter(parts)
    return {**message, "content": [next(images) if part["type"] == "image" else part for part in placed["content"]]}


def _find_chat_template(task: AnyItemTask, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of a task's chats; None: its prompts are texts."""
    if isinstance(task, ExactMatchTask):
        return resolve_chat_template(task.chat_rows, tokenizer, "chat" if task.source is None else "source.chat")
    prompt = task.prompt
    if prompt.format == "text":
        return None
    if prompt.chat_template is not None:
        return CHAT_TEMPLATES[prompt.chat_template]
    if tokenizer.chat_template is None:
        raise ValueError(
            f'prompt.format = "chat", and the model has no chat template: set prompt.chat_template to one of '
            f"{', '.join(CHAT_TEMPLATES)}"
        )
    return tokenizer.chat_template


def _question_and_gold(item: TaskItem) -> tuple[str, str]:
    """What a copy of an item shares with it, whatever other fields it has."""
    return str(item.fields.get("question", "")).strip(), item.gold


# ----------------------------------------------------------------------------------------------------------------------
# Tasks of variants, checked before a model is loaded


@dataclass(frozen=True)
class PreparedText:
    """A perplexity task whose text is opened."""

    name: str
    config: PerplexityTask
    text: OpenedText
    items: Sequence[TaskItem] = (TaskItem("", id="text"),)


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
    if any(task.runs_code for variant in variants for task in variant.tasks):
        try:
            probe_isolation()
        except RuntimeError as error:
            raise ValueError(f"run_code = true: {error}") from None
    prepared = []
    for variant in variants:
        with prefix_errors(f"variant {variant.name!r}" if len(variants) > 1 else ""):
            model = describe_model(variant.model)
            tasks = tuple(_prepare_task(task, model, variant.model) for task in variant.tasks)
        prepared.append(replace(variant, prepared=tasks, directory=model.directory))
    return prepared


def _prepare_task(task: AnyTask, model: ModelDescription, model_config: InferModelConfig) -> PreparedTask:
    with prefix_errors(f"task {task.name or task.kind!r}"):
        if isinstance(task, PerplexityTask):
            config = EvalConfig(model=model_config, data=task.text_config, likelihood=task.likelihood)
            return PreparedText(task.name or task.kind, task, OpenedText(config, model))
        processor = None if model.config.vision is None else load_processor(model.directory)
        return prepare_items(task, read_task_items(task), model.tokenizer, model.config, processor)


def prepare_items(
    task: AnyItemTask,
    items: Sequence[TaskItem],
    tokenizer: Tokenizer,
    model: ModelConfig,
    processor: ImageProcessor | None = None,
) -> PreparedItems:
    """Check the items and prompts of a task against a model.

    Raises:
        ValueError: code would be executed without ``run_code``, an item cannot be graded, repeats would be equal, there
            is no chat template, the settings do not fit the model, or a prompt does not fit its context; names the
            item.
    """
    prepared = PreparedItems(task, items, tokenizer, model, processor)
    is_chat = prepared.chat_template is not None and not (isinstance(task, GenerationTask) and task.fills_masks)
    # The settings are resolved here, so that no item is blamed for them.
    if isinstance(task, GenerationTask) and not prepared.requests.settings.is_random and task.repeats > 1:
        raise ValueError(
            f"repeats = {task.repeats} would give equal answers, because decoding is deterministic: set "
            "generation.temperature above 0 and generation.top_k other than 1, or repeats = 1"
        )
    answers = AnswerBuilder(model, task.likelihood) if isinstance(task, LikelihoodTask) else None
    for item in items:
        with prefix_errors(f"{task.data or 'source'}: item {item.id!r}"):
            if item.images and not is_chat:
                raise ValueError(
                    'it has images, which only chats have: set prompt.format = "chat", or remove image and images'
                )
            if isinstance(task, GenerationTask):
                task.check_item(item)
                prepared.build_request(item, 0)
            else:
                assert answers is not None
                context, continuations = prepared.encode_options(item, task.list_options(item))
                for index, token_ids in enumerate(continuations):
                    answers.build(context.token_ids, token_ids, f"option {index}", context.options)
    return prepared
