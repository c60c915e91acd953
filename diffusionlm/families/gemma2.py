"""Gemma 2 (Gemma Team 2024)."""

from __future__ import annotations

from typing import ClassVar

from config.model import MAX_MODULES, ModelConfig
from diffusionlm.families.family import (
    FULL,
    SLIDING,
    JsonObject,
    ModelFamily,
    Options,
    read_layer_type_list,
    sliding_options,
)

_FIXED_OPTIONS: Options = {
    "sandwich_norms": True,
    "norm_offset": True,
    "scale_embeddings": True,
    "qk_norm": False,
    "num_experts": 0,
}
_DEFAULT_OPTIONS: Options = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


class Gemma2Family(ModelFamily):
    """Its code computes ``hidden_activation`` and ignores ``hidden_act``; a missing key of a soft cap is a cap."""

    activation_key: ClassVar[str] = "hidden_activation"
    activations: ClassVar[tuple[str, ...]] = ("silu", "gelu_pytorch_tanh")

    def read_layer_types(self, values: JsonObject, problems: list[str]) -> Options:
        """Read which layers have a sliding window; without ``layer_types``, every second one, from the first."""
        layer_types, num_layers = read_layer_type_list(values, problems), values.get("num_hidden_layers")
        if not isinstance(num_layers, int) or num_layers > MAX_MODULES:
            return {}  # ModelConfig reports the key.
        if layer_types is None:
            layer_types = [SLIDING if index % 2 == 0 else FULL for index in range(num_layers)]
        return sliding_options(layer_types, values.get("sliding_window", 4096))

    def omitted_keys(self, config: ModelConfig) -> set[str]:
        return set()

    def family_keys(self, config: ModelConfig) -> JsonObject:
        scale = config.query_pre_attn_scalar or config.head_dim
        return {
            "hidden_act": config.hidden_act,
            "hidden_activation": config.hidden_act,
            "query_pre_attn_scalar": int(scale) if scale == int(scale) else scale,
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
            "layer_types": list(config.layer_types or [FULL] * config.num_hidden_layers),
        }


GEMMA2 = Gemma2Family("gemma2", "Gemma2ForCausalLM", _FIXED_OPTIONS, _DEFAULT_OPTIONS)
