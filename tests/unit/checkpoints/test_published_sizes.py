"""Released config.json files, key by key, give models of the size that the released weights have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diffusionlm.checkpoints.huggingface import build_config_json
from diffusionlm.checkpoints.weights import to_stored_tensors
from diffusionlm.families.model_directory import read_model_config
from diffusionlm.families.registry import get_family
from diffusionlm.models.transformer import Transformer
from profiling.flops import count_parameters

QWEN: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "use_sliding_window": False}
SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
SIZE_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "moe_intermediate_size",
)  # fmt: skip


def qwen3_vl(tower: dict[str, Any], *sizes: int, tied: bool = False) -> dict[str, Any]:
    text = {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_theta": 5000000, "use_cache": True,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "vocab_size": 151936, **dict(zip(SIZE_KEYS, sizes, strict=False)),
    }  # fmt: skip
    vision = {
        "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "initializer_range": 0.02, "num_heads": 16,
        "num_position_embeddings": 2304, "out_hidden_size": text["hidden_size"], "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2, **tower,
    }  # fmt: skip
    model_type = "qwen3_vl_moe" if "moe_intermediate_size" in text else "qwen3_vl"
    if model_type == "qwen3_vl_moe":
        text |= {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1}
        text |= {"mlp_only_layers": []}
    elif tied:
        text |= {"tie_word_embeddings": True}
    return {
        "model_type": model_type, "tie_word_embeddings": tied, "image_token_id": 151655, "video_token_id": 151656,
        "vision_start_token_id": 151652, "vision_end_token_id": 151653,
        "text_config": text | {"model_type": f"{model_type}_text"},
        "vision_config": vision | {"model_type": model_type},
    }  # fmt: skip


def nemotron(theta: float, *sizes: int) -> dict[str, Any]:
    rope = {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": theta, "rope_type": "yarn",
    }  # fmt: skip
    return {
        "ar_loss_weight": 1.0, "attention_bias": False, "attention_dropout": 0.0, "attn_implementation": "sdpa",
        "block_size": 32, "bos_token_id": 1, "dlm_loss_weight": None, "dlm_paradigm": "bidirectional",
        "dp_varying_mask_ratio": False, "eos_token_id": 11, "head_dim": 128, "hidden_act": "silu",
        "initializer_range": 0.02, "mask_token_id": 100, "max_position_embeddings": 262144, "mlp_bias": False,
        "model_type": "nemotron_labs_diffusion", "rms_norm_eps": 1e-5, "rope_parameters": rope,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": False,
        "vocab_size": 131072, **dict(zip(SIZE_KEYS, sizes, strict=False)),
    }  # fmt: skip


PUBLISHED: list[Any] = [
    pytest.param(
        qwen3_vl(SMALL_TOWER, 2048, 6144, 28, 16, 8, tied=True), 2_127_532_032, 625, id="Qwen3-VL-2B-Instruct"
    ),
    pytest.param(
        qwen3_vl(SMALL_TOWER, 2560, 9728, 36, 32, 8, tied=True), 4_437_815_808, 713, id="Qwen3-VL-4B-Instruct"
    ),
    pytest.param(qwen3_vl(TOWER, 4096, 12288, 36, 32, 8), 8_767_123_696, 750, id="Qwen3-VL-8B-Instruct"),
    pytest.param(qwen3_vl(TOWER, 5120, 25600, 64, 64, 8), 33_357_390_064, 1058, id="Qwen3-VL-32B-Instruct"),
    pytest.param(qwen3_vl(TOWER, 2048, 6144, 48, 32, 4, 768), 31_070_754_032, 882, id="Qwen3-VL-30B-A3B-Instruct"),
    pytest.param(
        qwen3_vl(TOWER, 4096, 12288, 94, 64, 4, 1536), 235_670_022_896, 1388, id="Qwen3-VL-235B-A22B-Instruct"
    ),
    pytest.param(
        {"model_type": "sdar", **QWEN, "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728}
        | {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
        | {"max_position_embeddings": 32768, "attention_bias": False, "sliding_window": None, "max_window_layers": 36}
        | {"tie_word_embeddings": False, "eos_token_id": 151643, "bos_token_id": 151643, "rope_scaling": None}
        | {"torch_dtype": "bfloat16", "attn_implementation": "flex_attention", "fuse_cross_entropy": True},
        8_822_848_512 // 2,
        399,
        id="SDAR-4B-Chat",
    ),
    pytest.param(nemotron(1e6, 3072, 9216, 26, 32, 8), 3_831_659_520, 237, id="Nemotron-Labs-Diffusion-3B"),
    pytest.param(nemotron(1e6, 4096, 14336, 34, 32, 8), 8_489_553_920, 309, id="Nemotron-Labs-Diffusion-8B"),
    pytest.param(nemotron(1e9, 5120, 16384, 40, 32, 8), 13_506_073_600, 363, id="Nemotron-Labs-Diffusion-14B"),
    pytest.param(
        {"model_type": "wedlm", **QWEN, "vocab_size": 151936, "qk_norm": True, "attention_bias": False}
        | dict(zip(SIZE_KEYS, (4096, 12288, 36, 32, 8), strict=False))
        | {"head_dim": 128, "max_position_embeddings": 16384, "sliding_window": None, "max_window_layers": 36}
        | {"layer_types": ["full_attention"] * 36, "tie_word_embeddings": False, "mask_token_id": 151665},
        8_190_735_360,
        399,
        id="WeDLM-8B",
    ),
    pytest.param(
        {"model_type": "llada", "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "alibi": False}
        | {"mlp_hidden_size": 12288, "mlp_ratio": 4, "vocab_size": 126464, "embedding_size": 126464}
        | {"max_sequence_length": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope": True}
        | {"activation_type": "silu", "block_type": "llama", "block_group_size": 1, "layer_norm_type": "rms"}
        | {"include_bias": False, "include_qkv_bias": False, "weight_tying": False, "multi_query_attention": None}
        | {"eos_token_id": 126081, "pad_token_id": 126081, "mask_token_id": 126336, "scale_logits": False},
        8_015_581_184,
        291,
        id="LLaDA-8B",
    ),
    pytest.param(
        {"model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216}
        | {"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
        | {"max_position_embeddings": 8192, "sliding_window": 4096, "query_pre_attn_scalar": 256}
        | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 10000.0}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "cache_implementation": "hybrid"},
        2_614_341_888,
        288,
        id="gemma-2-2b",
    ),
]


@pytest.mark.parametrize(("values", "parameters", "tensors"), PUBLISHED)
def test_published_models_have_their_size(
    values: dict[str, Any], parameters: int, tensors: int, tmp_path: Path
) -> None:
    """The released config.json gives a model of as many numbers and tensors as the released files hold."""
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = read_model_config(tmp_path)
    with torch.device("meta"):
        model = Transformer(config)
    stored = to_stored_tensors(config, dict(model.named_parameters()))
    assert (sum(tensor.numel() for tensor in stored.values()), len(stored)) == (parameters, tensors)
    assert count_parameters(config, config.vocab_size)[0] == parameters
    assert get_family(config).model_type == values["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(build_config_json(config, torch.bfloat16)))
    assert read_model_config(tmp_path) == config
