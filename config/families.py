"""The families of checkpoints: what a config.json of each says, as a `ModelConfig`, and back.

| model_type  | parameters | where config.json is silent on diffusion                                              |
|-------------|------------|---------------------------------------------------------------------------------------|
| qwen3       | Qwen3      | autoregressive: block_length 1, shifted logits, no mask token                         |
| qwen2       | Qwen2      | the same (Qwen2 and Qwen2.5)                                                          |
| llama       | Llama      | the same                                                                              |
| qwen3_moe   | Qwen3-MoE  | the same                                                                              |
| gemma2      | Gemma 2    | the same                                                                              |
| sdar        | Qwen3      | mask 151669, same position, block_length 4 or what the directory's name ends in (-b16) |
| sdar_moe    | Qwen3-MoE  | the same                                                                              |
| llada       | OLMo       | mask 126336, end of text 126081, same position, the whole sequence at once            |
| Dream       | Qwen2      | mask 151666, shifted logits, the whole sequence at once                               |

SDAR's chats end with 151645 or 151643, LLaDA's with 126081 or 126348 (`Family.stops`).

Keys that config.json has win over this table. What a family computes and this model does not is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config import llada
from config.model import ModelConfig
from config.spelling import SLIDING, read_layer_types, read_rope, read_shared_keys, read_stop_tokens

Values = dict[str, Any]

GEMMA = {"sandwich_norms": True, "norm_offset": True, "scale_embeddings": True, "qk_norm": False, "num_experts": 0}
GEMMA_KEYS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
MOE_KEYS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "router_aux_loss_coef",
)
GEMMA_OPTIONS_OFF: Values = {
    "sandwich_norms": False,
    "norm_offset": False,
    "scale_embeddings": False,
    "query_pre_attn_scalar": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
DENSE_OPTIONS = {**GEMMA_OPTIONS_OFF, "num_experts": 0}
AUTOREGRESSIVE_OPTIONS: Values = {"logit_alignment": "shifted", "block_length": 1}
DIFFUSION = ("mask_token_id", "logit_alignment", "block_length")
MOE_DEFAULTS: Values = {
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
}
GEMMA_DEFAULTS: Values = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class ModelFamily:
    """What a ``model_type`` stands for."""

    architecture: str
    """The class that transformers, or the checkpoint's own code, has for it."""
    fixed_options: Mapping[str, Any]
    """Options that every model of the family has, as `ModelConfig` spells them."""
    default_options: Mapping[str, Any] = field(default_factory=dict)
    """Where config.json is silent: what the family's own code takes."""
    diffusion: Mapping[str, Any] | None = None
    """Mask token, alignment and blocks where config.json is silent. None: `AUTOREGRESSIVE` if it has none of them."""
    has_attention_output_bias: bool = True
    """``attention_bias`` puts one in the output projection, too."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a text where no file says it: those that the family's chats end their turns and texts with."""
    has_block_size_key: bool = False
    """The directory's name may end in the block length, as in -b16."""


SDAR: Values = {"mask_token_id": 151669, "logit_alignment": "same_position", "block_length": 4}
DREAM: Values = {"mask_token_id": 151666, "logit_alignment": "shifted", "block_length": None}
SDAR_STOP_TOKEN_IDS = (151645, 151643)
"""<|im_end|> and <|endoftext|>."""
QWEN2: Values = {**DENSE_OPTIONS, "qk_norm": False, "attention_bias": True, "attention_output_bias": False}
QWEN3: Values = {**DENSE_OPTIONS, "qk_norm": True}
MOE: Values = {**GEMMA_OPTIONS_OFF, "qk_norm": True}
QWEN3_DEFAULTS: Values = {"head_dim": 128}

