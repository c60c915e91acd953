"""The adapter of a model family: its config.json, its tensor names and its defaults. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from config.model import MAX_MODULES, LinearRope, Llama3Rope, ModelConfig, YarnRope

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

AUTOREGRESSIVE_OPTIONS: Options = {"logit_alignment": "shifted", "block_length": 1}
GEMMA_OPTIONS_OFF: Options = {
    "sandwich_norms": False,
    "norm_offset": False,
    "scale_embeddings": False,
    "query_pre_attn_scalar": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
DENSE_OPTIONS: Options = {**GEMMA_OPTIONS_OFF, "num_experts": 0}

_DIFFUSION_KEYS = ("mask_token_id", "logit_alignment", "clean_alignment", "noisy_attention", "block_length")
_MOE_KEYS = {
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "router_aux_loss_coef",
}
_KEYS_WITH_READERS = {
    "model_type",
    "rope_scaling",
    "rope_theta",
    "layer_types",
    "sliding_window",
    "eos_token_id",
    "stop_token_ids",
    *_DIFFUSION_KEYS,
}
_NULLABLE_KEYS = {"pad_token_id", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}
"""Keys in which null is a value. In any other key null means that the key is absent."""
_NEUTRAL_VALUES: Options = {"mlp_bias": False, "partial_rotary_factor": 1.0, "quantization_config": None}
"""Keys whose other values, except null, would change the computation."""
_BLOCK_LENGTH_SUFFIX = re.compile(r"-b(\d+)$", re.IGNORECASE)


@dataclass(frozen=True)
class ModelFamily:
    """A ``model_type`` whose config.json has the keys of transformers and whose tensors have Hugging Face's names.

    A family with other keys or names overrides the methods of the first group.
    """

    model_type: str
    architecture: str
    """Class of the model in transformers, or in the checkpoint's own code."""
    fixed_options: Mapping[str, Any]
    """Options of `ModelConfig` that every model of the family has."""
    default_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of a model whose config.json does not name them, as in the family's own code."""
    diffusion_defaults: Mapping[str, Any] | None = None
    """Mask token, alignment and block length, where config.json does not name them. None: the family is
    autoregressive, unless config.json has a diffusion key; its code is part of transformers."""
    has_attention_output_bias: bool = True
    """``attention_bias`` also adds a bias to the attention output projection."""
    supports_sliding_window: bool = True
    requires_experts: bool = False
    has_vision: bool = False
    """Its models have a vision tower; those of other families have none."""
    scales_queries: bool = False
    """Its attention scales queries by position (Llama 4); that of other families does not."""
    stacks_experts: bool = False
    """Weight files hold a projection of all experts of a layer in one tensor."""
    has_block_size_key: bool = False
    """The key is ``block_size``; without it, the directory's name may end in the block length (-b16)."""
    stop_token_ids: tuple[int, ...] = ()
    """Ends of a chat turn and of a text, used where no file names more than these."""
    default_strategy: str = "low_confidence"
    """Decoding strategy where the config names none."""
    next_token_first: bool = False
    """Default of `GenerationConfig.next_token_first`."""

    activation_key: ClassVar[str] = "hidden_act"
    activations: ClassVar[tuple[str, ...]] = ("silu",)

    # Methods for families with other keys or tensor names.

    def to_transformers_keys(self, values: JsonObject, problems: list[str]) -> JsonObject:
        """Rename the keys of a config.json to those of transformers."""
        return values

    def read_layer_types(self, values: JsonObject, problems: list[str]) -> Options:
        """Read which layers have a sliding window, by the rule of Qwen's code in transformers."""
        layer_types, num_layers = read_layer_type_list(values, problems), values.get("num_hidden_layers")
        if not isinstance(num_layers, int) or num_layers > MAX_MODULES:
            return {}  # ModelConfig reports the key.
        is_on = bool(values.get("use_sliding_window"))
        if not self.supports_sliding_window:
            if SLIDING in (layer_types or ()):
                problems.append(
                    f"layer_types = {layer_types!r} is not supported: {self.model_type} has no sliding layers"
                )
            elif is_on:
                problems.append(f"use_sliding_window = true is not supported for {self.model_type}")
            return {}
        if layer_types is None and is_on:
            start = values.get("max_window_layers")
            if not isinstance(start, int):
                problems.append("use_sliding_window = true needs layer_types or max_window_layers")
                return {}
            layer_types = [SLIDING if index >= start else FULL for index in range(num_layers)]
        elif SLIDING in (layer_types or ()) and not is_on:
            # Transformers ignores the window then, and computes full attention in these layers.
            problems.append(
                f"use_sliding_window = {values.get('use_sliding_window')!r} contradicts layer_types = {layer_types!r}"
            )
            return {}
        return sliding_options(layer_types, values.get("sliding_window"))

    def omitted_keys(self, config: ModelConfig) -> set[str]:
        """Options of `ModelConfig` that config.json does not hold, beside those that no family writes."""
        return set() if SLIDING in (config.layer_types or ()) else {"layer_types", "sliding_window"}

    def family_keys(self, config: ModelConfig) -> JsonObject:
        """Keys of config.json that only this family writes, or writes with another value."""
        return {"use_sliding_window": True} if SLIDING in (config.layer_types or ()) else {}

    def write_options(self, config: ModelConfig) -> JsonObject:
        """Build the keys of config.json, without ``model_type`` and ``architectures``."""
        omitted = {"model_type", "stop_token_ids"} | GEMMA_OPTIONS_OFF.keys() | self.omitted_keys(config)
        omitted |= set() if config.num_experts else _MOE_KEYS
        omitted |= {"noisy_attention"} if config.noisy_attention == "block" else set()
        values = config.model_dump(mode="json", exclude_none=True, exclude=omitted)
        if config.attention_output_bias == (self.has_attention_output_bias and config.attention_bias):
            del values["attention_output_bias"]
        values |= self.family_keys(config)
        # A missing key would mean the family's default, so None is written as null.
        for key in ("eos_token_id", "pad_token_id"):
            if key in self.default_options:
                values[key] = getattr(config, key)
        if self.diffusion_defaults is not None:
            values |= {key: getattr(config, key) for key in self.diffusion_defaults}
        elif config.block_length is None:
            values["is_causal"] = False  # transformers then computes bidirectional attention
        if self.has_block_size_key:
            values["block_size"] = values.pop("block_length")
        return {"hidden_act": "silu", **values}

    def parameter_name(self, stored_name: str) -> str | None:
        """Translate a tensor name of a weight file. None: it is not a name that only this family has."""
        return None

    def stored_name(self, parameter_name: str) -> str:
        """Translate a parameter name to the tensor name in the family's weight files."""
        return parameter_name

    # Reading and writing, the same for nearly all families.

    def read_options(
        self, values: JsonObject, directory: Path, generation: JsonObject | None = None
    ) -> tuple[Options, list[str]]:
        """Translate a config.json to options of `ModelConfig`.

        Args:
            values: the object in config.json.
            directory: where it is, with links resolved; SDAR's block length may be a part of its name.
            generation: the object in generation_config.json. None: there is none, or it only repeats config.json.

        Returns:
            The options, and a message for each key that this code cannot compute.
        """
        problems: list[str] = []
        values = self.to_transformers_keys(values, problems)
        options = self._read_shared_keys(values, problems)
        options |= read_rope(values, problems)
        options |= self.read_layer_types(values, problems)
        options |= self._read_stop_tokens(values, generation, problems)
        options = self._add_defaults(options, problems)
        options |= self._read_diffusion_options(values, directory, problems)
        options["model_type"] = self.model_type
        return {key: value for key, value in options.items() if value is not None}, problems

    def _read_shared_keys(self, values: JsonObject, problems: list[str]) -> Options:
        """Read the keys that have the same name and meaning in config.json and in `ModelConfig`."""
        names = ModelConfig.model_fields.keys() - _KEYS_WITH_READERS - {"hidden_act"}
        options = {
            key: value for key, value in values.items() if key in names and (value is not None or key in _NULLABLE_KEYS)
        }
        problems += [
            f"{key} = {values[key]!r} is not supported"
            for key, value in _NEUTRAL_VALUES.items()
            if values.get(key, value) not in (value, None)
        ]
        activation = values.get(self.activation_key)
        if activation in self.activations:
            options["hidden_act"] = activation
        elif activation is not None:
            problems.append(
                f"{self.activation_key} = {activation!r} is not supported, only {', '.join(self.activations)}"
            )
        if values.get("num_local_experts") is not None:
            options.setdefault("num_experts", values["num_local_experts"])
        return options

    def _add_defaults(self, options: Options, problems: list[str]) -> Options:
        """Add the family's fixed and default options, and those that follow from others."""
        problems += [
            f"{key} = {options[key]!r} contradicts model_type = {self.model_type!r}, whose models have {value!r}"
            for key, value in self.fixed_options.items()
            if options.get(key, value) != value
        ]
        if ("llama_4_scaling_beta" in (options.get("rope_scaling") or {})) != self.scales_queries:
            relation = "needs rope_parameters of type yarn with" if self.scales_queries else "does not support"
            problems.append(f"model_type = {self.model_type!r} {relation} llama_4_scaling_beta")
        options = {"tie_word_embeddings": False, **self.default_options, **options, **self.fixed_options}
        has_bias = self.has_attention_output_bias and options.get("attention_bias", False)
        options.setdefault("attention_output_bias", has_bias)
        num_heads, width = options.get("num_attention_heads"), options.get("hidden_size")
        if options.get("num_key_value_heads") is None:
            options["num_key_value_heads"] = num_heads
        if options.get("head_dim") is None and isinstance(num_heads, int) and isinstance(width, int) and num_heads > 0:
            options["head_dim"] = width // num_heads
        if options.get("query_pre_attn_scalar") == options.get("head_dim"):
            options["query_pre_attn_scalar"] = None
        return options

    def _read_stop_tokens(self, values: JsonObject, generation: JsonObject | None, problems: list[str]) -> Options:
        """Read the stop tokens of the files; add the family's own if the files name no others."""
        ids = read_stop_tokens(values, generation, problems)
        is_silent = not ids and "eos_token_id" not in values
        if is_silent and "eos_token_id" in self.default_options:
            ids = [self.default_options["eos_token_id"]]
        size = values.get("vocab_size")
        has_room = isinstance(size, int) and size > max(self.stop_token_ids, default=0)
        if generation is None and has_room and (ids or is_silent) and set(ids) <= set(self.stop_token_ids):
            ids = list(dict.fromkeys([*ids, *self.stop_token_ids]))
        options: Options = {} if is_silent and not ids else {"eos_token_id": next(iter(ids), None)}
        return options | ({"stop_token_ids": ids} if len(ids) > 1 else {})

    def _read_diffusion_options(self, values: JsonObject, directory: Path, problems: list[str]) -> Options:
        """Read mask token, alignment and block length: from config.json, else from the directory's name."""
        options = {key: values[key] for key in _DIFFUSION_KEYS if key in values}
        if "block_size" in values:
            if options.setdefault("block_length", values["block_size"]) != values["block_size"]:
                problems.append(
                    f"block_size = {values['block_size']!r} contradicts block_length = {options['block_length']!r}"
                )
        elif self.has_block_size_key and (match := _BLOCK_LENGTH_SUFFIX.search(model_name(directory))):
            options.setdefault("block_length", int(match[1]))
        if self.diffusion_defaults is not None:
            return {**self.diffusion_defaults, **options}
        if all(value is None for value in options.values()):
            options = AUTOREGRESSIVE_OPTIONS
        block_length = options.get("block_length")
        if values.get("is_causal") is False and block_length is not None:
            problems.append(
                f"is_causal = False contradicts block_length = {block_length}: remove is_causal, or name mask_token_id "
                "and no block_length for bidirectional attention"
            )
        return options

    def to_config_json(self, config: ModelConfig) -> JsonObject:
        """Build the object of config.json, with the keys that diffusion adds.

        Raises:
            ValueError: the family has no model with these options; names the keys.
        """
        self._check_options(config)
        return {"architectures": [self.architecture], "model_type": self.model_type, **self.write_options(config)}

    def _check_options(self, config: ModelConfig) -> None:
        if SLIDING in (config.layer_types or ()) and not self.supports_sliding_window:
            raise ValueError(
                f'layer_types has "{SLIDING}", which model_type = {self.model_type!r} does not support: '
                "choose a family with sliding layers, such as qwen3 (qk_norm = true, num_experts = 0)"
            )
        problems = [
            f"{key} = {getattr(config, key)!r} (it has {value!r})"
            for key, value in self.fixed_options.items()
            if getattr(config, key) != value
        ]
        if config.num_experts == 0 and self.requires_experts:
            problems.append("num_experts = 0")
        if (config.vision is not None) != self.has_vision:
            problems.append("no vision tower" if self.has_vision else "a vision tower")
        if config.scales_queries != self.scales_queries:
            problems.append(("no " if self.scales_queries else "") + "llama_4_scaling_beta in rope_scaling")
        if config.hidden_act not in self.activations:
            problems.append(f"hidden_act = {config.hidden_act!r} (it has {' or '.join(map(repr, self.activations))})")
        if problems:
            raise ValueError(f"model_type = {self.model_type!r}: the family has no model with {'; '.join(problems)}")

    def check_diffusion(self, config: ModelConfig) -> None:
        """Check that the family's own code would find the model's diffusion options.

        Raises:
            ValueError: it would not; names the options and what the family has.
        """
        if self.diffusion_defaults is None:
            return
        problems = []
        if config.mask_token_id is None:
            problems.append("no mask_token_id (add [diffusion])")
        for key in ("logit_alignment", "clean_alignment", "noisy_attention"):
            value, own = getattr(config, key), self.diffusion_defaults.get(key, ModelConfig.model_fields[key].default)
            if value != own:
                problems.append(f"{key} = {value!r} (it has {own!r}; see [diffusion])")
        if self.has_block_size_key and config.block_length is None:
            problems.append("no block_length (set diffusion.block_length)")
        if problems:
            raise ValueError(f"model_type = {self.model_type!r}: the family has no model with {'; '.join(problems)}")


def model_name(directory: Path) -> str:
    """Return the name of a model's directory, or of its repository in the Hub's cache."""
    # The cache has directories models--OWNER--NAME/snapshots/REVISION.
    return (directory.parent.parent if directory.parent.name == "snapshots" else directory).name


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
        if kind == "yarn" and rope.get("mscale") and rope["mscale"] == rope.get("mscale_all_dim"):
            # The factor is the quotient of their scales (transformers).
            factor = 1.0 if rope.get("attention_factor") is None else rope["attention_factor"]
            rope = {**rope, "mscale": None, "mscale_all_dim": None, "attention_factor": factor}
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
