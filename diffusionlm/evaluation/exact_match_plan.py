"""The prompts of an exact-match evaluation, checked before the model is loaded. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from config.eval import EvalConfig
from config.finetune.exact_match import ExactMatchConfig
from config.model import ModelConfig
from diffusionlm.checkpoints.model_files import check_weight_files, read_model_description
from diffusionlm.data.chat.reference_answers import ReferenceAnswer, read_reference_answers
from diffusionlm.data.chat.templates import resolve_chat_template
from diffusionlm.data.pipeline import open_chat
from diffusionlm.inference.request_builder import RequestBuilder
from diffusionlm.inference.requests import PreparedRequest
from diffusionlm.inference.settings import DecodingSettings
from tokenizer import ChatTemplate, Tokenizer

KEY = "exact_match.source"


@dataclass(frozen=True)
class ExactMatchPlan:
    """Prompts that fit the model, with their references."""

    config: ExactMatchConfig
    tokenizer: Tokenizer
    settings: DecodingSettings
    references: tuple[ReferenceAnswer, ...]
    requests: tuple[PreparedRequest, ...]
    """One for each reference."""


def plan_exact_match(config: EvalConfig) -> ExactMatchPlan:
    """Read the prompts of ``[exact_match]`` and check them against the model.

    Raises:
        ValueError: the model or its tokenizer is missing, the source has no conversations, there is no chat template,
            or a prompt does not fit the model's context.
    """
    section = config.exact_match
    if config.model.path is None or section is None:
        raise ValueError("model.path and exact_match are required")
    model = read_model_description(config.model.path)
    references = read_reference_answers(section.source, section.split, KEY, section.max_prompts)
    chat = open_chat(section.source, f"{KEY}.chat")
    assert chat is not None, "read_reference_answers has checked it"
    template = resolve_chat_template(chat.config, model.tokenizer, chat.key)
    plan = prepare_references(references, template, model.tokenizer, model.config, section)
    check_weight_files(config.model.path)
    return plan


def prepare_references(
    references: Sequence[ReferenceAnswer],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    model: ModelConfig,
    config: ExactMatchConfig,
) -> ExactMatchPlan:
    """Encode the prompts with the generation prompt of the template, and check them.

    Raises:
        ValueError: a prompt does not fit the model with its answer, or the settings do not fit the model.
    """
    builder = RequestBuilder.from_config(tokenizer, model, config.generation, template)
    requests = [
        builder.prepare(
            builder.encode_chat(item.messages, item.tools), config.seed + number, f"{KEY}: prompt {number + 1}"
        )
        for number, item in enumerate(references)
    ]
    return ExactMatchPlan(config, tokenizer, builder.settings, tuple(references), tuple(requests))
