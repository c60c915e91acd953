"""Ministral 3 (Mistral AI 2025), and Nemotron-Labs-Diffusion (NVIDIA 2026): its layers under other tensor names."""

from __future__ import annotations

from config.model import ModelConfig
from diffusionlm.families.family import DENSE_OPTIONS, JsonObject, ModelFamily, Options

_FIXED_OPTIONS: Options = {
    **DENSE_OPTIONS,
    "qk_norm": False,
    "attention_bias": False,
    "attention_output_bias": False,
}
_DEFAULT_OPTIONS: Options = {"head_dim": 128, "rms_norm_eps": 1e-5}
_EQUAL_MSCALES: JsonObject = {"mscale": 1.0, "mscale_all_dim": 1.0}
_NEMOTRON_TO_MODULE = {"encoder.": "model.", "diffusion_head.": "lm_head."}


class MinistralFamily(ModelFamily):
    """Its rotary options are in ``rope_parameters``: always YaRN, whose queries are scaled by position."""

    def to_transformers_keys(self, values: JsonObject, problems: list[str]) -> JsonObject:
        if values.get("sliding_window") is not None:
            problems.append(f"sliding_window = {values['sliding_window']!r} is not supported for {self.model_type}")
        return values

    def write_options(self, config: ModelConfig) -> JsonObject:
        values = super().write_options(config)
        rope = {"rope_theta": values.pop("rope_theta"), **values.pop("rope_scaling")}
        if rope.get("attention_factor") == 1.0:  # as published; programs with a YaRN of their own read these keys
            rope = {key: value for key, value in rope.items() if key != "attention_factor"} | _EQUAL_MSCALES
        return {**values, "rope_parameters": rope}


class NemotronFamily(MinistralFamily):
    """The body is ``encoder``, the head ``diffusion_head``."""

    def parameter_name(self, stored_name: str) -> str | None:
        names = _NEMOTRON_TO_MODULE.items()
        return next((name + stored_name[len(own) :] for own, name in names if stored_name.startswith(own)), None)

    def stored_name(self, parameter_name: str) -> str:
        names = _NEMOTRON_TO_MODULE.items()
        return next(own + parameter_name[len(name) :] for own, name in names if parameter_name.startswith(name))


MINISTRAL3 = MinistralFamily(
    "ministral3",
    "Ministral3ForCausalLM",
    _FIXED_OPTIONS,
    {**_DEFAULT_OPTIONS, "eos_token_id": 2, "pad_token_id": 11},
    supports_sliding_window=False,
    scales_queries=True,
)
NEMOTRON_LABS_DIFFUSION = NemotronFamily(
    "nemotron_labs_diffusion",
    "NemotronLabsDiffusionModel",
    {**_FIXED_OPTIONS, "tie_word_embeddings": False},
    {**_DEFAULT_OPTIONS, "eos_token_id": 11},
    {"mask_token_id": 100, "logit_alignment": "same_position", "clean_alignment": "shifted", "block_length": 32},
    supports_sliding_window=False,
    scales_queries=True,
    has_block_size_key=True,
    default_strategy="threshold",
    next_token_first=True,
)
