"""LLaDA (Nie et al. 2025): the computation of a bidirectional Llama under OLMo's config keys and tensor names.

They are those of configuration_llada.py and modeling_llada.py in LLaDA-8B.
"""

from __future__ import annotations

import math
import re

from config.model import ModelConfig
from diffusionlm.families.family import DENSE_OPTIONS, JsonObject, ModelFamily, Options

_FIXED_OPTIONS: Options = {
    "qk_norm": False,
    "attention_bias": False,
    "attention_output_bias": False,
    "rope_scaling": None,
    **DENSE_OPTIONS,
}
_DEFAULT_OPTIONS: Options = {"rms_norm_eps": 1e-5, "eos_token_id": 126081, "pad_token_id": 126081}
_DIFFUSION_DEFAULTS: Options = {"mask_token_id": 126336, "logit_alignment": "same_position", "block_length": None}

_KEY_TO_OPTION = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "mlp_hidden_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "weight_tying": "tie_word_embeddings",
    "init_std": "initializer_range",
}
_SHARED_KEYS = (
    "rms_norm_eps",
    "rope_theta",
    "eos_token_id",
    "pad_token_id",
    "mask_token_id",
    "block_length",
    "block_origin",
    "logit_alignment",
    "clean_alignment",
    "noisy_attention",
    "begin_with_eos",
)
_SUPPORTED_VALUES: JsonObject = {
    "block_type": "llama",
    "block_group_size": 1,
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "bias_for_layer_norm": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "attention_layer_norm": False,
    "alibi": False,
    "rope": True,
    "input_emb_norm": False,
    "scale_logits": False,
    "clip_qkv": None,
}
"""Values of the released models. LLaDA's code also computes others; this code does not."""

_TENSOR_PREFIX = "model.transformer."
_TENSOR_TO_MODULE = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
_LAYER_TENSOR_TO_MODULE = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}


class LLaDAFamily(ModelFamily):
    """Keys and tensor names are OLMo's."""

    def to_transformers_keys(self, values: JsonObject, problems: list[str]) -> JsonObject:
        problems += [
            f"{key} = {values[key]!r} is not supported for llada, only {value!r}"
            for key, value in _SUPPORTED_VALUES.items()
            if values.get(key, value) != value and values[key] is not None
        ]
        renamed = {key: values[key] for key in ("model_type", *_SHARED_KEYS) if key in values}
        renamed |= {name: values[key] for key, name in _KEY_TO_OPTION.items() if values.get(key) is not None}
        if values.get("mlp_hidden_size") is None and isinstance(values.get("d_model"), int):
            ratio = values.get("mlp_ratio") or 4
            if isinstance(ratio, int) or (isinstance(ratio, float) and math.isfinite(ratio)):
                renamed["intermediate_size"] = int(ratio) * values["d_model"]
            else:
                problems.append(f"mlp_ratio = {ratio!r} must be a number")
        if values.get("n_kv_heads") is None and values.get("multi_query_attention"):
            renamed["num_key_value_heads"] = 1
        # The embedding has embedding_size rows, which may be more than the vocabulary.
        renamed["vocab_size"] = values.get("embedding_size") or values.get("vocab_size")
        return renamed

    def write_options(self, config: ModelConfig) -> JsonObject:
        """Build the keys of config.json.

        Raises:
            ValueError: head_dim is not hidden_size / num_attention_heads, for which LLaDA has no key.
        """
        if config.head_dim * config.num_attention_heads != config.hidden_size:
            raise ValueError(
                f"head_dim = {config.head_dim}: model_type = 'llada' has no key for it, and its models have "
                f"hidden_size / num_attention_heads = {config.hidden_size / config.num_attention_heads:g}"
            )
        return {
            **{key: value for key, value in _SUPPORTED_VALUES.items() if value is not None},
            "rope_full_precision": True,
            "vocab_size": config.vocab_size,
            "embedding_size": config.vocab_size,
            **{key: getattr(config, name) for key, name in _KEY_TO_OPTION.items()},
            **{key: getattr(config, key) for key in _SHARED_KEYS},
        }

    def parameter_name(self, stored_name: str) -> str | None:
        if not stored_name.startswith(_TENSOR_PREFIX):
            return None
        module, _, kind = stored_name.removeprefix(_TENSOR_PREFIX).rpartition(".")
        if module in _TENSOR_TO_MODULE:
            return f"{_TENSOR_TO_MODULE[module]}.{kind}"
        match = re.fullmatch(r"blocks\.(\d+)\.(\w+)", module)
        if match is None or match[2] not in _LAYER_TENSOR_TO_MODULE:
            return None
        return f"model.layers.{match[1]}.{_LAYER_TENSOR_TO_MODULE[match[2]]}.{kind}"

    def stored_name(self, parameter_name: str) -> str:
        module, _, kind = parameter_name.rpartition(".")
        for tensor, name in _TENSOR_TO_MODULE.items():
            if module == name:
                return f"{_TENSOR_PREFIX}{tensor}.{kind}"
        layer, _, name = module.removeprefix("model.layers.").partition(".")
        tensor = next(tensor for tensor, module_name in _LAYER_TENSOR_TO_MODULE.items() if module_name == name)
        return f"{_TENSOR_PREFIX}blocks.{layer}.{tensor}.{kind}"


LLADA = LLaDAFamily(
    "llada",
    "LLaDAModelLM",
    _FIXED_OPTIONS,
    _DEFAULT_OPTIONS,
    _DIFFUSION_DEFAULTS,
    supports_sliding_window=False,
    stop_token_ids=(126081, 126348),  # <|endoftext|> and <|eot_id|>
)
