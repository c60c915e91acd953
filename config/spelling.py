"""Spellings of config.json, of transformers 4 and 5, in the words of `ModelConfig`."""

from __future__ import annotations

from typing import Any

from config.model import LinearRope, Llama3Rope, ModelConfig, YarnRope

Values = dict[str, Any]
SLIDING = "sliding_attention"
_ROPES: dict[str, type[LinearRope] | type[Llama3Rope] | type[YarnRope]] = {
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
}
_NEUTRAL_YARN_KEYS: Values = {"mscale": None, "mscale_all_dim": None, "truncate": True}
"""Keys of other families' YaRN that change what is computed unless they have this value, or null."""
_READ_ELSEWHERE = {
    "model_type",
    "rope_scaling",
    "rope_theta",
    "layer_types",
    "sliding_window",
    "eos_token_id",
    "stop_token_ids",
}
_DIFFUSION = {"mask_token_id", "logit_alignment", "block_length"}
_NEUTRAL_KEYS: Values = {
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""Keys that change what is computed unless they have this value, or null."""
_NULLABLE_KEYS = {
    "pad_token_id",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
}
"""Keys in which null is a value; in any other it is the same as no key."""


def read_shared_keys(values: Values, *, gemma: bool) -> tuple[Values, list[str]]:
    """Keys that mean here what they mean there, and what is not supported."""
    names = ModelConfig.model_fields.keys() - _READ_ELSEWHERE - _DIFFUSION
    known = {
        key: value for key, value in values.items() if key in names and (value is not None or key in _NULLABLE_KEYS)
    }
    harmless = (
        _NEUTRAL_KEYS if gemma else _NEUTRAL_KEYS | dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"))
    )
    problems = [
        f"{key} = {values[key]!r} is not supported"
        for key, value in harmless.items()
        if values.get(key, value) not in (value, None)
    ]
    if gemma:
        known.pop("hidden_act", None)  # Gemma computes its hidden_activation, whatever hidden_act says.
        if values.get("hidden_activation") is not None:
            known["hidden_act"] = values["hidden_activation"]
    supported = ("silu", "gelu_pytorch_tanh") if gemma else ("silu",)
    if known.get("hidden_act", "silu") not in supported:
        problems.append(f"hidden_act = {known.pop('hidden_act')!r} is not supported, only {', '.join(supported)}")
    if values.get("num_local_experts") is not None:
        known.setdefault("num_experts", values["num_local_experts"])
    return known, problems


def read_stop_tokens(values: Values, generation: Values | None) -> tuple[list[int], list[str]]:
    """Ids that end a text: those of config.json, then those of generation_config.json, each once."""
    found: list[int] = []
    problems = []
    size = values.get("vocab_size")
    for place, ids in (
        ("", list_eos_token_ids(values)),
        ("generation_config.json: ", list_eos_token_ids(generation or {})),
    ):
        if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in ids):
            problems.append(f"{place}eos_token_id = {ids!r} must be a token id, or a list of them")
            continue
        outside = [each for each in ids if isinstance(size, int) and each >= size]
        if outside:
            problems.append(f"{place}eos_token_id = {outside[0]} is outside the vocabulary of {size} tokens")
        found += ids
    return list(dict.fromkeys(found)), problems


def list_eos_token_ids(values: Values) -> list[Any]:
    """``eos_token_id``, which is an id, a list of them, or null."""
    said = values.get("eos_token_id")
    return said if isinstance(said, list) else [] if said is None else [said]


def read_rope(values: Values) -> tuple[Values, list[str]]:
    """Base and scaling of the rotations: ``rope_theta`` and ``rope_scaling``, or ``rope_parameters``."""
    known: Values = {} if values.get("rope_theta") is None else {"rope_theta": values["rope_theta"]}
    problems = []
    for key in ("rope_scaling", "rope_parameters"):
        rope = values.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
        is_known = isinstance(kind, str) and (kind == "default" or kind in _ROPES)
        if not is_known or any(isinstance(value, dict) for value in rope.values()):
            problems.append(f"{key} = {rope!r} is not supported; rope types are default, {', '.join(_ROPES)}")
            continue
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            problems.append(f"{key} has partial_rotary_factor = {rope['partial_rotary_factor']!r}: not supported")
        if (
            rope.get("rope_theta") is not None
            and known.setdefault("rope_theta", rope["rope_theta"]) != rope["rope_theta"]
        ):
            problems.append(f"{key} has rope_theta = {rope['rope_theta']!r}, which contradicts {known['rope_theta']!r}")
        for name, value in _NEUTRAL_YARN_KEYS.items() if kind == "yarn" else ():
            if rope.get(name) not in (None, value):
                problems.append(f"{key} has {name} = {rope[name]!r}: not supported")
        if isinstance(kind, str) and kind != "default":
            names = _ROPES[kind].model_fields.keys()
            scaling = {name: rope[name] for name in names if rope.get(name) is not None} | {"rope_type": kind}
            if known.setdefault("rope_scaling", scaling) != scaling:
                problems.append(f"rope_scaling and {key} contradict each other")
    return known, problems


def read_layer_types(values: Values, model_type: str) -> tuple[Values, list[str]]:
    """Which layers have a sliding window, by the rule of the family's code in transformers."""
    layers, window = values.get("layer_types"), values.get("sliding_window")
    count = values.get("num_hidden_layers")
    if not isinstance(count, int):
        return {}, []  # ModelConfig says that it is missing.
    if model_type == "gemma2":
        if layers is None:
            layers = [SLIDING if index % 2 == 0 else "full_attention" for index in range(count)]
        return _sliding_options(layers, values.get("sliding_window", 4096)), []
    is_on = bool(values.get("use_sliding_window"))
    if model_type in ("llama", "llada", "qwen3_moe", "sdar_moe"):
        if SLIDING in (layers or ()):
            return {}, [f"layer_types = {layers!r} is not supported: {model_type} has no sliding layers"]
        return {}, [f"use_sliding_window = true is not supported for {model_type}"] if is_on else []
    if layers is None and is_on:
        start = values.get("max_window_layers")
        if not isinstance(start, int):
            return {}, ["use_sliding_window = true needs layer_types or max_window_layers, which say in which layers"]
        layers = [SLIDING if index >= start else "full_attention" for index in range(count)]
    elif SLIDING in (layers or ()) and not is_on:
        # Transformers drops the window then, and computes these layers as full ones.
        return {}, [f"use_sliding_window = {values.get('use_sliding_window')!r} contradicts layer_types = {layers!r}"]
    return _sliding_options(layers, window), []


def _sliding_options(layers: Any, window: Any) -> Values:
    """Nothing where no layer slides: a window that none has is not one."""
    return {"layer_types": layers, "sliding_window": window} if SLIDING in (layers or ()) else {}