FAMILIES: dict[str, ModelFamily] = {
    "qwen3": ModelFamily("Qwen3ForCausalLM", QWEN3, QWEN3_DEFAULTS),
    "qwen2": ModelFamily("Qwen2ForCausalLM", QWEN2),
    "llama": ModelFamily("LlamaForCausalLM", {**DENSE_OPTIONS, "qk_norm": False}),
    "qwen3_moe": ModelFamily("Qwen3MoeForCausalLM", MOE, MOE_DEFAULTS),
    "gemma2": ModelFamily("Gemma2ForCausalLM", GEMMA, GEMMA_DEFAULTS),
    "sdar": ModelFamily(
        "SDARForCausalLM", QWEN3, QWEN3_DEFAULTS, SDAR, stop_token_ids=SDAR_STOP_TOKEN_IDS, has_block_size_key=True
    ),
    "sdar_moe": ModelFamily(
        "SDARMoeForCausalLM", MOE, MOE_DEFAULTS, SDAR, stop_token_ids=SDAR_STOP_TOKEN_IDS, has_block_size_key=True
    ),
    "llada": ModelFamily(
        "LLaDAModelLM", llada.FIXED_OPTIONS, llada.DEFAULTS, llada.DIFFUSION, stop_token_ids=llada.STOP_TOKEN_IDS
    ),
    "Dream": ModelFamily("DreamModel", QWEN2, {"eos_token_id": 151643, "pad_token_id": 151643}, DREAM),
}
_BLOCKS_IN_NAME = re.compile(r"-b(\d+)$", re.IGNORECASE)


def infer_model_type(config: ModelConfig) -> str:
    """The family of transformers that a model's options say."""
    if config.num_experts:
        return "qwen3_moe"
    if config.sandwich_norms:
        return "gemma2"
    if config.qk_norm:
        return "qwen3"
    return "qwen2" if config.attention_bias and not config.attention_output_bias else "llama"


def read_options(values: Values, directory: Path, generation: Values | None = None) -> tuple[Values, list[str]]:
    """What a config.json says in the words of `ModelConfig`, and what of it cannot be computed here.

    Args:
        values: the JSON object.
        directory: where it lies; SDAR's block length may stand in its name.
        generation: what generation_config.json says. None: there is none, or it says nothing of its own.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        return {}, [
            f"model_type = {model_type!r} is not supported; supported are {', '.join(FAMILIES)}. If the model is "
            'built like one of them, name that one as "model_type" in config.json'
        ]
    family, problems = FAMILIES[model_type], []
    if model_type == "llada":
        values, found = llada.to_transformers_keys(values)
        problems += found
    known, found = read_shared_keys(values, gemma=model_type == "gemma2")
    problems += found
    for read in (read_rope(values), read_layer_types(values, model_type)):
        known |= read[0]
        problems += read[1]
    ends, found = _read_stop_tokens(values, generation, family)
    problems += found
    known, found = _add_defaults(known | ends, family)
    problems += found
    blocks, found = _read_diffusion_options(values, family, directory)
    problems += found
    known |= blocks
    known["model_type"] = model_type
    return {key: value for key, value in known.items() if value is not None}, problems


def _add_defaults(known: Values, family: ModelFamily) -> tuple[Values, list[str]]:
    """The options that the family fixes, and its defaults where config.json is silent."""
    problems = [
        f"{key} = {known[key]!r} contradicts the model_type, whose models have {value!r}"
        for key, value in family.fixed_options.items()
        if known.get(key, value) != value
    ]
    known = {"tie_word_embeddings": False, **family.default_options, **known, **family.fixed_options}
    known.setdefault("attention_output_bias", family.has_attention_output_bias and known.get("attention_bias", False))
    heads, width = known.get("num_attention_heads"), known.get("hidden_size")
    if known.get("num_key_value_heads") is None:
        known["num_key_value_heads"] = heads
    if known.get("head_dim") is None and isinstance(heads, int) and isinstance(width, int) and heads > 0:
        known["head_dim"] = width // heads
    if known.get("query_pre_attn_scalar") == known.get("head_dim"):
        known["query_pre_attn_scalar"] = None
    return known, problems


def _read_stop_tokens(values: Values, generation: Values | None, family: ModelFamily) -> tuple[Values, list[str]]:
    """End of text, and what else ends one; the family's where the files know no more than those."""
    ends, problems = read_stop_tokens(values, generation)
    is_silent = not ends and "eos_token_id" not in values
    if is_silent and "eos_token_id" in family.default_options:
        ends = [family.default_options["eos_token_id"]]
    size = values.get("vocab_size")
    has_room = isinstance(size, int) and size > max(family.stop_token_ids, default=0)
    if generation is None and has_room and (ends or is_silent) and set(ends) <= set(family.stop_token_ids):
        ends = list(dict.fromkeys([*ends, *family.stop_token_ids]))
    known: Values = {} if is_silent and not ends else {"eos_token_id": next(iter(ends), None)}
    return known | ({"stop_token_ids": ends} if len(ends) > 1 else {}), problems


