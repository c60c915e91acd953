"""LLaDA-8B's tensor names, which are OLMo's: those of its modeling_llada.py (Nie et al. 2025)."""

from __future__ import annotations

import re

_LAYER_TENSOR_NAMES = {
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
_OUTER_TENSOR_NAMES = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
_TENSOR_PREFIX = "model.transformer."


def parameter_name(name: str) -> str:
    """The name that Llama has for a tensor of LLaDA; any other name as it is."""
    if not name.startswith(_TENSOR_PREFIX):
        return name
    parts = name.removeprefix(_TENSOR_PREFIX).rsplit(".", 1)
    if len(parts) == 2 and parts[0] in _OUTER_TENSOR_NAMES:
        return f"{_OUTER_TENSOR_NAMES[parts[0]]}.{parts[1]}"
    match = re.fullmatch(r"blocks\.(\d+)\.(\w+)\.(\w+)", name.removeprefix(_TENSOR_PREFIX))
    if match is None or match[2] not in _LAYER_TENSOR_NAMES:
        return name
    return f"model.layers.{match[1]}.{_LAYER_TENSOR_NAMES[match[2]]}.{match[3]}"


def stored_name(name: str) -> str:
    """The name that LLaDA has for one of Llama's tensors."""
    stem, _, kind = name.rpartition(".")
    for theirs, ours in _OUTER_TENSOR_NAMES.items():
        if stem == ours:
            return f"{_TENSOR_PREFIX}{theirs}.{kind}"
    layer, _, module = stem.removeprefix("model.layers.").partition(".")
    theirs = next(theirs for theirs, ours in _LAYER_TENSOR_NAMES.items() if ours == module)
    return f"{_TENSOR_PREFIX}blocks.{layer}.{theirs}.{kind}"
