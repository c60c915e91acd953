"""Qwen3-VL (Qwen Team 2025): Qwen3 and Qwen3-MoE with a vision tower, nested config keys and other tensor names."""

from __future__ import annotations

import re

from config.model import ModelConfig, VisionConfig
from diffusionlm.families.family import DENSE_OPTIONS, GEMMA_OPTIONS_OFF, JsonObject, ModelFamily, Options

_TOP_LEVEL_KEYS = (
    "tie_word_embeddings",
    "quantization_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "mask_token_id",
    "block_length",
    "block_origin",
    "logit_alignment",
    "clean_alignment",
    "noisy_attention",
    "begin_with_eos",
)
"""Keys beside ``text_config`` and ``vision_config``; all others of the text are in ``text_config``."""
_VISION_VALUES: JsonObject = {"in_channels": 3, "hidden_act": "gelu_pytorch_tanh"}
"""Keys of ``vision_config`` whose other values, except null, would change the computation."""
_VISION_ROPE: JsonObject = {"rope_type": "axial", "rope_theta": 10_000.0}
_MROPE_SECTION = [24, 20, 20]
_DEFAULT_OPTIONS: Options = {
    "rope_theta": 500_000.0,
    "image_token_id": 151655,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
_TEXT_NAME = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(?P<name>.+)")
"""Tensors of the text, in files of the whole model and of its parts."""


class Qwen3VLFamily(ModelFamily):
    """Options of the text are in ``text_config``, those of the tower in ``vision_config``."""

    def to_transformers_keys(self, values: JsonObject, problems: list[str]) -> JsonObject:
        text, vision = (values.get(key) or {} for key in ("text_config", "vision_config"))
        if not (isinstance(text, dict) and isinstance(vision, dict) and text and vision):
            problems.append(f"model_type = {self.model_type!r} needs the objects text_config and vision_config")
            return {}
        axial = vision.get("rope_parameters") or {}
        axial = axial if isinstance(axial, dict) else {"rope_type": axial}
        rules = [("vision_config", vision, _VISION_VALUES | {"out_hidden_size": text.get("hidden_size")})]
        rules += [("rope_parameters of vision_config", axial, _VISION_ROPE)]
        ropes = [text[key] for key in ("rope_scaling", "rope_parameters") if isinstance(text.get(key), dict)]
        rules += [("the rope of text_config", rope, {"mrope_interleaved": True}) for rope in ropes]
        problems += [
            f"{place} has {key} = {part[key]!r}, only {value!r} is supported"
            for place, part, supported in rules
            for key, value in supported.items()
            if part.get(key) not in (value, None)
        ]
        tower = {key: vision[key] for key in VisionConfig.model_fields if vision.get(key) is not None}
        section = next((rope["mrope_section"] for rope in ropes if "mrope_section" in rope), _MROPE_SECTION)
        top_level = {key: values[key] for key in _TOP_LEVEL_KEYS if key in values}
        return {**text, **top_level, "vision": tower | {"mrope_section": section}}

    def write_options(self, config: ModelConfig) -> JsonObject:
        text = super().write_options(config)
        vision = text.pop("vision")
        mrope = {"mrope_section": vision.pop("mrope_section"), "mrope_interleaved": True}
        text["rope_scaling"] = {"rope_type": "default", **text.get("rope_scaling", {}), **mrope}
        top_level = {key: text.pop(key) for key in _TOP_LEVEL_KEYS if key in text}
        tied = {"tie_word_embeddings": config.tie_word_embeddings}  # transformers 4 reads that of the text
        return {
            **top_level,
            "text_config": {"model_type": f"{self.model_type}_text", **text, **tied, "use_cache": False},
            "vision_config": {
                "model_type": self.model_type,
                **_VISION_VALUES,
                "out_hidden_size": config.hidden_size,
                **vision,
            },
        }

    def parameter_name(self, stored_name: str) -> str | None:
        if match := _TEXT_NAME.fullmatch(stored_name):
            return match["name"] if match["name"].startswith("lm_head.") else f"model.{match['name']}"
        return f"model.{stored_name}" if stored_name.startswith("visual.") else None

    def stored_name(self, parameter_name: str) -> str:
        if parameter_name.startswith(("lm_head.", "model.visual.")):
            return parameter_name
        return f"model.language_model.{parameter_name.removeprefix('model.')}"


QWEN3_VL = Qwen3VLFamily(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    {**DENSE_OPTIONS, "qk_norm": True},
    {**_DEFAULT_OPTIONS, "head_dim": 128},
    supports_sliding_window=False,
    has_vision=True,
)
QWEN3_VL_MOE = Qwen3VLFamily(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    {**GEMMA_OPTIONS_OFF, "qk_norm": True, "norm_topk_prob": True},
    {
        **_DEFAULT_OPTIONS,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "router_aux_loss_coef": 0.001,
    },
    supports_sliding_window=False,
    requires_experts=True,
    has_vision=True,
    stacks_experts=True,
)
