"""Readers of config.json keys that all families share, in the spelling of transformers 4 and 5.

Each returns options of `ModelConfig` and appends a message to ``problems`` for every key that is not supported.
"""

from __future__ import annotations

from typing import Any

from config.model import LinearRope, Llama3Rope, YarnRope

JsonObject = dict[str, Any]
"""The object in a config.json or generation_config.json."""
Options = dict[str, Any]
"""Fields of `ModelConfig`, by name."""

FULL, SLIDING = "full_attention", "sliding_attention"
_ROPE_CLASSES: dict[str, type[LinearRope] | type[Llama3Rope] | type[YarnRope]] = {
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
}
_NEUTRAL_YARN_VALUES: JsonObject = {"mscale": None, "mscale_all_dim": None, "truncate": True}
"""YaRN keys of other families. Any other value, except null, would change the computation."""


def read_rope(values: JsonObject, problems: list[str]) -> Options:
    """Read the rotary base and its scaling from ``rope_theta`` and ``rope_scaling``, or from ``rope_parameters``."""
    options: Options = {} if values.get("rope_theta") is None else {"rope_theta": values["rope_theta"]}
    for key in ("rope_scaling", "rope_parameters"):
        rope = values.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
        is_supported = isinstance(kind, str) and (kind == "default" or kind in _ROPE_CLASSES)
        if not is_supported or any(isinstance(value, dict) for value in rope.values()):
            problems.append(f"{key} = {rope!r} is not supported; rope types are default, {', '.join(_ROPE_CLASSES)}")
            continue
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            problems.append(f"{key} has partial_rotary_factor = {rope['partial_rotary_factor']!r}: not supported")
        theta = rope.get("rope_theta")
        if theta is not None and options.setdefault("rope_theta", theta) != theta:
            problems.append(f"{key} has rope_theta = {theta!r}, which contradicts {options['rope_theta']!r}")
        for name, value in _NEUTRAL_YARN_VALUES.items() if kind == "yarn" else ():
            if rope.get(name) not in (None, value):
                problems.append(f"{key} has {name} = {rope[name]!r}: not supported")
        if isinstance(kind, str) and kind != "default":
            names = _ROPE_CLASSES[kind].model_fields.keys()
            scaling = {name: rope[name] for name in names if rope.get(name) is not None} | {"rope_type": kind}
            if options.setdefault("rope_scaling", scaling) != scaling:
                problems.append(f"rope_scaling and {key} contradict each other")
    return options


def read_stop_tokens(values: JsonObject, generation: JsonObject | None, problems: list[str]) -> list[int]:
    """List the stop tokens: ``eos_token_id`` of config.json, then of generation_config.json, without repetitions."""
    stop_token_ids: list[int] = []
    size = values.get("vocab_size")
    for prefix, source in (("", values), ("generation_config.json: ", generation or {})):
        ids = list_eos_token_ids(source)
        if not all(isinstance(id_, int) and not isinstance(id_, bool) and id_ >= 0 for id_ in ids):
            problems.append(f"{prefix}eos_token_id = {ids!r} must be a token id, or a list of token ids")
            continue
        outside = [id_ for id_ in ids if isinstance(size, int) and id_ >= size]
        if outside:
            problems.append(f"{prefix}eos_token_id = {outside[0]} is outside the vocabulary of {size} tokens")
        stop_token_ids += ids
    return list(dict.fromkeys(stop_token_ids))


def list_eos_token_ids(values: JsonObject) -> list[Any]:
    """Return ``eos_token_id``, which may be an id, a list of ids or null, as a list."""
    ids = values.get("eos_token_id")
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def read_layer_type_list(values: JsonObject, problems: list[str]) -> list[Any] | None:
    """Return ``layer_types``. None: there is no such list."""
    layer_types = values.get("layer_types")
    if layer_types is None or isinstance(layer_types, list):
        return layer_types
    problems.append(f"layer_types = {layer_types!r} must be a list")
    return None


def sliding_options(layer_types: Any, window: Any) -> Options:
    """Return the options of sliding layers; none if no layer slides, because the window is then unused."""
    return {"layer_types": layer_types, "sliding_window": window} if SLIDING in (layer_types or ()) else {}
