"""LLaDA-8B's config.json, whose keys are OLMo's: those of its configuration_llada.py (Nie et al. 2025).

It computes what a Llama computes, with every token seeing every other.
"""

from __future__ import annotations

from typing import Any

from config.model import ModelConfig

Values = dict[str, Any]

FIXED_OPTIONS: Values = {
    "qk_norm": False,
    "attention_bias": False,
    "attention_output_bias": False,
    "rope_scaling": None,
    "sandwich_norms": False,
    "norm_offset": False,
    "scale_embeddings": False,
    "query_pre_attn_scalar": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "num_experts": 0,
}
DEFAULTS: Values = {"rms_norm_eps": 1e-5, "eos_token_id": 126081, "pad_token_id": 126081}
DIFFUSION: Values = {"mask_token_id": 126336, "logit_alignment": "same_position", "block_length": None}

STOP_TOKEN_IDS = (126081, 126348)
"""End of text, and of a turn (<|eot_id|>)."""

_KEY_NAMES = {
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
    "logit_alignment",
    "begin_with_eos",
)
_SUPPORTED_VALUES: Values = {
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
"""The one setting of LLaDA's many switches that was released, and that is computed here."""


def to_transformers_keys(values: Values) -> tuple[Values, list[str]]:
    """LLaDA's keys in the words of transformers' Llama, and what of them is not computed here."""
    problems = [
        f"{key} = {values[key]!r} is not supported for llada, only {value!r}"
        for key, value in _SUPPORTED_VALUES.items()
        if values.get(key, value) != value and values[key] is not None
    ]
    common = {key: values[key] for key in ("model_type", *_SHARED_KEYS) if key in values}
    common |= {ours: values[theirs] for theirs, ours in _KEY_NAMES.items() if values.get(theirs) is not None}
    if values.get("mlp_hidden_size") is None and isinstance(values.get("d_model"), int):
        common["intermediate_size"] = int(values.get("mlp_ratio") or 4) * values["d_model"]
    if values.get("n_kv_heads") is None and values.get("multi_query_attention"):
        common["num_key_value_heads"] = 1
    # Tables have embedding_size rows, which may be more than the vocabulary.
    common["vocab_size"] = values.get("embedding_size") or values.get("vocab_size")
    return common, problems


def to_config_json(config: ModelConfig) -> Values:
    """The keys of LLaDA's config.json.

    Raises:
        ValueError: heads whose width is not hidden_size / num_attention_heads, which it cannot say.
    """
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        raise ValueError(
            f"head_dim = {config.head_dim} cannot be said in llada's config.json: it has hidden_size / "
            f"num_attention_heads = {config.hidden_size / config.num_attention_heads:g}"
        )
    values = {theirs: getattr(config, ours) for theirs, ours in _KEY_NAMES.items()}
    kept = {key: getattr(config, key) for key in _SHARED_KEYS}
    sizes = {"vocab_size": config.vocab_size, "embedding_size": config.vocab_size}
    required = {key: value for key, value in _SUPPORTED_VALUES.items() if value is not None}
    return {**required, "rope_full_precision": True, **sizes, **values, **kept}
