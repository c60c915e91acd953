"""LLaDA-8B's tensor names, which are OLMo's: those of its modeling_llada.py (Nie et al. 2025)."""

from __future__ import annotations

import re

_TENSORS = {
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
_OUTER = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
_TRUNK = "model.transformer."


def canonical_name(name: str) -> str:
    """The name that Llama has for a tensor of LLaDA; any other name as it is."""
    if not name.startswith(_TRUNK):
        return name
    parts = name.removeprefix(_TRUNK).rsplit(".", 1)
    if len(parts) == 2 and parts[0] in _OUTER:
        return f"{_OUTER[parts[0]]}.{parts[1]}"
    match = re.fullmatch(r"blocks\.(\d+)\.(\w+)\.(\w+)", name.removeprefix(_TRUNK))
    if match is None or match[2] not in _TENSORS:
        return name
    return f"model.layers.{match[1]}.{_TENSORS[match[2]]}.{match[3]}"


def file_name(name: str) -> str:
    """The name that LLaDA has for one of Llama's tensors."""
    stem, _, kind = name.rpartition(".")
    for theirs, ours in _OUTER.items():
        if stem == ours:
            return f"{_TRUNK}{theirs}.{kind}"
    layer, _, module = stem.removeprefix("model.layers.").partition(".")
    theirs = next(theirs for theirs, ours in _TENSORS.items() if ours == module)
    return f"{_TRUNK}blocks.{layer}.{theirs}.{kind}"
