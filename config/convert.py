"""The whole configs of ``diffusionlm-convert`` and ``diffusionlm-analyze``."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import field_validator, model_validator

from config.base import ConfigPath, NonEmptyStr, NonNegativeInt, PositiveInt, Section
from diffusionlm.families.hub import is_hub_name


class DiffusionSection(Section):
    """``[diffusion]``: convert an autoregressive model to a diffusion model. Its weights do not change; continue
    training (`model.init_from`) to let it learn to fill in masked tokens."""

    mask_token: NonEmptyStr = "<|mask|>"
    """Text of the mask token, added to the tokenizer if it has none of this name."""
    mask_token_id: NonNegativeInt | None = None
    """Id of the mask token. None: its id in the tokenizer, else the first unused row of the embedding, else a new
    row."""
    mask_row: NonEmptyStr | None = None
    """Values of the mask token's row of the embedding, and of an untied head. "mean": the mean of the other rows.
    "random": normal, with the other rows' standard deviation. "reuse:ID": those of the token ID. None: the mean if no
    token was trained on the row, else as in the source."""
    block_length: PositiveInt | None = None
    """Tokens of a block in block diffusion. None: one block for the whole sequence."""
    logit_alignment: Literal["keep", "same_position", "shifted"] = "keep"
    """Output that predicts token i: i, or i - 1 (shifted). keep: as in the source; autoregressive models are
    shifted."""
    clean_alignment: Literal["shifted"] | None = None
    """shifted: committed text is token-causal and its output i - 1 predicts token i, as in the source: the model keeps
    its next-token law. Train it with objective.clean_attention = "token". None: committed text is block-causal."""
    untie_head: bool = False
    """Give the output head its own weights, a copy of the embedding (SDAR)."""

    @field_validator("mask_row")
    @classmethod
    def _check_mask_row(cls, value: str | None) -> str | None:
        if value is not None and re.fullmatch(r"mean|random|reuse:\d+", value, re.ASCII) is None:
            raise ValueError('must be "mean", "random" or "reuse:ID" with the id of a token')
        return value

    @property
    def reused_row(self) -> int | None:
        """ID of ``mask_row = "reuse:ID"``."""
        kind, _, token_id = (self.mask_row or "").partition(":")
        return int(token_id) if kind == "reuse" else None


class ConvertConfig(Section):
    """The whole config of ``diffusionlm-convert``."""

    source: ConfigPath | None = None
    """A model directory, a checkpoint, a run directory, or a model of the Hub (org/name); required, here or as
    --source."""
    target: ConfigPath | None = None
    """Directory to write; must not exist. Required, here or as --target."""
    adapter: ConfigPath | None = None
    """Directory of a PEFT adapter (LoRA) to merge into the weights: computed in float32, rounded once."""
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = "keep"
    """Dtype of the weights. keep: that of the source; of several, the narrowest that holds all of them."""
    model_type: NonEmptyStr | None = None
    """Model family, whose config keys and tensor names the target has, such as "sdar" or "qwen3". None: the
    source's."""
    diffusion: DiffusionSection | None = None
    """None: no conversion to a diffusion model."""
    push: NonEmptyStr | None = None
    """Repository of the Hugging Face Hub, OWNER/NAME, to upload the target to; without `target` the source as it is: a
    model, an adapter, or the last checkpoint of a run. It is created if it does not exist. None: no upload."""
    private: bool = False
    """Create the repository as a private one, and push to no public one. false: its owner's default, mostly public."""

    @model_validator(mode="after")
    def _check_push(self) -> Self:
        if self.push is not None and ("@" in self.push or not is_hub_name(self.push)):
            raise ValueError(f'push = "{self.push}": expected OWNER/NAME, a repository of the Hugging Face Hub')
        if self.private and self.push is None:
            raise ValueError("private = true has no effect without push: set push to OWNER/NAME, or remove private")
        changes = {"adapter", "dtype", "model_type", "diffusion"} & self.model_fields_set
        if self.push is not None and self.target is None and changes:
            raise ValueError(f"push without target uploads the source as it is: set target, or remove {min(changes)}")
        return self


class AnalyzeConfig(Section):
    """The whole config of ``diffusionlm-analyze``."""

    a: ConfigPath | None = None
    """A model directory, a checkpoint, a run directory, or a model of the Hub (org/name); required, here or as the
    first argument."""
    b: ConfigPath | None = None
    """Directory to compare with. None: only describe the first one."""
    values: bool = True
    """Compare the values of tensors; otherwise only names, shapes and dtypes."""
    max_rows: NonNegativeInt = 40
    """Rows of each table at most; 0: all."""
    format: Literal["text", "json"] = "text"
    """text: tables. json: one JSON object."""
