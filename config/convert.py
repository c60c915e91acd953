"""The whole config of ``diffusionlm-convert``."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from config.base import ConfigPath, NonEmptyStr, NonNegativeInt, PositiveFloat, PositiveInt, Section
from config.families.registry import FAMILIES


class DiffusionSection(Section):
    """``[diffusion]``: what makes a diffusion language model of an autoregressive one. Weights stay as they are; it
    learns to fill masks in training that goes on (`model.init_from`)."""

    mask_token: NonEmptyStr = "<|mask|>"
    """Text of the token that stands for noise; added to the tokenizer if it is not there."""
    mask_token_id: NonNegativeInt | None = None
    """Its id. None: the id it has; else the first row of the embedding that no token uses; else a new row."""
    block_length: PositiveInt | None = None
    """Blocks that the model will be trained to fill one after the other. None: the whole sequence at once."""
    logit_alignment: Literal["keep", "same_position", "shifted"] = "keep"
    """Which output predicts token i: i, or i - 1. keep: as in the source; autoregressive models are shifted."""
    untie_head: bool = False
    """Give the head weights of its own, a copy of the embedding's (SDAR)."""


class ConvertConfig(Section):
    """One call of ``diffusionlm-convert``."""

    source: ConfigPath | None = None
    """A model directory, a checkpoint or a run directory; required, here or as --source."""
    target: ConfigPath | None = None
    """The directory that is written; must not exist. Required, here or as --target."""
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = "keep"
    """Of the weights that are written. keep: the source's, the widest one where they differ."""
    model_type: NonEmptyStr | None = None
    """Family in whose keys and names the target is written, such as "sdar" or "qwen3". None: the source's."""
    max_shard_gigabytes: PositiveFloat = 5.0
    """Largest weight file, in 10^9 bytes."""
    diffusion: DiffusionSection | None = None
    """None: the model stays what it is."""

    @field_validator("model_type")
    @classmethod
    def _check_model_type(cls, value: str | None) -> str | None:
        if value is not None and value not in FAMILIES:
            raise ValueError(f"must be one of {', '.join(FAMILIES)}")
        return value


class AnalyzeConfig(Section):
    """Two model directories, side by side."""

    a: ConfigPath | None = None
    """A model directory, a checkpoint or a run directory; required, here or as the first argument."""
    b: ConfigPath | None = None
    """The other one; None: only the first one is described."""
    values: bool = True
    """Compare the values of tensors that belong together, too; else only names, shapes and dtypes."""
    max_rows: NonNegativeInt = 40
    """Rows of each table that are shown; 0: all."""
    format: Literal["text", "json"] = "text"
    """text: tables. json: one JSON object."""
