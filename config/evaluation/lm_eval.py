"""Settings of the adapter to lm-evaluation-harness: ``--model_args`` of its command line, or keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from config.base import NonNegativeInt, PositiveInt, Section
from config.evaluation.likelihood import AnswerLikelihoodConfig
from config.evaluation.presets import apply_preset, get_preset, list_deviations
from config.generation import GenerationConfig
from config.infer import InferModelConfig

SHORT_NAMES = {"pretrained": "path"} | {name: name for name in InferModelConfig.model_fields}
"""Arguments that stand for keys of ``model``: `path` or, as for other models of the harness, `pretrained`."""

PROTOCOL_SECTIONS = ("generation", "likelihood")
"""Sections that a preset sets."""


class HarnessLikelihoodConfig(AnswerLikelihoodConfig):
    """Likelihoods whose differences are judged by the harness."""

    racing: bool = False
    """As of own tasks; but off, because the harness also compares log-likelihoods per character and per byte (acc_norm,
    acc_bytes), which may need more draws than their sums."""


class LmEvalConfig(Section):
    """How a model answers the requests of lm-evaluation-harness."""

    preset: str | None = None
    """Published protocol, such as llada-instruct/gsm8k, whose generation and likelihood are the defaults here
    (`config/resources/evaluation/presets.toml`). Prompts, examples and grading are those of the harness's task."""
    model: InferModelConfig = InferModelConfig()
    generation: GenerationConfig = GenerationConfig()
    """How answers are decoded. A task's length replaces max_new_tokens; its temperature, filters (top_k, top_p, min_p)
    and penalties count only if they are not set here, or if the task asks for sampling (do_sample = true). Without any
    length: 256 new tokens."""
    likelihood: HarnessLikelihoodConfig = HarnessLikelihoodConfig()
    """How continuations and options are scored."""
    batch_size: PositiveInt = 16
    """Answers that are decoded at a time; results do not depend on it."""
    seed: NonNegativeInt = 0
    """Seed of answers. An answer's randomness depends on it, the task, the document and the number of the repeat."""
    is_greedy: Literal["auto", "always", "never"] = "auto"
    """Whether continuations are also compared with greedy decoding. auto: those of documents with a single one, where
    accuracy is this (LAMBADA); the accuracy of multiple choice is not. always: also for multiple choice with the metric
    exact_match. never: reported as false."""
    window: Annotated[int, Field(ge=2)] | None = None
    """Tokens of a window of loglikelihood_rolling, one of which is context. None: the model's context length."""
    truncation: Literal["error", "left"] = "error"
    """A context that does not fit into the model's. error: nothing is computed. left: it loses its first tokens, and
    the number of such requests is reported."""
    chat_template: Literal["chatml", "qwen3", "llama3", "llada"] | None = None
    """Chat template of --apply_chat_template. None: the model's own."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("preset"), str):
            return values
        sections = {key: values[key] for key in PROTOCOL_SECTIONS if isinstance(values.get(key), dict)}
        merged = apply_preset(values["preset"], sections)
        return {**values, **{key: merged[key] for key in PROTOCOL_SECTIONS if key in merged}}

    @property
    def deviations(self) -> list[str]:
        """Return what differs from the preset, as far as it is set here."""
        if self.preset is None:
            return []
        published = get_preset(self.preset).values
        values = self.model_dump(exclude_unset=True, include=set(PROTOCOL_SECTIONS))
        return list_deviations(self.preset, {**published, **values})


def nest_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Turn arguments such as ``path`` and ``generation.steps`` into the nested values of `LmEvalConfig`.

    Raises:
        ValueError: two arguments name the same key, or one names a key within the value of another.
    """
    tree: dict[str, Any] = {}
    for name, value in arguments.items():
        parts = ["model", SHORT_NAMES[name]] if name in SHORT_NAMES else name.split(".")
        table = tree
        for part in parts[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ValueError(f"argument {name} = {value!r}: {part} has a value already; name each key once")
        if parts[-1] in table:
            raise ValueError(f"argument {name} = {value!r}: {'.'.join(parts)} has a value already; name each key once")
        table[parts[-1]] = dict(value) if isinstance(value, Mapping) else value
    return tree
