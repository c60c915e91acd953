"""Config of ``diffusionlm-eval``."""

from __future__ import annotations

from typing import Literal

from config.base import ConfigPath, Section
from config.evaluation.text import EvalDataConfig, LikelihoodConfig, NelboConfig
from config.finetune.exact_match import ExactMatchConfig
from config.infer import InferModelConfig


class EvalOutputConfig(Section):
    """``[output]``: format of the printed result."""

    format: Literal["text", "json"] = "text"
    """text: a table. json: one object on one line."""
    file: ConfigPath | None = None
    """Also write the JSON object to this file; an existing one is replaced."""


class EvalConfig(Section):
    """All sections of ``diffusionlm-eval``."""

    model: InferModelConfig = InferModelConfig()
    data: EvalDataConfig = EvalDataConfig()
    likelihood: LikelihoodConfig = NelboConfig()
    exact_match: ExactMatchConfig | None = None
    output: EvalOutputConfig = EvalOutputConfig()
