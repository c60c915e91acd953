"""The list of model families.

| model_type              | layers as    | where config.json has no diffusion keys                                    |
|-------------------------|--------------|----------------------------------------------------------------------------|
| qwen3                   | Qwen3        | autoregressive: block_length 1, shifted logits, no mask token              |
| qwen2                   | Qwen2        | autoregressive (Qwen2 and Qwen2.5)                                         |
| llama                   | Llama        | autoregressive                                                             |
| qwen3_moe               | Qwen3-MoE    | autoregressive                                                             |
| qwen3_vl                | Qwen3        | autoregressive, with a vision tower                                        |
| qwen3_vl_moe            | Qwen3-MoE    | autoregressive, with a vision tower                                        |
| gemma2                  | Gemma 2      | autoregressive                                                             |
| ministral3              | Ministral 3  | autoregressive; YaRN with scaled queries                                   |
| sdar                    | Qwen3        | mask 151669, same position, block_length 4, or B of a directory's name -bB |
| sdar_moe                | Qwen3-MoE    | as sdar                                                                    |
| llada                   | Llama        | mask 126336, same position, one block for the whole sequence               |
| Dream                   | Qwen2        | mask 151666, shifted logits, one block for the whole sequence              |
| nemotron_labs_diffusion | Ministral 3  | mask 100, same position, shifted in committed text, block_length 32        |
| wedlm                   | Qwen2, Qwen3 | mask 151665, else as nemotron_labs_diffusion; qk_norm: Qwen3               |

Keys in config.json override this table. A key that changes the computation and is not supported is an error. I-DLM
calls itself sdar: its config.json needs keys that say its alignments (`diffusionlm.families.sdar`).

To add a family with the same keys and tensor names, add a row to `FAMILIES`. For other keys or names, subclass
`ModelFamily` in a file of its own, as `diffusionlm.families.llada` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from config.model import ModelConfig
from diffusionlm.families.family import DENSE_OPTIONS, GEMMA_OPTIONS_OFF, ModelFamily, Options
from diffusionlm.families.gemma2 import GEMMA2
from diffusionlm.families.llada import LLADA
from diffusionlm.families.ministral import MINISTRAL3, NEMOTRON_LABS_DIFFUSION
from diffusionlm.families.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE
from diffusionlm.families.sdar import SDARFamily

_QWEN2: Options = {**DENSE_OPTIONS, "qk_norm": False, "attention_bias": True, "attention_output_bias": False}
_QWEN3: Options = {**DENSE_OPTIONS, "qk_norm": True}
_QWEN3_DEFAULTS: Options = {"head_dim": 128}
_QWEN3_MOE: Options = {**GEMMA_OPTIONS_OFF, "qk_norm": True}
_QWEN3_MOE_DEFAULTS: Options = {
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
}
_LLAMA: Options = {**DENSE_OPTIONS, "qk_norm": False}
_SDAR_DIFFUSION: Options = {"mask_token_id": 151669, "logit_alignment": "same_position", "block_length": 4}
_SDAR_STOP_TOKEN_IDS = (151645, 151643)
"""<|im_end|> and <|endoftext|>."""
_DREAM_DEFAULTS: Options = {"eos_token_id": 151643, "pad_token_id": 151643}
_DREAM_DIFFUSION: Options = {"mask_token_id": 151666, "logit_alignment": "shifted", "block_length": None}
_WEDLM_DIFFUSION: Options = {
    "mask_token_id": 151665,
    "logit_alignment": "same_position",
    "clean_alignment": "shifted",
    "noisy_attention": "visible_first",
    "block_length": 32,
}

_FAMILIES = (
    ModelFamily("qwen3", "Qwen3ForCausalLM", _QWEN3, _QWEN3_DEFAULTS),
    ModelFamily("qwen2", "Qwen2ForCausalLM", _QWEN2),
    ModelFamily("llama", "LlamaForCausalLM", _LLAMA, supports_sliding_window=False),
    ModelFamily(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _QWEN3_MOE,
        _QWEN3_MOE_DEFAULTS,
        supports_sliding_window=False,
        requires_experts=True,
    ),
    QWEN3_VL,
    QWEN3_VL_MOE,
    GEMMA2,
    MINISTRAL3,
    SDARFamily(
        "sdar",
        "SDARForCausalLM",
        _QWEN3,
        _QWEN3_DEFAULTS,
        _SDAR_DIFFUSION,
        has_block_size_key=True,
        stop_token_ids=_SDAR_STOP_TOKEN_IDS,
        default_strategy="low_confidence_dynamic",
    ),
    SDARFamily(
        "sdar_moe",
        "SDARMoeForCausalLM",
        _QWEN3_MOE,
        _QWEN3_MOE_DEFAULTS,
        _SDAR_DIFFUSION,
        supports_sliding_window=False,
        requires_experts=True,
        has_block_size_key=True,
        stop_token_ids=_SDAR_STOP_TOKEN_IDS,
        default_strategy="low_confidence_dynamic",
    ),
    LLADA,
    ModelFamily("Dream", "DreamModel", _QWEN2, _DREAM_DEFAULTS, _DREAM_DIFFUSION, default_strategy="entropy"),
    NEMOTRON_LABS_DIFFUSION,
    ModelFamily(
        "wedlm",
        "WeDLMForCausalLM",
        {**DENSE_OPTIONS, "attention_output_bias": False},
        {"qk_norm": False, "attention_bias": True},
        _WEDLM_DIFFUSION,
        has_attention_output_bias=False,
        default_strategy="penalized_entropy",
    ),
)
FAMILIES: Mapping[str, ModelFamily] = MappingProxyType({family.model_type: family for family in _FAMILIES})
"""``model_type`` -> its adapter."""


def infer_model_type(config: ModelConfig) -> str:
    """Return the transformers family that a model's options describe."""
    if config.vision is not None:
        return "qwen3_vl_moe" if config.num_experts else "qwen3_vl"
    if config.num_experts:
        return "qwen3_moe"
    if config.sandwich_norms:
        return "gemma2"
    if config.scales_queries:
        return "ministral3"
    if config.qk_norm:
        return "qwen3"
    return "qwen2" if config.attention_bias and not config.attention_output_bias else "llama"


def get_family(config: ModelConfig) -> ModelFamily:
    """Return the adapter of ``config.model_type``, or of the family that the options describe.

    Raises:
        ValueError: there is no such family.
    """
    model_type = config.model_type or infer_model_type(config)
    if model_type not in FAMILIES:
        raise ValueError(f"model_type = {model_type!r} must be one of {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def parameter_name(stored_name: str) -> str:
    """Translate a tensor name of any family's weight files.

    The family does not matter: a run that starts from a LLaDA directory reads its names into a model whose config
    no longer says LLaDA.
    """
    names = (family.parameter_name(stored_name) for family in FAMILIES.values())
    return next((name for name in names if name is not None), stored_name)