def _read_diffusion_options(values: Values, family: ModelFamily, directory: Path) -> tuple[Values, list[str]]:
    """Mask token, alignment and blocks: from config.json, else from the directory's name, else the family's."""
    said = {key: values[key] for key in DIFFUSION if key in values}
    problems = []
    if "block_size" in values:
        if said.setdefault("block_length", values["block_size"]) != values["block_size"]:
            problems.append(
                f"block_size = {values['block_size']!r} contradicts block_length = {said['block_length']!r}"
            )
    elif family.has_block_size_key and "block_length" not in said:
        # The Hub's cache keeps models--OWNER--NAME/snapshots/REVISION.
        folder = directory.parent.parent if directory.parent.name == "snapshots" else directory
        if match := _BLOCKS_IN_NAME.search(folder.name):
            said["block_length"] = int(match[1])
    if family.diffusion is not None:
        return {**family.diffusion, **said}, problems
    is_silent = all(value is None for value in said.values())
    return (AUTOREGRESSIVE_OPTIONS if is_silent else said), problems


def to_config_json(config: ModelConfig) -> Values:
    """What config.json says of a model, in its family's words, with the keys that diffusion adds.

    Raises:
        ValueError: an option that no checkpoint of the family holds; names the keys.
    """
    model_type = config.model_type or infer_model_type(config)
    if model_type not in FAMILIES:
        raise ValueError(f"model_type = {model_type!r} must be one of {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    is_sliding = SLIDING in (config.layer_types or ())
    if is_sliding and model_type in ("llama", "qwen3_moe", "sdar_moe", "llada"):
        raise ValueError(
            f'layer_types has "{SLIDING}", which the family {model_type} does not know: set qk_norm = true, without '
            "experts"
        )
    _check_options(config, model_type, family)
    if model_type == "llada":
        return {"architectures": [family.architecture], "model_type": model_type, **llada.to_config_json(config)}
    unused = {"model_type", "stop_token_ids"} | GEMMA_OPTIONS_OFF.keys()
    unused |= set() if config.num_experts else set(MOE_KEYS)
    unused |= set() if is_sliding or model_type == "gemma2" else {"layer_types", "sliding_window"}
    values = config.model_dump(mode="json", exclude_none=True, exclude=unused)
    if config.attention_output_bias == (family.has_attention_output_bias and config.attention_bias):
        del values["attention_output_bias"]
    if model_type == "gemma2":
        values |= _gemma_values(config)
    elif is_sliding:
        values["use_sliding_window"] = True
    for key in ("eos_token_id", "pad_token_id"):
        if key in family.default_options:
            values[key] = getattr(config, key)  # null says: none
    if family.diffusion is not None:
        values["block_length"] = config.block_length  # null says: the whole sequence at once
        values["mask_token_id"] = config.mask_token_id
    if family.has_block_size_key:
        values["block_size"] = values.pop("block_length")
    return {"architectures": [family.architecture], "model_type": model_type, "hidden_act": "silu", **values}


def _check_options(config: ModelConfig, model_type: str, family: ModelFamily) -> None:
    """Refuse what the family's config.json could not say."""
    wrong = [
        f"{key} = {getattr(config, key)!r} (it has {value!r})"
        for key, value in family.fixed_options.items()
        if getattr(config, key) != value
    ]
    if config.num_experts == 0 and model_type in ("qwen3_moe", "sdar_moe"):
        wrong.append("num_experts = 0")
    if model_type != "gemma2" and config.hidden_act != "silu":
        wrong.append(f"hidden_act = {config.hidden_act!r} (it has 'silu')")
    if wrong:
        raise ValueError(f"no checkpoint of the family {model_type} holds a model with {'; '.join(wrong)}")


def _gemma_values(config: ModelConfig) -> Values:
    """Gemma 2 writes its caps also where there are none: a missing key is a cap."""
    scale = config.query_pre_attn_scalar or config.head_dim
    return {
        "hidden_act": config.hidden_act,
        "hidden_activation": config.hidden_act,
        "query_pre_attn_scalar": int(scale) if scale == int(scale) else scale,
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
        "layer_types": list(config.layer_types or ["full_attention"] * config.num_hidden_layers),
    }
