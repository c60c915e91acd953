"""A task for a model: its items and prompts, checked against the model before that is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from config.eval import EvalConfig
from config.evaluation.tasks import AnyItemTask, AnyTask
from config.infer import InferModelConfig
from config.model import ModelConfig
from diffusionlm.checkpoints.model_files import ModelDescription
from diffusionlm.evaluation.grading.code_execution import probe_isolation
from diffusionlm.evaluation.likelihood.answers import AnswerBuilder
from diffusionlm.evaluation.tasks.item_task import GenerationTask, LikelihoodTask, TaskItem
from diffusionlm.evaluation.tasks.items import read_task_items
from diffusionlm.evaluation.tasks.perplexity import PerplexityTask
from diffusionlm.evaluation.tasks.prompts import PreparedItems
from diffusionlm.evaluation.text_likelihood import OpenedText, describe_model
from diffusionlm.vision.processor import ImageProcessor, load_processor
from files.usage_error import prefix_errors
from tokenizer import Tokenizer


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

    Args:
        processor: of images in items; None: the model reads none.

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
